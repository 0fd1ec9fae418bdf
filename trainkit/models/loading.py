"""From a configuration to a model, its policy and a tokenizer; the only place that knows kinds of models."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from trainkit.config import ModelConfig, TRLConfig
from trainkit.errors import ConfigError, DataError
from trainkit.models.adapters import (
    ADAPTER_CONFIG,
    HEADS,
    HUB,
    adapter_base,
    add_adapter,
    bare,
    find_base,
    hub_arguments,
    make_peft_config,
    merge_adapter,
)
from trainkit.models.policy import CausalPolicy, Policy
from trainkit.models.seq2seq import Seq2SeqPolicy
from trainkit.models.trunk import depth_of, freeze_below


def load_model(config: ModelConfig, model: PreTrainedModel | None = None) -> PreTrainedModel:
    """The language model (or classifier) that ``config`` names, or the live ``model``, with what is to be trained
    trainable.

    A mapping as ``model_path`` gives random weights from torch's global generator. Where ``model_path`` holds an
    adapter, it is merged into the weights it belongs to. A live model, or what a wrapper holds, stays the object it
    is; its parameters are frozen as the config says.

    Raises:
        ConfigError: nothing names a model, transformers cannot load it, or what is to be trained does not fit it.
    """
    live, model = model, _load(config) if model is None else bare(model)
    if config.peft_config is not None:
        add_adapter(model, make_peft_config(config.peft_config))
    elif config.num_layers_unfrozen >= 0:
        freeze_below(model, config.num_layers_unfrozen)
    elif not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(
            "nothing in the live model is trainable; load its adapter with is_trainable=True, or unfreeze something"
        )
    if config.disable_dropout:
        disable_dropout(model if live is None else live)  # a wrapper's heads have dropout too
    model.eval()
    return model


def auto_class(config: PreTrainedConfig) -> Any:
    """transformers' class of automatic models for what the config says that the model is."""
    if is_classifier(config):
        return AutoModelForSequenceClassification
    return AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM


def is_classifier(config: PreTrainedConfig) -> bool:
    """Whether the config is that of a model that gives texts scores, not tokens probabilities."""
    return any(name.endswith("ForSequenceClassification") for name in config.architectures or ())


def make_policy(
    model: PreTrainedModel,
    *,
    temperature: float = 1.0,
    logit_mask: Tensor | None = None,
    value_head: bool = False,
    head: nn.Module | None = None,
) -> Policy:
    """The policy that fits the model's architecture; the arguments are those of `Policy`."""
    kind = Seq2SeqPolicy if model.config.is_encoder_decoder else CausalPolicy
    return kind(model, temperature=temperature, logit_mask=logit_mask, value_head=value_head, head=head)


def _load(config: ModelConfig) -> PreTrainedModel:
    arguments = {"dtype": getattr(torch, config.dtype), **config.kwargs}
    model_config = load_model_config(config)
    if not isinstance(config.model_path, str):
        return cast(PreTrainedModel, auto_class(model_config).from_config(model_config, **arguments))
    try:
        base, arguments = find_base(config.model_path, arguments)
        arguments |= {name: getattr(model_config, name) for name in _fuse_activation(model_config)}
        model = auto_class(model_config).from_pretrained(base or config.model_path, **arguments)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(_cannot_load("model", "model.model_path", config.model_path, error)) from error
    if base is None:
        return cast(PreTrainedModel, model)
    return merge_adapter(model, config.model_path, **hub_arguments(config.kwargs))


def merge_export(adapter: Path, out: Path, base: str | None = None) -> None:
    """Write the whole model of an exported adapter to ``out``: weights with the adapter added, tokenizer and heads.

    Raises:
        ConfigError: there is no adapter, ``out`` holds something, or the base model cannot be loaded.
    """
    found = base or adapter_base(adapter)
    if not (adapter / ADAPTER_CONFIG).is_file() or found is None:
        raise ConfigError(f"{adapter} holds no {ADAPTER_CONFIG}; give an export of a run with model.peft_config")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is not empty; give a new directory")
    try:
        model = auto_class(AutoConfig.from_pretrained(found)).from_pretrained(found, dtype="auto")
        merged = merge_adapter(model, adapter)
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        raise ConfigError(
            f"the adapter {adapter} does not merge into {found!r}: {error}. Say where its base model is with --base"
        ) from error
    merged.save_pretrained(out)
    AutoTokenizer.from_pretrained(adapter).save_pretrained(out)
    if (adapter / HEADS).exists():
        shutil.copy2(adapter / HEADS, out)


def check_trainable(config: ModelConfig, model_config: PreTrainedConfig, live: bool) -> None:
    """Try what is to be trained on a model without weights, before one with weights is loaded.

    Raises:
        ConfigError: there are fewer layers than ``num_layers_unfrozen``, or the adapter fits nowhere.
    """
    depth = depth_of(model_config)
    if depth is not None and config.num_layers_unfrozen > depth:
        raise ConfigError(
            f"model.num_layers_unfrozen is {config.num_layers_unfrozen}, and the model has {depth} layers; "
            f"give 0 to {depth}, or -1 to train everything"
        )
    if config.peft_config is not None:
        wanted = make_peft_config(config.peft_config)
        check_adapter_dropout(config)
        if not live:
            with torch.device("meta"):
                trust = {key: value for key, value in config.kwargs.items() if key == "trust_remote_code"}
                skeleton = auto_class(model_config).from_config(model_config, **trust)
            if hasattr(wanted, "init_lora_weights"):
                wanted.init_lora_weights = False  # some ways of initialising read the weights
            add_adapter(skeleton, wanted)


def check_adapter_dropout(config: ModelConfig) -> None:
    """Refuse dropout within an adapter that `disable_dropout` would switch off without a word.

    Raises:
        ConfigError: ``peft_config`` asks for dropout, and ``disable_dropout`` is true.
    """
    fields = config.peft_config or {}
    dropout = [name for name, value in fields.items() if name.endswith("dropout") and value]
    if dropout and config.disable_dropout:
        raise ConfigError(
            f"model.peft_config.{dropout[0]} is {fields[dropout[0]]}, and model.disable_dropout switches all dropout "
            "off; set that to false, or leave the adapter's out"
        )


def load_model_config(config: ModelConfig) -> PreTrainedConfig:
    """The transformers config of the model, read without loading weights.

    Raises:
        ConfigError: nothing names a model, or it cannot be read.
    """
    path = config.model_path
    if path is None:
        raise ConfigError(
            "no model is given; set model.model_path (hub id, directory, or a config's fields) or pass one"
        )
    try:
        if isinstance(path, str):
            known = {k: v for k, v in config.kwargs.items() if k in (*HUB, "trust_remote_code")}
            base, known = find_base(path, known)
            return cast(PreTrainedConfig, AutoConfig.from_pretrained(base or path, **known))
        model_config = AutoConfig.for_model(**path)
        _fuse_activation(model_config)
        return model_config
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(_cannot_load("model", "model.model_path", path, error)) from error


def _fuse_activation(config: PreTrainedConfig) -> list[str]:
    """Name the tanh form of GELU, where a config has it step by step, as the one that runs in one kernel.

    The function is the same; GPT-2 spends a quarter of a pass on its eight steps. Returns the fields that name it.
    """
    fields = [name for name in ("activation_function", "hidden_act") if getattr(config, name, None) == "gelu_new"]
    for name in fields:
        setattr(config, name, "gelu_pytorch_tanh")
    return fields


def load_tokenizer(config: TRLConfig[Any], tokenizer: PreTrainedTokenizerBase | None = None) -> PreTrainedTokenizerBase:
    """The live ``tokenizer``, or the one that ``config`` names.

    Raises:
        ConfigError: nothing names a tokenizer, or it cannot be loaded.
        DataError: it has no EOS token, so no response could be taught to end.
    """
    if tokenizer is None:
        path = config.tokenizer.tokenizer_path or config.model.model_path
        if not isinstance(path, str):
            raise ConfigError(
                "no tokenizer is given; set tokenizer.tokenizer_path (hub id or directory), or pass tokenizer=. "
                "A model made from a config has none of its own"
            )
        try:
            tokenizer = AutoTokenizer.from_pretrained(path, **config.tokenizer.kwargs)
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(_cannot_load("tokenizer", "tokenizer.tokenizer_path", path, error)) from error
    if tokenizer.eos_token_id is None:
        raise DataError(
            f"the tokenizer {type(tokenizer).__name__} has no EOS token, so no response can end; "
            "set tokenizer.kwargs.eos_token, or tokenizer.eos_token = ... on a live one"
        )
    return tokenizer


def pad_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """An id to fill padding with. Any will do: masks come from lengths and pad values never matter (law 1)."""
    return int(tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id)


def context_length(config: PreTrainedConfig) -> int | None:
    """The most tokens the model can attend to, of an encoder-decoder on either side; None if it sets no limit."""
    text = config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None)
    if not config.is_encoder_decoder:  # T5's n_positions is how long its training data was
        limit = limit or getattr(text, "n_positions", None)
    return int(limit) if limit else None


def disable_dropout(model: nn.Module) -> None:
    """Set every dropout probability to 0: modules, and the floats that functional attention dropout reads (S-17)."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)
    config = getattr(model, "config", None)
    for name, value in list(vars(config).items()) if config is not None else []:
        if ("dropout" in name or name.endswith("pdrop")) and isinstance(value, float):
            setattr(config, name, 0.0)


def _cannot_load(what: str, key: str, path: Any, error: Exception) -> str:
    return f"the {what} {path!r} ({key}) cannot be loaded: {error}. Give a hub id, or a local directory that holds one"
