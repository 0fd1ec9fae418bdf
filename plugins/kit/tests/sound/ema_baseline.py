"""REINFORCE with an exponential moving average of the scores as the baseline (Williams 1992, section 5)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from pydantic import Field
from torch import Tensor

from trainkit import AccelerateRLTrainer, MethodConfig, Rollouts, TokenBatch, register_trainer
from trainkit.functional import masked_mean, per_response
from trainkit.metrics import Mean, Metrics
from trainkit.testing import Declaration, Structure, Target


class EMABaselineConfig(MethodConfig):
    """Settings of REINFORCE with a moving average."""

    section_defaults: ClassVar[dict[str, Any]] = {"train": {"total_steps": 1000}}
    name: str = "_sound_ema_baseline"
    """The registered name."""
    decay: float = Field(0.9, ge=0, lt=1)
    """The weight of the average before a collection; the collection's mean has the rest."""


@dataclass(frozen=True)
class EMABaselineBatch(TokenBatch):
    """Experience; advantages [B]."""

    advantages: Tensor


@register_trainer("_sound_ema_baseline")
class EMABaselineTrainer(AccelerateRLTrainer[EMABaselineConfig]):
    """Trainer of REINFORCE with A = score − b, b ← decay · b + (1 − decay) · mean score, b as it was before."""

    inputs: ClassVar[tuple[str, ...]] = ("reward_fn", "prompts")
    remembers: ClassVar[dict[str, Any]] = {"baseline": float}
    baseline: float

    def experience(self, rollouts: Rollouts, scores: Tensor) -> EMABaselineBatch:
        """Return the scores [B] in place of advantages."""
        return EMABaselineBatch(rollouts.sequences, per_response(scores))

    def prepare_experience(self, experience: EMABaselineBatch) -> EMABaselineBatch:
        """Subtract the average of the collections before, and update it with this one. [B]."""
        scores = experience.advantages
        total, count = self.reduce(scores.new_tensor([float(scores.sum()), float(len(scores))])).tolist()
        before = self.baseline
        self.baseline = self.method.decay * before + (1 - self.method.decay) * total / count
        return replace(experience, advantages=scores - before)

    def loss(self, batch: EMABaselineBatch) -> tuple[Tensor, Metrics]:
        """Return −A log π, a mean over response tokens. -> []."""
        mask = batch.sequences.response_mask
        losses = -batch.advantages.unsqueeze(1) * self.policy(batch.sequences).logprobs
        return masked_mean(losses, mask), {"policy/baseline": Mean.of(batch.advantages)}


KIT = Declaration(
    # the average begins at 0, so that it has an effect from the second collection on
    contexts={"decay": {"train.total_steps": 12}},
    structure=(Structure(gradient="policy", surrogate="none", detached=()),),
    targets={
        "baseline": Target(
            lambda trainer: trainer.baseline,
            lambda trainer: trainer.recorder.pending["reward/mean"].compute(),
            lambda method: 1 - method.decay,
        )
    },
)
