"""GRPO: advantages standardised within the group, k3 in the loss (Shao et al. 2024)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from pydantic import Field
from torch import Tensor

from trainkit import AccelerateRLTrainer, MethodConfig, Rollouts, TokenBatch, register_trainer
from trainkit.functional import clipped_surrogate, kl_k3, masked_sum, per_response, to_float64, zero_masked
from trainkit.metrics import Mean, Metrics


class GroupConfig(MethodConfig):
    """Settings of GRPO."""

    section_defaults: ClassVar[dict[str, Any]] = {"optimizer": {"lr": 1e-6}, "train": {"total_steps": 1000}}

    name: str = "_test_grpo"
    """The registered name."""
    k: int = Field(8, ge=2)
    """Responses per prompt."""
    beta: float = Field(0.04, ge=0)
    """β: weight of the KL from the reference."""


@dataclass(frozen=True)
class GroupBatch(TokenBatch):
    """Log-probabilities at sampling and of the reference [B, T], advantages [B]."""

    unit: ClassVar[str] = "responses"
    old_logprobs: Tensor
    ref_logprobs: Tensor
    advantages: Tensor

    @property
    def weight(self) -> Tensor:
        """Number of responses []."""
        return self.advantages.new_tensor(len(self))


@register_trainer("_test_grpo")
class GroupTrainer(AccelerateRLTrainer[GroupConfig]):
    """Trainer of GRPO."""

    inputs: ClassVar[tuple[str, ...]] = ("reward_fn", "prompts")
    group = "k"
    needs_reference: ClassVar[bool] = True

    def experience(self, rollouts: Rollouts, scores: Tensor) -> GroupBatch:
        """Return scores [B] in the place of advantages, and log-probabilities [B, T]."""
        reference = self.reference(rollouts.sequences).logprobs
        return GroupBatch(rollouts.sequences, self.behaviour(rollouts).logprobs, reference, per_response(scores))

    def prepare_experience(self, experience: GroupBatch) -> GroupBatch:
        """Return the advantages [B], (r − mean) / std over the group."""
        groups = to_float64(experience.advantages).view(-1, self.method.k)
        advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)
        return replace(experience, advantages=advantages.flatten().float())

    def loss(self, batch: GroupBatch) -> tuple[Tensor, Metrics]:
        """Return the surrogate + β·k3, a mean over the tokens of each response, then over responses. -> []."""
        mask = batch.sequences.response_mask
        logprobs = self.policy(batch.sequences).logprobs
        ratio = zero_masked(logprobs - batch.old_logprobs, mask).exp()
        each = clipped_surrogate(ratio, batch.advantages.unsqueeze(1), cliprange=0.2)
        each = each + self.method.beta * kl_k3(logprobs, zero_masked(batch.ref_logprobs, mask))
        loss = (masked_sum(each, mask, dim=1) / mask.sum(1).clamp(min=1)).mean()
        return loss, {"policy/ratio": Mean.of(ratio, mask)}
