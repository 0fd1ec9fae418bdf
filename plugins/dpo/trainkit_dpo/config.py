"""The settings of DPO and its variants."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from trainkit import (
    GroupSize,
    MethodConfig,
)

SORTED = ("aot", "aot_unpaired")
"""Losses of optimal transport, which sort the pairs of a step."""
ALONE = ("kto_pair", "nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down", *SORTED)
"""Losses that compare each side, or a sorted one, with the reference, not one side with the other alone."""
SMOOTHED = ("sigmoid", "robust", "exo_pair", *SORTED)
"""Losses that know of pairs whose labels are flipped."""


class DPOConfig(MethodConfig):
    """Settings of DPO. The defaults are those of Rafailov et al. 2023, appendix B."""

    section_defaults: ClassVar[dict[str, Any]] = {"optimizer": {"lr": 1e-6}}

    name: str = "dpo"
    """The registered name."""
    loss_type: Literal[
        "sigmoid", "hinge", "ipo", "robust", "kto_pair", "sigmoid_norm", "exo_pair", "nca_pair", "bco_pair",
        "sppo_hard", "apo_zero", "apo_down", "discopop", "aot", "aot_unpaired",
    ] = "sigmoid"  # fmt: skip
    """The loss of a pair; the README of trainkit-dpo has the equations."""
    beta: float = Field(0.1, gt=0)
    """β: implicit reward per nat of log-ratio to the reference; for `ipo`, the τ of the paper."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """ε: the assumed share of pairs whose labels are flipped; for `sigmoid`, `aot` and `aot_unpaired`, required for
    `robust` and `exo_pair`."""
    ipo_length_normalize: bool = True
    """For `ipo`: use the mean of a response's log-probabilities over tokens, as its authors do, instead of the sum."""
    reference_free: bool = False
    """Train without a reference model; the implicit rewards are β log π."""

    @model_validator(mode="after")
    def _settings_fit_the_loss(self) -> Self:
        if self.label_smoothing and self.loss_type not in SMOOTHED:
            raise ValueError(
                f"label_smoothing is for loss_type {', '.join(map(repr, SMOOTHED))}, not {self.loss_type!r}"
            )
        if self.loss_type == "robust" and not self.label_smoothing:
            raise ValueError("loss_type 'robust' without label_smoothing is 'sigmoid'; give the share of wrong labels")
        if self.loss_type == "exo_pair" and not self.label_smoothing:
            raise ValueError("loss_type 'exo_pair' needs label_smoothing above 0, such as the 0.001 of its authors")
        if self.loss_type != "ipo" and not self.ipo_length_normalize:
            raise ValueError(f"ipo_length_normalize is for loss_type 'ipo', not {self.loss_type!r}; remove it")
        if self.reference_free and self.loss_type in ALONE:
            raise ValueError(
                f"loss_type {self.loss_type!r} compares each side with a reference; set reference_free to false"
            )
        return self


class OnlineDPOConfig(DPOConfig):
    """Settings of DPO on responses sampled from the policy. Guo et al. 2024 sample two responses per prompt."""

    section_defaults: ClassVar[dict[str, Any]] = {"optimizer": {"lr": 1e-6}, "train": {"total_steps": 1000}}

    name: str = "online_dpo"
    """The registered name."""
    k: GroupSize = 2
    """Responses per prompt; the best and the worst of them are the pair."""


class BestOfKConfig(MethodConfig):
    """Settings of best-of-K fine-tuning."""

    section_defaults: ClassVar[dict[str, Any]] = {"optimizer": {"lr": 1e-6}, "train": {"total_steps": 1000}}

    name: str = "best_of_k"
    """The registered name."""
    k: GroupSize = 4
    """Responses per prompt; the best of them is trained on."""


class XPOConfig(MethodConfig):
    """Settings of XPO. The defaults are those of TRL."""

    section_defaults: ClassVar[dict[str, Any]] = {"optimizer": {"lr": 5e-7}, "train": {"total_steps": 1000}}

    name: str = "xpo"
    """The registered name."""
    beta: float = Field(0.1, gt=0)
    """β: implicit reward per nat of log-ratio to the reference."""
    alpha: float = Field(1e-5, ge=0)
    """α: weight of the log-likelihood of the reference's responses, which is made small."""


class SPINConfig(MethodConfig):
    """Settings of SPIN. The defaults are those of Chen et al. 2024 for their first iterations."""

    section_defaults: ClassVar[dict[str, Any]] = {"optimizer": {"lr": 5e-7}, "train": {"total_steps": 1000}}

    name: str = "spin"
    """The registered name."""
    beta: float = Field(0.1, gt=0)
    """λ of the paper: reward per nat of log-ratio to the policy of the last collection."""
