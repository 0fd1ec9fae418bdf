"""SPIN: samples are preferred to what the policy of the last collection answers itself (Chen et al. 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from trainkit import AccelerateRLTrainer, MethodConfig, Row, Sequences, register_trainer
from trainkit.data import Preferences
from trainkit.functional import masked_sum
from trainkit.metrics import Mean, Metrics
from trainkit.testing import Declaration, Effect, Structure
from trainkit.testing.trainers import SAMPLES


class SPINConfig(MethodConfig):
    """Settings of SPIN."""

    section_defaults: ClassVar[dict[str, Any]] = {"train": {"total_steps": 1000}}
    name: str = "_sound_spin"
    """The registered name."""
    beta: float = Field(0.1, gt=0)
    """λ of the paper: reward per nat of log-ratio to the policy of the last collection."""


@dataclass(frozen=True)
class SPINBatch(Preferences):
    """The given outputs and the policy's own, with their log-probabilities before the collection's updates [B]."""

    old_chosen: Tensor
    old_rejected: Tensor


@register_trainer("_sound_spin")
class SPINTrainer(AccelerateRLTrainer[SPINConfig]):
    """Trainer of SPIN: loss = mean −log σ(λ (r_given − r_own)), r = log π − log π before the collection."""

    inputs: ClassVar[tuple[str, ...]] = ("prompts",)
    columns: ClassVar[tuple[str, ...]] = ("answer",)

    def read(self, policy: Any, sequences: Sequences) -> Tensor:
        """Return log π of whole outputs. [B, T] -> [B]."""
        return masked_sum(policy(sequences).logprobs, sequences.response_mask, dim=1)

    def make_experience(self, rows: list[Row]) -> SPINBatch:
        """Sample an answer to each prompt; return it as the rejected side of the given one [B, T]."""
        own = self.sample(rows).sequences
        given = self.encode_samples(self.read_samples([(row["prompt"], row["answer"]) for row in rows]))
        old = [self.read(self.unwrapped, side) for side in (given, own)]
        return SPINBatch(given, own, *old)

    def loss(self, batch: SPINBatch) -> tuple[Tensor, Metrics]:
        """Return the loss of SPIN, a mean over pairs. -> []."""
        given, own = self.read(self.policy, batch.both).chunk(2)
        margins = self.method.beta * ((given - batch.old_chosen) - (own - batch.old_rejected))
        return -F.logsigmoid(margins).mean(), {"rewards/margins": Mean.of(margins)}


KIT = Declaration(
    arguments={"prompts": [{"prompt": prompt, "answer": output} for prompt, output in SAMPLES]},
    effects={"beta": Effect("credit of chosen", proportional=(0.1, 0.2, 1.0))},
    structure=(Structure(surrogate="none", detached=()),),
)
