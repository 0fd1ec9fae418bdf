"""The settings of PPO."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from trainkit import (
    MethodConfig,
)


class PPOConfig(MethodConfig):
    """Settings of PPO. The defaults are trlX's for sentiment tuning of GPT-2, except `init_kl_coef`, which is TRL's."""

    section_defaults: ClassVar[dict[str, Any]] = {
        "optimizer": {"lr": 3e-5, "weight_decay": 1e-6},
        "train": {"total_steps": 1000},
    }

    name: str = "ppo"
    """The registered name."""
    ppo_epochs: int = Field(4, ge=1)
    """Passes over each collection of rollouts."""
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount per token."""
    lam: float = Field(0.95, ge=0, le=1)
    """λ of generalised advantage estimation."""
    lam_length: float | None = Field(None, gt=0)
    """α: the advantages of a response of l tokens have λ = 1 − 1/(αl), at least 0, and `lam` is that of the returns
    alone; VAPO (Yue et al. 2025, equation 12) has 0.05, with a `lam` of 1. None: both have `lam`."""
    cliprange: float = Field(0.2, gt=0)
    """ε of the clipped surrogate: the ratio is clipped to 1 ± ε."""
    cliprange_value: float = Field(0.2, gt=0)
    """ε_v of the clipped value loss: a value is clipped to the value at sampling ± ε_v."""
    vf_coef: float = Field(1.0, ge=0)
    """Weight of the value loss."""
    ent_coef: float = Field(0.0, ge=0)
    """Weight of the entropy bonus."""
    init_kl_coef: float = Field(0.05, ge=0)
    """β: weight of the KL penalty, per nat of KL from the reference; the initial weight if `target` is set."""
    target: float | None = Field(None, gt=0)
    """Target KL from the reference, in nats per response; β is adapted to reach it. None: β is constant."""
    horizon: int = Field(10_000, ge=1)
    """Time scale of the adaptation of β, in responses; smaller is faster. Only with `target`."""
    scale_reward: Literal["none", "running", "ref"] = "none"
    """Divide scores by the standard deviation of all scores so far (`running`) or of the first collection (`ref`)."""
    cliprange_reward: float | None = Field(10.0, gt=0)
    """Scores are clipped to ± this, after scaling. None: not clipped."""
    missing_eos_penalty: float | None = Field(None, gt=0)
    """Penalty subtracted from the score of a response truncated at the length limit, before scaling. None: no
    penalty."""
    bootstrap_truncated: bool = False
    """Whether V after the last token of a response truncated at the length limit is the critic's value instead of 0."""
    target_kl: float | None = Field(None, gt=0)
    """KL from the old policy, in nats per token. A step above 1.5 times this value is skipped, with all further steps
    on its collection. None: no limit."""
    ratio_threshold: float | None = Field(10.0, gt=1)
    """A step whose mean ratio is above this value is skipped, as in TRL. None: no limit."""

    @model_validator(mode="after")
    def _target_can_be_steered_to(self) -> Self:
        if self.target is not None and self.init_kl_coef == 0:
            raise ValueError("target multiplies β, and an init_kl_coef of 0 stays 0; give a positive init_kl_coef")
        return self
