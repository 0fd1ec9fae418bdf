"""The trainers of distillation: experience and loss."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from trainkit import AccelerateRLTrainer, Rollouts, Row, TokenBatch, TRLConfig, register_trainer
from trainkit.errors import ConfigError
from trainkit.functional import jensen_shannon, masked_mean, per_response, to_float64
from trainkit.metrics import Mean, Metrics
from trainkit_distill.config import DistillConfig, DistillOfflineConfig, GKDConfig


@dataclass(frozen=True)
class DistillBatch(TokenBatch):
    """Responses with weighted advantages [B], 0 without rewards; before `prepare_experience`, these are the scores."""

    advantages: Tensor


C = TypeVar("C", bound=DistillOfflineConfig)


class Distillation(AccelerateRLTrainer[C]):
    """What both trainers share: the teacher is the chosen reference, and the loss a mean over response tokens."""

    needs_reference: ClassVar[bool] = True

    def __init__(self, config: TRLConfig[C], **kwargs: Any) -> None:
        super().__init__(config, **kwargs)
        if self.chosen_reference is None:
            given = "set model.reference_path (hub id, directory or model config), or pass reference= to trainkit.train"
            raise ConfigError(f"{config.method.name!r} learns from a teacher, and none is given; {given}")

    def loss(self, batch: DistillBatch) -> tuple[Tensor, Metrics]:
        """Return the mean over response tokens of D_t − A log π(y_t). -> []."""
        mask, name, beta = batch.sequences.response_mask, self.method.divergence, self.method.beta
        measure: Any = (lambda p, q, _: jensen_shannon(p, q, beta=beta)) if name == "jensen_shannon" else name
        told = self.policy(batch.sequences, reference=self.reference, divergence=measure)
        loss = told.divergence - batch.advantages.unsqueeze(1) * told.logprobs
        return masked_mean(loss, mask), {"loss/divergence": Mean.of(told.divergence, mask)}


@register_trainer("distill")
class DistillTrainer(Distillation[DistillConfig]):
    """Trainer of on-policy distillation, on sampled responses; mixed with REINFORCE if rewards have a weight."""

    inputs: ClassVar[tuple[str, ...]] = ("prompts",)

    @classmethod
    def inputs_for(cls, method: DistillConfig) -> tuple[str, ...]:
        """Return prompts, with a reward function if rewards have a weight."""
        return ("reward_fn", "prompts") if method.reward_coef else cls.inputs

    def experience(self, rollouts: Rollouts, scores: Tensor) -> DistillBatch:
        """Return the responses with their scores [B]."""
        return DistillBatch(rollouts.sequences, per_response(scores))

    def prepare_experience(self, experience: DistillBatch) -> DistillBatch:
        """Return advantages, A = w (R − mean of the other R of the collection), over all processes. [B]."""
        scores = to_float64(experience.advantages)
        total, count = self.reduce(torch.stack([scores.sum(), scores.new_tensor(len(scores))]))
        advantages = (count * scores - total) / (count - 1).clamp(min=1)  # exactly 0 if all scores are equal
        return replace(experience, advantages=(self.method.reward_coef * advantages).float())


@register_trainer("distill_offline")
class DistillOfflineTrainer(Distillation[DistillOfflineConfig]):
    """Trainer of supervised distillation: the same loss on the outputs of a dataset, such as samples of the teacher."""

    def make_experience(self, rows: list[Row]) -> DistillBatch:
        """Return the samples as token sequences [B, T], without rewards."""
        return DistillBatch(self.encode_samples(rows), torch.zeros(len(rows), device=self.accelerator.device))


@register_trainer("gkd")
class GKDTrainer(Distillation[GKDConfig]):
    """Trainer of GKD: the same loss, on the outputs of a dataset or on responses to its prompts, by collection."""

    inputs: ClassVar[tuple[str, ...]] = ("samples", "prompts")

    def make_experience(self, rows: list[Row]) -> DistillBatch:
        """Return the samples [B, T], or responses to their prompts: of n collections ⌈λ n⌉ are sampled."""
        share, before = self.method.sampled, self.progress.collection
        sampled = math.ceil(share * (before + 1)) > math.ceil(share * before)
        sequences = self.sample_and_score(rows)[0].sequences if sampled else self.encode_samples(rows)
        self.record({"rollout/sampled": Mean.of(torch.full((len(rows),), float(sampled)))})
        return DistillBatch(sequences, torch.zeros(len(rows), device=self.accelerator.device))
