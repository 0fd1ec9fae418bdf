"""Dr. GRPO: advantages without the group's standard deviation, a loss with a constant length (Liu et al. 2025)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import Field
from torch import Tensor

from trainkit import AccelerateRLTrainer, MethodConfig, Rollouts, TokenBatch, register_trainer
from trainkit.functional import clipped_surrogate, masked_sum, per_response, zero_masked
from trainkit.metrics import Mean, Metrics


class DrGRPOConfig(MethodConfig):
    """Settings of Dr. GRPO; the defaults are those of its authors."""

    section_defaults: ClassVar[dict[str, Any]] = {"optimizer": {"lr": 1e-6}, "train": {"total_steps": 1000}}

    name: str = "_test_dr_grpo"
    """The registered name."""
    k: int = Field(8, ge=2)
    """Responses per prompt."""
    cliprange: float = Field(0.2, gt=0)
    """ε of the clipped surrogate."""


@dataclass(frozen=True)
class DrGRPOBatch(TokenBatch):
    """Experience; old log-probabilities [B, T], advantages [B]. The loss is a mean over responses."""

    unit: ClassVar[str] = "responses"
    old_logprobs: Tensor
    advantages: Tensor

    @property
    def weight(self) -> Tensor:
        """Number of responses []."""
        return self.advantages.new_tensor(len(self))


@register_trainer("_test_dr_grpo")
class DrGRPOTrainer(AccelerateRLTrainer[DrGRPOConfig]):
    """Trainer of Dr. GRPO: A = R − mean R of the group; Σ_t of the clipped surrogate / max_new_tokens."""

    inputs: ClassVar[tuple[str, ...]] = ("reward_fn", "prompts")
    group = "k"

    def experience(self, rollouts: Rollouts, scores: Tensor) -> DrGRPOBatch:
        """Return the rewards [B] in the place of advantages, and old log-probabilities [B, T]."""
        return DrGRPOBatch(rollouts.sequences, self.behaviour(rollouts).logprobs, per_response(scores))

    def prepare_experience(self, experience: DrGRPOBatch) -> DrGRPOBatch:
        """Return the advantages [B]: rewards minus the mean of their group."""
        groups = experience.advantages.view(-1, self.method.k)
        centred = (groups - groups.mean(1, keepdim=True)).flatten()
        return DrGRPOBatch(experience.sequences, experience.old_logprobs, centred)

    def loss(self, batch: DrGRPOBatch) -> tuple[Tensor, Metrics]:
        """Return the clipped surrogate, summed over tokens and divided by a constant, a mean over responses. -> []."""
        mask = batch.sequences.response_mask
        log_ratio = zero_masked(self.policy(batch.sequences).logprobs - batch.old_logprobs, mask)
        ratio = log_ratio.exp()
        each = clipped_surrogate(ratio, batch.advantages.unsqueeze(1), cliprange=self.method.cliprange)
        loss = masked_sum(each, mask, dim=1).mean() / self.config.rollout.max_new_tokens
        return loss, {"policy/ratio": Mean.of(ratio, mask)}
