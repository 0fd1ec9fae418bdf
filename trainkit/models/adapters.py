"""Adapters, through peft: put on a model, switched off, merged into the weights."""

from __future__ import annotations

import copy
import json
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from torch import nn
from transformers import PreTrainedModel

from trainkit.errors import ConfigError, suggest

if TYPE_CHECKING:
    from peft import PeftConfig

HEADS = "heads.safetensors"
"""In an export, the weights that transformers does not know, such as the value head's."""
MARK = "trainkit.json"
"""The file that says which step of which algorithm an export is of."""
BASE = "base"
"""In an export, the directory of the weights below an adapter, where they have no path of their own."""
ADAPTER_CONFIG = "adapter_config.json"
"""What makes a directory an adapter's."""
HUB = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")
"""Arguments of `from_pretrained` that say where files are; all that is loaded is looked for there."""


def make_peft_config(fields: Mapping[str, Any]) -> PeftConfig:
    """peft's configuration from its fields; ``peft_type`` is LoRA unless they say otherwise.

    Raises:
        ConfigError: peft knows no such type or field.
    """
    from peft import PEFT_TYPE_TO_CONFIG_MAPPING

    rest = dict(fields)
    name = str(rest.pop("peft_type", "LORA")).upper()
    known = {str(kind.value): cls for kind, cls in PEFT_TYPE_TO_CONFIG_MAPPING.items()}
    if name not in known:
        raise ConfigError(
            f"model.peft_config.peft_type is {name!r}{suggest(name, known)}; peft knows {', '.join(sorted(known))}"
        )
    config: PeftConfig
    try:
        config = known[name](**rest)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"model.peft_config does not fit {known[name].__name__}: {error}") from error
    check_within_layers(config)
    return config


def check_within_layers(config: PeftConfig) -> None:
    """Refuse what is no adapter within layers.

    Raises:
        ConfigError: it puts tokens before the prompt.
    """
    if getattr(config, "is_prompt_learning", False):
        kind = getattr(config.peft_type, "value", config.peft_type)
        raise ConfigError(
            f"model.peft_config.peft_type is {kind!r}, which puts tokens before the prompt; trainkit trains adapters "
            "within the model's layers, such as LORA, DORA (use_dora), IA3, OFT"
        )


@contextmanager
def quiet_peft() -> Iterator[None]:
    """Within, peft does not tell of what it settles by itself."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to False")  # GPT-2: peft then sets it
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning)
        yield


def add_adapter(model: PreTrainedModel, config: PeftConfig) -> None:
    """Put a new adapter into the model's layers and freeze everything else.

    Raises:
        ConfigError: it fits no module of the model, or the model has one already.
    """
    if has_adapter(model):
        raise ConfigError(
            "model.peft_config is given, and the live model has an adapter already; leave peft_config out to train "
            "that one, or merge it first"
        )
    with fitting(model):
        model.add_adapter(config)


@contextmanager
def fitting(model: Any, adapter: str | Path | None = None, **hub: Any) -> Iterator[None]:
    """Within, an adapter is put on the model; what peft and torch raise where it does not fit says so.

    Args:
        model: a transformers model, or a `peft.PeftModel`.
        adapter: the directory or hub id of one that was saved; None: a new one, of ``peft_config``.
        **hub: for hub ids.

    Raises:
        ConfigError: it does not fit.
    """
    try:
        with quiet_peft():
            yield
    except ConfigError:
        raise
    except (RuntimeError, ValueError, TypeError, AttributeError, LookupError, OSError) as error:
        inner = language_model(model)
        fault = _no_module(inner, error) if adapter is None else _another_model(inner, str(adapter), error, hub)
        raise ConfigError(fault) from error


def _no_module(model: PreTrainedModel, error: Exception) -> str:
    linear = sorted({name.rsplit(".", 1)[-1] for name, m in model.named_modules() if _is_linear(m)})
    return (
        f"model.peft_config fits no module of {type(model).__name__}: {error}\n"
        f"Modules that adapters fit are called {', '.join(linear)}; name those in target_modules"
    )


SHAPES = re.compile(r"size mismatch for (\S+): .*?Size\((\[.*?\])\) from checkpoint, .*?Size\((\[.*?\])\)")
"""How torch says that a saved tensor has another shape."""


def _another_model(model: PreTrainedModel, adapter: str, error: Exception, hub: Mapping[str, Any]) -> str:
    try:
        base = adapter_base(adapter, **hub)
    except (OSError, ValueError):
        base = None
    if base is None:
        return f"there is no adapter at {adapter!r}: {error}. Give a directory or hub id that has an {ADAPTER_CONFIG}"
    shapes = SHAPES.search(str(error))
    fault = "{} is {} there, and {} here".format(*shapes.groups()) if shapes else str(error)
    return (
        f"the adapter {adapter!r} does not fit this {type(model).__name__}: {fault}. As its base it "
        f"names {base!r}; give the model that it was trained on, or set base_model_name_or_path in its {ADAPTER_CONFIG}"
    )


def has_adapter(model: nn.Module) -> bool:
    """Whether the model has adapters in its layers."""
    return bool(adapted(model))


def adapted(model: nn.Module) -> list[Any]:
    """The modules that peft has wrapped; they know their base layer."""
    if not hasattr(model, "peft_config"):
        return []
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import AuxiliaryTrainingWrapper

    return [module for module in model.modules() if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper)]


def switch_off(model: nn.Module) -> None:
    """The model as it is without its adapters."""
    for module in adapted(model):
        module.enable_adapters(False)


def switch_on(model: nn.Module) -> None:
    """The model with its adapters."""
    for module in adapted(model):
        module.enable_adapters(True)


def language_model(model: Any) -> PreTrainedModel:
    """The transformers model in a wrapper, or a `peft.PeftModel`, or both; adapters stay in its layers."""
    model = getattr(model, "pretrained_model", model)
    return cast("PreTrainedModel", model.get_base_model() if hasattr(model, "get_base_model") else model)


def bare(model: Any) -> PreTrainedModel:
    """The `language_model` of a live model, of whose adapters one is trained and saved, and the others stay.

    Raises:
        ConfigError: several of its adapters are active, or none is.
    """
    inner = language_model(model)
    names = list(getattr(inner, "peft_config", None) or {})
    if names:
        inner._hf_peft_config_loaded = True  # or transformers would save the wrapped layers as a whole model
    if len(names) > 1 and len(active := inner.active_adapters()) != 1:
        raise ConfigError(
            f"of the live model's adapters {', '.join(names)} there are {len(active)} active ones; the one that is "
            "trained should be: call set_adapter(name)"
        )
    return inner


def hub_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Of the arguments of `from_pretrained`, those that say where files are."""
    return {name: arguments[name] for name in HUB if name in arguments}


def find_base(path: str, arguments: Mapping[str, Any]) -> tuple[str | None, dict[str, Any]]:
    """What lies below the adapter at ``path``, if one is there, and the arguments by which whole weights are loaded.

    Where in the adapter's repository it is says nothing of the base's.

    Raises:
        ConfigError: the adapter does not say what it belongs to.
    """
    base = adapter_base(path, **hub_arguments(arguments))
    gone = () if base is None else ("revision", "subfolder")
    return base, {name: value for name, value in arguments.items() if name not in gone}


def adapter_base(path: str | Path, **hub: Any) -> str | None:
    """What lies below the adapter at ``path``, a directory or a hub id: another such path. None: no adapter is there.

    Args:
        path: where to look.
        **hub: ``token``, ``revision`` and the like, for hub ids.

    Raises:
        ConfigError: the adapter does not say what it belongs to.
    """
    from transformers.utils.peft_utils import find_adapter_config_file

    file = find_adapter_config_file(str(path), **hub)
    if file is None:
        return None
    beside = Path(file).parent / BASE
    base = str(beside) if beside.is_dir() else json.loads(Path(file).read_text("utf-8"))["base_model_name_or_path"]
    if not base:
        raise ConfigError(f"{file} names no base model; set base_model_name_or_path there to where its weights are")
    return str(base)


def has_score_head(directory: Path) -> bool:
    """Whether a reward model's export is there with its head beside it: a language model, not a classifier."""
    mark = directory / MARK
    made_by = json.loads(mark.read_text("utf-8"))["method"] if mark.is_file() else None
    return made_by == "reward" and (directory / HEADS).is_file()


def save_model(model: PreTrainedModel, directory: Path, target: Path) -> None:
    """Save the model into ``directory``, which will become ``target``: whole, or of an adapted one the adapter alone.

    Weights below an adapter that have no path of their own (random ones) are saved beside it.
    """
    if not has_adapter(model):
        model.save_pretrained(directory)
        return
    [active] = model.active_adapters()
    config = model.peft_config[active]
    start = getattr(config, "init_lora_weights", True)
    source = "" if isinstance(start, str) and start != "gaussian" else model.name_or_path  # those change the weights
    saved: dict[str, Any] = {"base_model_name_or_path": source or str(target / BASE)}
    if not source and hasattr(config, "init_lora_weights"):
        saved["init_lora_weights"] = True  # what is saved beside has been changed already
    with warnings.catch_warnings(), _set_to(config, saved):
        warnings.filterwarnings("ignore", message="Could not find a config file")  # peft looks for it at the base
        model.save_pretrained(directory)
    if not source:
        _without_adapter(model).save_pretrained(directory / BASE)


@contextmanager
def _set_to(config: Any, values: Mapping[str, Any]) -> Iterator[None]:
    """Within, the configuration has these values."""
    before = {name: getattr(config, name) for name in values}
    vars(config).update(values)
    try:
        yield
    finally:
        vars(config).update(before)


def _without_adapter(model: PreTrainedModel) -> PreTrainedModel:
    """The model below the adapter, sharing its weights."""
    tensors = [*model.parameters(), *model.buffers()]
    base = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    wrapped = {id(module) for module in adapted(base)}
    for name, module in list(base.named_modules()):
        if id(module) in wrapped:
            parent, _, child = name.rpartition(".")
            inner = module.get_base_layer() if hasattr(module, "get_base_layer") else module.original_module
            setattr(base.get_submodule(parent), child, inner)
    del base.peft_config
    base._hf_peft_config_loaded = False
    return base


def merge_adapter(model: PreTrainedModel, path: str | Path, **hub: Any) -> PreTrainedModel:
    """The base ``model`` with the adapter at ``path``, a directory or a hub id, added to its weights.

    Raises:
        ConfigError: it does not fit.
    """
    from peft import PeftModel

    with fitting(model, path, **hub):
        merged: PreTrainedModel = PeftModel.from_pretrained(model, str(path), **hub).merge_and_unload()
    merged.requires_grad_(True)  # peft has frozen what is below the adapter
    merged.name_or_path = merged.config.name_or_path = ""  # these weights are nowhere yet
    return merged


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
