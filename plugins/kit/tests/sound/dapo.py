"""DAPO: clip-higher, a mean over tokens, a soft penalty of long responses, groups that all differ (Yu et al. 2025)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from pydantic import Field
from torch import Tensor

from trainkit import AccelerateRLTrainer, MethodConfig, Rollouts, TokenBatch, register_trainer
from trainkit.functional import clipped_surrogate, masked_mean, per_response, zero_masked
from trainkit.metrics import Mean, Metrics
from trainkit.testing import Declaration, Effect, Structure


class DAPOConfig(MethodConfig):
    """Settings of DAPO. The defaults are those of Yu et al. 2025, but for the group and the lengths."""

    section_defaults: ClassVar[dict[str, Any]] = {"train": {"total_steps": 1000}}
    name: str = "_sound_dapo"
    """The registered name."""
    group_size: int = Field(4, ge=2)
    """Responses per prompt."""
    cliprange: float = Field(0.2, gt=0)
    """ε_low: how far the ratio may fall below 1."""
    cliprange_high: float = Field(0.28, gt=0)
    """ε_high: how far it may rise above 1."""
    overlong_buffer: int = Field(2, ge=1)
    """Tokens before the limit from which on a response is punished."""
    overlong_penalty: float = Field(0.5, ge=0)
    """What a response at the limit loses; less in equal steps before it."""


@dataclass(frozen=True)
class DAPOBatch(TokenBatch):
    """Experience; old log-probabilities [B, T], advantages [B]."""

    old_logprobs: Tensor
    advantages: Tensor


@register_trainer("_sound_dapo")
class DAPOTrainer(AccelerateRLTrainer[DAPOConfig]):
    """Trainer of DAPO: A = (R − mean) / std of the group, R = score − penalty of length; asymmetric clipping."""

    inputs: ClassVar[tuple[str, ...]] = ("reward_fn", "prompts")
    group = "group_size"

    def keep(self, rollouts: Rollouts, scores: Tensor) -> Tensor:
        """Return True for groups whose scores differ: the others have no gradient. [B]."""
        groups = per_response(scores).view(-1, self.method.group_size)
        return (groups != groups[:, :1]).any(1).repeat_interleave(self.method.group_size)

    def experience(self, rollouts: Rollouts, scores: Tensor) -> DAPOBatch:
        """Return the punished scores [B] in the place of advantages, and old log-probabilities [B, T]."""
        buffer, limit = self.method.overlong_buffer, self.config.rollout.max_new_tokens
        over = rollouts.sequences.response_mask.sum(1) - (limit - buffer)
        punished = per_response(scores) - self.method.overlong_penalty * over.clamp(0, buffer) / buffer
        return DAPOBatch(rollouts.sequences, self.behaviour(rollouts).logprobs, punished)

    def prepare_experience(self, experience: DAPOBatch) -> DAPOBatch:
        """Return rewards standardised within their group [B]."""
        groups = experience.advantages.double().view(-1, self.method.group_size)
        advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)
        return replace(experience, advantages=advantages.flatten().float())

    def loss(self, batch: DAPOBatch) -> tuple[Tensor, Metrics]:
        """Return the clipped surrogate, a mean over all response tokens. -> []."""
        method, mask = self.method, batch.sequences.response_mask
        ratio = zero_masked(self.policy(batch.sequences).logprobs - batch.old_logprobs, mask).exp()
        advantages = batch.advantages.unsqueeze(1)
        losses = clipped_surrogate(ratio, advantages, cliprange=method.cliprange, cliprange_high=method.cliprange_high)
        return masked_mean(losses, mask), {
            "policy/ratio": Mean.of(ratio, mask),
            "policy/clipfrac": Mean.of(losses > -advantages * ratio, mask),
        }


def lost_at_the_limit(trainer: Any) -> float:
    """Return what the longest of given responses with a score of 0 loses."""
    rollouts = trainer.sample([{"prompt": prompt} for prompt in "abcdefgh" * 2])
    longest = int(rollouts.sequences.response_mask.sum(1).argmax())
    return -float(trainer.experience(rollouts, rollouts.terminated.new_zeros(16, dtype=float)).advantages[longest])


KIT = Declaration(
    effects={
        "group_size": Effect("responses", equals={2: 2, 4: 4}),
        "overlong_penalty": Effect(lost_at_the_limit, equals={0.0: 0.0, 0.5: 0.5, 1.0: 1.0}),
    },
    structure=(Structure(scores="group", surrogate="token", cliprange=("cliprange", "cliprange_high"), detached=()),),
)
