"""Models with a value head as those of trlX: `base_model`, outputs with `value`, and a frozen branch as reference."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from transformers import AutoConfig, PreTrainedConfig
from transformers.utils.generic import ModelOutput

from trainkit import models
from trainkit.models import ValueBranch, ValueHead, create_reference_model, state_width

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "AutoModelForCausalLMWithHydraValueHead",
    "AutoModelForCausalLMWithValueHead",
    "AutoModelForSeq2SeqLMWithHydraValueHead",
    "AutoModelForSeq2SeqLMWithValueHead",
    "CausalLMOutputWithValue",
    "PreTrainedModelWrapper",
    "Seq2SeqLMOutputWithValue",
]


BASE = "base_model."
"""What the names of the language model's weights begin with in a checkpoint of trlX."""
READ = ("input_ids", "attention_mask", "position_ids")
"""The arguments of a forward pass that decide the states of a token."""
LAYERS = {
    f"{there}.{name}": f"{here}.{name}"
    for there, here in ((0, "hidden"), (2, "summary"))
    for name in ("weight", "bias")
}
"""The weights of a value head by their names in trlX."""


def under(prefix: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the entries of a state dictionary that begin with a prefix, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}


def checkpoint(path: str | Path) -> dict[str, Tensor]:
    """Return the weights that trlX has saved in a directory; empty if it is none of trlX."""
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
    return state if any(name.startswith(BASE) for name in state) else {}


@dataclass
class CausalLMOutputWithValue(ModelOutput):
    """Logits [B, T, V], the loss with labels, and values [B, T]."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    value: Tensor | None = None


class Seq2SeqLMOutputWithValue(CausalLMOutputWithValue):
    """The same of an encoder-decoder; T is the length of the decoder's input."""


class OfTrlx:
    """What the models of trlX have besides those of trainkit, before which it stands in the order of inheritance.

    The value head is Linear, ReLU, Linear. It begins with values of 0, unlike in trlX. With
    ``num_value_layers_unfrozen`` it reads the states of a trained copy of the upper layers.
    """

    output_class: type[CausalLMOutputWithValue] = CausalLMOutputWithValue
    supported_args: ClassVar[tuple[str, ...]] = ("num_value_layers_unfrozen",)
    if TYPE_CHECKING:
        pretrained_model: Any
        transformers_parent_class: Any
        _put: Any
        v_head: Any

    def __init__(self, base_model: Any = None, *, num_value_layers_unfrozen: int = 0, **kwargs: Any) -> None:
        super().__init__(base_model, summary_dropout_prob=0.0, **kwargs)  # type: ignore[call-arg]
        self._put(ValueHead(state_width(base_model.config)))
        layers = num_value_layers_unfrozen
        self.v_branch = ValueBranch(base_model, layers) if layers else None

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Self:
        """Load a model as trainkit does; or a checkpoint of trlX, with the weights of its value head."""
        path = pretrained_model_name_or_path
        state = checkpoint(path) if isinstance(path, str | Path) else {}
        if not state:
            return super().from_pretrained(path, *args, **kwargs)  # type: ignore[misc,no-any-return]
        model = cls.transformers_parent_class.from_config(AutoConfig.from_pretrained(path))
        model.load_state_dict(under(BASE, state), strict=False)
        model.tie_weights()
        made = super().from_pretrained(model, *args, **kwargs)  # type: ignore[misc]
        head = under("v_head.", state)
        made.v_head.load_state_dict({LAYERS.get(name, name): tensor for name, tensor in head.items()})
        return made  # type: ignore[no-any-return]

    @property
    def base_model(self) -> Any:
        """The language model."""
        return self.pretrained_model

    @classmethod
    def from_config(cls, config: PreTrainedConfig, peft_config: Any = None, **kwargs: Any) -> Self:
        """Make a model with random weights."""
        made = cls.transformers_parent_class.from_config(config)
        return cls.from_pretrained(made, peft_config=peft_config, **kwargs)

    def get_compatible_forward_kwargs(self, **kwargs: Any) -> dict[str, Any]:
        """Return those of the arguments that the language model takes."""
        known = inspect.signature(self.base_model.forward).parameters
        return {name: value for name, value in kwargs.items() if name in known}

    def forward(self, *args: Any, return_dict: bool = True, **kwargs: Any) -> Any:
        """Return logits and values, as an object with the attributes ``logits`` and ``value`` or as a tuple."""
        if self.v_branch is None:
            logits, loss, value = super().forward(*args, **kwargs)  # type: ignore[misc]
        else:
            inputs = inspect.signature(self.base_model.forward).bind_partial(*args, **kwargs).arguments
            read: dict[str, Any] = {name: value for name, value in inputs.items() if name in READ}
            run = partial(super().forward, *args, **kwargs)  # type: ignore[misc]
            (logits, loss, _), states = self.v_branch.states(run, {**read, "use_cache": False}, None)
            value = self.v_head(states)
        return self.output_class(loss=loss, logits=logits, value=value) if return_dict else (logits, value)


class PreTrainedModelWrapper(OfTrlx, models.PreTrainedModelWrapper):
    """Base class of the models with a value head."""


class Hydra(PreTrainedModelWrapper):
    """A model with a frozen branch: a copy of its upper layers, above those that neither of the two trains.

    Args:
        base_model: the language model.
        num_layers_unfrozen: the layers that are copied, and may be trained; those below are frozen. -1: a copy of the
            whole model, and nothing is frozen.
        **kwargs: those of the model with a value head.
    """

    supported_args: ClassVar[tuple[str, ...]] = ("num_layers_unfrozen", "num_value_layers_unfrozen")

    def __init__(self, base_model: Any, *, num_layers_unfrozen: int = -1, **kwargs: Any) -> None:
        super().__init__(base_model, **kwargs)
        self.num_layers_unfrozen = num_layers_unfrozen
        config = base_model.config.get_text_config(decoder=True)
        layers = getattr(config, "num_decoder_layers", None) or config.num_hidden_layers
        shared = None if num_layers_unfrozen < 0 else layers - num_layers_unfrozen
        self._frozen = [create_reference_model(base_model, shared)]  # a list, so that it is no submodule

    @property
    def frozen_head(self) -> Any:
        """The frozen model."""
        return self._frozen[0]

    @torch.no_grad()
    def forward_hydra(self, *args: Any, return_dict: bool = True, **kwargs: Any) -> Any:
        """Return the logits of the frozen model."""
        logits = self.frozen_head(*args, **kwargs).logits.float()
        return CausalLMOutputWithValue(logits=logits) if return_dict else logits


class AutoModelForCausalLMWithValueHead(PreTrainedModelWrapper, models.AutoModelForCausalLMWithValueHead):  # type: ignore[misc]
    """A causal language model with a value head."""


class AutoModelForCausalLMWithHydraValueHead(Hydra, models.AutoModelForCausalLMWithValueHead):  # type: ignore[misc]
    """A causal language model with a value head and a frozen branch."""


class AutoModelForSeq2SeqLMWithValueHead(PreTrainedModelWrapper, models.AutoModelForSeq2SeqLMWithValueHead):  # type: ignore[misc]
    """An encoder-decoder with a value head."""

    output_class = Seq2SeqLMOutputWithValue


class AutoModelForSeq2SeqLMWithHydraValueHead(Hydra, models.AutoModelForSeq2SeqLMWithValueHead):  # type: ignore[misc]
    """An encoder-decoder with a value head and a frozen branch of its decoder."""

    output_class = Seq2SeqLMOutputWithValue
