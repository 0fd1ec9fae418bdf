"""The settings of distillation."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from trainkit import MethodConfig


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


class GKDConfig(DistillOfflineConfig):
    """Settings of distillation on given outputs and on sampled responses. Divergence, β, λ: as in TRL's GKD."""

    section_defaults: ClassVar[dict[str, Any]] = {"optimizer": {"lr": 1e-6}, "train": {"total_steps": 1000}}
    name: str = "gkd"
    """The registered name."""
    divergence: Literal["reverse", "forward", "jensen_shannon"] = "jensen_shannon"
    """As of `distill_offline`."""
    sampled: float = Field(0.5, ge=0, le=1)
    """λ: share of the collections that are sampled from the policy, to the prompts of the samples."""


class DistillConfig(DistillOfflineConfig):
    """Settings of on-policy distillation."""

    section_defaults: ClassVar[dict[str, Any]] = {"optimizer": {"lr": 1e-6}, "train": {"total_steps": 1000}}
    name: str = "distill"
    """The registered name."""
    reward_coef: float = Field(0.0, ge=0)
    """w: weight of rewards. With 0, the policy learns from the teacher alone, and a reward function is refused."""
