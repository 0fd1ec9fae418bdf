"""KTO: learning from samples that are labelled as desirable or not (Ethayarajh et al. 2024)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from trainkit import AccelerateRLTrainer, MethodConfig, Row, Sequences, TokenBatch, register_trainer
from trainkit.functional import masked_sum
from trainkit.metrics import Mean, Metrics


class KTOConfig(MethodConfig):
    """Settings of KTO; the defaults are those of its authors."""

    section_defaults: ClassVar[dict[str, Any]] = {"optimizer": {"lr": 5e-7}}

    name: str = "_test_kto"
    """The registered name."""
    beta: float = Field(0.1, gt=0)
    """β: implicit reward per nat of log-ratio to the reference."""
    undesirable_weight: float = Field(1.0, gt=0)
    """Weight λ_U of undesirable samples."""


@dataclass(frozen=True)
class KTOBatch(TokenBatch):
    """Labelled samples; log π_ref [B], labels [B], and the KL estimate z of the step, repeated [B]."""

    unit: ClassVar[str] = "rows"
    ref_logps: Tensor
    label: Tensor
    kl: Tensor

    @property
    def weight(self) -> Tensor:
        """Number of samples []."""
        return self.ref_logps.new_tensor(len(self))


@register_trainer("_test_kto")
class KTOTrainer(AccelerateRLTrainer[KTOConfig]):
    """Trainer of KTO: λ(1 − σ(±β(r − z))), r = log π − log π_ref; z is the step's mean of r, at least 0."""

    inputs: ClassVar[tuple[str, ...]] = ("samples", "labels")
    needs_reference: ClassVar[bool] = True

    def make_experience(self, rows: list[Row]) -> KTOBatch:
        """Return samples as sequences [B, T] with log π_ref [B] and labels [B]."""
        sequences = self.encode_samples(rows)
        ref = self.logps(self.reference, sequences)
        return KTOBatch(sequences, ref, torch.tensor([row["label"] for row in rows]), torch.zeros_like(ref))

    def logps(self, policy: Any, sequences: Sequences) -> Tensor:
        """Return log π of the responses. [B, T] -> [B]."""
        return masked_sum(policy(sequences).logprobs, sequences.response_mask, dim=1)

    def prepare_step(self, batch: KTOBatch) -> KTOBatch:
        """Return the step with z, the mean of r over all its rows, repeated [B]."""
        sums = torch.zeros(2, dtype=torch.float64)
        for micro in self.micro_batches(batch):
            micro = micro.to(self.accelerator.device)
            ratios = self.logps(self.unwrapped, micro.sequences) - micro.ref_logps
            sums += torch.stack([ratios.sum(), ratios.new_tensor(len(ratios))]).double().cpu()
        total, count = self.reduce(sums)
        return replace(batch, kl=(total / count).clamp(min=0).float().expand(len(batch)))

    def loss(self, batch: KTOBatch) -> tuple[Tensor, Metrics]:
        """Return the loss of KTO, a mean over samples. -> []."""
        ratios, beta = self.logps(self.policy, batch.sequences) - batch.ref_logps, self.method.beta
        sign = torch.where(batch.label, 1.0, -1.0)
        weights = torch.where(batch.label, 1.0, self.method.undesirable_weight)
        losses = weights * (1 - F.sigmoid(sign * beta * (ratios - batch.kl)))
        return losses.mean(), {"rewards/desirable": Mean.of(beta * ratios, batch.label)}
