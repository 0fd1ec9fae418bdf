"""The trainer of BCO: a classifier of desirable and undesirable samples, whose threshold moves with the rewards."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor

from trainkit import Verdict, register_trainer
from trainkit.metrics import Mean, Metrics
from trainkit_kto.config import BCOConfig
from trainkit_kto.trainer import LabelledBatch, LabelTrainer


def bco_loss(margins: Tensor) -> Tensor:
    """Return −log σ(m), m = r − δ if desirable, δ − r if undesirable. [*] -> [*].

    Source: Jung et al. 2024, without the weights of undesirable samples by their prompts.
    """
    return -F.logsigmoid(margins)


@register_trainer("bco")
class BCOTrainer(LabelTrainer[BCOConfig]):
    """Trainer of BCO: loss = mean −log σ(±(r − δ)), r = β log(π / π_ref), δ midway between the labels' mean r."""

    remembers: ClassVar[Mapping[str, Any]] = {"seen": lambda: {"desirable": [0, 0.0], "undesirable": [0, 0.0]}}
    seen: dict[str, list[float]]
    """By label, the number of steps with samples of it, and the mean of their mean rewards."""

    @property
    def shift(self) -> float:
        """δ, by the steps so far; 0 before the first."""
        return sum(mean for _, mean in self.seen.values()) / 2

    def loss(self, batch: LabelledBatch) -> tuple[Tensor, Metrics]:
        """Return the loss of BCO, a mean over samples. -> []."""
        margins, told = self.margins(batch, self.shift)
        return bco_loss(margins).mean(), {**told, "rewards/shift": Mean.of(margins.new_full((len(batch),), self.shift))}

    def judge(self, metrics: Mapping[str, float]) -> Verdict:
        """Move δ by the rewards of the step, on all processes; a step may have one of the labels alone."""
        for label, (steps, mean) in self.seen.items():
            if math.isfinite(reward := metrics[f"rewards/{label}"]):
                self.seen = {**self.seen, label: [steps + 1, mean + (reward - mean) / (steps + 1)]}
        return Verdict.STEP
