"""ReMax: REINFORCE with the reward of the greedy response as baseline (Li et al. 2023)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from trainkit import AccelerateRLTrainer, MethodConfig, Rollouts, Row, TokenBatch, register_trainer
from trainkit.functional import masked_sum, per_response
from trainkit.metrics import Mean, Metrics
from trainkit.testing import Declaration


class ReMaxConfig(MethodConfig):
    """Settings of ReMax."""

    section_defaults: ClassVar[dict[str, Any]] = {"optimizer": {"lr": 1e-6}, "train": {"total_steps": 1000}}

    name: str = "_test_remax"
    """The registered name."""


@dataclass(frozen=True)
class ReMaxBatch(TokenBatch):
    """Experience; advantages [B]. The loss is a mean over responses."""

    unit: ClassVar[str] = "responses"
    advantages: Tensor

    @property
    def weight(self) -> Tensor:
        """Number of responses []."""
        return self.advantages.new_tensor(len(self))


@register_trainer("_test_remax")
class ReMaxTrainer(AccelerateRLTrainer[ReMaxConfig]):
    """Trainer of ReMax: A = R(sampled) − R(greedy); loss = −mean A · Σ log π."""

    inputs: ClassVar[tuple[str, ...]] = ("reward_fn", "prompts")

    def make_experience(self, rows: list[Row]) -> ReMaxBatch:
        """Return sampled responses [B, T] with their advantages over the greedy ones [B]."""
        sampled, greedy = self.sample(rows), self.sample(rows, temperature=0)
        rewards, baselines = (per_response(self.score(rollouts)) for rollouts in (sampled, greedy))
        self.record({"reward/mean": Mean.of(rewards), "reward/greedy": Mean.of(baselines)})
        return ReMaxBatch(sampled.sequences, rewards - baselines)

    def experience(self, rollouts: Rollouts, scores: Tensor) -> ReMaxBatch:
        """Return given responses with their scores [B] as advantages: there is no greedy response to compare with."""
        return ReMaxBatch(rollouts.sequences, per_response(scores))

    def loss(self, batch: ReMaxBatch) -> tuple[Tensor, Metrics]:
        """Return −A · Σ_t log π_t, a mean over responses. -> []."""
        logps = masked_sum(self.policy(batch.sequences).logprobs, batch.sequences.response_mask, dim=1)
        return -(batch.advantages * logps).mean(), {"policy/advantage": Mean.of(batch.advantages)}


KIT = Declaration(
    expected_failures={"given_responses": "responses given to step() have no greedy response to compare with"}
)
