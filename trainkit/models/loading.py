"""From a configuration to a model and a tokenizer."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from trainkit.config import ModelConfig, TRLConfig
from trainkit.errors import ConfigError, DataError


def load_model(config: ModelConfig, model: PreTrainedModel | None = None) -> PreTrainedModel:
    """The causal language model that ``config`` names, or the live ``model`` as it is.

    A mapping as ``model_path`` gives random weights from torch's global generator.

    Raises:
        ConfigError: nothing names a model, or transformers cannot load it; gives its reason.
    """
    if model is None:
        arguments = {"dtype": getattr(torch, config.dtype), **config.kwargs}
        if isinstance(config.model_path, str):
            try:
                model = AutoModelForCausalLM.from_pretrained(config.model_path, **arguments)
            except (OSError, ValueError, TypeError) as error:
                raise ConfigError(_cannot_load("model", "model.model_path", config.model_path, error)) from error
        else:
            model = AutoModelForCausalLM.from_config(load_model_config(config), **arguments)
    if config.disable_dropout:
        disable_dropout(model)
    model.eval()
    return model


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
            keys = ("revision", "trust_remote_code", "token", "subfolder", "cache_dir")
            known = {k: v for k, v in config.kwargs.items() if k in keys}
            return cast(PreTrainedConfig, AutoConfig.from_pretrained(path, **known))
        return AutoConfig.for_model(**path)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(_cannot_load("model", "model.model_path", path, error)) from error


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
    """The most tokens the model can attend to; None if it sets no limit."""
    text = config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", None)
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
