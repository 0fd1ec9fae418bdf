"""Models with a value head as those of trlX: `base_model`, outputs with `value`, and a frozen branch as reference."""

from __future__ import annotations

import copy
import inspect
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from peft import PeftConfig
from transformers import AutoConfig, PreTrainedConfig
from transformers.utils.generic import ModelOutput

from trainkit import models
from trainkit.errors import ConfigError, describe
from trainkit.models import (
    ValueBranch,
    ValueHead,
    create_reference_model,
    has_adapter,
    make_peft_config,
    state_width,
    with_adapter,
)
from trainkit_trlx.overrides import own_class, remembered, replaced
from trainkit_trlx.utils.modeling import (
    hf_get_decoder_blocks,
    hf_get_decoder_final_norm,
    hf_get_num_hidden_layers,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = [
    "AutoModelForCausalLMWithHydraValueHead",
    "AutoModelForCausalLMWithValueHead",
    "AutoModelForSeq2SeqLMWithHydraValueHead",
    "AutoModelForSeq2SeqLMWithValueHead",
    "CausalLMOutputWithValue",
    "PreTrainedModelWrapper",
    "Seq2SeqLMOutputWithValue",
]


BASE, HEAD, HEADS = "base_model.", "v_head.", "ilql_heads."
"""What the names of weights begin with in a checkpoint of trlX: of the language model, a value head, heads of ILQL."""
PLACES = {
    False: ("input_ids", "attention_mask", "past_key_values", "position_ids"),
    True: ("input_ids", "attention_mask", "decoder_input_ids", "decoder_attention_mask"),
}
"""The first arguments of a forward pass in trlX; True: of encoder-decoders."""
READ = ("input_ids", "attention_mask", "position_ids")
"""The arguments of a forward pass that decide the states of a token."""
LAYERS = {
    f"{there}.{name}": f"{here}.{name}"
    for there, here in ((0, "hidden"), (2, "summary"))
    for name in ("weight", "bias")
}
"""The weights of a value head by their names in trlX."""
CONSTANTS = re.compile(r"(\.attn\.bias|\.attention\.bias|masked_bias|rotary_emb\.inv_freq|embed_positions\.weights)$")
"""Names of tensors that older models saved and newer ones compute."""


def under(prefix: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the entries of a state dictionary that begin with a prefix, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}


def checkpoint(path: str | Path) -> dict[str, Tensor]:
    """Return the weights that trlX has saved in a directory, with an adapter the heads alone; else an empty one."""
    index = Path(path) / "pytorch_model.bin.index.json"
    names = {"pytorch_model.bin"}
    if index.is_file():
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    files = [Path(path) / name for name in sorted(names)]
    if not all(file.is_file() for file in files):
        return {}
    state: dict[str, Tensor] = {}
    for file in files:
        state |= torch.load(file, map_location="cpu", weights_only=True)
    return state if any(name.startswith((BASE, HEADS, f"{HEAD}0.", f"{HEAD}decoder_blocks.")) for name in state) else {}


INSTEAD = (
    "trainkit runs the language model and its heads itself; override forward of the language model, base_model, or "
    "derive the trainer from AccelerateRLTrainer, whose loop calls the model"
)


def checked_model(model: Any, heads: Mapping[str, type[Any]]) -> Any:
    """Return a model of the user, if trainkit calls all that is theirs in it.

    Args:
        model: a model of trlX, or of transformers.
        heads: the classes of the modules that it has besides the language model, by their names.

    Raises:
        ConfigError: a function of its class or of a head would not be called.
    """
    parts = {name: getattr(model, name) for name in heads if hasattr(model, name)}
    for name, part in parts.items():
        if not isinstance(part, heads[name]):
            raise ConfigError(
                f"{name} of the model is {describe(part)}, which would not be trained; give a "
                f"{heads[name].__module__}.{heads[name].__qualname__}, whose weights you may set, or derive the "
                "trainer from AccelerateRLTrainer, whose loop calls the model"
            )
    for each in (model, *parts.values()):
        for name in replaced(each) if own_class(type(each)) is not object else ():
            if name != "post_init":  # called while the model is made
                raise ConfigError(f"{type(each).__name__}.{name} would not be called: {INSTEAD}")
    return model


def load(module: nn.Module, state: Mapping[str, Tensor], where: str) -> None:
    """Load all weights of a module.

    Raises:
        ConfigError: some are missing, are too many or have another shape.
    """
    try:
        wrong = module.load_state_dict(state, strict=False)
    except RuntimeError as error:
        raise ConfigError(f"{where} does not fit {type(module).__name__}: {error}") from error
    unknown = [name for name in wrong.unexpected_keys if not CONSTANTS.search(name)]
    if wrong.missing_keys or unknown:
        lacking = f"lacks {', '.join(wrong.missing_keys)}" if wrong.missing_keys else f"also has {', '.join(unknown)}"
        raise ConfigError(
            f"{where} does not fit {type(module).__name__}, of which it {lacking}; give the directory that trlX wrote, "
            "with its config.json"
        )


def adapted(base_model: Any, peft_config: Any) -> Any:
    """Return a language model with an adapter, an object of peft or its fields; unchanged without one."""
    if peft_config is None:
        return base_model
    given = peft_config if isinstance(peft_config, PeftConfig) else make_peft_config(peft_config)
    return with_adapter(base_model, given)


def new_model(classes: tuple[Any, Any], config: Any, **kwargs: Any) -> Any:
    """Return a model as a configuration of trlX describes it.

    Args:
        classes: of causal models and of encoder-decoders.
        config: the section ``model``; its path may be a transformers config, for random weights.
        **kwargs: further arguments of the class.
    """
    made = classes[config.model_arch_type == "seq2seq"]
    make = made.from_pretrained if isinstance(config.model_path, str) else made.from_config
    return make(config.model_path, peft_config=config.peft_config, **kwargs)


def base_from(path: str | Path, state: Mapping[str, Tensor], parent: Any) -> Any:
    """Return what the heads of a checkpoint of trlX belong to: its language model, or the path for transformers.

    Args:
        path: the directory.
        state: its weights.
        parent: the auto class of transformers.
    """
    base = under(BASE, state)
    if not base:  # an adapter, or names of transformers, as earlier versions of trlX wrote them
        return path
    model = parent.from_config(AutoConfig.from_pretrained(path))
    load(model, base, f"the checkpoint {str(path)!r}")
    model.tie_weights()
    return model.eval()


def load_branch(model: nn.Module, state: Mapping[str, Tensor], where: str) -> None:
    """Load the upper layers of a model, and the norm after them, from a branch of trlX.

    Args:
        model: a language model, or its body, with at least as many layers as the branch.
        state: ``decoder_blocks.*`` and ``final_norm.*``.
        where: names the branch in messages.
    """
    layers, blocks = depth(state), list(hf_get_decoder_blocks(model))
    for place, block in enumerate(blocks[len(blocks) - layers :]):
        load(block, under(f"decoder_blocks.{place}.", state), where)
    load(hf_get_decoder_final_norm(model), under("final_norm.", state), where)


def depth(state: Mapping[str, Tensor]) -> int:
    """Return how many layers a branch of trlX has."""
    return len({name.split(".")[1] for name in state if name.startswith("decoder_blocks.")})


def arguments(model: Any) -> inspect.Signature:
    """Return the arguments of the forward pass of a language model, with or without an adapter."""
    return inspect.signature(getattr(model, "get_base_model", lambda: model)().forward)


@contextmanager
def adapter_off(model: Any) -> Iterator[None]:
    """Switch off the adapter of a model within the context."""
    if hasattr(model, "disable_adapter"):  # a peft.PeftModel
        with model.disable_adapter():
            yield
        return
    model.disable_adapters()
    try:
        yield
    finally:
        model.enable_adapters()


@dataclass
class CausalLMOutputWithValue(ModelOutput):
    """Logits [B, T, V], values [B, T], and what transformers returns with the logits."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    past_key_values: Any = None
    hidden_states: Any = None
    attentions: Any = None
    cross_attentions: Any = None
    value: Tensor | None = None


@dataclass
class Seq2SeqLMOutputWithValue(ModelOutput):
    """The same of an encoder-decoder; T is the length of the decoder's input."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    past_key_values: Any = None
    decoder_hidden_states: Any = None
    decoder_attentions: Any = None
    cross_attentions: Any = None
    encoder_last_hidden_state: Tensor | None = None
    encoder_hidden_states: Any = None
    encoder_attentions: Any = None
    value: Tensor | None = None


@remembered
class PreTrainedModelWrapper(models.PreTrainedModelWrapper):
    """Base class of the models of trlX: a language model, ``base_model``, and heads."""

    def __init__(self, base_model: Any = None, peft_config: Any = None, **kwargs: Any) -> None:
        super().__init__(adapted(base_model, peft_config), **kwargs)

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: Any,
        revision: str | None = None,
        peft_config: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Self:
        """Load a model as trainkit does; or a checkpoint of trlX, with the weights of its heads and branches.

        Args:
            pretrained_model_name_or_path: a hub id or a directory, or a live model.
            revision: the revision on the hub.
            peft_config: an adapter to add.
            *args: passed to transformers.
            **kwargs: those of the class; ``is_trainable=True`` makes an adapter that is loaded trainable; others are
                passed to transformers.
        """
        path = pretrained_model_name_or_path
        state = checkpoint(path) if isinstance(path, str | Path) else {}
        base = base_from(path, state, cls.transformers_parent_class)
        given = {**cls.arguments_of(state), "peft_config": peft_config, **kwargs}
        if revision is not None:
            given["revision"] = revision
        made = super().from_pretrained(base, *args, **given)
        if base is not path:  # otherwise the heads are loaded
            made.post_init(state)
        return made

    @classmethod
    def arguments_of(cls, state_dict: Mapping[str, Tensor]) -> dict[str, Any]:  # noqa: ARG003
        """Return the arguments of the class that the weights of a checkpoint of trlX show."""
        return {}

    @property
    def base_model(self) -> Any:
        """The language model."""
        return self.pretrained_model

    def state_dict(self, *, heads_only: bool = False, **kwargs: Any) -> Any:
        """Return all weights, named as in transformers, those of a model with an adapter too, and those of the heads.

        With ``heads_only``, return what is not the model's alone.
        """
        state = super().state_dict(**kwargs)
        if heads_only:
            return {name: tensor for name, tensor in state.items() if name.split(".")[0] in self.supported_modules}
        if has_adapter(self.base_model):
            self.base_model.state_dict(destination=state, **kwargs)
        return state

    @property
    def is_loaded_in_8bit(self) -> bool:
        """Whether the weights of the language model have 8 bits."""
        return bool(getattr(self.base_model, "is_loaded_in_8bit", False))

    @property
    def forward_kwargs(self) -> list[str]:
        """The arguments of the forward pass of the language model."""
        return list(arguments(self.base_model).parameters)

    @classmethod
    def from_config(cls, config: PreTrainedConfig, peft_config: Any = None, **kwargs: Any) -> Self:
        """Make a model with random weights."""
        made = cls.transformers_parent_class.from_config(config)
        return cls.from_pretrained(made, None, peft_config, **kwargs)

    def get_compatible_forward_kwargs(self, **kwargs: Any) -> dict[str, Any]:
        """Return those of the arguments that the language model takes."""
        known = arguments(self.base_model).parameters
        return {name: value for name, value in kwargs.items() if name in known}

    @property
    def peft_type(self) -> str | None:
        """The type of the adapter; None without one."""
        config = getattr(self.base_model, "peft_config", {}).get("default")
        return None if config is None else str(getattr(config.peft_type, "value", config.peft_type))


class WithValueHead(PreTrainedModelWrapper):
    """A model with a value head, Linear, ReLU, Linear. It begins with values of 0, unlike in trlX.

    With ``num_value_layers_unfrozen`` the head reads the states of ``critic``, a trained copy of the upper layers.
    """

    output_class: type[Any] = CausalLMOutputWithValue
    supported_args: ClassVar[tuple[str, ...]] = ("num_value_layers_unfrozen",)
    supported_modules: ClassVar[tuple[str, ...]] = ("v_head", "critic")
    critic: ValueBranch | None
    if TYPE_CHECKING:
        _put: Any
        v_head: Any

    def __init__(
        self, base_model: Any = None, peft_config: Any = None, num_value_layers_unfrozen: int = 0, **kwargs: Any
    ) -> None:
        super().__init__(base_model, peft_config, summary_dropout_prob=0.0, **kwargs)
        self._put(ValueHead(state_width(self.config)))
        if num_value_layers_unfrozen:
            self._set_branch(num_value_layers_unfrozen)

    def post_init(self, state_dict: Mapping[str, Tensor]) -> None:
        """Load the value head and its layers from a state dictionary that may have them, with names of trlX or ours.

        Raises:
            ConfigError: they do not fit, or the head reads other layers than this model's.
        """
        head, critic = under(HEAD, state_dict), under("critic.", state_dict)
        if layers := depth(head):
            self._set_branch(layers)
            load_branch(self.critic.body, head, "the value branch")  # type: ignore[union-attr]
            head = under("lm_head.", head)
        elif critic:
            numbers = [int(found[1]) for name in critic if (found := re.search(r"\.(\d+)\.", name))]
            self._set_branch(hf_get_num_hidden_layers(self.config) - min(numbers))
            load(self.critic, critic, "the critic")  # type: ignore[arg-type]
        elif head:
            self._set_branch(0)
        named = {f"v_head.{LAYERS.get(name, name)}": tensor for name, tensor in head.items()}
        super().post_init(named)

    def _set_branch(self, layers: int) -> None:
        """Give the value head layers of its own, as a checkpoint has them."""
        own = getattr(self, "critic", None)
        given = 0 if own is None else own.layers
        if given not in (0, layers):
            raise ConfigError(
                f"num_value_layers_unfrozen is {given}, and the value head of the checkpoint has {layers} layers of "
                f"its own; give {layers}"
            )
        if layers and own is None:
            self.critic = ValueBranch(self.base_model, layers).train(self.base_model.training)

    @property
    def num_value_layers_unfrozen(self) -> int:
        """How many layers the value head has of its own."""
        own = getattr(self, "critic", None)
        return 0 if own is None else own.layers

    def inputs(self, args: tuple[Any, ...], given: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a forward pass by name, in the order of trlX, without those that the model lacks.

        Raises:
            TypeError: there are more arguments without a name than trlX and transformers have in common.
        """
        names = PLACES[bool(self.config.is_encoder_decoder)]
        if len(args) > len(names):
            raise TypeError(f"forward() takes {', '.join(names)} in this order; give the others by name")
        found = {**dict(zip(names, args, strict=False)), **given}
        for name in ("position_ids", "head_mask"):
            if found.get(name) is None or not self.get_compatible_forward_kwargs(**{name: None}):
                found.pop(name, None)
        return found

    def forward(
        self,
        *args: Any,
        return_dict: bool | None = None,
        ignore_peft_adapter: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Return logits and values: a tuple ``(logits, *others, value)`` or, with ``return_dict``, an object.

        The others are what transformers returns after the logits, the hidden states among them. With
        ``ignore_peft_adapter`` they are those of the model without its adapter.
        """
        if ignore_peft_adapter and has_adapter(self.base_model):
            with adapter_off(self.base_model):
                return self.forward(*args, return_dict=return_dict, **kwargs)
        kwargs = {**self.inputs(args, kwargs), "output_hidden_states": True, "return_dict": True}
        run = partial(self.pretrained_model, **kwargs)
        if (branch := getattr(self, "critic", None)) is None:
            outputs = run()
            states = outputs.decoder_hidden_states if self.config.is_encoder_decoder else outputs.hidden_states
            value = self.v_head(states[-1])
        else:
            inputs = arguments(self.base_model).bind_partial(**kwargs).arguments
            read: dict[str, Any] = {name: value for name, value in inputs.items() if name in READ}
            outputs, last = branch.states(run, {**read, "use_cache": False})
            value = self.v_head(last)
        names = [each.name for each in fields(self.output_class) if getattr(outputs, each.name, None) is not None]
        found = {**{name: outputs[name] for name in names}, "logits": outputs.logits.float(), "value": value}
        if return_dict:
            return self.output_class(**found)
        return (found["logits"], *(found[name] for name in names if name not in ("loss", "logits")), value)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate with the model's own ``generate``. ``return_dict`` is allowed, and has no effect."""
        kwargs.pop("return_dict", None)
        return self.pretrained_model.generate(*args, **kwargs)


class Hydra(WithValueHead):
    """A model with a frozen branch: a copy of its upper layers, above those that neither of the two trains.

    Args:
        base_model: the language model. If it has an adapter, the frozen model is the one without the adapter.
        num_layers_unfrozen: the layers that are copied, and may be trained; those below are frozen. -1: a copy of the
            whole model, and nothing is frozen.
        **kwargs: those of the model with a value head; ``frozen`` is the frozen model, instead of a copy.
    """

    supported_args: ClassVar[tuple[str, ...]] = ("num_layers_unfrozen", "num_value_layers_unfrozen")

    def __init__(self, base_model: Any, *, num_layers_unfrozen: int = -1, **kwargs: Any) -> None:
        frozen = kwargs.pop("frozen", None)
        super().__init__(base_model, **kwargs)
        self.num_layers_unfrozen, base_model = num_layers_unfrozen, self.pretrained_model
        self._frozen: list[Any] = [] if frozen is None else [frozen]  # a list, so that it is no submodule
        reads_virtual_tokens = getattr(getattr(base_model, "active_peft_config", None), "is_prompt_learning", False)
        if frozen is None and (
            not has_adapter(base_model) or reads_virtual_tokens
        ):  # which change the outputs from the beginning
            layers = hf_get_num_hidden_layers(base_model.config.get_text_config(decoder=True))
            shared = None if num_layers_unfrozen < 0 else layers - num_layers_unfrozen
            self._frozen = [create_reference_model(base_model, shared)]

    def post_init(self, state_dict: Mapping[str, Tensor]) -> None:
        """Load heads from a state dictionary that may have them, and the frozen branch of a checkpoint of trlX.

        Raises:
            ConfigError: they do not fit.
        """
        super().post_init(state_dict)
        branch = under("frozen_head.", state_dict)
        if branch and self._frozen:
            if 0 <= self.num_layers_unfrozen < depth(branch):
                raise ConfigError(
                    f"num_layers_unfrozen is {self.num_layers_unfrozen}, and the frozen branch of the checkpoint has "
                    f"{depth(branch)} layers; give {depth(branch)}, or -1"
                )
            load_branch(self.frozen_head, branch, "the frozen branch")
            head = copy.deepcopy(
                self.frozen_head.get_output_embeddings()
            )  # it may share weights with the trained model
            load(head, under("lm_head.", branch), "the frozen branch")
            self.frozen_head.set_output_embeddings(head)

    @property
    def frozen_head(self) -> Any:
        """The frozen model; None with an adapter in the layers, without which the model is the frozen one."""
        return self._frozen[0] if self._frozen else None

    @torch.no_grad()
    def forward_hydra(self, *args: Any, return_dict: bool | None = None, **kwargs: Any) -> Any:
        """Return the logits of the frozen model or, with ``return_dict``, what transformers returns with them."""
        given = self.inputs(args, kwargs)
        if self._frozen:
            outputs = self.frozen_head(**given)
        else:
            with adapter_off(self.base_model):
                outputs = self.base_model(**given)
        return outputs if return_dict else outputs.logits


@remembered
class AutoModelForCausalLMWithValueHead(WithValueHead, models.AutoModelForCausalLMWithValueHead):  # type: ignore[misc]
    """A causal language model with a value head."""


@remembered
class AutoModelForCausalLMWithHydraValueHead(Hydra, models.AutoModelForCausalLMWithValueHead):  # type: ignore[misc]
    """A causal language model with a value head and a frozen branch."""


@remembered
class AutoModelForSeq2SeqLMWithValueHead(WithValueHead, models.AutoModelForSeq2SeqLMWithValueHead):  # type: ignore[misc]
    """An encoder-decoder with a value head."""

    output_class = Seq2SeqLMOutputWithValue


@remembered
class AutoModelForSeq2SeqLMWithHydraValueHead(Hydra, models.AutoModelForSeq2SeqLMWithValueHead):  # type: ignore[misc]
    """An encoder-decoder with a value head and a frozen branch of its decoder."""

    output_class = Seq2SeqLMOutputWithValue
