"""The settings of ILQL."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from trainkit import MethodConfig, SamplingConfig


class ILQLSampling(SamplingConfig):
    """Settings of sampling, with the weight of the advantage."""

    beta: float = Field(1.0, ge=0)
    """β: tokens are sampled from π(a|s)·exp(β(Q(s, a) − V(s))), normalised. 0 samples from the language model."""


class ILQLConfig(MethodConfig):
    """Settings of ILQL. The defaults are trlX's, except those of the targets (Kostrikov et al. 2021) and the clamp."""

    section_defaults: ClassVar[dict[str, Any]] = {"optimizer": {"lr": 5e-5}, "train": {"total_steps": 1000}}
    sampling: ClassVar[type[SamplingConfig]] = ILQLSampling

    name: str = "ilql"
    """The registered name."""
    tau: float = Field(0.7, gt=0, lt=1)
    """τ: expectile of Q that V is fitted to. 0.5 is the mean over the actions in the data; near 1 is their maximum."""
    gamma: float = Field(0.99, ge=0, le=1)
    """Discount per token."""
    cql_scale: float = Field(0.1, ge=0)
    """Weight of the conservative loss, which lowers Q of tokens that are not in the data."""
    awac_scale: float = Field(1.0, ge=0)
    """Weight of the language-model loss."""
    beta_awac: float = Field(0.0, ge=0)
    """β_awac: tokens have weight exp(β_awac·advantage) in the language-model loss; 0 gives equal weights. The β of
    sampling is a separate setting."""
    awac_weight_max: float = Field(20.0, ge=1)
    """Upper bound of the weight of a token in the language-model loss."""
    two_qs: bool = True
    """Use two Q heads and the lower of their values."""
    alpha: float = Field(0.005, gt=0, le=1)
    """Update rate of the target Q towards Q; 1 copies Q."""
    steps_for_target_q_sync: int = Field(1, ge=1)
    """Optimizer steps between updates of the target Q."""
