"""The configuration of contrastive preference optimisation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from trainkit_migrate import refusing
from trainkit_trl.trainer.reward_config import OldArguments


@dataclass
class CPOConfig(OldArguments):
    """Settings of `CPOTrainer`: those of `transformers.TrainingArguments`, some that it no longer has, and its own.

    ``max_length`` is the largest number of tokens of a side; None: 512, or less if tokenizer or model allow less.
    ``beta`` is β of the loss, and ``label_smoothing`` the share of pairs whose sides are swapped.
    """

    max_length: int | None = None
    max_prompt_length: int | None = None
    max_completion_length: int | None = None
    max_target_length: int | None = None
    beta: float = 0.1
    label_smoothing: float = 0
    loss_type: Literal["sigmoid", "hinge", "ipo", "kto_pair"] = "sigmoid"
    disable_dropout: bool = True
    label_pad_token_id: int = -100
    padding_value: int | None = None
    truncation_mode: str = "keep_end"
    generate_during_eval: bool = False
    is_encoder_decoder: bool | None = None
    model_init_kwargs: dict[str, Any] | None = None
    dataset_num_proc: int | None = None


__getattr__ = refusing(__name__)
