"""REINFORCE++: a KL penalty in the reward, advantages whitened over the whole collection, no critic (Hu 2025)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from trainkit import AccelerateRLTrainer, MethodConfig, Rollouts, TokenBatch, register_trainer
from trainkit.functional import clipped_surrogate, gae, kl_k1, kl_shaped_rewards, masked_mean, whiten, zero_masked
from trainkit.metrics import Mean, Metrics
from trainkit.testing import Declaration, Structure

KIT = Declaration(structure=(Structure(discount=(1.0, 1.0), gradient="policy", penalty="kl_coef"),))


class ReinforcePPConfig(MethodConfig):
    """Settings of REINFORCE++. The defaults are those of Hu 2025 for general domains."""

    section_defaults: ClassVar[dict[str, Any]] = {
        "optimizer": {"lr": 5e-7},
        "rollout": {"num_rollouts": 256},
        "train": {"batch_size": 128, "total_steps": 1000},
    }

    name: str = "reinforce_pp"
    """The registered name."""
    kl_coef: float = Field(0.01, ge=0)
    """β: weight of the KL penalty in the reward of each token, per nat of KL from the reference."""
    cliprange: float = Field(0.2, gt=0)
    """ε of the clipped surrogate; has no effect in the first step on a collection."""


@dataclass(frozen=True)
class ReinforcePPBatch(TokenBatch):
    """Log-probabilities and advantages [B, T]; ``advantages`` holds rewards until the collection is complete."""

    old_logprobs: Tensor
    advantages: Tensor


@register_trainer("reinforce_pp")
class ReinforcePPTrainer(AccelerateRLTrainer[ReinforcePPConfig]):
    """Trainer of REINFORCE++: r_t = score − β·k1, returns whitened over the collection, clipped surrogate."""

    inputs: ClassVar[tuple[str, ...]] = ("reward_fn", "prompts")
    needs_reference: ClassVar[bool] = True

    def experience(self, rollouts: Rollouts, scores: Tensor) -> ReinforcePPBatch:
        """Return log-probabilities, and rewards per token with the KL penalty [B, T], before any update."""
        sequences, policy = rollouts.sequences, self.behaviour(rollouts)
        reference, mask = self.reference(sequences).logprobs, sequences.response_mask
        divergence = zero_masked(kl_k1(policy.logprobs, reference), mask).sum(1)
        self.record({"policy/kl": Mean.of(divergence), "policy/entropy": Mean.of(policy.entropy, mask)})
        rewards = kl_shaped_rewards(scores, policy.logprobs, reference, mask, self.method.kl_coef)
        return ReinforcePPBatch(sequences, policy.logprobs, rewards)

    def prepare_experience(self, experience: ReinforcePPBatch) -> ReinforcePPBatch:
        """Return advantages: the sum of the rewards from t on, whitened over all tokens of all processes. [B, T]."""
        rewards, mask = experience.advantages, experience.sequences.response_mask
        returns, _ = gae(torch.zeros_like(rewards), rewards, mask, gamma=1.0, lam=1.0)
        advantages = whiten(returns, mask, reduce=self.reduce)
        return ReinforcePPBatch(experience.sequences, experience.old_logprobs, advantages)

    def loss(self, batch: ReinforcePPBatch) -> tuple[Tensor, Metrics]:
        """Return the clipped surrogate, a mean over response tokens. -> []."""
        mask = batch.sequences.response_mask
        ratio = zero_masked(self.policy(batch.sequences).logprobs - batch.old_logprobs, mask).exp()
        surrogate = clipped_surrogate(ratio, batch.advantages, cliprange=self.method.cliprange)
        return masked_mean(surrogate, mask), {
            "policy/ratio": Mean.of(ratio, mask),
            "policy/clipfrac": Mean.of(surrogate > -batch.advantages * ratio, mask),
        }
