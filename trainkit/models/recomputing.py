"""Activation checkpointing: blocks or MLPs whose activations are computed again in the backward pass, and not kept."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from trainkit.errors import ConfigError
from trainkit.models.trunk import find_blocks

ENABLE = ("activation_checkpointing_enable", "gradient_checkpointing_enable", "enable_gradient_checkpointing")
"""Methods that switch it on: of transformers, of transformers before 5.23, and of diffusers."""


def recompute_activations(model: nn.Module) -> None:
    """Let the trained blocks of the models in ``model`` keep only their inputs for the backward pass.

    They do so in training mode. Frozen lower layers, which stay in evaluation mode, and models without trained
    parameters are left as they are.

    Raises:
        ConfigError: one of them does not support it, or there is none.
    """
    models = _outermost(model)
    for each in models:
        name = next(name for name in ENABLE if hasattr(each, name))
        try:
            getattr(each, name)()
        except ValueError as error:
            raise ConfigError(_unsupported(type(each).__name__, str(error))) from error
        if hasattr(each, "disable_input_require_grads"):
            # needed for reentrant checkpoints alone; with it, frozen layers would keep activations, too
            each.disable_input_require_grads()
    if not models:
        raise ConfigError(_unsupported(type(model).__name__, "it contains no model of transformers or diffusers"))


def recompute_mlps(model: nn.Module) -> None:
    """Let the MLPs of a language model's blocks keep only their inputs for the backward pass, in training mode.

    They keep most of what a block keeps, and take less than half of its arithmetic.

    Raises:
        ConfigError: the blocks, or their MLPs, are not found.
    """
    network: Any = getattr(model, "model", None)
    blocks = find_blocks(network) if hasattr(network, "base_model") else None
    mlps: list[Any] = [getattr(block, "mlp", None) for block in blocks or ()]
    if not mlps or None in mlps:
        raise ConfigError(
            f"train.gradient_checkpointing is 'mlp', and the blocks of {type(network or model).__name__} have no part "
            "named mlp; set it to true, which keeps the inputs of whole blocks alone"
        )
    for mlp in mlps:
        mlp.forward = MethodType(_again, mlp)  # a copy of the module gets a method of its own


def _again(mlp: Any, *args: Any, **kwargs: Any) -> Any:
    forward = type(mlp).forward
    if not (mlp.training and torch.is_grad_enabled()):
        return forward(mlp, *args, **kwargs)
    return checkpoint(forward, mlp, *args, use_reentrant=False, **kwargs)


def _outermost(model: nn.Module) -> list[Any]:
    """Return the models of libraries in ``model`` that have trained parameters, without those inside others."""
    outermost: list[Any] = []
    inside: set[nn.Module] = set()
    for module in model.modules():
        if module in inside or not any(hasattr(module, name) for name in ENABLE):
            continue
        inside.update(module.modules())
        if any(parameter.requires_grad for parameter in module.parameters()):
            outermost.append(module)
    return outermost


def _unsupported(name: str, why: str) -> str:
    return (
        f"train.gradient_checkpointing is true, and {name} does not support it ({why}); set it to false, and for less "
        "memory lower train.microbatch_size"
    )
