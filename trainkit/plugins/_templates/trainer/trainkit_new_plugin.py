"""new_plugin: the policy gradient without a critic, to be changed into your own algorithm.

Williams 1992, "Simple statistical gradient-following algorithms for connectionist reinforcement learning", equation 11.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import Field
from torch import Tensor

from trainkit import AccelerateRLTrainer, MethodConfig, Rollouts, TokenBatch, register_trainer
from trainkit.functional import masked_mean, per_response, zero_masked
from trainkit.metrics import Mean, Metrics


class NewPluginConfig(MethodConfig):
    """The settings of new_plugin. The docstring under each is its help text."""

    section_defaults: ClassVar[dict[str, Any]] = {"train": {"total_steps": 1000}}
    name: str = "new_plugin"
    """The registered name."""
    baseline: float = Field(0.5, ge=0, le=1)
    """Responses that score above it become likelier, those below it less likely; 0.5 suits scores between 0 and 1."""


@dataclass(frozen=True)
class NewPluginBatch(TokenBatch):
    """The tensors that the loss needs besides ``sequences``: old_logprobs [B, T] and advantages [B]."""

    old_logprobs: Tensor
    advantages: Tensor


@register_trainer("new_plugin")
class NewPluginTrainer(AccelerateRLTrainer[NewPluginConfig]):
    """loss = −mean (score − baseline) · π(y_t | prompt, y_<t) / π_old(y_t | prompt, y_<t) over response tokens."""

    inputs: ClassVar[tuple[str, ...]] = ("reward_fn", "prompts")

    def experience(self, rollouts: Rollouts, scores: Tensor) -> NewPluginBatch:
        """Return the batch of rollouts and their scores, [B] or [B, T]; made before the update, without gradients."""
        advantages = per_response(scores) - self.method.baseline  # [B]
        return NewPluginBatch(rollouts.sequences, self.behaviour(rollouts).logprobs, advantages)

    def loss(self, batch: NewPluginBatch) -> tuple[Tensor, Metrics]:
        """Return −mean(A · ratio) over response tokens, []. At ratio 1, its gradient is −mean(A · ∇ log π)."""
        mask = batch.sequences.response_mask  # [B, T]
        ratio = zero_masked(self.policy(batch.sequences).logprobs - batch.old_logprobs, mask).exp()  # [B, T]
        loss = masked_mean(-batch.advantages.unsqueeze(1) * ratio, mask)
        return loss, {"policy/ratio": Mean.of(ratio, mask), "policy/approx_kl": Mean.of(ratio - 1 - ratio.log(), mask)}
