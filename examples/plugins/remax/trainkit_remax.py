"""ReMax: REINFORCE with the reward of the greedy response as baseline (Li et al. 2023)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import Field
from torch import Tensor

from trainkit import AccelerateRLTrainer, MethodConfig, Rollouts, Row, TokenBatch, register_trainer
from trainkit.functional import kl_k1, masked_sum, per_response, zero_masked
from trainkit.metrics import Mean, Metrics
from trainkit.testing import Declaration, Effect, Structure

KIT = Declaration(
    effects={"kl_coef": Effect("gradient", linear=(0.0, 0.1, 0.2))},
    structure=(Structure(gradient="policy", penalty="kl_coef"),),
)


class ReMaxConfig(MethodConfig):
    """Settings of ReMax. The KL coefficient is that of the code of Li et al. 2023, the learning rate of its scripts."""

    section_defaults: ClassVar[dict[str, Any]] = {"optimizer": {"lr": 1e-6}, "train": {"total_steps": 1000}}

    name: str = "remax"
    """The registered name."""
    kl_coef: float = Field(0.1, ge=0)
    """β: weight of the KL penalty, per nat of KL from the reference."""


@dataclass(frozen=True)
class ReMaxBatch(TokenBatch):
    """Experience; log-probabilities and advantages [B, T]. The loss is a mean over responses."""

    unit: ClassVar[str] = "responses"
    old_logprobs: Tensor
    advantages: Tensor

    @property
    def weight(self) -> Tensor:
        """Number of responses []."""
        return self.advantages.new_tensor(len(self))


def remax_advantages(gains: Tensor, k1: Tensor, mask: Tensor, *, kl_coef: float) -> Tensor:
    """Return A_t = R − R(greedy) − β·Σ k1 of the tokens from t on, 0 outside the mask. [B], [B, T] ×2 -> [B, T].

    ``gains`` are R − R(greedy). Source: Li et al. 2023, algorithm 1; without β·Σ k1 it is the advantage there.
    """
    penalty = zero_masked(kl_coef * k1, mask)
    following = penalty.sum(1, keepdim=True) - penalty.cumsum(1) + penalty
    return zero_masked(gains.unsqueeze(1) - following, mask)


@register_trainer("remax")
class ReMaxTrainer(AccelerateRLTrainer[ReMaxConfig]):
    """Trainer of ReMax: loss = −mean Σ_t A_t log π_t, where the greedy response to each prompt is the baseline."""

    inputs: ClassVar[tuple[str, ...]] = ("reward_fn", "prompts")
    needs_reference: ClassVar[bool] = True

    def make_experience(self, rows: list[Row]) -> ReMaxBatch:
        """Sample a response and the greedy response to each prompt; the difference of their scores is the gain."""
        sampled, greedy = self.sample(rows), self.sample(rows, temperature=0)
        scores, baselines = (per_response(self.score(rollouts)) for rollouts in (sampled, greedy))
        self.record(
            {
                "reward/mean": Mean.of(scores),
                "reward/greedy": Mean.of(baselines),
                "rollout/length": Mean.of(sampled.sequences.response_mask.sum(1)),
            }
        )
        return self.experience(sampled, scores - baselines)

    def experience(self, rollouts: Rollouts, scores: Tensor) -> ReMaxBatch:
        """Return responses with their advantages [B, T]; ``scores`` [B] are gains over the greedy responses."""
        sequences, policy = rollouts.sequences, self.behaviour(rollouts)
        mask, k1 = sequences.response_mask, kl_k1(policy.logprobs, self.reference(sequences).logprobs)
        self.record({"policy/kl": Mean.of(masked_sum(k1, mask, dim=1))})
        advantages = remax_advantages(per_response(scores), k1, mask, kl_coef=self.method.kl_coef)
        return ReMaxBatch(sequences, policy.logprobs, advantages)

    def loss(self, batch: ReMaxBatch) -> tuple[Tensor, Metrics]:
        """Return −Σ_t A_t log π_t, a mean over responses. -> []."""
        logprobs, mask = self.policy(batch.sequences).logprobs, batch.sequences.response_mask
        losses = -masked_sum(batch.advantages * logprobs, mask, dim=1)
        ratio = zero_masked(logprobs - batch.old_logprobs, mask).exp()
        return losses.mean(), {"policy/ratio": Mean.of(ratio, mask)}
