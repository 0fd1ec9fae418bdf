"""A curriculum: what counts as a success rises with the policy, and is state (Bengio et al. 2009, in spirit)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from pydantic import Field
from torch import Tensor

from trainkit import AccelerateRLTrainer, MethodConfig, Rollouts, TokenBatch, register_trainer
from trainkit.functional import masked_mean, per_response
from trainkit.metrics import Mean, Metrics
from trainkit.testing import Declaration, Structure


class CurriculumConfig(MethodConfig):
    """Settings of the curriculum."""

    section_defaults: ClassVar[dict[str, Any]] = {"train": {"total_steps": 1000}}
    name: str = "_sound_curriculum"
    """The registered name."""
    k: int = Field(4, ge=2)
    """Responses per prompt."""
    easy: float = Field(0.6, ge=0, le=1)
    """The share of responses above the level from which on the level rises."""
    rise: float = Field(0.25, gt=0)
    """How much the level rises after a collection that was easy."""


@dataclass(frozen=True)
class CurriculumBatch(TokenBatch):
    """Experience; advantages [B]."""

    advantages: Tensor


@register_trainer("_sound_curriculum")
class CurriculumTrainer(AccelerateRLTrainer[CurriculumConfig]):
    """Trainer of REINFORCE on score − level, cut at 0 from below by a slope of 1/10; the level rises with success."""

    inputs: ClassVar[tuple[str, ...]] = ("reward_fn", "prompts")
    group = "k"
    remembers: ClassVar[dict[str, Any]] = {"level": float, "steps_at_level": int}
    level: float
    steps_at_level: int

    def experience(self, rollouts: Rollouts, scores: Tensor) -> CurriculumBatch:
        """Return the scores [B] in the place of advantages."""
        return CurriculumBatch(rollouts.sequences, per_response(scores))

    def prepare_experience(self, experience: CurriculumBatch) -> CurriculumBatch:
        """Return the gains over the level, less the mean of the group [B]; then raise the level if it is easy."""
        over = experience.advantages - self.level
        gains = over.clamp(min=0) + 0.1 * over.clamp(max=0)
        groups = gains.view(-1, self.method.k)
        above = over.new_tensor([float((over >= 0).sum()), float(len(over))])
        good, count = self.reduce(above).tolist()
        if good / count >= self.method.easy:
            self.level, self.steps_at_level = self.level + self.method.rise, 0
        return replace(experience, advantages=(groups - groups.mean(1, keepdim=True)).flatten())

    def loss(self, batch: CurriculumBatch) -> tuple[Tensor, Metrics]:
        """Return −A log π, a mean over response tokens. -> []."""
        mask = batch.sequences.response_mask
        losses = -batch.advantages.unsqueeze(1) * self.policy(batch.sequences).logprobs
        return masked_mean(losses, mask), {"policy/loss": Mean.of(losses, mask)}

    def after_step(self) -> None:
        """Count the steps since the level has risen."""
        self.steps_at_level += 1


KIT = Declaration(
    contexts={"easy": {"method.easy": 1.0}},
    structure=(Structure(scores="group", surrogate="none", detached=()),),
)
