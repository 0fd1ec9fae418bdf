"""The settings of KTO and BCO."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from trainkit import MethodConfig


class LabelConfig(MethodConfig):
    """Settings of methods that learn from labelled samples."""

    beta: float = Field(0.1, gt=0)
    """β: implicit reward per nat of log-ratio to the reference."""


class BCOConfig(LabelConfig):
    """Settings of BCO. The defaults are those of Jung et al. 2024."""

    section_defaults: ClassVar[dict[str, Any]] = {"optimizer": {"lr": 5e-7}}
    name: str = "bco"
    """The registered name."""


class KTOConfig(LabelConfig):
    """Settings of KTO. The defaults are those of Ethayarajh et al. 2024 and of their code."""

    section_defaults: ClassVar[dict[str, Any]] = {"optimizer": {"lr": 5e-6}}
    name: str = "kto"
    """The registered name."""
    desirable_weight: float = Field(1.0, gt=0)
    """λ_D: weight of the loss of desirable samples."""
    undesirable_weight: float = Field(1.0, gt=0)
    """λ_U: weight of the loss of undesirable samples."""
    reference_point: Literal["mismatched", "zero"] = "mismatched"
    """z, with which log-ratios are compared: the KL as estimated from mismatched prompts and outputs, or 0."""
