"""RLOO: REINFORCE with a leave-one-out baseline over the k responses of each prompt.

Kool et al. 2019 (the estimator), Ahmadian et al. 2024 (for language models).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from trainkit import AccelerateRLTrainer, GroupSize, MethodConfig, Rollouts, TokenBatch, register_trainer
from trainkit.functional import (
    clipped_surrogate,
    kl_k1,
    kl_k3,
    leave_one_out,
    masked_mean,
    masked_sum,
    penalise_cut,
    place_scores,
    zero_masked,
)
from trainkit.metrics import Mean, Metrics
from trainkit_rloo.kit import Declared


class RLOOConfig(MethodConfig):
    """Settings of RLOO. The defaults are those of Ahmadian et al. 2024, section 4, which uses k = 2 and k = 4."""

    section_defaults: ClassVar[dict[str, Any]] = {"optimizer": {"lr": 1e-6}, "train": {"total_steps": 1000}}

    name: str = "rloo"
    """The registered name."""
    rloo_k: GroupSize = 4
    """Responses per prompt; each is compared with the mean of the others."""
    rloo_epochs: int = Field(1, ge=1)
    """Passes over each collection of rollouts."""
    kl_coef: float = Field(0.05, ge=0)
    """β: weight of the KL penalty, per nat of KL from the reference."""
    kl_level: Literal["sequence", "token"] = "sequence"
    """Whether the advantage of a token includes the KL penalty of its whole response, or only from this token on."""
    ratio_level: Literal["sequence", "token"] = "sequence"
    """Whether the importance ratio is computed per response or per token."""
    cliprange: float = Field(0.2, gt=0)
    """ε of the clipped surrogate; has no effect in the first step on a collection."""
    missing_eos_penalty: float | None = Field(None, gt=0)
    """Penalty subtracted from the score of a response truncated at the length limit. None: no penalty."""
    missing_eos_score: float | None = Field(None, ge=-1e6, le=1e6)
    """Score of a response truncated at the length limit, instead of its own; async_rlhf's is −1. None: its own."""

    @model_validator(mode="after")
    def _one_rule_for_truncated_responses(self) -> Self:
        if self.missing_eos_penalty is not None and self.missing_eos_score is not None:
            raise ValueError(
                f"missing_eos_penalty is {self.missing_eos_penalty}, and missing_eos_score {self.missing_eos_score} "
                "replaces the score that it is subtracted from; give one of the two"
            )
        return self

    @model_validator(mode="after")
    def _levels_agree(self) -> Self:
        if self.kl_level == "token" and self.ratio_level == "sequence":
            raise ValueError("kl_level 'token' gives an advantage per token, which needs ratio_level 'token'")
        return self


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
class RLOOTrainer(Declared, AccelerateRLTrainer[RLOOConfig]):
    """Trainer of RLOO: A_k = R_k − mean of the other R_j, R = score − β·Σ k1; clipped surrogate per response (F-11)."""

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
            return penalise_cut(placed, terminated, mask, self.method.missing_eos_penalty)
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
        past = penalty.cumsum(1) - penalty if self.method.kl_level == "token" else torch.zeros_like(penalty)
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
