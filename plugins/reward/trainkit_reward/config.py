"""The settings of reward modelling."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from trainkit import MethodConfig


class RewardConfig(MethodConfig):
    """Settings of reward modelling. The defaults are those of Stiennon et al. 2020."""

    section_defaults: ClassVar[dict[str, Any]] = {"optimizer": {"lr": 1.5e-5}}

    name: str = "reward"
    """The registered name."""
    center_coef: float = Field(0.0, ge=0)
    """c: weight of (r_c + r_r)², which keeps the mean of the scores near 0. With 0 the mean is not determined.
    Eisenstein et al. 2023 use 0.01."""
