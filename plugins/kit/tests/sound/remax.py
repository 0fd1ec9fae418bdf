"""ReMax: REINFORCE whose baseline is the score of the greedy response (Li et al. 2023)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import Field
from torch import Tensor

from trainkit import AccelerateRLTrainer, MethodConfig, Rollouts, Row, TokenBatch, register_trainer
from trainkit.functional import kl_k1, masked_sum, per_response, zero_masked
from trainkit.metrics import Mean, Metrics
from trainkit.testing import Declaration, Effect, Structure


class ReMaxConfig(MethodConfig):
    """Settings of ReMax."""

    section_defaults: ClassVar[dict[str, Any]] = {"train": {"total_steps": 1000}}
    name: str = "_sound_remax"
    """The registered name."""
    kl_coef: float = Field(0.1, ge=0)
    """β: weight of the KL penalty of a response."""


@dataclass(frozen=True)
class ReMaxBatch(TokenBatch):
    """Experience; advantages [B]. The loss is a mean over responses."""

    unit: ClassVar[str] = "responses"
    advantages: Tensor

    @property
    def weight(self) -> Tensor:
        """Number of responses []."""
        return self.advantages.new_tensor(len(self))


@register_trainer("_sound_remax")
class ReMaxTrainer(AccelerateRLTrainer[ReMaxConfig]):
    """Trainer of ReMax: loss = −mean (R − R(greedy) − β Σ k1) Σ log π."""

    inputs: ClassVar[tuple[str, ...]] = ("reward_fn", "prompts")
    needs_reference: ClassVar[bool] = True

    def make_experience(self, rows: list[Row]) -> ReMaxBatch:
        """Return sampled responses with their gains over the greedy ones [B]."""
        sampled, greedy = self.sample(rows), self.sample(rows, temperature=0)
        scores, baselines = (per_response(self.score(rollouts)) for rollouts in (sampled, greedy))
        self.record({"reward/mean": Mean.of(scores), "reward/greedy": Mean.of(baselines)})
        return self.experience(sampled, scores - baselines)

    def experience(self, rollouts: Rollouts, scores: Tensor) -> ReMaxBatch:
        """Return responses with their advantages [B]; ``scores`` [B] are gains over the greedy responses."""
        sequences = rollouts.sequences
        k1 = kl_k1(self.behaviour(rollouts).logprobs, self.reference(sequences).logprobs)
        kl = zero_masked(k1, sequences.response_mask).sum(1)
        self.record({"policy/kl": Mean.of(kl)})
        return ReMaxBatch(sequences, per_response(scores) - self.method.kl_coef * kl)

    def loss(self, batch: ReMaxBatch) -> tuple[Tensor, Metrics]:
        """Return −A Σ_t log π_t, a mean over responses. -> []."""
        logps = masked_sum(self.policy(batch.sequences).logprobs, batch.sequences.response_mask, dim=1)
        return -(batch.advantages * logps).mean(), {"policy/advantage": Mean.of(batch.advantages)}


KIT = Declaration(
    effects={"kl_coef": Effect("gradient", linear=(0.0, 0.1, 0.2))},
    structure=(Structure(scores="row", surrogate="none", detached=()),),
    expected_failures={"given_responses": "responses that are given to step() have no greedy response beside them"},
)
