"""The trainer of KTO: experience and loss."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from trainkit import AccelerateRLTrainer, Batch, Row, Sequences, register_trainer
from trainkit.data import Pipeline
from trainkit.functional import preference_accuracy
from trainkit.metrics import Mean, Metrics
from trainkit.models import response_logprobs
from trainkit_kto.config import KTOConfig
from trainkit_kto.unpaired import check_labels, mismatched


@dataclass(frozen=True)
class KTOBatch(Batch):
    """Samples [B, T], whether they are desirable, bool [B], and mismatched samples [B, T]; log π_ref of both [B]."""

    unit: ClassVar[str] = "samples"
    own: Sequences
    ref_logps: Tensor
    desirable: Tensor
    mismatched: Sequences = None  # type: ignore[assignment]  # None if `reference_point` is "zero"
    mismatched_ref_logps: Tensor = None  # type: ignore[assignment]
    kl: Tensor | None = None  # mean of log π − log π_ref over the mismatched samples of a step, repeated [B]


def kto_loss(margins: Tensor, weights: Tensor) -> Tensor:
    """Return λ(1 − σ(m)), m = ±β(r − z), λ_D and + if desirable, λ_U and − if undesirable. [*] ×2 -> [*].

    Source: Ethayarajh et al. 2024, equation 7; with z = 0, D'Oosterlinck et al. 2024 (APO-zero without pairs).
    """
    return weights * F.sigmoid(-margins)  # 1 − σ(m) = σ(−m)


@register_trainer("kto")
class KTOTrainer(AccelerateRLTrainer[KTOConfig]):
    """Trainer of KTO: loss = mean λ(1 − σ(±β(r − z))), r = log π − log π_ref, z = an estimate of KL(π‖π_ref)."""

    inputs: ClassVar[tuple[str, ...]] = ("samples", "labels")
    needs_reference: ClassVar[bool] = True
    reference_makes_experience: ClassVar[bool] = True

    def add_samples(self, samples: Iterable[Any], rewards: Iterable[Any] | None = None) -> None:
        """Set the samples to train on, and check their labels; those of a stream are not known in advance."""
        super().add_samples(samples, rewards)
        if isinstance(self.pipeline, Pipeline):
            weights = {name: getattr(self.method, name) for name in ("desirable_weight", "undesirable_weight")}
            check_labels(self.pipeline.rows, weights, ratio=(1, 4 / 3))  # the ratio of equation 8

    def add_eval_samples(self, samples: Iterable[Any], rewards: Iterable[Any] | None = None) -> None:
        """Set held-out samples; all labels may be the same."""
        super().add_eval_samples(samples, rewards)
        self.eval_samples = self.arrange(self.eval_samples)

    def arrange(self, rows: list[Row]) -> list[Row]:
        """Return the samples, each with a mismatched one, which it keeps wherever it is trained on."""
        if self.method.reference_point == "zero":
            return rows
        return [{**row, "mismatched": other} for row, other in zip(rows, mismatched(rows), strict=True)]

    def make_experience(self, rows: list[Row]) -> KTOBatch:
        """Return samples and mismatched samples as sequences [B, T], with log π_ref [B]."""
        own = self.through_trunk(self.encode_samples(rows))
        desirable = torch.tensor([row["label"] for row in rows], device=own.input_ids.device)
        if self.method.reference_point == "zero":
            return KTOBatch(own, self.ref_logps(own), desirable)
        others = self.through_trunk(self.encode_samples([row["mismatched"] for row in rows]))
        return KTOBatch(own, self.ref_logps(own), desirable, others, self.ref_logps(others))

    def ref_logps(self, sequences: Sequences) -> Tensor:
        """Return log π_ref of whole outputs. [B, T] -> [B]."""
        return self.in_micro_batches(sequences, lambda micro: response_logprobs(self.reference, micro))

    def prepare_step(self, batch: KTOBatch) -> KTOBatch:
        """Compute the estimate of the KL, a mean over the step and not over a micro-batch, without gradient."""
        if self.method.reference_point == "zero":
            return batch
        kl = self.step_mean(batch, lambda x: response_logprobs(self.unwrapped, x.mismatched) - x.mismatched_ref_logps)
        return replace(batch, kl=kl.expand(len(batch)))

    def loss(self, batch: KTOBatch) -> tuple[Tensor, Metrics]:
        """Return the loss of KTO, a mean over samples. -> []."""
        method, desirable = self.method, batch.desirable
        logps = response_logprobs(self.policy, batch.own)
        rewards = method.beta * (logps - batch.ref_logps)
        point = torch.zeros_like(rewards) if batch.kl is None else method.beta * batch.kl.clamp(min=0)
        margins = torch.where(desirable, rewards - point, point - rewards)
        weights = torch.where(desirable, method.desirable_weight, method.undesirable_weight)
        return kto_loss(margins, weights).mean(), {
            "rewards/desirable": Mean.of(rewards, desirable),
            "rewards/undesirable": Mean.of(rewards, ~desirable),
            "rewards/margins": Mean.of(margins),
            "rewards/accuracies": Mean.of(preference_accuracy(margins, torch.zeros_like(margins))),
            "logps/desirable": Mean.of(logps, desirable),
            "logps/undesirable": Mean.of(logps, ~desirable),
            **({} if batch.kl is None else {"policy/kl": Mean.of(batch.kl)}),
        }
