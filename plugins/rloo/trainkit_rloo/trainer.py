"""The trainer of RLOO: experience and loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from trainkit import AccelerateRLTrainer, Rollouts, TokenBatch, register_trainer
from trainkit.functional import (
    clipped_surrogate,
    kl_k1,
    kl_k3,
    leave_one_out,
    masked_mean,
    masked_sum,
    penalise_truncated,
    place_scores,
    running_sums,
    zero_masked,
)
from trainkit.metrics import Mean, Metrics
from trainkit_rloo.config import RLOOConfig


@dataclass(frozen=True)
class RLOORollouts(TokenBatch):
    """Rollouts before their collection is complete; all fields [B, T] like ``sequences``."""

    logprobs: Tensor
    ref_logprobs: Tensor
    entropy: Tensor
    scores: Tensor
    weights: Tensor


@dataclass(frozen=True)
class RLOOBatch(TokenBatch):
    """Experience for a ratio per token; old log-probabilities and advantages [B, T]."""

    old_logprobs: Tensor
    advantages: Tensor


class RLOORows(RLOOBatch):
    """Experience for a ratio per response: advantages [B], and the loss is averaged over responses."""

    unit: ClassVar[str] = "responses"

    @property
    def weight(self) -> Tensor:
        """Number of responses []."""
        return self.advantages.new_tensor(len(self))


@register_trainer("rloo")
class RLOOTrainer(AccelerateRLTrainer[RLOOConfig]):
    """Trainer of RLOO: A_k = R_k − mean of the other R_j, R = score − β·Σ k1; clipped surrogate per response."""

    inputs: ClassVar[tuple[str, ...]] = ("reward_fn", "prompts")
    group = "rloo_k"
    needs_reference: ClassVar[bool] = True
    corrections: ClassVar[tuple[str, ...]] = ("sampler", "decoupled", "masked")

    @property
    def correction_level(self) -> str:
        """The level of importance weights, ``"sequence"`` if the ratio of the loss is that of a response."""
        return "sequence" if self.method.ratio_level == "sequence" else super().correction_level

    @property
    def passes(self) -> int:
        """Passes over each collection: `rloo_epochs`."""
        return self.method.rloo_epochs

    def experience(self, rollouts: Rollouts, scores: Tensor) -> RLOORollouts:
        """Return scored rollouts with log-probabilities of policy and reference [B, T], before any update."""
        sequences, policy = rollouts.sequences, self.behaviour(rollouts)
        reference = self.reference(sequences)
        placed = self.scored(scores, rollouts.terminated, sequences.response_mask)
        weights = self.importance_weights(rollouts, policy)
        return RLOORollouts(sequences, policy.logprobs, reference.logprobs, policy.entropy, placed, weights)

    def scored(self, scores: Tensor, terminated: Tensor, mask: Tensor) -> Tensor:
        """Return rewards per token, those of truncated responses by `missing_eos_penalty` or `missing_eos_score`.

        [B] or [B, T], [B], [B, T] -> [B, T].
        """
        placed = place_scores(scores, mask)
        if self.method.missing_eos_penalty is not None:
            return penalise_truncated(placed, terminated, mask, self.method.missing_eos_penalty)
        if self.method.missing_eos_score is not None:
            fixed = place_scores(placed.new_full((len(mask),), self.method.missing_eos_score), mask)
            return torch.where(terminated.unsqueeze(-1), placed, fixed)
        return placed

    def prepare_experience(self, experience: RLOORollouts) -> RLOOBatch:
        """Return the advantages, A = R − mean of the other R of the prompt, [B], or [B, T] with a ratio per token.

        With ``kl_level="token"``, the KL penalty of earlier tokens is excluded from a token's advantage.
        """
        x, mask = experience, experience.sequences.response_mask
        k1 = zero_masked(kl_k1(x.logprobs, x.ref_logprobs), mask)
        penalty = -self.method.kl_coef * k1
        advantages = leave_one_out(masked_sum(x.scores + penalty, mask, dim=1), self.method.rloo_k)
        self.record(
            {
                "policy/kl": Mean.of(k1.sum(1)),
                "policy/kl_per_token": Mean.of(kl_k3(x.logprobs, x.ref_logprobs), mask),
                "policy/entropy": Mean.of(x.entropy, mask),
            }
        )
        if self.method.ratio_level == "sequence":
            weights = masked_sum(x.weights, mask, dim=1) / mask.sum(1)  # one for the whole response
            return RLOORows(x.sequences, x.logprobs, advantages * weights)
        past = running_sums(penalty) - penalty if self.method.kl_level == "token" else torch.zeros_like(penalty)
        return RLOOBatch(x.sequences, x.logprobs, zero_masked((advantages.unsqueeze(1) - past) * x.weights, mask))

    def loss(self, batch: RLOOBatch) -> tuple[Tensor, Metrics]:
        """Return the clipped surrogate, a mean over responses, or tokens with ``ratio_level="token"``. -> []."""
        mask = batch.sequences.response_mask
        log_ratio = zero_masked(self.policy(batch.sequences).logprobs - batch.old_logprobs, mask)
        if isinstance(batch, RLOORows):
            mask, log_ratio = mask.any(1), log_ratio.sum(1)
        ratio = log_ratio.exp()
        loss = clipped_surrogate(ratio, batch.advantages, cliprange=self.method.cliprange)
        return masked_mean(loss, mask), {
            "policy/ratio": Mean.of(ratio, mask),
            "policy/approx_kl": Mean.of(ratio - 1 - log_ratio, mask),
            "policy/clipfrac": Mean.of(loss > -batch.advantages * ratio, mask),
        }
