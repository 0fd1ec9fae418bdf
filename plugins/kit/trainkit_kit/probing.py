"""Probes of models, made once: they take longer than the rest of making a tiny model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from trainkit.models import policy
from trainkit.rollouts import sampler

PROBES: tuple[tuple[Any, str], ...] = (
    (policy, "_head_gives_logits"),
    (policy, "needs_mask"),
    (policy.CausalPolicy, "why_not_shared"),
    (sampler, "stepping_fault"),
)
"""Functions that run a model to see how it can be run, given the model or what has it as its attribute ``model``."""

_answers: dict[tuple[Any, ...], Any] = {}


@contextmanager
def probed_once() -> Iterator[None]:
    """Let models of equal modules, configuration and precision have the answers of the first of them, within."""
    honest = {(owner, name): getattr(owner, name) for owner, name in PROBES}
    for (owner, name), probe in honest.items():
        setattr(owner, name, _once(name, probe))
    try:
        yield
    finally:
        for (owner, name), probe in honest.items():
            setattr(owner, name, probe)


def _once(name: str, probe: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(probe)
    def answer(asked: Any, *others: Any) -> Any:
        key = (name, *_kind(asked), *_kind(getattr(asked, "model", None)), repr(others))
        if key not in _answers:
            _answers[key] = probe(asked, *others)
        return _answers[key]

    return answer


def _kind(model: Any) -> tuple[Any, ...]:
    """Return all of a model but the values of its weights that an answer may depend on."""
    if not isinstance(model, nn.Module):
        return type(model), getattr(model, "hidden", None)
    modules = [
        (name, type(each), "forward" in vars(each), getattr(each, "gradient_checkpointing", None), *_hooks_of(each))
        for name, each in model.named_modules()
    ]
    parameters = [(p.shape, p.dtype, p.device, p.requires_grad) for p in model.parameters()]
    precision = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    config = vars(model.config) if isinstance(model, PreTrainedModel) else None
    return type(model), repr((modules, parameters, precision, config))


def _hooks_of(module: nn.Module) -> tuple[int, int]:
    """Return how many hooks are called before and after a module."""
    return len(module._forward_pre_hooks), len(module._forward_hooks)
