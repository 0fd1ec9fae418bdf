"""DAPO: advantages standardised per group; groups of equal rewards are not trained on (Yu et al. 2025)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import Field
from torch import Tensor

from trainkit import AccelerateRLTrainer, MethodConfig, Rollouts, TokenBatch, register_trainer
from trainkit.functional import clipped_surrogate, masked_mean, per_response, zero_masked
from trainkit.metrics import Mean, Metrics


class DapoConfig(MethodConfig):
    """Settings of DAPO."""

    section_defaults: ClassVar[dict[str, Any]] = {"train": {"total_steps": 10}}
    name: str = "_test_dapo"
    """The registered name."""
    k: int = Field(4, ge=2)
    """Responses per prompt."""


@dataclass(frozen=True)
class DapoBatch(TokenBatch):
    """Experience; old log-probabilities [B, T], advantages [B]."""

    old_logprobs: Tensor
    advantages: Tensor


@register_trainer("_test_dapo")
class DapoTrainer(AccelerateRLTrainer[DapoConfig]):
    """DAPO: advantages standardised per group, groups of equal rewards are not trained on."""

    inputs: ClassVar[tuple[str, ...]] = ("reward_fn", "prompts")
    group = "k"

    def keep(self, rollouts: Rollouts, scores: Tensor) -> Tensor:
        """Return True for the groups whose rewards differ. [B]."""
        groups = per_response(scores).view(-1, self.method.k)
        return (groups.std(1) > 0).repeat_interleave(self.method.k)

    def experience(self, rollouts: Rollouts, scores: Tensor) -> DapoBatch:
        """Return rewards standardised within their group [B], and old log-probabilities [B, T]."""
        groups = per_response(scores).view(-1, self.method.k)
        advantages = (groups - groups.mean(1, keepdim=True)) / groups.std(1, keepdim=True)
        return DapoBatch(rollouts.sequences, self.behaviour(rollouts).logprobs, advantages.flatten())

    def loss(self, batch: DapoBatch) -> tuple[Tensor, Metrics]:
        """Return the clipped surrogate, a mean over response tokens. -> []."""
        mask = batch.sequences.response_mask
        log_ratio = zero_masked(self.policy(batch.sequences).logprobs - batch.old_logprobs, mask)
        loss = clipped_surrogate(log_ratio.exp(), batch.advantages.unsqueeze(1), cliprange=0.2)
        return masked_mean(loss, mask), {"policy/ratio": Mean.of(log_ratio.exp(), mask)}
