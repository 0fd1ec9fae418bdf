"""Products of few rows on a CPU, with weights in the layout in which oneDNN multiplies them fastest.

A decoding step multiplies one row for each response. torch gives oneDNN the weight as it is, which rearranges it for
every product. Rearranged once, a product of 4 rows takes half as long, and of 32 rows three quarters. Its bits are the
same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainkit.models.backend import autocast_dtype

SMALLEST = 2**16
"""The smallest number of elements of a weight that is packed."""
MOST_ROWS = 128
"""The largest number of rows; with more, packing hardly pays."""


@contextmanager
def packed(model: nn.Module) -> Iterator[None]:
    """Let linear layers multiply few rows by packed weights inside the context, where the weights must not change."""
    layers = [layer for layer in model.modules() if _is_packable(layer)]
    for layer in layers:
        layer.forward = _forward(layer)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _is_packable(layer: nn.Module) -> bool:
    if type(layer) is not nn.Linear or "forward" in vars(layer):
        return False
    weight = layer.weight
    return type(weight) is nn.Parameter and weight.device.type == "cpu" and weight.numel() >= SMALLEST


def _forward(layer: Any) -> Callable[[Tensor], Tensor]:
    """Return a function that returns what the linear layer does for x [*, D]."""
    weight, bias = layer.weight, layer.bias
    packs: dict[torch.dtype, tuple[Tensor, Tensor | None]] = {}

    def forward(x: Tensor) -> Tensor:
        rows, dtype = x.numel() // x.size(-1), autocast_dtype("cpu") or weight.dtype
        if rows > MOST_ROWS or not _by_onednn(dtype):
            return F.linear(x, weight, bias)
        if not _has_the_same_bits(dtype, rows, *weight.shape, bias is not None):
            return F.linear(x, weight, bias)
        if dtype not in packs:
            of_weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach().to(dtype), rows)
            packs[dtype] = of_weight, None if bias is None else bias.detach().to(dtype)
        output: Tensor = torch.ops.mkldnn._linear_pointwise(x.to(dtype), *packs[dtype], "none", [], "")
        return output

    return forward


def bytes_of_packs(model: nn.Module, rows: int, bf16: bool) -> int:
    """Return the bytes of the packed weights of a model's linear layers while ``rows`` responses are sampled."""
    weights = [layer.weight for layer in model.modules() if isinstance(layer, nn.Linear)]
    sizes = [
        weight.numel() * (2 if bf16 else weight.dtype.itemsize) for weight in weights if weight.numel() >= SMALLEST
    ]
    return sum(sizes) if rows <= MOST_ROWS else 0


def _by_onednn(dtype: torch.dtype) -> bool:
    """Return whether torch's products of this type are made by oneDNN."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.float32:
        return torch.get_float32_matmul_precision() == "medium"
    return dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()


@cache
def _has_the_same_bits(dtype: torch.dtype, rows: int, columns: int, inner: int, biased: bool) -> bool:
    """Return whether a product with a packed weight can be made, and has the bits of `F.linear`."""
    draws = torch.Generator().manual_seed(0)
    shapes = ((rows, inner), (columns, inner), (columns,))
    x, weight, bias = (torch.randn(shape, generator=draws).to(dtype) for shape in shapes)
    added = bias if biased else None
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
        output = torch.ops.mkldnn._linear_pointwise(x, packed, added, "none", [], "")
    except (AttributeError, NotImplementedError, RuntimeError):  # these functions are not among torch's public ones
        return False
    return torch.equal(output, F.linear(x, weight, added))
