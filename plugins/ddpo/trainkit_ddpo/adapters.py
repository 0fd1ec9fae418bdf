"""Adapters of peft in a network that is not a transformers model."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.errors import ConfigError
from trainkit.models import make_peft_config

ATTENTION = ["to_q", "to_k", "to_v", "to_out.0"]
"""Default target modules of adapters, as in Black et al. 2023."""


def add_adapter(network: nn.Module, fields: Mapping[str, Any]) -> None:
    """Add an adapter to the network, and freeze all other weights.

    Raises:
        ConfigError: peft has no such adapter, or no module of the network matches it.
    """
    from peft import inject_adapter_in_model

    config = make_peft_config({"target_modules": ATTENTION, **fields})
    try:
        inject_adapter_in_model(config, network)
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"model.peft_config fits no module of {type(network).__name__}: {error}") from error
    for parameter in network.parameters():
        if parameter.requires_grad:  # trained weights are in float32, frozen ones may be in 16 bits
            parameter.data = parameter.data.float()


def merged(network: nn.Module) -> nn.Module:
    """Return the network if it has no adapter, else a copy with the adapter merged into its weights."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    if not any(isinstance(module, BaseTunerLayer) for module in network.modules()):
        return network
    whole = copy.deepcopy(network)
    cast(whole, torch.float32)  # in 16 bits, small changes of the adapter would be lost to rounding
    for name, module in list(whole.named_modules()):
        if isinstance(module, BaseTunerLayer):
            module.merge()
            parent, _, child = name.rpartition(".")
            setattr(whole.get_submodule(parent), child, module.get_base_layer())
    return whole


def cast(module: nn.Module, dtype: torch.dtype) -> None:
    """Convert the module's floating-point tensors to ``dtype``, in place."""
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)


def lora_of(network: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the weights and the configuration of the network's adapter if it is LoRA, else two empty dicts."""
    from peft import get_peft_model_state_dict

    [config] = network.peft_config.values()
    if str(getattr(config.peft_type, "value", config.peft_type)) != "LORA":
        return {}, {}
    return dict(get_peft_model_state_dict(network)), config.to_dict()
