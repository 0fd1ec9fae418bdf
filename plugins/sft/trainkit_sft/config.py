"""The settings of supervised fine-tuning."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from trainkit import MethodConfig


class SFTConfig(MethodConfig):
    """Settings of supervised fine-tuning."""

    section_defaults: ClassVar[dict[str, Any]] = {"optimizer": {"lr": 2e-5}}

    name: str = "sft"
    """The registered name."""
    train_on_prompts: bool = False
    """Train on prompts too: on all tokens of a sample but the first."""
    packing: bool = False
    """Pack several samples into a row of at most `train.seq_length` tokens. Samples in a row do not attend to each
    other, and `train.batch_size` counts rows."""
    neftune_alpha: float = Field(0.0, ge=0)
    """α of NEFTune: noise U(−α, α) / sqrt(tokens · width) is added to the embeddings in training. The paper uses 5 to
    15; 0 turns it off."""
