"""The trainer of SPIN: samples are preferred to what the policy of the last collection answers itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from trainkit import AccelerateRLTrainer, Preferences, Row, register_trainer
from trainkit.metrics import Metrics
from trainkit.models import response_logprobs
from trainkit_dpo.config import SPINConfig
from trainkit_dpo.trainer import pair_metrics


@dataclass(frozen=True)
class SPINBatch(Preferences):
    """The given outputs and the policy's own, with their log-probabilities before the collection's updates [B]."""

    old_chosen: Tensor
    old_rejected: Tensor


@register_trainer("spin")
class SPINTrainer(AccelerateRLTrainer[SPINConfig]):
    """Trainer of SPIN: loss = mean −log σ(λ (r_given − r_own)), r = log π − log π before the collection."""

    inputs: ClassVar[tuple[str, ...]] = ("samples", "prompts")

    def make_experience(self, rows: list[Row]) -> SPINBatch:
        """Sample a response to the prompt of each sample; return it as the rejected side of the given one [B, T]."""
        rollouts, _ = self.sample_and_score(rows)
        sides = [self.unwrapped.through_trunk(side) for side in (self.encode_samples(rows), rollouts.sequences)]
        old = [self.in_micro_batches(side, lambda part: response_logprobs(self.unwrapped, part)) for side in sides]
        return SPINBatch(*sides, *old)

    def loss(self, batch: SPINBatch) -> tuple[Tensor, Metrics]:
        """Return the loss of SPIN, a mean over pairs. -> []."""
        beta, (given, own) = self.method.beta, response_logprobs(self.policy, batch.both).chunk(2)
        ratios = given - batch.old_chosen, own - batch.old_rejected
        pairs = torch.ones_like(given, dtype=torch.bool)
        return -F.logsigmoid(beta * (ratios[0] - ratios[1])).mean(), pair_metrics((given, own), ratios, beta, pairs)
