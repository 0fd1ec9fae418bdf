"""The configuration of Kahneman-Tversky optimisation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainkit_migrate import refusing
from trainkit_trl.trainer.reward_config import OldArguments


@dataclass
class KTOConfig(OldArguments):
    """Settings of `KTOTrainer`: those of `transformers.TrainingArguments`, some that it no longer has, and its own.

    ``max_length`` is the largest number of tokens of a side; None: 512, or less if tokenizer or model allow less.
    ``beta`` is β of the loss; the weights are those of the two kinds of samples.
    """

    max_length: int | None = None
    max_prompt_length: int | None = None
    max_completion_length: int | None = None
    beta: float = 0.1
    desirable_weight: float | None = 1.0
    undesirable_weight: float | None = 1.0
    label_pad_token_id: int = -100
    padding_value: int | None = None
    truncation_mode: str = "keep_end"
    generate_during_eval: bool = False
    is_encoder_decoder: bool | None = None
    precompute_ref_log_probs: bool = False
    model_init_kwargs: dict[str, Any] | None = None
    ref_model_init_kwargs: dict[str, Any] | None = None
    dataset_num_proc: int | None = None


__getattr__ = refusing(__name__)
