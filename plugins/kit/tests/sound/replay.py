"""GRPO with replay: groups of earlier collections are trained on again (RePO, Li et al. 2025, arXiv 2506.09340)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from pydantic import Field
from torch import Tensor

from trainkit import AccelerateRLTrainer, GroupSize, MethodConfig, Rollouts, TokenBatch, register_trainer
from trainkit.functional import clipped_surrogate, leave_one_out, masked_mean, per_response, zero_masked
from trainkit.metrics import Mean, Metrics
from trainkit.testing import Declaration, Effect, Structure


class ReplayConfig(MethodConfig):
    """Settings of replay."""

    section_defaults: ClassVar[dict[str, Any]] = {"train": {"total_steps": 1000}}
    name: str = "_sound_replay"
    """The registered name."""
    k: GroupSize = 4
    """Responses to each prompt."""
    kept: int = Field(3, ge=1)
    """Collections from which groups are replayed."""
    replayed: int = Field(2, ge=0)
    """Groups that are replayed with each collection."""


@dataclass(frozen=True)
class ReplayBatch(TokenBatch):
    """Experience; log-probabilities [B, T] at sampling, and advantages [B]."""

    old_logprobs: Tensor
    advantages: Tensor


@register_trainer("_sound_replay")
class ReplayTrainer(AccelerateRLTrainer[ReplayConfig]):
    """Trainer of replay: loss = mean −min(Aρ, A clip(ρ)), ρ = π / π when sampled, A against the rest of the group."""

    inputs: ClassVar[tuple[str, ...]] = ("reward_fn", "prompts")
    group = "k"
    remembers: ClassVar[dict[str, Any]] = {"earlier": list}
    earlier: list[ReplayBatch]

    @property
    def experience_rows(self) -> int:
        """Rows of a collection, with those that are replayed."""
        return super().experience_rows + self.method.replayed * self.method.k

    def experience(self, rollouts: Rollouts, scores: Tensor) -> ReplayBatch:
        """Return the scores [B] in place of advantages."""
        return ReplayBatch(rollouts.sequences, self.behaviour(rollouts).logprobs, per_response(scores))

    def prepare_experience(self, experience: ReplayBatch) -> ReplayBatch:
        """Return the collection with its advantages [B], and groups of earlier collections as they were."""
        made = replace(experience, advantages=leave_one_out(experience.advantages, self.method.k))
        return self.replay(made, self.earlier, collections=self.method.kept, prompts=self.method.replayed)

    def loss(self, batch: ReplayBatch) -> tuple[Tensor, Metrics]:
        """Return the clipped surrogate, a mean over response tokens. -> []."""
        mask = batch.sequences.response_mask
        ratio = zero_masked(self.policy(batch.sequences).logprobs - batch.old_logprobs, mask).exp()
        loss = clipped_surrogate(ratio, batch.advantages.unsqueeze(1), cliprange=0.2)
        return masked_mean(loss, mask), {"policy/ratio": Mean.of(ratio, mask)}


def rows_of_the_fourth_collection(trainer: Any) -> int:
    """Return the rows of the fourth collection, with its replayed ones."""
    for _ in range(3):
        trainer.store.clear()
        trainer.collect()
        trainer.progress.collection += 1
    return len(trainer.store)


KIT = Declaration(
    effects={
        "k": Effect("responses", equals={2: 2, 4: 4}),
        "replayed": Effect(rows_of_the_fourth_collection, equals={0: 16, 2: 24, 100: 64}),
        "kept": Effect(rows_of_the_fourth_collection, equals={1: 32, 2: 48}, under={"method.replayed": 100}),
    },
    structure=(Structure(scores="group", baseline="leave_one_out"),),
)
