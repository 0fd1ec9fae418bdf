"""The settings of ORPO and CPO."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from trainkit import MethodConfig


class ORPOConfig(MethodConfig):
    """Settings of ORPO. The defaults are those of Hong, Lee, Thorne 2024, of their model Mistral-ORPO."""

    section_defaults: ClassVar[dict[str, Any]] = {"optimizer": {"lr": 5e-6}}

    name: str = "orpo"
    """The registered name."""
    beta: float = Field(0.1, gt=0)
    """λ of the paper: the weight of the odds ratio, beside the negative log-likelihood of chosen outputs."""


class CPOConfig(MethodConfig):
    """Settings of CPO and SimPO. The defaults are those of Xu et al. 2024; `simpo_gamma` is that of TRL."""

    section_defaults: ClassVar[dict[str, Any]] = {"optimizer": {"lr": 1e-6}}

    name: str = "cpo"
    """The registered name."""
    loss_type: Literal["sigmoid", "hinge", "ipo", "simpo"] = "sigmoid"
    """The loss of a pair; the README of trainkit-orpo has the equations."""
    beta: float = Field(0.1, gt=0)
    """β: reward per nat of log-probability, with `simpo` per nat and token, where Meng et al. use 2 to 10."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """ε: the assumed share of pairs whose labels are flipped; for `sigmoid` and `simpo`."""
    simpo_gamma: float = Field(0.5, ge=0)
    """γ, for `simpo`: how much higher the reward of the chosen output should be; 0: higher by any amount."""
    cpo_alpha: float | None = Field(None, ge=0)
    """Weight of the negative log-likelihood of chosen outputs; None: that of the papers, 1, and 0 with `simpo`."""

    @model_validator(mode="after")
    def _settings_fit_the_loss(self) -> Self:
        if self.label_smoothing and self.loss_type not in ("sigmoid", "simpo"):
            raise ValueError(f"label_smoothing is for loss_type 'sigmoid' or 'simpo', not {self.loss_type!r}")
        if self.simpo_gamma != type(self).model_fields["simpo_gamma"].default and self.loss_type != "simpo":
            raise ValueError(f"simpo_gamma is for loss_type 'simpo', not {self.loss_type!r}; remove it")
        return self

    @property
    def nll_weight(self) -> float:
        """The weight of the negative log-likelihood: `cpo_alpha`, or that of the papers."""
        return float(self.loss_type != "simpo") if self.cpo_alpha is None else self.cpo_alpha
