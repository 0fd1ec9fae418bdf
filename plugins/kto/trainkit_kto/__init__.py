"""KTO: learning from samples that are labelled as desirable or undesirable, without pairs (Ethayarajh et al. 2024)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from trainkit import AccelerateRLTrainer, MethodConfig, Row, Sequences, register_trainer
from trainkit.data import Pipeline
from trainkit.functional import exact, masked_sum, preference_accuracy
from trainkit.metrics import Mean, Metrics
from trainkit_kto.kit import Declared
from trainkit_kto.samples import KTOBatch, Outputs, check_labels, mismatched


class KTOConfig(MethodConfig):
    """Settings of KTO. The defaults are those of Ethayarajh et al. 2024 and of their code."""

    section_defaults: ClassVar[dict[str, Any]] = {"optimizer": {"lr": 5e-6}}

    name: str = "kto"
    """The registered name."""
    beta: float = Field(0.1, gt=0)
    """β: implicit reward per nat of log-ratio to the reference."""
    desirable_weight: float = Field(1.0, gt=0)
    """λ_D: weight of the loss of desirable samples."""
    undesirable_weight: float = Field(1.0, gt=0)
    """λ_U: weight of the loss of undesirable samples."""
    reference_point: Literal["mismatched", "zero"] = "mismatched"
    """z, with which log-ratios are compared: the KL as estimated from mismatched prompts and outputs, or 0."""


def kto_loss(margins: Tensor, weights: Tensor) -> Tensor:
    """Return λ(1 − σ(m)), m = ±β(r − z), λ_D and + if desirable, λ_U and − if undesirable. [*] ×2 -> [*].

    Source: Ethayarajh et al. 2024, equation 7; with z = 0, D'Oosterlinck et al. 2024 (APO-zero without pairs).
    """
    return weights * F.sigmoid(-margins)  # 1 − σ(m) = σ(−m)


@register_trainer("kto")
class KTOTrainer(Declared, AccelerateRLTrainer[KTOConfig]):
    """Trainer of KTO: loss = mean λ(1 − σ(±β(r − z))), r = log π − log π_ref, z = an estimate of KL(π‖π_ref)."""

    inputs: ClassVar[tuple[str, ...]] = ("samples", "labels")
    needs_reference: ClassVar[bool] = True

    def add_samples(self, samples: Iterable[Any], rewards: Iterable[Any] | None = None) -> None:
        """Set the samples to train on, and check their labels; those of a stream are not known in advance."""
        super().add_samples(samples, rewards)
        if isinstance(self.pipeline, Pipeline):
            check_labels(list(self.pipeline.rows), self.method.desirable_weight, self.method.undesirable_weight)

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
        own = self._outputs(rows)
        desirable = torch.tensor([row["label"] for row in rows], device=own.ref_logps.device)
        if self.method.reference_point == "zero":
            return KTOBatch(own, desirable)
        return KTOBatch(own, desirable, self._outputs([row["mismatched"] for row in rows]))

    def _outputs(self, rows: list[Row]) -> Outputs:
        sequences = self.encode_samples(rows)
        return Outputs(sequences, self.in_micro_batches(sequences, lambda micro: self.logps(self.reference, micro)))

    def logps(self, policy: Any, sequences: Sequences) -> Tensor:
        """Return log π of whole outputs, EOS included. [B, T] -> [B]."""
        return masked_sum(policy(sequences).logprobs, sequences.response_mask, dim=1)

    def prepare_step(self, batch: KTOBatch) -> KTOBatch:
        """Compute the estimate of the KL, a mean over the step and not over a micro-batch, without gradient."""
        if batch.mismatched is None:
            return batch
        total = torch.zeros(2, dtype=torch.float64)
        for micro in self.micro_batches(batch.mismatched):
            micro = micro.to(self.accelerator.device)
            ratios = exact(self.logps(self.unwrapped, micro.sequences) - micro.ref_logps)
            total += torch.stack([ratios.sum(), ratios.new_tensor(len(ratios))]).cpu()
        ratio, count = self.reduce(total)
        return replace(batch, kl=(ratio / count).float().expand(len(batch)))

    def loss(self, batch: KTOBatch) -> tuple[Tensor, Metrics]:
        """Return the loss of KTO, a mean over samples. -> []."""
        method, desirable = self.method, batch.desirable
        logps = self.logps(self.policy, batch.own.sequences)
        rewards = method.beta * (logps - batch.own.ref_logps)
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
