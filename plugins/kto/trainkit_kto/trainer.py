"""The trainer of KTO: experience and loss."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from trainkit import AccelerateRLTrainer, Batch, Row, Sequences, register_trainer
from trainkit.data import Pipeline, check_both_labels
from trainkit.functional import preference_accuracy
from trainkit.metrics import Mean, Metrics
from trainkit.models import response_logprobs
from trainkit_kto.config import KTOConfig, LabelConfig
from trainkit_kto.unpaired import check_labels, mismatched


@dataclass(frozen=True)
class LabelledBatch(Batch):
    """Samples [B, T] with log π_ref [B], and whether they are desirable, bool [B]."""

    unit: ClassVar[str] = "samples"
    own: Sequences
    ref_logps: Tensor
    desirable: Tensor


@dataclass(frozen=True)
class KTOBatch(LabelledBatch):
    """Samples, and mismatched samples [B, T] with log π_ref [B]."""

    mismatched: Sequences = None  # type: ignore[assignment]  # None if `reference_point` is "zero"
    mismatched_ref_logps: Tensor = None  # type: ignore[assignment]
    kl: Tensor | None = None  # mean of log π − log π_ref over the mismatched samples of a step, repeated [B]


def kto_loss(margins: Tensor, weights: Tensor) -> Tensor:
    """Return λ(1 − σ(m)), m = ±β(r − z), λ_D and + if desirable, λ_U and − if undesirable. [*] ×2 -> [*].

    Source: Ethayarajh et al. 2024, equation 7; with z = 0, D'Oosterlinck et al. 2024 (APO-zero without pairs).
    """
    return weights * F.sigmoid(-margins)  # 1 − σ(m) = σ(−m)


C = TypeVar("C", bound=LabelConfig)


class LabelTrainer(AccelerateRLTrainer[C]):
    """Base of trainers on labelled samples, whose loss is a function of r = β (log π − log π_ref) and the label."""

    inputs: ClassVar[tuple[str, ...]] = ("samples", "labels")
    needs_reference: ClassVar[bool] = True
    reference_makes_experience: ClassVar[bool] = True

    def add_samples(self, samples: Iterable[Any], rewards: Iterable[Any] | None = None) -> None:
        """Set the samples to train on, and check their labels; those of a stream are not known in advance."""
        super().add_samples(samples, rewards)
        if isinstance(self.pipeline, Pipeline):
            self.check_labels(self.pipeline.rows)

    def check_labels(self, rows: Sequence[Row]) -> None:
        """Raise a `DataError` if all labels are the same."""
        good = sum(bool(row["label"]) for row in rows)
        check_both_labels(good, len(rows) - good)

    def labelled(self, rows: list[Row]) -> tuple[Sequences, Tensor, Tensor]:
        """Return samples as sequences [B, T], log π_ref [B], and whether they are desirable, bool [B]."""
        own = self.through_trunk(self.encode_samples(rows))
        return own, self.ref_logps(own), torch.tensor([row["label"] for row in rows], device=own.input_ids.device)

    def make_experience(self, rows: list[Row]) -> LabelledBatch:
        """Return samples as sequences [B, T], with log π_ref and their labels [B]."""
        return LabelledBatch(*self.labelled(rows))

    def ref_logps(self, sequences: Sequences) -> Tensor:
        """Return log π_ref of whole outputs. [B, T] -> [B]."""
        return self.in_micro_batches(sequences, lambda micro: response_logprobs(self.reference, micro))

    def margins(self, batch: LabelledBatch, point: Tensor | float) -> tuple[Tensor, Metrics]:
        """Return r − z of desirable samples and z − r of undesirable ones [B], and their metrics; z is ``point``."""
        logps, desirable = response_logprobs(self.policy, batch.own), batch.desirable
        rewards = self.method.beta * (logps - batch.ref_logps)
        margins = torch.where(desirable, rewards - point, point - rewards)
        return margins, {
            "rewards/desirable": Mean.of(rewards, desirable),
            "rewards/undesirable": Mean.of(rewards, ~desirable),
            "rewards/margins": Mean.of(margins),
            "rewards/accuracies": Mean.of(preference_accuracy(margins, torch.zeros_like(margins))),
            "logps/desirable": Mean.of(logps, desirable),
            "logps/undesirable": Mean.of(logps, ~desirable),
        }


@register_trainer("kto")
class KTOTrainer(LabelTrainer[KTOConfig]):
    """Trainer of KTO: loss = mean λ(1 − σ(±β(r − z))), r = log π − log π_ref, z = an estimate of KL(π‖π_ref)."""

    def check_labels(self, rows: Sequence[Row]) -> None:
        """Raise a `DataError` if all labels are the same; log advice if one kind has much more weight."""
        weights = {name: getattr(self.method, name) for name in ("desirable_weight", "undesirable_weight")}
        check_labels(rows, weights, ratio=(1, 4 / 3))  # the ratio of equation 8

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
        labelled = self.labelled(rows)
        if self.method.reference_point == "zero":
            return KTOBatch(*labelled)
        others = self.through_trunk(self.encode_samples([row["mismatched"] for row in rows]))
        return KTOBatch(*labelled, others, self.ref_logps(others))

    def prepare_step(self, batch: KTOBatch) -> KTOBatch:
        """Compute the estimate of the KL, a mean over the step and not over a micro-batch, without gradient."""
        if self.method.reference_point == "zero":
            return batch
        kl = self.step_mean(batch, lambda x: response_logprobs(self.unwrapped, x.mismatched) - x.mismatched_ref_logps)
        return replace(batch, kl=kl.expand(len(batch)))

    def loss(self, batch: KTOBatch) -> tuple[Tensor, Metrics]:
        """Return the loss of KTO, a mean over samples. -> []."""
        method, kl = self.method, batch.kl
        margins, told = self.margins(batch, 0.0 if kl is None else method.beta * kl.clamp(min=0))
        weights = torch.where(batch.desirable, method.desirable_weight, method.undesirable_weight)
        return kto_loss(margins, weights).mean(), {**told, **({} if kl is None else {"policy/kl": Mean.of(kl)})}
