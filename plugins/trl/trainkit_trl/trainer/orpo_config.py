"""The configuration of odds ratio preference optimisation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainkit_migrate import refusing
from trainkit_trl.trainer.reward_config import OldArguments


@dataclass
class ORPOConfig(OldArguments):
    """Settings of `ORPOTrainer`: those of `transformers.TrainingArguments`, some that it no longer has, and its own.

    ``max_length`` is the largest number of tokens of a side; None: 512, or less if tokenizer or model allow less.
    ``beta`` is λ of the paper, the weight of the odds ratio.
    """

    max_length: int | None = None
    max_prompt_length: int | None = None
    max_completion_length: int | None = None
    beta: float = 0.1
    disable_dropout: bool = True
    label_pad_token_id: int = -100
    padding_value: int | None = None
    truncation_mode: str = "keep_end"
    generate_during_eval: bool = False
    is_encoder_decoder: bool | None = None
    model_init_kwargs: dict[str, Any] | None = None
    dataset_num_proc: int | None = None


__getattr__ = refusing(__name__)
