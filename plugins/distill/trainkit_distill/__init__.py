"""Distillation: a divergence from a teacher on the policy's own responses, or on given ones (Agarwal et al. 2023)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self, TypeVar

import torch
from pydantic import Field, model_validator
from torch import Tensor

from trainkit import AccelerateRLTrainer, MethodConfig, Rollouts, Row, TokenBatch, TRLConfig, register_trainer
from trainkit.errors import ConfigError
from trainkit.functional import exact, jensen_shannon, masked_mean, per_response
from trainkit.metrics import Mean, Metrics
from trainkit_distill.kit import Declared


class DistillOfflineConfig(MethodConfig):
    """Settings of distillation on given outputs. Divergence and rate are the defaults of TRL 1.16's distillation."""

    section_defaults: ClassVar[dict[str, Any]] = {"optimizer": {"lr": 1e-6}}
    name: str = "distill_offline"
    """The registered name."""
    divergence: Literal["reverse", "forward", "jensen_shannon"] = "reverse"
    """What is minimised: KL(π‖teacher), KL(teacher‖π), or the generalised Jensen-Shannon divergence with `beta`."""
    beta: float = Field(0.5, gt=0, lt=1)
    """β: weight of the teacher in the mixture; for `jensen_shannon` only."""

    @model_validator(mode="after")
    def _beta_is_used(self) -> Self:
        if self.beta != 0.5 and self.divergence != "jensen_shannon":
            raise ValueError(f"beta is for the divergence 'jensen_shannon', not {self.divergence!r}; remove it")
        return self


class DistillConfig(DistillOfflineConfig):
    """Settings of on-policy distillation."""

    section_defaults: ClassVar[dict[str, Any]] = {"optimizer": {"lr": 1e-6}, "train": {"total_steps": 1000}}
    name: str = "distill"
    """The registered name."""
    reward_coef: float = Field(0.0, ge=0)
    """w: weight of rewards. With 0, the policy learns from the teacher alone, and a reward function is refused."""


@dataclass(frozen=True)
class DistillBatch(TokenBatch):
    """Responses with weighted advantages [B], 0 without rewards; before `prepare_experience`, these are the scores."""

    advantages: Tensor


C = TypeVar("C", bound=DistillOfflineConfig)


class Distillation(Declared, AccelerateRLTrainer[C]):
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
        scores = exact(experience.advantages)
        total, count = self.reduce(torch.stack([scores.sum(), scores.new_tensor(len(scores))]))
        advantages = (count * scores - total) / (count - 1).clamp(min=1)  # exactly 0 if all scores are equal
        return replace(experience, advantages=(self.method.reward_coef * advantages).float())


@register_trainer("distill_offline")
class DistillOfflineTrainer(Distillation[DistillOfflineConfig]):
    """Trainer of supervised distillation: the same loss on the outputs of a dataset, such as samples of the teacher."""

    def make_experience(self, rows: list[Row]) -> DistillBatch:
        """Return the samples as token sequences [B, T], without rewards."""
        return DistillBatch(self.encode_samples(rows), torch.zeros(len(rows), device=self.accelerator.device))
