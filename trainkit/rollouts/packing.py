"""Products of few rows on a CPU, with weights in the layout in which oneDNN multiplies them fastest.

A decoding step multiplies one row for each response. torch gives oneDNN the weight as it is, which rearranges it for
every product. Rearranged once, a product of 4 rows takes half as long, and of 32 rows three quarters. Its bits are the
same.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainkit.models.backend import autocast_dtype

SMALLEST = 2**16
"""The smallest number of elements of a weight that is packed."""
MOST_ROWS = 128
"""The largest number of rows; with more, packing hardly pays."""

Linear = Callable[..., Tensor]


class Packs:
    """The packed weights of one sampling, during which the weights do not change."""

    def __init__(self) -> None:
        self.packed: dict[tuple[int, torch.dtype], Tensor] = {}

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Linear | None:
        """Return a function that returns what `F.linear` does for inputs such as x [*, D]; None if it is not faster."""
        kind, rows = x.device.type, x.numel() // x.size(-1)
        dtype = autocast_dtype(kind) or weight.dtype
        if kind != "cpu" or weight.numel() < SMALLEST or rows > MOST_ROWS or not _by_onednn(dtype):
            return None
        if not _has_the_same_bits(dtype, rows, *weight.shape, bias is not None):
            return None
        key = (id(weight), dtype)
        if key not in self.packed:
            self.packed[key] = torch.ops.mkldnn._reorder_linear_weight(weight.detach().to(dtype), rows)
        packed, added = self.packed[key], None if bias is None else bias.detach().to(dtype)

        def product(x: Tensor, *_: Tensor | None) -> Tensor:
            found: Tensor = torch.ops.mkldnn._linear_pointwise(x.to(dtype), packed, added, "none", [], "")
            return found

        return product


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
        found = torch.ops.mkldnn._linear_pointwise(x, packed, added, "none", [], "")
    except (AttributeError, NotImplementedError, RuntimeError):  # these functions are not among torch's public ones
        return False
    return torch.equal(found, F.linear(x, weight, added))
