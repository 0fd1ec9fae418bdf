"""REINFORCE with a moving average of rewards as baseline (Williams 1992)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from researchers.remax import ReMaxBatch
from trainkit import AccelerateRLTrainer, MethodConfig, Rollouts, register_trainer
from trainkit.functional import masked_sum, per_response
from trainkit.metrics import Mean, Metrics


class EMAConfig(MethodConfig):
    """Settings of REINFORCE with a moving average."""

    section_defaults: ClassVar[dict[str, Any]] = {"optimizer": {"lr": 1e-6}, "train": {"total_steps": 1000}}

    name: str = "_test_ema_baseline"
    """The registered name."""
    decay: float = Field(0.9, ge=0, lt=1)
    """Share of the old baseline in the new one."""


@register_trainer("_test_ema_baseline")
class EMATrainer(AccelerateRLTrainer[EMAConfig]):
    """Trainer of REINFORCE: A = R − b, where b follows the mean reward of each collection."""

    inputs: ClassVar[tuple[str, ...]] = ("reward_fn", "prompts")
    remembers: ClassVar[Mapping[str, Callable[[], Any]]] = {"baseline": float}
    baseline: float

    def experience(self, rollouts: Rollouts, scores: Tensor) -> ReMaxBatch:
        """Return the scores [B] in the place of advantages."""
        return ReMaxBatch(rollouts.sequences, per_response(scores))

    def prepare_experience(self, experience: ReMaxBatch) -> ReMaxBatch:
        """Return the advantages [B], and update the baseline with the mean of the collection."""
        scores = experience.advantages
        advantages = scores - self.baseline
        total, count = self.reduce(torch.stack([scores.sum(), scores.new_tensor(len(scores))]).double()).tolist()
        self.baseline = self.method.decay * self.baseline + (1 - self.method.decay) * total / count
        return replace(experience, advantages=advantages)

    def loss(self, batch: ReMaxBatch) -> tuple[Tensor, Metrics]:
        """Return −A · Σ_t log π_t, a mean over responses. -> []."""
        logps = masked_sum(self.policy(batch.sequences).logprobs, batch.sequences.response_mask, dim=1)
        return -(batch.advantages * logps).mean(), {"policy/advantage": Mean.of(batch.advantages)}
