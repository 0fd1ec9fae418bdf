"""Load models, policies and tokenizers from a configuration, by the kind of model that it names."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoProcessor,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)

from trainkit.config import ModelConfig, TRLConfig, absent, unknown_advice
from trainkit.data.chat import read_template
from trainkit.data.images import READERS, ImageReader
from trainkit.errors import ConfigError, DataError, describe, suggest
from trainkit.models.adapters import (
    HUB,
    adapter_base,
    add_adapter,
    bare,
    find_base,
    has_adapter,
    hub_arguments,
    language_model,
    load_adapter,
    make_peft_config,
)
from trainkit.models.images import reads_images
from trainkit.models.policy import CausalPolicy, Policy
from trainkit.models.seq2seq import Seq2SeqPolicy
from trainkit.models.trunk import depth_of, freeze_below
from trainkit.models.unloaded import loads_weights, place, reads_weights
from trainkit.models.value_head import find_file
from trainkit.models.virtual import count_of, saved_count, virtual_tokens
from trainkit.security import TRUST, hidden, is_secret

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json")
"""Files of which a directory or repository with a tokenizer has at least one."""

MOST_NEAR = 1000
"""The most directories among which one with a similar name is looked for."""


def load_model(config: ModelConfig, model: PreTrainedModel | None = None) -> PreTrainedModel:
    """Load the model that ``config`` names, or take the live ``model``, and set what is trained as ``config`` says.

    The model is a language model or a classifier. A mapping as ``model_path`` gives random weights from torch's
    global generator. An adapter at ``model_path`` is merged into the weights of its base model; virtual tokens are
    trained further. A live model, or the model in a live wrapper, is modified in place and returned.

    Raises:
        ConfigError: no model is given, transformers cannot load it, or what is to be trained does not fit it.
    """
    live, model = model, _load(config) if model is None else bare(model)
    peft_config = None if config.peft_config is None else make_peft_config(config.peft_config)
    if peft_config is not None:
        add_adapter(model, _for_skeleton(peft_config) if model.device.type == "meta" else peft_config)
    place(model)  # after an adapter's weights were drawn, which are the same on all devices
    if peft_config is None and config.num_layers_unfrozen >= 0:
        _check_weights_are_trained(config, virtual_tokens(model) is not None)
        if has_adapter(model):
            raise ConfigError(
                f"model.num_layers_unfrozen is {config.num_layers_unfrozen}, and the live model has an adapter, a part "
                "of which would be frozen; set it to -1, or merge the adapter first"
            )
        freeze_below(model, config.num_layers_unfrozen)
    elif not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(
            "the live model has no trainable parameters; load its adapter with is_trainable=True, or unfreeze some"
        )
    if config.freeze_vision:
        tower: Any = model.get_encoder(modality="image")
        tower.requires_grad_(False)
    if config.disable_dropout:
        disable_dropout(model if live is None else live)  # a wrapper's heads have dropout too
    model.eval()
    return model


def load_frozen(config: ModelConfig, source: Any, key: str) -> PreTrainedModel:
    """Load a second model, without an adapter that ``config`` adds to the trained one.

    Args:
        config: the settings of the trained model, of which ``dtype`` and ``kwargs`` apply.
        source: a hub id, a directory, or the fields of a model config (random weights from torch's global generator);
            an adapter is merged. Or a live model, a live wrapper or a policy, whose model is returned as it is.
        key: the name of the setting or argument, for error messages.

    Raises:
        ConfigError: transformers cannot load it.
    """
    if isinstance(source, str | Mapping):
        return _load(_of_second(config, source), key)
    return bare(source.model if isinstance(source, Policy) else source)


def load_frozen_config(config: ModelConfig, source: Any, key: str) -> PreTrainedConfig:
    """Load the transformers config of what `load_frozen` loads, without its weights.

    Raises:
        ConfigError: it cannot be loaded, or ``source`` is no model and names none.
    """
    if isinstance(source, str | Mapping):
        return load_model_config(_of_second(config, source), key)
    model = language_model(source.model if isinstance(source, Policy) else source)
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise ConfigError(
            f"{key} should be a hub id, a directory, the fields of a model config, or a language model; "
            f"given {describe(source)}"
        )
    return model.config


def _of_second(config: ModelConfig, source: str | Mapping[str, Any]) -> ModelConfig:
    """Return the settings for a second model; ``revision`` and the like refer to the repository of the first."""
    names = ("revision", "subfolder") if isinstance(source, str) else HUB
    kwargs = {name: value for name, value in config.kwargs.items() if name not in names}
    return ModelConfig(model_path=source, dtype=config.dtype, kwargs=kwargs)


def check_frozen(trained: PreTrainedConfig, other: PreTrainedConfig, key: str, limit: int | None) -> None:
    """Check that a second model can read the sequences of the trained one and has the same vocabulary.

    Args:
        trained: the config of the trained model.
        other: the config of the second model.
        key: the name of the setting or argument, for error messages.
        limit: the largest number of tokens of a sequence of the run; None if unlimited.

    Raises:
        ConfigError: it does not.
    """
    sizes = [config.get_text_config().vocab_size for config in (trained, other)]
    if sizes[0] != sizes[1]:
        raise ConfigError(
            f"the model of {key} has a vocabulary of {sizes[1]} tokens and the trained model one of {sizes[0]}; give a "
            "model with the same tokenizer"
        )
    if bool(trained.is_encoder_decoder) != bool(other.is_encoder_decoder):
        kinds = ("reads prompt and response as one text", "is an encoder-decoder")
        raise ConfigError(
            f"the model of {key} {kinds[bool(other.is_encoder_decoder)]} and the trained model "
            f"{kinds[bool(trained.is_encoder_decoder)]}; give two of one kind"
        )
    context = context_length(other)
    if context is not None and (limit is None or limit > context):
        raise ConfigError(
            f"the model of {key} attends to at most {context} tokens, and the run's sequences may have "
            f"{limit or 'any number'}; set train.seq_length to {context} or less"
        )


def check_tokens(tokenizer: PreTrainedTokenizerBase, config: ModelConfig, source: Any, key: str) -> None:
    """Check that the tokenizer in the directory or repository of a second model, if it has one, has the same tokens.

    Padding tokens may differ, because padding has no effect.

    Args:
        tokenizer: the tokenizer of the run.
        config: the settings of the trained model.
        source: what `load_frozen` takes; only a hub id or a directory can have a tokenizer.
        key: the name of the setting or argument, for error messages.

    Raises:
        ConfigError: a token has another id there, or none; or the tokenizer cannot be loaded.
    """
    if not isinstance(source, str):
        return
    kwargs = _of_second(config, source).kwargs
    if not any(find_file(source, name, hub_arguments(kwargs)) for name in TOKENIZER_FILES):
        return
    arguments = {**hub_arguments(kwargs), **trust(kwargs)}
    try:
        other = AutoTokenizer.from_pretrained(source, **arguments)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(_cannot_load("tokenizer", key, source, error)) from error
    ids, others = tokenizer.get_vocab(), other.get_vocab()
    padding = {tokenizer.pad_token, other.pad_token} - {tokenizer.eos_token, other.eos_token}
    if differ := sorted({token for token, _ in ids.items() ^ others.items()} - padding):
        here, there = (f"the id {v[differ[0]]}" if differ[0] in v else "no token" for v in (ids, others))
        raise ConfigError(
            f"the tokenizer of {source!r} ({key}) differs from the run's in {len(differ)} tokens: {differ[0]!r} has "
            f"{there} there and {here} here, so the two models would read different text. Give a model with the same "
            "tokenizer"
        )


def auto_class(config: PreTrainedConfig) -> Any:
    """Return transformers' ``AutoModelFor...`` class for the kind of model that the config describes."""
    if is_classifier(config):
        return AutoModelForSequenceClassification
    if config.is_encoder_decoder:
        return AutoModelForSeq2SeqLM
    return AutoModelForImageTextToText if reads_images(config) else AutoModelForCausalLM


def is_classifier(config: PreTrainedConfig) -> bool:
    """Return whether the config is of a sequence classifier, which gives scores to texts, not of a language model."""
    return any(name.endswith("ForSequenceClassification") for name in config.architectures or ())


def make_policy(
    model: PreTrainedModel,
    *,
    temperature: float = 1.0,
    logit_mask: Tensor | None = None,
    value_head: bool = False,
    head: nn.Module | None = None,
    critic: int | PreTrainedModel | None = None,
) -> Policy:
    """Create the policy for the model's architecture; the arguments are those of `Policy`."""
    kind = Seq2SeqPolicy if model.config.is_encoder_decoder else CausalPolicy
    return kind(model, temperature=temperature, logit_mask=logit_mask, value_head=value_head, head=head, critic=critic)


def _load(config: ModelConfig, key: str = "model.model_path") -> PreTrainedModel:
    arguments = {"dtype": getattr(torch, config.dtype or "float32"), **config.kwargs, **trust(config.kwargs)}
    model_config = load_model_config(config, key)
    if not reads_weights():
        arguments = {name: value for name, value in arguments.items() if name not in HUB}
    try:
        if not isinstance(config.model_path, str) or not reads_weights():
            with nullcontext() if loads_weights() else torch.device("meta"):
                return cast("PreTrainedModel", auto_class(model_config).from_config(model_config, **arguments))
        base, arguments = find_base(config.model_path, arguments)
        arguments |= {} if loads_weights() else {"device_map": "meta"}
        arguments |= {name: getattr(model_config, name) for name in _fuse_activation(model_config)}
        model = auto_class(model_config).from_pretrained(base or config.model_path, **arguments)
    except (OSError, ValueError, TypeError, ImportError) as error:  # an ImportError: of what quantises
        raise ConfigError(_cannot_load("model", key, config.model_path, error)) from error
    if base is None:
        return cast("PreTrainedModel", model)
    return load_adapter(model, config.model_path, **hub_arguments(config.kwargs))


def eos_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the EOS ids of the tokenizer and of the model's generation config; chat models have several."""
    return sorted({tokenizer.eos_token_id, *_named_eos(getattr(model, "generation_config", None))})


def coming_eos(config: ModelConfig, model: PreTrainedModel | None, model_config: PreTrainedConfig) -> list[int]:
    """Return the EOS ids of the generation config that a model will have, before its weights are loaded.

    Args:
        config: names the model.
        model: the live model, if one is given.
        model_config: the transformers config of the model.
    """
    if model is not None:
        return _named_eos(getattr(bare(model), "generation_config", None))
    generation = None
    if isinstance(config.model_path, str):
        base, arguments = find_base(config.model_path, config.kwargs)
        with suppress(OSError):
            generation = GenerationConfig.from_pretrained(base or config.model_path, **hub_arguments(arguments))
    return _named_eos(generation or GenerationConfig.from_model_config(model_config))


def name_eos(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Write the EOS ids at which responses end into the configurations of ``model``; return whether one was missing.

    transformers' ``generate`` stops at the EOS ids of the generation config. Without this function it would continue
    past the trained EOS if the tokenizer's EOS differs from the one in the model's config.
    """
    ids = [token for token in eos_ids(model, tokenizer) if token < model.config.get_text_config().vocab_size]
    text, generation = model.config.get_text_config(), getattr(model, "generation_config", None)
    lacking = [c for c in (text, generation) if c is not None and tokenizer.eos_token_id not in _named_eos(c)]
    if generation is not None:
        generation.eos_token_id = ids[0] if len(ids) == 1 else ids
    if text in lacking:
        text.eos_token_id = tokenizer.eos_token_id
    return bool(lacking)


def _named_eos(config: Any) -> list[int]:
    """Return the EOS ids of a configuration of a model or of its generation."""
    named = getattr(config, "eos_token_id", None)
    return named if isinstance(named, list) else [] if named is None else [named]


def check_trainable(config: ModelConfig, model_config: PreTrainedConfig, live: bool) -> None:
    """Check the settings of what is trained on a model without weights, before the weights are loaded.

    Args:
        config: the settings.
        model_config: the transformers config of the model.
        live: whether the model is a live one, whose adapter is checked when it is added.

    Raises:
        ConfigError: the model has fewer layers than ``num_layers_unfrozen``, the adapter fits none of its modules, or a
            loss is configured and not asked for.
    """
    _check_experts(config, model_config)
    if config.freeze_vision and not reads_images(model_config):
        raise ConfigError(
            f"model.freeze_vision is true, and a model of the kind {model_config.model_type!r} reads no images; remove "
            "it"
        )
    depth = depth_of(model_config)
    if depth is not None and config.num_layers_unfrozen > depth:
        raise ConfigError(
            f"model.num_layers_unfrozen is {config.num_layers_unfrozen}, and the model has {depth} layers; "
            f"give 0 to {depth}, or -1 to train everything"
        )
    if not live:
        _check_weights_are_trained(config, _saved_virtual(config) > 0)
    if config.peft_config is not None:
        peft_config = make_peft_config(config.peft_config)
        check_adapter_dropout(config)
        if not live:
            with torch.device("meta"):
                skeleton = auto_class(model_config).from_config(model_config, **trust(config.kwargs))
            add_adapter(skeleton, _for_skeleton(peft_config))


def _check_experts(config: ModelConfig, model_config: PreTrainedConfig) -> None:
    """Raise a ConfigError if a coefficient of the loss that balances experts is given, and that loss is not asked for.

    As in transformers, a coefficient in the model's own config asks for nothing.
    """
    if getattr(model_config.get_text_config(), "output_router_logits", False):
        return
    given = {"model.kwargs": config.kwargs}
    given |= {"model.model_path": config.model_path} if isinstance(config.model_path, Mapping) else {}
    for key, fields in given.items():
        if value := fields.get("router_aux_loss_coef"):
            raise ConfigError(
                f"{key}.router_aux_loss_coef is {value}, and the loss that balances the experts of a mixture is not "
                f"added without {key}.output_router_logits: true"
            )


def balances_experts(model_config: PreTrainedConfig) -> bool:
    """Return whether the config has a coefficient of the loss that balances experts, and does not ask for that loss."""
    config = model_config.get_text_config()
    return bool(getattr(config, "router_aux_loss_coef", 0)) and not getattr(config, "output_router_logits", False)


def _check_weights_are_trained(config: ModelConfig, virtual: bool) -> None:
    """Raise a ConfigError if layers or an adapter are to be trained in a model with virtual tokens."""
    asked = "num_layers_unfrozen" if config.num_layers_unfrozen >= 0 else "peft_config"
    if virtual and (config.num_layers_unfrozen >= 0 or config.peft_config is not None):
        raise ConfigError(
            f"the model has virtual tokens (prompt or prefix tuning), which are trained further while its weights are "
            f"frozen, and model.{asked} asks for other trained parameters; omit it, or give the base model"
        )


def check_trains_weights(config: ModelConfig, model: PreTrainedModel) -> None:
    """Raise a ConfigError if the weights of layers are to be trained and are quantised; of such, none would change."""
    quantiser: Any = getattr(model, "hf_quantizer", None)  # some train their weights as if they were quantised
    fixed = getattr(model, "is_quantized", False) and not (quantiser and quantiser.is_qat_trainable)
    if fixed and not has_adapter(model) and config.num_layers_unfrozen:
        raise ConfigError(
            f"the weights of {type(model).__name__} are quantised, so they cannot be trained; give model.peft_config, "
            "such as {r: 16, target_modules: all-linear}, or load the model without quantization_config"
        )


def count_virtual(config: ModelConfig, live: Any = None) -> int:
    """Return how many virtual tokens the model reads before each row: those of a live model, new or saved ones."""
    if live is not None and (count := count_of(live)):
        return count
    if config.peft_config is not None:
        return int(config.peft_config.get("num_virtual_tokens") or 0)
    return 0 if live is not None else _saved_virtual(config)


def _saved_virtual(config: ModelConfig) -> int:
    """Return how many virtual tokens are saved at ``model_path``."""
    path, arguments = config.model_path, hub_arguments(config.kwargs)
    if not isinstance(path, str) or adapter_base(path, **arguments) is None:
        return 0
    return saved_count(path, **arguments)


def _for_skeleton(adapter: PeftConfig) -> PeftConfig:
    """Return the config of an adapter for a model without weights, which some initialisations read."""
    if hasattr(adapter, "init_lora_weights"):
        adapter.init_lora_weights = False
    return adapter


def check_adapter_dropout(config: ModelConfig) -> None:
    """Raise a ConfigError if the adapter has dropout that ``disable_dropout`` would silently switch off.

    Raises:
        ConfigError: ``peft_config`` has a dropout above 0, and ``disable_dropout`` is true.
    """
    fields = config.peft_config or {}
    dropout = [name for name, value in fields.items() if name.endswith("dropout") and value]
    if dropout and config.disable_dropout:
        raise ConfigError(
            f"model.peft_config.{dropout[0]} is {fields[dropout[0]]}, and model.disable_dropout switches all dropout "
            f"off; set model.disable_dropout to false, or omit {dropout[0]}"
        )


def load_model_config(config: ModelConfig, key: str = "model.model_path") -> PreTrainedConfig:
    """Load the transformers config of the model, without its weights; ``key`` names the setting in error messages.

    Raises:
        ConfigError: no model is given, or its config cannot be loaded.
    """
    path = config.model_path
    if path is None:
        raise ConfigError(
            "no model is given; set model.model_path (hub id, directory, or a config's fields) or pass one"
        )
    try:
        if isinstance(path, str):
            arguments = {**hub_arguments(config.kwargs), **trust(config.kwargs)}
            base, arguments = find_base(path, arguments)
            model_config = cast(PreTrainedConfig, AutoConfig.from_pretrained(base or path, **arguments))
        else:
            model_config = AutoConfig.for_model(**path)
            _fuse_activation(model_config)
    except (OSError, ValueError, TypeError, KeyError, StrictDataclassError) as error:
        raise ConfigError(_cannot_load("model", key, path, error)) from error
    _check_kind(model_config, path if isinstance(path, str) else path["model_type"], key)
    return model_config


def reads_more(config: PreTrainedConfig) -> bool:
    """Return whether the config is of a model that reads images or sounds besides text."""
    return any(hasattr(config, f"{part}_config") for part in ("vision", "audio"))


def _check_kind(config: PreTrainedConfig, source: str, key: str) -> None:
    """Raise a ConfigError if transformers has no class that reads text for the kind of model."""
    if type(config) in auto_class(config)._model_mapping or getattr(config, "auto_map", None):
        return
    text = config.get_text_config()
    alone = type(text) in AutoModelForCausalLM._model_mapping
    besides = "reads more than text" if reads_more(config) else "is no language model"
    such_as = f", such as its text model ({text.model_type}) alone" if alone and text is not config else ""
    raise ConfigError(
        f"{key} is {source!r}, a model of the kind {config.model_type!r}, which {besides} and cannot be trained; give "
        f"a language model{such_as}"
    )


def _fuse_activation(config: PreTrainedConfig) -> list[str]:
    """Replace ``gelu_new`` in a config by ``gelu_pytorch_tanh``; return the fields that now have it.

    Both are the tanh form of GELU. ``gelu_new`` takes eight steps, on which GPT-2 spends a quarter of a pass; the
    other runs in one kernel.
    """
    fields = [name for name in ("activation_function", "hidden_act") if getattr(config, name, None) == "gelu_new"]
    for name in fields:
        setattr(config, name, "gelu_pytorch_tanh")
    return fields


PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
"""Files of which a directory or repository with a processor has at least one."""


def load_tokenizer(config: TRLConfig[Any], tokenizer: Any = None) -> PreTrainedTokenizerBase:
    """Return the live ``tokenizer``, or load the one that ``config`` names; with the chat template that it names.

    If there is a processor, which may be given as the tokenizer, it reads the images of rows (`READERS`).

    Raises:
        ConfigError: no tokenizer is given, or it or the chat template cannot be loaded.
        DataError: the tokenizer has no EOS token, so the model cannot learn to end a response.
    """
    processor = tokenizer if isinstance(tokenizer, ProcessorMixin) else None
    reader = None if processor is None else ImageReader(processor, urls=config.data.image_urls)
    tokenizer = tokenizer if processor is None else getattr(processor, "tokenizer", None)
    live = tokenizer is not None
    if tokenizer is None:
        path = config.tokenizer.tokenizer_path or config.model.model_path
        if not isinstance(path, str):
            raise ConfigError(
                "no tokenizer is given; set tokenizer.tokenizer_path (hub id or directory), or pass tokenizer=. "
                "A model made from a config comes without a tokenizer"
            )
        try:
            tokenizer = AutoTokenizer.from_pretrained(
                path, **{**config.tokenizer.kwargs, **trust(config.tokenizer.kwargs)}
            )
        except (OSError, ValueError, TypeError) as error:
            key = "model.model_path" if config.tokenizer.tokenizer_path is None else "tokenizer.tokenizer_path"
            raise ConfigError(_cannot_load("tokenizer", key, path, error)) from error
        _forget_secrets(tokenizer)
        reader = _load_reader(path, config, tokenizer)
    if tokenizer.eos_token_id is None:
        raise DataError(
            f"the tokenizer {type(tokenizer).__name__} has no EOS token, so no response can end; "
            "set tokenizer.kwargs.eos_token, or tokenizer.eos_token = ... on a live one"
        )
    if config.tokenizer.chat_template is not None:
        reader = reader or READERS.get(tokenizer)
        tokenizer = copy.deepcopy(tokenizer) if live else tokenizer
        tokenizer.chat_template = read_template(config.tokenizer.chat_template)
    if reader is not None:
        READERS[tokenizer] = reader
        tokenizer.chat_template = tokenizer.chat_template or getattr(reader.processor, "chat_template", None)
    return cast(PreTrainedTokenizerBase, tokenizer)


def _load_reader(path: str, config: TRLConfig[Any], tokenizer: PreTrainedTokenizerBase) -> ImageReader | None:
    """Return what reads images by the processor at a path; None if there is no processor.

    A processor that cannot be loaded, mostly for a package that is missing, is an error where a row has images.
    """
    arguments = {**hub_arguments(config.tokenizer.kwargs), **trust(config.tokenizer.kwargs)}
    if not any(find_file(path, name, hub_arguments(config.tokenizer.kwargs)) for name in PROCESSOR_FILES):
        return None
    try:
        processor = AutoProcessor.from_pretrained(path, **arguments)
    except Exception as error:  # of any processor
        return ImageReader(None, f"the processor {path!r} cannot be loaded: {' '.join(str(error).split())}")
    if not isinstance(processor, ProcessorMixin):  # where a package is missing, transformers loads the tokenizer alone
        needs = "those of models that read videos, too, need torchvision; install it"
        return ImageReader(None, f"the processor {path!r} cannot be loaded: {needs}")
    processor.tokenizer = tokenizer
    return ImageReader(processor, urls=config.data.image_urls)


def _forget_secrets(tokenizer: PreTrainedTokenizerBase) -> None:
    """Remove secrets from the arguments that a tokenizer was loaded with, which are saved with it."""
    kept = {name: value for name, value in tokenizer.init_kwargs.items() if not is_secret(name)}
    tokenizer.init_kwargs = {name: hidden(value) for name, value in kept.items()}


def pad_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the id for padding. Any id works: masks come from lengths, so padding values have no effect (law 1)."""
    return int(tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id)


def context_length(config: PreTrainedConfig) -> int | None:
    """Return the model's maximum number of tokens, None if unlimited; for an encoder-decoder, that of each side."""
    text = config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None)
    if not config.is_encoder_decoder:  # T5's n_positions is the length of its training data, not a limit
        limit = limit or getattr(text, "n_positions", None)
    return int(limit) if limit else None


def length_limit(config: PreTrainedConfig, asked: int | None, virtual: int = 0) -> int | None:
    """Return the largest number of tokens: ``asked``, which is `train.seq_length`, or else the model's context.

    Args:
        config: the config of the model.
        asked: the number that is asked for.
        virtual: how many virtual tokens it reads before them.

    Raises:
        ConfigError: more is asked for than the context, or virtual tokens fill it.
    """
    context = context_length(config)
    besides = f" besides {virtual} virtual ones" if virtual else ""
    if context is not None and virtual >= context:
        raise ConfigError(
            f"there are {virtual} virtual tokens (num_virtual_tokens), and the model attends to at most {context} "
            "tokens; give fewer"
        )
    context = None if context is None else context - virtual
    if context and asked and asked > context:
        raise ConfigError(f"train.seq_length is {asked}; the model attends to at most {context} tokens{besides}")
    return asked or context


def disable_dropout(model: nn.Module) -> None:
    """Set every dropout probability to 0: modules, and the floats that functional attention dropout reads."""
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


def trust(kwargs: Mapping[str, Any]) -> dict[str, bool]:
    """Return the argument of `from_pretrained` for code of a repository: False unless ``kwargs`` allow it.

    Without the argument, transformers asks on the terminal.
    """
    return {TRUST: bool(kwargs.get(TRUST, False))}


def _cannot_load(what: str, key: str, path: Any, error: Exception) -> str:
    if isinstance(path, str) and (missing := absent(path)):
        return f"{key} is {path!r}, and {missing} Give a hub id, or a local directory with a {what}"
    known = code_advice(error) or _import_advice(error) or unknown_advice(error)
    advice = known or f"Give a hub id, or a local directory with a {what}"
    near = "" if not isinstance(path, str) or Path(path).exists() else suggest(path, _directories_like(path))
    missing = f"There is no such directory{near} " if near else ""
    reason = " ".join(str(error).split()).rstrip(".")
    if "couldn't connect" in reason:
        reason = "it is not in the cache, and the hub cannot be reached"
    shown = repr(path) if isinstance(path, str) else f"of a {type(path).__name__}"
    return f"the {what} {shown} ({key}) cannot be loaded: {reason}. {missing}{advice}"


def _import_advice(error: Exception) -> str:
    """Return what to do if a package is missing; else an empty string."""
    return "Install it, or remove the setting that needs it" if isinstance(error, ImportError) else ""


def _directories_like(path: str) -> list[str]:
    """Return directories that a name without a directory of its own, which may be a hub id, could mean."""
    pattern = "/".join("*" for _ in Path(path).parts)
    return [str(path) for path in islice(Path().glob(pattern), MOST_NEAR) if path.is_dir()]


def code_advice(error: Exception) -> str:
    """Return what to do if a model was not loaded because it needs code of its repository; else an empty string."""
    if TRUST not in str(error):
        return ""
    return "If you trust that code, allow it with --trust-remote-code (trust_remote_code=True in Python)"
