"""APO-zero: raises chosen outputs and lowers rejected ones, each against the reference (D'Oosterlinck et al. 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from trainkit import AccelerateRLTrainer, MethodConfig, Row, Sequences, register_trainer
from trainkit.data import Preferences
from trainkit.functional import masked_sum
from trainkit.metrics import Mean, Metrics
from trainkit.testing import Declaration, Effect, Structure


class APOZeroConfig(MethodConfig):
    """Settings of APO-zero."""

    section_defaults: ClassVar[dict[str, Any]] = {"train": {"total_steps": 1000}}
    name: str = "_sound_apo_zero"
    """The registered name."""
    beta: float = Field(0.1, gt=0)
    """β: reward per nat of log-ratio to the reference."""


@dataclass(frozen=True)
class APOZeroBatch(Preferences):
    """Pairs with log π_ref of both sides [B]."""

    ref_chosen: Tensor
    ref_rejected: Tensor


@register_trainer("_sound_apo_zero")
class APOZeroTrainer(AccelerateRLTrainer[APOZeroConfig]):
    """Trainer of APO-zero: loss = mean (1 − σ(β r_c) + σ(β r_r)), r = log π − log π_ref."""

    inputs: ClassVar[tuple[str, ...]] = ("samples", "pairs")
    needs_reference: ClassVar[bool] = True

    def read(self, policy: Any, sequences: Sequences) -> Tensor:
        """Return log π of whole outputs. [B, T] -> [B]."""
        return masked_sum(policy(sequences).logprobs, sequences.response_mask, dim=1)

    def make_experience(self, rows: list[Row]) -> APOZeroBatch:
        """Return the pairs [B, T] with log π_ref of both sides [B]."""
        pairs = self.encode_preferences(rows)
        ref = self.in_micro_batches(pairs, lambda x: torch.stack(self.read(self.reference, x.both).chunk(2), dim=1))
        return APOZeroBatch(pairs.chosen, pairs.rejected, ref[:, 0], ref[:, 1])

    def loss(self, batch: APOZeroBatch) -> tuple[Tensor, Metrics]:
        """Return the loss of APO-zero, a mean over pairs. -> []."""
        chosen, rejected = self.read(self.policy, batch.both).chunk(2)
        good, bad = self.method.beta * (chosen - batch.ref_chosen), self.method.beta * (rejected - batch.ref_rejected)
        losses = (-good).sigmoid() + bad.sigmoid()
        return losses.mean(), {"rewards/chosen": Mean.of(good), "rewards/rejected": Mean.of(bad)}


KIT = Declaration(
    effects={"beta": Effect("credit of chosen", proportional=(0.1, 0.2, 1.0))},
    structure=(Structure(surrogate="none", detached=()),),
)
