"""Adapters of peft in a network that is no model of transformers."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.errors import ConfigError
from trainkit.models import make_peft_config

ATTENTION = ["to_q", "to_k", "to_v", "to_out.0"]
"""What is adapted unless the configuration says otherwise, as Black et al. 2023 do."""


def add_adapter(network: nn.Module, fields: Mapping[str, Any]) -> None:
    """Put an adapter into the network, and freeze everything else.

    Raises:
        ConfigError: peft knows no such adapter, or it fits no module.
    """
    from peft import inject_adapter_in_model

    config = make_peft_config({"target_modules": ATTENTION, **fields})
    try:
        inject_adapter_in_model(config, network)
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"model.peft_config fits no module of {type(network).__name__}: {error}") from error
    for parameter in network.parameters():
        if parameter.requires_grad:  # what is trained is never half, what is frozen may be (S-49)
            parameter.data = parameter.data.float()


def merged(network: nn.Module) -> nn.Module:
    """The network itself if it has no adapter, else a copy with the adapter added to its weights."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    if not any(isinstance(module, BaseTunerLayer) for module in network.modules()):
        return network
    whole = copy.deepcopy(network)
    cast(whole, torch.float32)  # or what was learnt would be rounded away
    for name, module in list(whole.named_modules()):
        if isinstance(module, BaseTunerLayer):
            module.merge()
            parent, _, child = name.rpartition(".")
            setattr(whole.get_submodule(parent), child, module.get_base_layer())
    return whole


def cast(module: nn.Module, dtype: torch.dtype) -> None:
    """Hold the module's floating-point tensors in ``dtype``."""
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)


def lora_of(network: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The weights of the network's adapter and its configuration if it is LoRA, which diffusers loads, else nothing."""
    from peft import get_peft_model_state_dict

    [config] = network.peft_config.values()
    if str(getattr(config.peft_type, "value", config.peft_type)) != "LORA":
        return {}, {}
    return dict(get_peft_model_state_dict(network)), config.to_dict()
