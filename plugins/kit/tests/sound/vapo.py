"""VAPO: PPO whose λ depends on the length, a critic with λ = 1, and imitation of the best (Yue et al. 2025)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import Field
from torch import Tensor

from trainkit import AccelerateRLTrainer, MethodConfig, Rollouts, TokenBatch, TRLConfig, register_trainer
from trainkit.functional import clipped_surrogate, gae, masked_mean, place_scores, zero_masked
from trainkit.metrics import Mean, Metrics
from trainkit.models import Policy, load_heads, load_model, make_policy
from trainkit.testing import Declaration, Effect, Structure


class VAPOConfig(MethodConfig):
    """Settings of VAPO."""

    section_defaults: ClassVar[dict[str, Any]] = {"train": {"total_steps": 1000}}
    name: str = "_sound_vapo"
    """The registered name."""
    alpha: float = Field(0.5, gt=0)
    """α: λ of a response of l tokens is 1 − 1 / (α l), at least 0."""
    cliprange: float = Field(0.2, gt=0)
    """ε_low: how far the ratio may fall below 1."""
    cliprange_high: float = Field(0.28, gt=0)
    """ε_high: how far it may rise above 1."""
    vf_coef: float = Field(0.5, ge=0)
    """Weight of the critic's loss."""
    imitation: float = Field(0.1, ge=0)
    """μ: weight of the likelihood of responses with at least `good`."""
    good: float = Field(3.0, ge=-1e6, le=1e6)
    """The score from which on a response is imitated."""


@dataclass(frozen=True)
class VAPOBatch(TokenBatch):
    """Experience: old log-probabilities, advantages and returns [B, T], whether a response is imitated [B, T]."""

    old_logprobs: Tensor
    advantages: Tensor
    returns: Tensor
    imitated: Tensor


@register_trainer("_sound_vapo")
class VAPOTrainer(AccelerateRLTrainer[VAPOConfig]):
    """Trainer of VAPO: A by GAE with λ = 1 − 1 / (α l), V fitted to the score, −μ log π of good responses."""

    inputs: ClassVar[tuple[str, ...]] = ("reward_fn", "prompts")

    def get_arch(self, config: TRLConfig[VAPOConfig]) -> Policy:
        """Return the language model with a value head."""
        model = load_model(config.model, self.live_model)
        kwargs: dict[str, Any] = {"temperature": config.rollout.temperature, "logit_mask": self.logit_mask}
        return load_heads(make_policy(model, value_head=True, **kwargs), config.model.model_path, config.model.kwargs)

    def experience(self, rollouts: Rollouts, scores: Tensor) -> VAPOBatch:
        """Return the experience [B, T] of scored responses."""
        sequences, mask, policy = rollouts.sequences, rollouts.sequences.response_mask, self.behaviour(rollouts)
        rewards = zero_masked(place_scores(scores, mask), mask)
        lam = (1 - 1 / (self.method.alpha * mask.sum(1))).clamp(min=0)  # [B]
        advantages, _ = gae(policy.values, rewards, mask, gamma=1.0, lam=lam)
        _, returns = gae(policy.values, rewards, mask, gamma=1.0, lam=1.0)
        imitated = mask & (rewards.sum(1, keepdim=True) >= self.method.good)
        return VAPOBatch(sequences, policy.logprobs, advantages, returns, imitated)

    def loss(self, batch: VAPOBatch) -> tuple[Tensor, Metrics]:
        """Return surrogate + c (V − R)² / 2 − μ log π of good responses, means over response tokens. -> []."""
        method, mask, new = self.method, batch.sequences.response_mask, self.policy(batch.sequences)
        ratio = zero_masked(new.logprobs - batch.old_logprobs, mask).exp()
        high = method.cliprange_high
        policy = clipped_surrogate(ratio, batch.advantages, cliprange=method.cliprange, cliprange_high=high)
        value, likelihood = 0.5 * (new.values - batch.returns) ** 2, new.logprobs * batch.imitated
        losses = policy + method.vf_coef * value - method.imitation * likelihood
        return masked_mean(losses, mask), {
            "policy/ratio": Mean.of(ratio, mask),
            "loss/value": Mean.of(value, mask),
            "loss/imitation": Mean.of(-likelihood, mask),
        }


def share_imitated(trainer: Any) -> float:
    """Return the share of response tokens that are imitated."""
    batch = trainer.store.experience
    return float(batch.imitated[batch.sequences.response_mask].float().mean())


ALONE = {"method.imitation": 0.0}
KIT = Declaration(
    effects={
        "vf_coef": Effect("slope of values", proportional=(0.0, 0.5, 1.0)),
        "imitation": [Effect("gradient", linear=(0.0, 0.5, 1.0)), Effect("likelihood", rises=(0.0, 0.5, 1.0))],
        "good": Effect(share_imitated, equals={-100.0: 1.0, 100.0: 0.0}),
    },
    structure=(
        Structure(scores="row", detached=()),
        Structure(surrogate="token", cliprange=("cliprange", "cliprange_high"), under=ALONE),
    ),
)
