"""GSPO: the importance ratio of a response is the geometric mean of its tokens' (Zheng et al. 2025)."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field
from torch import Tensor

from researchers.dr_grpo import DrGRPOBatch, DrGRPOTrainer
from trainkit import MethodConfig, register_trainer
from trainkit.functional import clipped_surrogate, masked_sum, zero_masked
from trainkit.metrics import Mean, Metrics
from trainkit.testing import Declaration, Structure

KIT = Declaration(structure=[Structure(surrogate="sequence_mean", under={"method.cliprange": 0.2})])


class GSPOConfig(MethodConfig):
    """Settings of GSPO."""

    section_defaults: ClassVar[dict[str, Any]] = {"optimizer": {"lr": 1e-6}, "train": {"total_steps": 1000}}

    name: str = "_test_gspo"
    """The registered name."""
    k: int = Field(8, ge=2)
    """Responses per prompt."""
    cliprange: float = Field(3e-4, gt=0)
    """ε of the clipped surrogate."""


@register_trainer("_test_gspo")
class GSPOTrainer(DrGRPOTrainer):
    """Trainer of GSPO: A = R − mean R of the group, ρ = exp(mean_t log ρ_t)."""

    method_class = GSPOConfig

    def loss(self, batch: DrGRPOBatch) -> tuple[Tensor, Metrics]:
        """Return the clipped surrogate, a mean over responses. -> []."""
        mask = batch.sequences.response_mask
        log_ratio = zero_masked(self.policy(batch.sequences).logprobs - batch.old_logprobs, mask)
        ratio = (masked_sum(log_ratio, mask, dim=1) / mask.sum(1).clamp(min=1)).exp()
        loss = clipped_surrogate(ratio, batch.advantages, cliprange=self.method.cliprange).mean()
        return loss, {"policy/ratio": Mean.of(ratio)}
