"""Models with a value head."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from trainkit import models
from trainkit.models import AutoModelForCausalLMWithValueHead, AutoModelForSeq2SeqLMWithValueHead
from trainkit_migrate import refusing

__all__ = ["AutoModelForCausalLMWithValueHead", "AutoModelForSeq2SeqLMWithValueHead", "ValueHead"]


class ValueHead(models.ValueHead):
    """A linear head for values of hidden states, [*, D] -> [*, 1].

    Args:
        config: the configuration of the model; ``summary_dropout_prob`` of it is the dropout.
        **kwargs: ``summary_dropout_prob``, if the configuration has none; 0.1 by default.
    """

    def __init__(self, config: Any, **kwargs: Any) -> None:
        dropout = getattr(config, "summary_dropout_prob", kwargs.get("summary_dropout_prob", 0.1))
        text = config.get_text_config(decoder=True)
        width = getattr(text, "word_embed_proj_dim", None) or text.hidden_size  # OPT-350m projects its states
        super().__init__(width, deep=False, dropout=dropout or 0.0, start="default")

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return the values of hidden states."""
        return super().forward(hidden_states).unsqueeze(-1)


__getattr__ = refusing(__name__)
