"""Models with a value head as those of trlX: `base_model`, outputs with `value`, and a frozen branch as reference."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch
from transformers import PreTrainedConfig
from transformers.modeling_outputs import ModelOutput

from trainkit import models
from trainkit.errors import ConfigError
from trainkit.models import PreTrainedModelWrapper, ValueHead, create_reference_model, state_width

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

    The value head is Linear, ReLU, Linear. It begins with values of 0, unlike in trlX.
    """

    output_class: type[CausalLMOutputWithValue] = CausalLMOutputWithValue
    if TYPE_CHECKING:
        pretrained_model: Any
        transformers_parent_class: Any
        _put: Any

    def __init__(self, base_model: Any = None, *, num_value_layers_unfrozen: int = 0, **kwargs: Any) -> None:
        if num_value_layers_unfrozen:
            raise ConfigError(
                f"num_value_layers_unfrozen is {num_value_layers_unfrozen}; the value head has no layers of its own "
                "besides the head: give 0"
            )
        super().__init__(base_model, summary_dropout_prob=0.0, **kwargs)  # type: ignore[call-arg]
        self._put(ValueHead(state_width(base_model.config)))

    @property
    def base_model(self) -> Any:
        """The language model."""
        return self.pretrained_model

    @classmethod
    def from_config(cls, config: PreTrainedConfig, peft_config: Any = None, **kwargs: Any) -> Self:
        """Make a model with random weights."""
        made = cls.transformers_parent_class.from_config(config)
        return cls.from_pretrained(made, peft_config=peft_config, **kwargs)  # type: ignore[attr-defined,no-any-return]

    def get_compatible_forward_kwargs(self, **kwargs: Any) -> dict[str, Any]:
        """Return those of the arguments that the language model takes."""
        known = inspect.signature(self.base_model.forward).parameters
        return {name: value for name, value in kwargs.items() if name in known}

    def forward(self, *args: Any, return_dict: bool = True, **kwargs: Any) -> Any:
        """Return logits and values, as an object with the attributes ``logits`` and ``value`` or as a tuple."""
        logits, loss, value = super().forward(*args, **kwargs)  # type: ignore[misc]
        return self.output_class(loss=loss, logits=logits, value=value) if return_dict else (logits, value)


class Hydra(OfTrlx):
    """A model with a frozen branch: a copy of its upper layers, above those that neither of the two trains.

    Args:
        base_model: the language model.
        num_layers_unfrozen: the layers that are copied, and may be trained; those below are frozen. -1: a copy of the
            whole model, and nothing is frozen.
        **kwargs: those of the model with a value head.
    """

    supported_args = ("num_layers_unfrozen", "num_value_layers_unfrozen")

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


class AutoModelForCausalLMWithValueHead(OfTrlx, models.AutoModelForCausalLMWithValueHead):
    """A causal language model with a value head."""

    supported_args = ("num_value_layers_unfrozen",)


class AutoModelForCausalLMWithHydraValueHead(Hydra, models.AutoModelForCausalLMWithValueHead):
    """A causal language model with a value head and a frozen branch."""


class AutoModelForSeq2SeqLMWithValueHead(OfTrlx, models.AutoModelForSeq2SeqLMWithValueHead):
    """An encoder-decoder with a value head."""

    supported_args = ("num_value_layers_unfrozen",)
    output_class = Seq2SeqLMOutputWithValue


class AutoModelForSeq2SeqLMWithHydraValueHead(Hydra, models.AutoModelForSeq2SeqLMWithValueHead):
    """An encoder-decoder with a value head and a frozen branch of its decoder."""

    output_class = Seq2SeqLMOutputWithValue
