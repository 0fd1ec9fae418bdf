"""The configuration of reward modelling, and what the configurations of trainers have in common."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import TrainingArguments

OLD = (
    "adafactor", "evaluation_strategy", "group_by_length", "logging_dir", "no_cuda", "overwrite_output_dir",
    "save_safetensors", "warmup_ratio",
)  # fmt: skip
"""Arguments that `transformers.TrainingArguments` had when TRL was written for it, and no longer has."""


@dataclass
class OldArguments(TrainingArguments):
    """The settings of `transformers.TrainingArguments`, and some that it no longer has."""

    adafactor: bool = False
    evaluation_strategy: str | None = None
    group_by_length: bool = False
    logging_dir: str | None = None
    no_cuda: bool = False
    overwrite_output_dir: bool = False
    save_safetensors: bool = True
    warmup_ratio: float = 0.0

    def __post_init__(self) -> None:
        if self.evaluation_strategy is not None:
            self.eval_strategy, self.evaluation_strategy = self.evaluation_strategy, None
        if getattr(self, "activation_checkpointing", False) is None:  # its new name, which also sets the old one
            self.activation_checkpointing = self.gradient_checkpointing
        super().__post_init__()  # type: ignore[no-untyped-call]


@dataclass
class RewardConfig(OldArguments):
    """Settings of `RewardTrainer`: those of `OldArguments`, and one more.

    ``max_length`` is the largest number of tokens of a side.
    """

    max_length: int | None = None
    gradient_checkpointing: bool | None = True
