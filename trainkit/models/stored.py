"""Weights in 16 bits: frozen ones in the precision of their checkpoint or of autocast, and copies in the latter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers.pytorch_utils import Conv1D

from trainkit.models.backend import autocast_dtype
from trainkit.models.trunk import tiny_input
from trainkit.models.unloaded import decided

KEPT = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
"""Attributes of transformers models with the names of modules that are computed in float32."""


class _Stored(nn.Module):
    """A layer with weights in 16 bits, which without autocast computes in the type of its input."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the product with ``x`` [*, D]."""
        if autocast_dtype(x.device.type) is None and any(p.dtype != x.dtype for p in self.parameters()):
            output: Tensor = functional_call(self, {name: p.to(x.dtype) for name, p in self.named_parameters()}, (x,))
        else:
            output = super().forward(x)
        return output


class StoredLinear(_Stored, nn.Linear):
    """`torch.nn.Linear`, stored in 16 bits."""


class StoredConv1D(_Stored, Conv1D):
    """The layer of GPT-2, stored in 16 bits."""


KINDS: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: StoredLinear, Conv1D: StoredConv1D}


def store_frozen(model: Any, dtype: torch.dtype, beside: nn.Module | None = None, rounds: bool = False) -> None:
    """Store the frozen weights of linear layers in ``dtype``, the precision of autocast.

    Autocast rounds them to ``dtype`` for each product, so all results and gradients keep their bits. Embeddings, norms
    and what transformers keeps in float32 are not rounded by it, and stay as they are.

    Args:
        model: the transformers model.
        dtype: bfloat16 or float16.
        beside: a model whose parameters stay as they are, also where ``model`` has them, too.
        rounds: whether weights may be rounded, because the model runs under autocast alone and is never exported. All
            stay as they are if its outputs would change. Otherwise only those are stored which have values of
            ``dtype``.
    """
    before = decided(partial(_outputs, model, dtype)) if rounds else []
    own: list[tuple[nn.Module, type[nn.Module], dict[str, nn.Parameter]]] = []
    for layer, parameters in _frozen(model, beside):
        if rounds or decided(partial(_exact, parameters, dtype)):
            own.append((layer, type(layer), parameters))
            for name, parameter in parameters.items():
                setattr(layer, name, nn.Parameter(parameter.to(dtype), requires_grad=False))
            layer.__class__ = KINDS[type(layer)]
    if rounds and not decided(lambda: all(map(torch.equal, _outputs(model, dtype), before))):
        for layer, kind, parameters in own:  # one of them is read in float32, too
            layer.__class__ = kind
            for name, parameter in parameters.items():
                setattr(layer, name, parameter)


class Casts:
    """Copies of the weights of a model's linear layers in the precision of autocast, instead of its own casts.

    Autocast keeps casts for all threads until the first of them leaves it, so a CUDA graph that reads them, beside a
    thread that trains, would read memory that is freed. Numbers have the same bits with either.

    Args:
        model: the transformers model.
        dtype: bfloat16 or float16.
    """

    def __init__(self, model: Any, dtype: torch.dtype) -> None:
        self.kind, self.dtype = model.device.type, dtype
        self.copies: list[tuple[dict[str, Any], str, Tensor]] = [
            (layer._parameters, name, parameter.detach().to(dtype))
            for layer in _linear(model)
            for name, parameter in layer.named_parameters(recurse=False)
            if parameter.dtype == torch.float32
        ]

    @contextmanager
    def used(self) -> Iterator[None]:
        """Run the model with the copies inside the block."""
        own = [held[name] for held, name, _ in self.copies]
        for held, name, copied in self.copies:
            held[name] = copied
        try:
            with torch.autocast(self.kind, self.dtype, cache_enabled=False):
                yield
        finally:
            for (held, name, _), parameter in zip(self.copies, own, strict=True):
                held[name] = parameter


def _linear(model: Any) -> list[nn.Module]:
    """Return the linear layers, without those that transformers keeps in float32."""
    kept = {part for name in KEPT for part in getattr(model, name, None) or ()}
    named = model.named_modules()
    return [module for name, module in named if type(module) in KINDS and not kept & {*name.split(".")}]


def _frozen(model: Any, beside: nn.Module | None) -> list[tuple[nn.Module, dict[str, nn.Parameter]]]:
    """Return the frozen linear layers in float32 with their parameters, which no other module and ``beside`` have."""
    layers = [layer for layer in _linear(model) if not any(parameter.requires_grad for parameter in layer.parameters())]
    layer_ids = {id(layer) for layer in layers}
    others = [each for each in model.modules() if id(each) not in layer_ids]
    elsewhere = {id(p) for module in others for p in module.parameters(recurse=False)}
    elsewhere |= set() if beside is None else {id(p) for p in beside.parameters()}
    found = [(layer, dict(layer.named_parameters())) for layer in layers]
    return [
        (layer, parameters)
        for layer, parameters in found
        if all(id(p) not in elsewhere and p.dtype == torch.float32 for p in parameters.values())
    ]


def _exact(parameters: Mapping[str, Tensor], dtype: torch.dtype) -> bool:
    """Return whether all values are numbers of ``dtype``."""
    return all(torch.equal(p.to(dtype).float(), p) for p in parameters.values())


@torch.no_grad()
def _outputs(model: Any, dtype: torch.dtype) -> list[Tensor]:
    """Return the logits of a test pass under autocast, and the states after each block, which are not rounded."""
    with torch.autocast(model.device.type, dtype):
        outputs = model(**tiny_input(model), output_hidden_states=True)
    values = [outputs.logits, *(value for name, value in outputs.items() if name.endswith("hidden_states"))]
    return [x.cpu() for value in values for x in (value if isinstance(value, tuple) else (value,))]
