"""Dr. GRPO with a penalty on the length of responses, as in Kimi k1.5 (2025)."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field
from torch import Tensor

from researchers.dr_grpo import DrGRPOBatch, DrGRPOTrainer
from trainkit import MethodConfig, Rollouts, register_trainer
from trainkit.functional import per_response


class LengthConfig(MethodConfig):
    """Settings of the length penalty."""

    section_defaults: ClassVar[dict[str, Any]] = {"optimizer": {"lr": 1e-6}, "train": {"total_steps": 1000}}

    name: str = "_test_length_penalised"
    """The registered name."""
    k: int = Field(8, ge=2)
    """Responses per prompt."""
    cliprange: float = Field(0.2, gt=0)
    """ε of the clipped surrogate."""
    length_coef: float = Field(0.05, ge=0)
    """Penalty per token."""


@register_trainer("_test_length_penalised")
class LengthTrainer(DrGRPOTrainer):
    """Trainer of Dr. GRPO on scores − length_coef · tokens."""

    method_class = LengthConfig

    def experience(self, rollouts: Rollouts, scores: Tensor) -> DrGRPOBatch:
        """Return the penalised scores [B] in the place of advantages, and old log-probabilities [B, T]."""
        lengths = rollouts.sequences.response_mask.sum(1)
        return super().experience(rollouts, per_response(scores) - self.method.length_coef * lengths)
