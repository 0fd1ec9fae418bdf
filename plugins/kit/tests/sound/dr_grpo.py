"""Dr. GRPO: the mean of the whole group as the baseline, and a constant length (Liu et al. 2025)."""

from __future__ import annotations

from typing import Any

from pydantic import Field
from torch import Tensor

from researchers.dr_grpo import DrGRPOConfig, DrGRPOTrainer
from trainkit import register_trainer
from trainkit.metrics import Metrics
from trainkit.testing import Declaration, Structure


class Config(DrGRPOConfig):
    """Settings of Dr. GRPO."""

    name: str = "_sound_dr_grpo"
    """The registered name."""
    k: int = Field(4, ge=2)
    """Responses per prompt."""


@register_trainer("_sound_dr_grpo")
class Trainer(DrGRPOTrainer):
    """Trainer of Dr. GRPO; its gradient has (k − 1) / k of the size of that of the objective, and its direction."""

    method_class = Config

    def loss(self, batch: Any) -> tuple[Tensor, Metrics]:
        """Return the clipped surrogate, summed over tokens and divided by a constant, a mean over responses. -> []."""
        return super().loss(batch)


KIT = Declaration(structure=(Structure(scores="group", surrogate="token", gradient="policy", detached=()),))
