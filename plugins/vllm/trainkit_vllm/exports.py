"""The trained model as files that vLLM reads: the whole model once, then its weights or its adapter."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from trainkit.data import save_processor
from trainkit.errors import ConfigError, EngineError
from trainkit.models import adapter_config, has_adapter, without_adapter

RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The largest ranks that vLLM can be prepared for."""


def check_adapter(model: Any) -> int | None:
    """Return the rank that vLLM must be prepared for, None without an adapter.

    Raises:
        ConfigError: vLLM cannot generate with an adapter of this kind.
    """
    config: Any = adapter_config(model)
    if config is None:
        return None
    kind = getattr(config.peft_type, "value", config.peft_type)
    odd = [
        f"{name} {value!r}"
        for name, plain in (("use_dora", False), ("modules_to_save", None), ("bias", "none"), ("lora_bias", False))
        if (value := getattr(config, name, plain)) not in (plain, [], None)
    ]
    if kind != "LORA" or odd:
        raise ConfigError(
            f"the engine 'vllm' generates with plain LoRA adapters, and model.peft_config has "
            f"{' and '.join(odd) if kind == 'LORA' else f'peft_type {kind!r}'}; change it, or set rollout.engine to "
            "'local'"
        )
    rank = max(config.r, *(config.rank_pattern or {}).values(), 0)
    if rank > RANKS[-1]:
        raise ConfigError(f"the adapter has rank {rank}; the engine 'vllm' allows at most {RANKS[-1]}")
    return min(known for known in RANKS if known >= rank)


def adapter_of(model: Any) -> tuple[str, Any]:
    """Return the name and the configuration of the model's active adapter."""
    [name] = model.active_adapters()
    return name, model.peft_config[name]


def write_model(served: Any, directory: Path) -> None:
    """Write the model without its adapter, the tokenizer, and the processor of a model that reads images."""
    base = served.model
    config = copy.deepcopy(base.config)
    config.architectures, config.dtype = [type(base).__name__], base.dtype
    config.save_pretrained(directory)
    with without_adapter(base) if has_adapter(base) else nullcontext():
        write_weights(base, base.state_dict(), directory)
    save_processor(served.tokenizer, directory)
    served.tokenizer.save_pretrained(directory)


def named_weights(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return ``tensors``, named as in the model's ``state_dict``, under the names that a checkpoint has.

    They are those that the model's ``save_pretrained`` writes, on all processes.
    """
    named = revert_weight_conversion(model, remove_tied_weights_from_state_dict(dict(tensors), model))
    return {name: tensor.detach() for name, tensor in named.items()}


def write_weights(model: Any, tensors: Mapping[str, Tensor], directory: Path) -> None:
    """Write ``tensors``, named as in the model's ``state_dict``, under the names that a checkpoint has."""
    directory.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: tensor.contiguous().cpu() for name, tensor in named_weights(model, tensors).items()},
        directory / "model.safetensors",
        metadata={"format": "pt"},
    )


def write_adapter(model: Any, tensors: Iterable[tuple[str, Tensor]], directory: Path) -> None:
    """Write the model's adapter with the values in ``tensors``, in the format of peft."""
    name, config = adapter_of(model)
    named = {
        f"base_model.model.{key.replace(f'.{name}.', '.')}": tensor.detach().contiguous().cpu()
        for key, tensor in tensors
        if f".{name}." in key
    }
    directory.mkdir(parents=True, exist_ok=True)
    save_file(named, directory / "adapter_model.safetensors")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft looks for the base model, which has no path
        config.save_pretrained(directory)
    file = directory / "adapter_config.json"
    fields = json.loads(file.read_text("utf-8"))
    file.write_text(json.dumps({**fields, "inference_mode": True, "lora_dropout": 0.0}), "utf-8")


def compare(pushed: Mapping[str, list[int]], known: Mapping[str, list[int]], where: str) -> None:
    """Compare the tensors that are to be loaded with those of the model at ``where``.

    vLLM cannot recover from a tensor of another shape, and does not report names that it does not know.

    Raises:
        EngineError: a tensor is unknown there, or has another shape.
    """
    if unknown := sorted(pushed.keys() - known.keys()):
        raise EngineError(
            f"the engine {where} serves another model: it has no tensor {unknown[0]!r}, which the trained model has, "
            f"and {len(unknown)} of {len(pushed)} tensors are unknown there; start it with the model that is trained"
        )
    for name, shape in pushed.items():
        if list(known[name]) != list(shape):
            raise EngineError(
                f"the engine {where} serves another model: {name!r} has the shape {list(known[name])} there and "
                f"{list(shape)} in the trained model; start it with the model that is trained"
            )
