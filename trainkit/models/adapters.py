"""peft adapters: added to a model, switched off, saved, and merged into the weights."""

from __future__ import annotations

import copy
import json
import logging
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from safetensors.torch import save_file
from torch import nn

from trainkit.errors import ConfigError, suggest
from trainkit.models.virtual import (
    WEIGHTS,
    attach,
    check_model,
    check_prompt_learning,
    is_virtual,
    load_virtual,
    save_virtual,
    saved_config,
    taken_out,
    virtual_tokens,
)

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

HEADS = "heads.safetensors"
"""The file of an export with the weights that transformers does not load, such as those of the value head."""
MARK = "trainkit.json"
"""The file of an export that names the algorithm and the step."""
BASE = "base"
"""The directory of an export with the base weights of an adapter, where these have no path of their own."""
ADAPTER_CONFIG = "adapter_config.json"
"""The file that every saved adapter has."""
HUB = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")
"""Arguments of `from_pretrained` that say where to look for files."""


def make_peft_config(fields: Mapping[str, Any]) -> PeftConfig:
    """Create a peft configuration from its fields; ``peft_type`` defaults to LoRA.

    Raises:
        ConfigError: peft has no such type or field, or the type is not supported.
    """
    from peft import PEFT_TYPE_TO_CONFIG_MAPPING

    rest = dict(fields)
    kind = rest.pop("peft_type", "LORA")
    name = str(getattr(kind, "value", kind)).upper()  # a name, or peft's PeftType
    classes = {str(kind.value): cls for kind, cls in PEFT_TYPE_TO_CONFIG_MAPPING.items()}
    if name not in classes:
        raise ConfigError(
            f"model.peft_config.peft_type is {name!r}{suggest(name, classes)}; peft knows {', '.join(sorted(classes))}"
        )
    config: PeftConfig
    try:
        config = classes[name](**rest)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"model.peft_config does not fit {classes[name].__name__}: {error}") from error
    return checked(config)


def checked(config: PeftConfig) -> PeftConfig:
    """Return the configuration; that of virtual tokens is made one for causal language models.

    Raises:
        ConfigError: it is of a type that is not supported.
    """
    if getattr(config, "is_prompt_learning", False):
        check_prompt_learning(config)
        config.task_type = "CAUSAL_LM"  # of models without a task, peft ignores the virtual tokens
    return config


@contextmanager
def quiet_peft() -> Iterator[None]:
    """Suppress the warnings of peft that need no action by the user."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to False")  # GPT-2: peft then sets it
        warnings.filterwarnings("ignore", message="Model (has|with) `tie_word_embeddings=True`")  # merging unties them
        warnings.filterwarnings("ignore", message="Input and output embeddings are no longer tied after merging")
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning)
        yield


def add_adapter(model: PreTrainedModel, config: PeftConfig) -> None:
    """Add a new adapter to the model's layers, or virtual tokens, and freeze everything else.

    Raises:
        ConfigError: the adapter does not fit the model, or the model already has an adapter.
    """
    if is_virtual(config):
        with_adapter(model, config)
        return
    check_without_adapter(model)
    with fitting(model):
        model.add_adapter(config)


def with_adapter(model: PreTrainedModel, config: PeftConfig) -> Any:
    """Return a `peft.PeftModel` of the model with a new adapter; everything else is frozen.

    The model itself has the adapter, too: in its layers, or as virtual tokens that it reads before the first token.

    Raises:
        ConfigError: the adapter does not fit the model, or the model already has an adapter.
    """
    from peft import get_peft_model

    check_without_adapter(model)
    if not is_virtual(config):
        with fitting(model):
            return get_peft_model(model, config)
    check_model(model)
    try:
        with quiet_peft():
            adapted = get_peft_model(model, copy.deepcopy(config))  # peft completes it for this model
    except (RuntimeError, ValueError, TypeError, AttributeError, LookupError, OSError) as error:
        raise ConfigError(f"model.peft_config does not fit {type(model).__name__}: {error}") from error
    attach(adapted)
    return adapted


def check_without_adapter(model: Any) -> None:
    """Raise a ConfigError if a live model, which gets a new adapter, already has one."""
    if has_adapter(model):
        raise ConfigError(
            "model.peft_config is given, but the live model already has an adapter; omit peft_config to train the "
            "existing adapter, or merge that one first"
        )


@contextmanager
def fitting(model: Any, adapter: str | Path | None = None, **hub: Any) -> Iterator[None]:
    """Convert the errors that peft and torch raise for an adapter that does not fit the model into a ConfigError.

    The context manager goes around the call that adds the adapter.

    Args:
        model: a transformers model, or a `peft.PeftModel`.
        adapter: the directory or hub id of a saved adapter; None for a new one, made from ``peft_config``.
        **hub: arguments for hub ids, such as ``revision``.

    Raises:
        ConfigError: the adapter does not fit.
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
        f"Adapters fit the modules called {', '.join(linear)}; name some of these in target_modules"
    )


SHAPES = re.compile(r"size mismatch for (\S+): .*?Size\((\[.*?\])\) from checkpoint, .*?Size\((\[.*?\])\)")
"""The part of torch's error message that names a tensor and its two shapes."""


def _another_model(model: PreTrainedModel, adapter: str, error: Exception, hub: Mapping[str, Any]) -> str:
    try:
        base = adapter_base(adapter, **hub)
    except (OSError, ValueError):
        base = None
    if base is None:
        return f"there is no adapter at {adapter!r}: {error}. Give a directory or hub id with an {ADAPTER_CONFIG}"
    shapes = SHAPES.search(str(error))
    fault = "{} has shape {} in the adapter and {} in the model".format(*shapes.groups()) if shapes else str(error)
    return (
        f"the adapter {adapter!r} does not fit this {type(model).__name__}: {fault}. The adapter names {base!r} as its "
        f"base model; give the model that it was trained on, or set base_model_name_or_path in its {ADAPTER_CONFIG}"
    )


def has_adapter(model: nn.Module) -> bool:
    """Return whether the model has adapters in its layers, or virtual tokens."""
    return bool(adapted(model)) or virtual_tokens(language_model(model)) is not None


def adapter_config(model: PreTrainedModel) -> PeftConfig | None:
    """Return peft's configuration of the model's active adapter, or of its virtual tokens; None if it has neither."""
    virtual = virtual_tokens(model)
    if virtual is not None:
        return cast("PeftConfig", virtual.config)
    if not has_adapter(model):
        return None
    [active] = model.active_adapters()
    return cast("PeftConfig", model.peft_config[active])


def adapted(model: nn.Module) -> list[Any]:
    """Return the modules that peft has wrapped; each holds its base layer."""
    if not hasattr(model, "peft_config"):
        return []
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import AuxiliaryTrainingWrapper

    return [module for module in model.modules() if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper)]


def switch_off(model: nn.Module) -> None:
    """Disable the model's adapters, so that it computes what its base weights alone give."""
    for module in adapted(model):
        module.enable_adapters(False)


def switch_on(model: nn.Module) -> None:
    """Enable the model's adapters again."""
    for module in adapted(model):
        module.enable_adapters(True)


def language_model(model: Any) -> PreTrainedModel:
    """Return the transformers model inside a wrapper, a `peft.PeftModel`, or both; adapters stay in its layers."""
    model = getattr(model, "pretrained_model", model)
    return cast("PreTrainedModel", model.get_base_model() if hasattr(model, "get_base_model") else model)


def bare(model: Any) -> PreTrainedModel:
    """Return the `language_model` of a live model. Its active adapter is trained and saved; others stay as they are.

    Raises:
        ConfigError: the model has several adapters, and not exactly one is active; or virtual tokens do not fit it.
    """
    peft_model = getattr(model, "pretrained_model", model)
    if getattr(peft_model, "_is_prompt_learning", False):
        checked(peft_model.active_peft_config)
        return attach(peft_model)
    inner = language_model(model)
    names = list(getattr(inner, "peft_config", None) or {})
    if names:
        inner._hf_peft_config_loaded = True  # otherwise transformers would save the wrapped layers as a full model
    if len(names) > 1 and len(active := inner.active_adapters()) != 1:
        raise ConfigError(
            f"the live model has the adapters {', '.join(names)}, of which {len(active)} are active; one has to be "
            "active, and is trained: call set_adapter(name)"
        )
    return inner


def hub_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return those arguments of `from_pretrained` that say where to look for files."""
    return {name: arguments[name] for name in HUB if name in arguments}


def find_base(path: str, arguments: Mapping[str, Any]) -> tuple[str | None, dict[str, Any]]:
    """Return the path of the adapter's base model, None without an adapter, and the arguments that load full weights.

    ``revision`` and ``subfolder`` refer to the adapter's repository, so they are removed for its base model.

    Args:
        path: the directory or hub id of an adapter or of a model.
        arguments: those of `from_pretrained`.

    Raises:
        ConfigError: the adapter names no base model.
    """
    base = adapter_base(path, **hub_arguments(arguments))
    gone = () if base is None else ("revision", "subfolder")
    return base, {name: value for name, value in arguments.items() if name not in gone}


def adapter_base(path: str | Path, **hub: Any) -> str | None:
    """Return the directory or hub id of the adapter's base model; None if there is no adapter at ``path``.

    Args:
        path: a directory or a hub id.
        **hub: ``token``, ``revision`` and the like, for hub ids.

    Raises:
        ConfigError: the adapter names no base model.
    """
    from transformers.utils.peft_utils import find_adapter_config_file

    if hub.get("subfolder") and Path(path).is_dir():  # transformers before 5.23 ignores subfolder for directories
        path, hub = Path(path) / hub["subfolder"], {**hub, "subfolder": ""}
    file = find_adapter_config_file(str(path), **hub)
    if file is None:
        return None
    beside = Path(file).parent / BASE
    base = str(beside) if beside.is_dir() else json.loads(Path(file).read_text("utf-8"))["base_model_name_or_path"]
    if not base:
        raise ConfigError(f"{file} names no base model; set base_model_name_or_path there to its path or hub id")
    return str(base)


def has_score_head(directory: Path) -> bool:
    """Return whether the directory is the export of a reward model that is a language model with a separate head."""
    mark = directory / MARK
    made_by = json.loads(mark.read_text("utf-8"))["method"] if mark.is_file() else None
    return made_by == "reward" and (directory / HEADS).is_file()


def save_model(model: PreTrainedModel, directory: Path, target: Path) -> None:
    """Save the model, or only its adapter if it has one, into ``directory``, which is later moved to ``target``.

    Base weights of an adapter that have no path of their own (random ones) are saved beside the adapter.
    """
    if not has_adapter(model):
        model.save_pretrained(directory)
        return
    config: Any = adapter_config(model)
    start = getattr(config, "init_lora_weights", True)
    source = "" if isinstance(start, str) and start != "gaussian" else model.name_or_path  # those change the weights
    saved: dict[str, Any] = {"base_model_name_or_path": source or str(target / BASE)}
    if virtual := virtual_tokens(model):
        save_virtual(virtual, directory, saved["base_model_name_or_path"])
    else:
        _save_layers(model, directory, config, saved, beside=not source)
    if not source:
        with without_adapter(model):
            model.save_pretrained(directory / BASE)


def _save_layers(model: PreTrainedModel, directory: Path, config: Any, saved: dict[str, Any], beside: bool) -> None:
    """Save the adapter in the model's layers as peft does, with the values ``saved`` in its configuration."""
    from peft import get_peft_model_state_dict

    if beside and hasattr(config, "init_lora_weights"):
        saved["init_lora_weights"] = True  # the base weights saved beside it are changed already
    saved |= {"inference_mode": True, "task_type": config.task_type or _task(model)}
    [active] = model.active_adapters()
    state = get_peft_model_state_dict(model, adapter_name=active, save_embedding_layers=False)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(  # a file of safetensors has no tensors that share memory, as adapters of tied weights do
        {_saved_name(name): tensor.detach().clone().contiguous() for name, tensor in state.items()},
        directory / WEIGHTS,
        metadata={"format": "pt"},
    )
    with _set_to(config, saved):
        config.save_pretrained(directory)
    if model.can_generate():
        model.generation_config.save_pretrained(directory)


def _saved_name(name: str) -> str:
    """Return the name of an adapter's tensor in a file; peft keeps RandLoRA's bases, which all layers share, once."""
    shared = name.rpartition(".")[2]
    return f"base_model.{shared}" if shared in ("randlora_A", "randlora_B") else f"base_model.model.{name}"


def _task(model: PreTrainedModel) -> str | None:
    """Return peft's name for the kind of model, which its ``AutoPeftModelFor...`` classes compare."""
    if type(model).__name__.endswith("ForSequenceClassification"):
        return "SEQ_CLS"
    if model.get_output_embeddings() is None:
        return None
    return "SEQ_2_SEQ_LM" if model.config.is_encoder_decoder else "CAUSAL_LM"


@contextmanager
def _set_to(config: Any, values: Mapping[str, Any]) -> Iterator[None]:
    """Set these values of the configuration within the context, and restore the previous ones afterwards."""
    before = {name: getattr(config, name) for name in values}
    vars(config).update(values)
    try:
        yield
    finally:
        vars(config).update(before)


@contextmanager
def without_adapter(model: PreTrainedModel) -> Iterator[None]:
    """Take the adapter's layers or the virtual tokens out of the model within the context."""
    if (virtual := virtual_tokens(model)) is not None:
        with taken_out(model, virtual):
            yield
        return
    wrapped = {id(module) for module in adapted(model)}
    outer: list[tuple[nn.Module, str, Any]] = []
    for parent in model.modules():
        outer += [(parent, child, module) for child, module in parent.named_children() if id(module) in wrapped]
    configs, model._hf_peft_config_loaded = model.__dict__.pop("peft_config"), False
    try:
        for parent, child, module in outer:
            while id(module) in wrapped:
                module = module.get_base_layer() if hasattr(module, "get_base_layer") else module.original_module
            setattr(parent, child, module)
        yield
    finally:
        for parent, child, module in outer:
            setattr(parent, child, module)
        model.peft_config, model._hf_peft_config_loaded = configs, True


def load_adapter(model: PreTrainedModel, path: str, **hub: Any) -> PreTrainedModel:
    """Return the base ``model`` with the adapter at ``path``, a directory or a hub id.

    An adapter within layers is merged into the weights. Virtual tokens are put before the first token, and are trained
    further; the weights are frozen.

    Raises:
        ConfigError: the adapter does not fit the model.
    """
    with fitting(model, path, **hub):
        virtual = saved_config(path, **hub) is not None
    if virtual:
        return language_model(load_peft_model(model, path, trainable=True, **hub))
    return model if model.device.type == "meta" else merge_adapter(model, path, **hub)


def load_peft_model(model: PreTrainedModel, path: str, *, trainable: bool, **hub: Any) -> Any:
    """Return a `peft.PeftModel` of the base ``model`` with the adapter at ``path``, a directory or a hub id.

    Raises:
        ConfigError: the adapter does not fit the model.
    """
    from peft import PeftModel

    with fitting(model, path, **hub):
        config = saved_config(path, **hub)
        if config is None:
            return PeftModel.from_pretrained(model, path, is_trainable=trainable, **hub)
        check_model(model)
        adapted = load_virtual(model, path, config, **hub)
    adapted.prompt_encoder.requires_grad_(trainable)
    return adapted


def merge_adapter(model: PreTrainedModel, path: str | Path, **hub: Any) -> PreTrainedModel:
    """Return the base ``model`` with the adapter at ``path``, a directory or a hub id, merged into its weights.

    Quantised weights are dequantised before.

    Raises:
        ConfigError: the adapter does not fit the model, or is one of virtual tokens.
    """
    from peft import PeftModel

    with fitting(model, path, **hub):
        if (config := saved_config(str(path), **hub)) is not None:
            raise ConfigError(
                f"{str(path)!r} holds virtual tokens ({config.peft_type.value}), which cannot be merged into weights; "
                "load them with peft.AutoPeftModelForCausalLM, or train them further: give this path as "
                "model.model_path without peft_config"
            )
        if getattr(model, "is_quantized", False):
            log.warning(
                "the adapter %s is merged into its base model, whose weights are dequantised for it to %s; to train on "
                "quantised weights, merge it into a directory (trainkit export) and give that",
                path,
                model.dtype,
            )
            whole: Any = model.dequantize()
            whole._weight_conversions = None  # those of the quantised file
            model = whole
        loaded: Any = PeftModel.from_pretrained(model, str(path), **hub)
        _untie(loaded.get_base_model())
        merged: PreTrainedModel = loaded.merge_and_unload()
        _name_tie(merged)
    merged.requires_grad_(True)  # peft has frozen the base weights
    merged.name_or_path = merged.config.name_or_path = ""  # the merged weights have no path yet
    return merged


def _untie(model: Any) -> None:
    """Give the head its own weights if it shares them with the embeddings and one of the two has an adapter.

    An adapter of the one would otherwise be merged into the other, too.
    """
    parts = [model.get_input_embeddings(), model.get_output_embeddings()]
    if None in parts or all(part not in adapted(model) for part in parts):
        return
    words, head = (getattr(part, "base_layer", getattr(part, "original_module", part)) for part in parts)
    if head.weight is words.weight:
        head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)


def _name_tie(model: Any) -> None:
    """Let the configuration say if head and embeddings no longer share their weights, so that both are saved."""
    words, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is not None and head.weight is not words.weight:
        model.config.get_text_config().tie_word_embeddings = model.config.tie_word_embeddings = False


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
