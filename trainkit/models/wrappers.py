"""Language models with a value head, compatible with the classes of TRL and trlX."""

from __future__ import annotations

import importlib.util
import inspect
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    PreTrainedConfig,
)
from transformers.utils.hub import PushToHubMixin

from trainkit.config import BITS, one_token, present_arguments, unknown_advice
from trainkit.errors import ConfigError, describe
from trainkit.models.adapters import (
    HEADS,
    bare,
    check_without_adapter,
    checked,
    find_base,
    fitting,
    has_adapter,
    hub_arguments,
    language_model,
    load_peft_model,
    make_peft_config,
    merge_adapter,
    save_model,
    with_adapter,
)
from trainkit.models.value_head import ValueHead, check_head_alone, saved_heads, saved_modules, state_width, under
from trainkit.models.virtual import count_of
from trainkit.security import TRUST

if TYPE_CHECKING:
    from accelerate import Accelerator
    from peft import PeftConfig

log = logging.getLogger(__name__)


class PreTrainedModelWrapper(nn.Module, PushToHubMixin):
    """A language model, ``pretrained_model``, with the additional modules that ``supported_modules`` names.

    Args:
        pretrained_model: a transformers model, or a `peft.PeftModel` of one.
        score_module: the layer that computes rewards from hidden states, with the adapter ``rm_adapter_name`` active.
        supports_rm_adapter: whether the model has a reward adapter and a ``score_module``.
        rm_adapter_name: the name of the reward adapter.
        **kwargs: arguments of the subclass.
    """

    transformers_parent_class: ClassVar[Any] = None
    """The transformers class that loads ``pretrained_model``."""
    supported_args: ClassVar[tuple[str, ...]] = ()
    """Arguments of `from_pretrained` for the wrapper itself."""
    supported_modules: ClassVar[tuple[str, ...]] = ("v_head",)
    """The wrapper's modules, whose weights are saved together with the model's."""
    supported_rm_modules: ClassVar[tuple[str, ...]] = ("score",)
    """Modules of a reward adapter that are not inside the model's layers."""

    def __init__(
        self,
        pretrained_model: Any = None,
        score_module: nn.Module | None = None,
        supports_rm_adapter: bool = False,
        rm_adapter_name: str | None = None,
        **kwargs: Any,
    ) -> None:
        if kwargs:
            raise ConfigError(f"{type(self).__name__} takes no {', '.join(kwargs)}; it takes {self._takes()}")
        super().__init__()
        self.pretrained_model = pretrained_model
        self.training = getattr(pretrained_model, "training", True)
        self.is_peft_model = pretrained_model is not None and has_adapter(pretrained_model)
        self.is_sequential_parallel = len(set(self._device_map().values())) > 1
        self.supports_rm_adapter, self.rm_adapter_name = supports_rm_adapter, rm_adapter_name
        self.policy_adapter_name = "default"
        if score_module is not None:
            self.score = score_module

    @classmethod
    def _takes(cls) -> str:
        return ", ".join(cls.supported_args) or "no arguments of its own"

    @property
    def parent_class(self) -> Any:
        """`transformers_parent_class`."""
        return self.transformers_parent_class

    @property
    def config(self) -> PreTrainedConfig:
        """The model's configuration."""
        return cast(PreTrainedConfig, self.pretrained_model.config)

    @property
    def current_device(self) -> torch.device:
        """The device of the model."""
        return self.pretrained_model.device  # type: ignore[no-any-return]

    @property
    def is_loaded_in_8bit(self) -> bool:
        """Whether the weights are in 8 bits."""
        return bool(getattr(self.pretrained_model, "is_loaded_in_8bit", False))

    @property
    def generation_config(self) -> Any:
        """The model's defaults for `generate`."""
        return self.pretrained_model.generation_config

    @property
    def prepare_inputs_for_generation(self) -> Any:
        """The model's own method."""
        return self.pretrained_model.prepare_inputs_for_generation

    @property
    def gradient_checkpointing_enable(self) -> Any:
        """The model's own method."""
        return self.pretrained_model.gradient_checkpointing_enable

    @property
    def gradient_checkpointing_disable(self) -> Any:
        """The model's own method."""
        return self.pretrained_model.gradient_checkpointing_disable

    # ----------------------------------------------------------------------------------------------------- loading

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *model_args: Any, **kwargs: Any) -> Self:
        """Load a model and the heads saved with it, or wrap a live model.

        Weights are loaded in float32 unless ``dtype`` is given. With ``peft_config``, an existing adapter is treated
        as by `trainkit.train`: a saved adapter is merged into the weights before the new one is added, and an adapter
        on a live model is an error.

        Args:
            pretrained_model_name_or_path: a hub id or directory of a model or an adapter, a live transformers model,
                or a live `peft.PeftModel`.
            *model_args: passed to transformers' ``from_pretrained``.
            **kwargs: ``peft_config`` (an object or its fields) adds a new adapter. ``is_trainable=True`` makes a
                loaded adapter trainable. ``reward_adapter`` (a hub id or directory) is loaded under the name
                ``reward_adapter_name`` (default ``"reward_adapter"``), for `compute_reward_score`. ``load_in_8bit``
                and ``load_in_4bit`` quantise the weights. The arguments in `supported_args` are passed to the class,
                all others to transformers.

        Raises:
            ConfigError: the arguments, the model and its adapters do not fit together.
        """
        path = pretrained_model_name_or_path
        peft_config = _peft_config(kwargs.pop("peft_config", None))
        reward_adapter = kwargs.pop("reward_adapter", None)
        reward_adapter_name = kwargs.pop("reward_adapter_name", "reward_adapter")
        is_trainable = kwargs.pop("is_trainable", False)
        wrapper_arguments, base, preparation = cls._split_kwargs(kwargs)
        if not isinstance(reward_adapter, str | Path | None):
            raise ConfigError(f"reward_adapter should be a hub id or a directory; given {describe(reward_adapter)}")
        if isinstance(path, str | Path):
            base = arguments_of_today(base)
            model = cls._load(str(path), model_args, base, is_trainable, merge=peft_config is not None)
        else:
            model = _live(path, [*map(repr, model_args), *base])
        if peft_config is not None:
            model = _add_adapter(model, peft_config, preparation)
        elif preparation:
            raise ConfigError(f"{', '.join(preparation)} prepare a quantised model for peft_config; give that too")
        if reward_adapter is not None:
            score = cls.add_and_load_reward_modeling_adapter(
                model, str(reward_adapter), reward_adapter_name, base.get("token")
            )
            wrapper_arguments |= {
                "score_module": score,
                "supports_rm_adapter": True,
                "rm_adapter_name": reward_adapter_name,
            }
        wrapper = cls(model, **wrapper_arguments)
        if isinstance(path, str | Path):
            wrapper._load_heads(str(path), hub_arguments(base))
        return wrapper

    @classmethod
    def _split_kwargs(cls, kwargs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """Split the arguments: for the wrapper, for transformers, for peft's ``prepare_model_for_kbit_training``."""
        from peft import prepare_model_for_kbit_training

        prepares = [name for name in inspect.signature(prepare_model_for_kbit_training).parameters if name != "model"]
        wrapper_arguments = {name: kwargs.pop(name) for name in cls.supported_args if name in kwargs}
        preparation = {name: kwargs.pop(name) for name in prepares if name in kwargs}
        return wrapper_arguments, kwargs, preparation

    @classmethod
    def _load(cls, path: str, model_args: tuple[Any, ...], kwargs: dict[str, Any], trainable: bool, merge: bool) -> Any:
        hub = hub_arguments(kwargs)
        arguments = {"dtype": kwargs.pop("torch_dtype", torch.float32), TRUST: False, **_quantisation(kwargs)}
        below, arguments = find_base(path, arguments)
        try:
            model = cls.transformers_parent_class.from_pretrained(below or path, *model_args, **arguments)
        except TypeError as error:
            raise ConfigError(f"{path!r} cannot be loaded: {error}. {unknown_advice(error)}".strip()) from error
        if below is None:
            return model
        if merge:
            return merge_adapter(model, path, **hub)
        return load_peft_model(model, path, trainable=trainable, **hub)

    def _load_heads(self, path: str, hub: dict[str, Any]) -> None:
        if "critic" not in self.supported_modules:
            check_head_alone(saved_heads(path, hub), f"{HEADS} of {path!r}")
        state = saved_modules(path, self.supported_modules, hub)
        if not state:
            log.warning("%s has no %s; it is newly initialised", path, " or ".join(self.supported_modules))
        self.post_init(state)

    def post_init(self, state_dict: Mapping[str, Tensor]) -> None:
        """Load the wrapper's modules from a state dictionary that may have them; subclasses implement this."""

    # ------------------------------------------------------------------------------------------------------ saving

    def state_dict(self, *, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """Return the model's weights, named as in transformers, and ``v_head.*``; with an adapter, only the latter."""
        state: dict[str, Any] = {} if destination is None else destination
        if not self.is_peft_model:
            self.pretrained_model.state_dict(destination=state, prefix=prefix, keep_vars=keep_vars)
        for name, module in self._modules_of_its_own().items():
            module.state_dict(destination=state, prefix=f"{prefix}{name}.", keep_vars=keep_vars)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load what `state_dict` returns."""
        prefixes = tuple(f"{name}." for name in self._modules_of_its_own())
        base = {name: tensor for name, tensor in state_dict.items() if not name.startswith(prefixes)}
        loaded = []
        if base or not self.is_peft_model:
            loaded.append(("", self.pretrained_model.load_state_dict(base, strict=strict, assign=assign)))
        for name, module in self._modules_of_its_own().items():
            part = under(f"{name}.", state_dict)
            loaded.append((f"{name}.", module.load_state_dict(part, strict=strict, assign=assign)))
        missing = [prefix + key for prefix, result in loaded for key in result.missing_keys]
        unexpected = [prefix + key for prefix, result in loaded for key in result.unexpected_keys]
        return nn.modules.module._IncompatibleKeys(missing, unexpected)

    def _modules_of_its_own(self) -> dict[str, nn.Module]:
        return {name: getattr(self, name) for name in self.supported_modules if hasattr(self, name)}

    def save_pretrained(self, save_directory: str | Path, **kwargs: Any) -> None:
        """Save the model in transformers' format, or only its adapter if it has one, and the heads in a separate file.

        The directory can be passed to `from_pretrained`, to transformers, and as ``model_path`` to `trainkit.train`.

        Args:
            save_directory: created if it does not exist.
            **kwargs: ``state_dict`` replaces the wrapper's own; all others are passed to transformers, for a model
                without an adapter.

        Raises:
            ConfigError: ``push_to_hub`` is given.
        """
        if kwargs.pop("push_to_hub", False):
            raise ConfigError("save_pretrained saves to disk; call push_to_hub(repo_id) to upload")
        directory = Path(save_directory)
        directory.mkdir(parents=True, exist_ok=True)
        state = kwargs.pop("state_dict", None)
        heads = self.state_dict() if state is None else state
        heads = {key: heads[key] for key in heads if key.split(".")[0] in self.supported_modules}
        if self.is_peft_model:
            save_model(bare(self.pretrained_model), directory, directory.resolve())
        else:
            base = None if state is None else {key: state[key] for key in state if key not in heads}
            self.pretrained_model.save_pretrained(directory, state_dict=base, **kwargs)
        names = {key: key.replace("v_head.", "value_head.", 1) for key in heads}
        save_file({names[key]: tensor.detach().cpu().contiguous() for key, tensor in heads.items()}, directory / HEADS)

    # ----------------------------------------------------------------------------------------------- reward adapter

    @classmethod
    def add_and_load_reward_modeling_adapter(
        cls,
        pretrained_model: Any,
        adapter_model_id: str,
        adapter_name: str = "reward_model_adapter",
        token: str | bool | None = None,
    ) -> nn.Linear:
        """Add a reward model's adapter to a `peft.PeftModel`, frozen and not active, and return its score layer.

        Args:
            pretrained_model: the `peft.PeftModel`.
            adapter_model_id: the directory or hub id of the reward adapter.
            adapter_name: the name that the adapter gets in the model.
            token: the token for the hub.

        Raises:
            ConfigError: the model has no adapter, or the reward adapter has no score layer or does not fit the model.
        """
        from peft import PeftModel

        if not isinstance(pretrained_model, PeftModel):
            raise ConfigError(
                f"a reward adapter needs a peft.PeftModel, and {type(pretrained_model).__name__} is no peft.PeftModel; "
                "give peft_config, or a model with an adapter"
            )
        if count_of(pretrained_model):
            raise ConfigError(
                "a reward adapter needs an adapter within the layers beside it, and this model has virtual tokens "
                "(prompt or prefix tuning); give peft_config a type such as LORA"
            )
        hub: dict[str, Any] = {} if token is None else {"token": token}
        with fitting(pretrained_model, adapter_model_id, **hub), _as_it_was(pretrained_model):
            score = _score_weights(adapter_model_id, hub)
            pretrained_model.load_adapter(adapter_model_id, adapter_name, is_trainable=False, **hub)
        labels, width = score["weight"].shape
        layer = nn.Linear(width, labels, bias="bias" in score)
        layer.load_state_dict(score)
        return layer.to(pretrained_model.device, pretrained_model.dtype).requires_grad_(False)

    @torch.no_grad()
    def compute_reward_score(self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        """Compute the reward model's scores at every token, in float32. [B, T] -> [B, T, labels].

        A response's score is that of the last attended token, which `trainkit.functional.at_last` selects. The
        active adapters, ``requires_grad`` of the parameters and the training mode are restored afterwards.

        Raises:
            ConfigError: the model has no reward adapter.
        """
        if not self.supports_rm_adapter or self.rm_adapter_name is None:
            raise ConfigError("this model has no reward adapter; give from_pretrained a reward_adapter")
        if attention_mask is not None and "position_ids" not in kwargs and not self.config.is_encoder_decoder:
            kwargs["position_ids"] = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)  # of left-padded rows too
        with _as_it_was(self.pretrained_model):
            self.pretrained_model.set_adapter(self.rm_adapter_name, inference_mode=True)
            self.pretrained_model.eval()
            _, hidden = self._run(input_ids=input_ids, attention_mask=attention_mask, **kwargs)
            scores: Tensor = self.score(hidden.to(next(self.score.parameters()).dtype))
        return scores.float()

    def _run(self, **inputs: Any) -> tuple[Any, Tensor]:
        """Return the model's outputs, and the last hidden states [B, T, D] of its decoder."""
        outputs = self.pretrained_model(**inputs, output_hidden_states=True, return_dict=True)
        states = outputs.decoder_hidden_states if self.config.is_encoder_decoder else outputs.hidden_states
        return outputs, states[-1]

    def _device_map(self) -> Mapping[str, Any]:
        return getattr(self.pretrained_model, "hf_device_map", None) or {}


class _WithValueHead(PreTrainedModelWrapper):
    """The base class of the two model classes with a value head."""

    supported_args = ("summary_dropout_prob", "v_head_initializer_range", "v_head_init_strategy")
    is_encoder_decoder: ClassVar[bool] = False
    """Whether the class is for encoder-decoders."""
    lm_head_namings: ClassVar[tuple[str, ...]] = ("lm_head", "embed_out")
    """Names of language-model heads, for models whose ``get_output_embeddings`` returns None."""

    def __init__(
        self,
        pretrained_model: Any,
        *,
        summary_dropout_prob: float | None = None,
        v_head_initializer_range: float = 0.2,
        v_head_init_strategy: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(pretrained_model, **kwargs)
        inner = language_model(pretrained_model)
        self._check_architecture(inner.config, type(inner).__name__)
        if inner.get_output_embeddings() is None and not any(hasattr(inner, name) for name in self.lm_head_namings):
            raise ConfigError(
                f"{type(inner).__name__} has no language-model head; load it with "
                f"{self.transformers_parent_class.__name__}"
            )
        if summary_dropout_prob is None:
            summary_dropout_prob = getattr(self.config, "summary_dropout_prob", 0.1)
        self._dropout = summary_dropout_prob
        self._init_weights(v_head_initializer_range=v_head_initializer_range, v_head_init_strategy=v_head_init_strategy)

    def _init_weights(
        self, *, v_head_initializer_range: float = 0.2, v_head_init_strategy: str | None = None, **_: Any
    ) -> None:
        """Put a new head in place; a name of TRL."""
        if v_head_init_strategy not in (None, "normal"):
            raise ConfigError(
                f"v_head_init_strategy is {v_head_init_strategy!r}; give 'normal', or None for torch's default"
            )
        head = ValueHead(
            state_width(self.config),
            deep=False,
            dropout=self._dropout,
            start="normal" if v_head_init_strategy else "default",
            std=v_head_initializer_range,
        )
        self._put(head)

    @classmethod
    def _check_architecture(cls, config: PreTrainedConfig, what: str) -> None:
        if bool(config.is_encoder_decoder) == cls.is_encoder_decoder:
            return
        kinds = ("a causal language model", "an encoder-decoder")
        other = AutoModelForCausalLMWithValueHead if cls.is_encoder_decoder else AutoModelForSeq2SeqLMWithValueHead
        raise ConfigError(
            f"{what} is {kinds[not cls.is_encoder_decoder]}, and {cls.__name__} takes {kinds[cls.is_encoder_decoder]}; "
            f"use {other.__name__}"
        )

    @classmethod
    def _load(cls, path: str, model_args: tuple[Any, ...], kwargs: dict[str, Any], trainable: bool, merge: bool) -> Any:
        try:
            return super()._load(path, model_args, kwargs, trainable, merge)
        except ValueError as error:
            if "Unrecognized configuration class" in str(error):  # that message lists all model classes
                below, arguments = find_base(path, kwargs)
                hub = {**hub_arguments(arguments), TRUST: arguments.get(TRUST, False)}
                cls._check_architecture(AutoConfig.from_pretrained(below or path, **hub), path)
            raise

    def _put(self, head: ValueHead) -> None:
        self.v_head = head.to(self._head_device()).train(self.training)

    def _head_device(self) -> torch.device:
        places = {str(place) for place in self._device_map().values()}
        if "disk" in places or ("cpu" in places and len(places) > 1):
            raise ConfigError(
                f"parts of the model are offloaded to {' and '.join(sorted(places & {'cpu', 'disk'}))}, where they "
                "cannot be trained; give a device_map with accelerators only, or a smaller model"
            )
        return language_model(self.pretrained_model).device

    def post_init(self, state_dict: Mapping[str, Tensor]) -> None:
        """Load the head from the ``v_head.*`` of a state dictionary, if it has them; the head takes their shape."""
        if head := under("v_head.", state_dict):
            width, dropout = self.v_head.width, self.v_head.dropout.p
            self._put(ValueHead.like(head, width, dropout))

    def forward(
        self,
        input_ids: Tensor | None = None,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return logits [B, T, V] in float32, the loss with ``labels``, and values [B, T] of the state at each token.

        For an encoder-decoder, T is the length of the decoder's input.
        """
        outputs, hidden = self._run(
            input_ids=input_ids, past_key_values=past_key_values, attention_mask=attention_mask, **kwargs
        )
        values = self.v_head(hidden.to(self.v_head.summary.weight.device))
        return outputs.logits.float(), outputs.loss, values.to(outputs.logits.device)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate with the model's own ``generate``."""
        return self.pretrained_model.generate(*args, **kwargs)


class AutoModelForCausalLMWithValueHead(_WithValueHead):
    """A causal language model with a value head: ``model(input_ids) -> (logits, loss, values)``.

    A new head has TRL's shape; a saved head keeps its shape.

    Args:
        pretrained_model: a language model.
        summary_dropout_prob: the dropout probability before the head; by default that of the model's config, or 0.1.
            Dropout acts in training mode only, and in `trainkit.train` only if ``model.disable_dropout`` is false.
        v_head_init_strategy: ``normal``, or None for torch's default.
        v_head_initializer_range: the standard deviation of ``normal``.
        **kwargs: those of `PreTrainedModelWrapper`.

    Raises:
        ConfigError: the model has no language-model head or is partly offloaded, or the strategy is unknown.
    """

    transformers_parent_class = AutoModelForCausalLM


class AutoModelForSeq2SeqLMWithValueHead(_WithValueHead):
    """An encoder-decoder with a value head on its decoder.

    ``model(input_ids, decoder_input_ids=...)`` returns ``(logits, loss, values)``. The arguments are those of
    `AutoModelForCausalLMWithValueHead`.
    """

    transformers_parent_class = AutoModelForSeq2SeqLM
    lm_head_namings = ("lm_head", "embed_out", "output_projection")
    is_encoder_decoder = True


@contextmanager
def unwrap_model_for_generation(model: Any, accelerator: Accelerator, is_peft_model: bool = False) -> Iterator[Any]:
    """Yield the model without accelerate's wrappers, and with ``is_peft_model`` without its adapters."""
    unwrapped = accelerator.unwrap_model(model)
    peft = getattr(unwrapped, "pretrained_model", unwrapped)
    with peft.disable_adapter() if is_peft_model else nullcontext():
        yield unwrapped


# ------------------------------------------------------------------------------------------------------------ parts


def _peft_config(config: PeftConfig | Mapping[str, Any] | None) -> PeftConfig | None:
    if config is None:
        return None
    if isinstance(config, Mapping):
        return make_peft_config(config)
    from peft import PeftConfig

    if not isinstance(config, PeftConfig):
        raise ConfigError(f"peft_config should be a peft.PeftConfig or its fields; given {describe(config)}")
    return checked(config)


def _live(model: Any, unused: list[str]) -> Any:
    if not hasattr(model, "get_output_embeddings") and not hasattr(model, "get_base_model"):
        raise ConfigError(f"give a hub id, a directory, or a model of transformers or peft; given {describe(model)}")
    if unused:
        raise ConfigError(f"a live model is given, and {', '.join(unused)} would say how to load one; omit them")
    if count_of(model):
        bare(model)  # the model of transformers then reads its virtual tokens
    return model


def _add_adapter(model: Any, config: PeftConfig, preparation: dict[str, Any]) -> Any:
    from peft import prepare_model_for_kbit_training

    check_without_adapter(model)
    if getattr(model, "is_quantized", False):
        model = prepare_model_for_kbit_training(model, **preparation)  # type: ignore[no-untyped-call]
    elif preparation:
        raise ConfigError(f"{', '.join(preparation)} prepare a quantised model, and this one is not; omit them")
    return with_adapter(model, config)


def _score_weights(adapter: str, hub: Mapping[str, Any]) -> dict[str, Tensor]:
    """Load the ``weight``, and the ``bias`` if any, of the score layer that was saved with an adapter."""
    from peft.utils import load_peft_weights

    weights = load_peft_weights(adapter, device="cpu", **hub)
    score = {match[2]: weights[key] for key in weights if (match := re.search(r"(^|\.)score\.(weight|bias)$", key))}
    if "weight" not in score:
        raise ConfigError(
            f"the adapter {adapter!r} has no score layer, which computes the reward; give one that was trained on an "
            "AutoModelForSequenceClassification, with task_type SEQ_CLS"
        )
    return score


def arguments_of_today(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of `from_pretrained`, also by names of transformers 4, as transformers 5 takes them.

    Raises:
        ConfigError: one has no counterpart, or quantises, and bitsandbytes is not installed.
    """
    asked = next((name for name in BITS if given.get(name)), None)
    if asked is not None and importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError(f"{asked} needs bitsandbytes, which is not installed; pip install bitsandbytes")
    try:
        return present_arguments(one_token(given))
    except ValueError as error:
        raise ConfigError(f"the arguments of from_pretrained do not fit: {error}") from error


def _quantisation(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return arguments with which a quantised model is by default loaded to a single device."""
    if kwargs.get("quantization_config") is not None and "device_map" not in kwargs:
        from accelerate import PartialState

        kwargs["device_map"] = {"": PartialState().device}
        log.warning("a quantised model without device_map is loaded to %s", kwargs["device_map"][""])
    return kwargs


@contextmanager
def _as_it_was(model: Any) -> Iterator[None]:
    """Restore the active adapters, ``requires_grad`` of the parameters and the training mode after the context."""
    gradients = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    modes = [(module, module.training) for module in model.modules()]
    first, active = model.active_adapter, list(model.active_adapters)
    try:
        yield
    finally:
        model.set_adapter(first)
        model.base_model.set_adapter(active)  # there may be several active ones
        for parameter, gradient in gradients:
            parameter.requires_grad_(gradient)
        for module, training in modes:
            module.training = training
