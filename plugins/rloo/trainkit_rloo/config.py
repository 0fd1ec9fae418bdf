"""The settings of RLOO."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from trainkit import GroupSize, MethodConfig


class RLOOConfig(MethodConfig):
    """Settings of RLOO. The defaults are those of Ahmadian et al. 2024, section 4, which uses k = 2 and k = 4."""

    section_defaults: ClassVar[dict[str, Any]] = {"optimizer": {"lr": 1e-6}, "train": {"total_steps": 1000}}

    name: str = "rloo"
    """The registered name."""
    rloo_k: GroupSize = 4
    """Responses per prompt; each is compared with the mean of the others."""
    rloo_epochs: int = Field(1, ge=1)
    """Passes over each collection of rollouts."""
    kl_coef: float = Field(0.05, ge=0)
    """β: weight of the KL penalty, per nat of KL from the reference."""
    kl_level: Literal["sequence", "token"] = "sequence"
    """Whether the advantage of a token includes the KL penalty of its whole response, or only from this token on."""
    ratio_level: Literal["sequence", "token"] = "sequence"
    """Whether the importance ratio is computed per response or per token."""
    cliprange: float = Field(0.2, gt=0)
    """ε of the clipped surrogate; has no effect in the first step on a collection."""
    missing_eos_penalty: float | None = Field(None, gt=0)
    """Penalty subtracted from the score of a response truncated at the length limit. None: no penalty."""
    missing_eos_score: float | None = Field(None, ge=-1e6, le=1e6)
    """Score of a response truncated at the length limit, instead of its own; async_rlhf's is −1. None: its own."""

    @model_validator(mode="after")
    def _one_rule_for_truncated_responses(self) -> Self:
        if self.missing_eos_penalty is not None and self.missing_eos_score is not None:
            raise ValueError(
                f"missing_eos_penalty is {self.missing_eos_penalty}, and missing_eos_score {self.missing_eos_score} "
                "replaces the score that it is subtracted from; give one of the two"
            )
        return self

    @model_validator(mode="after")
    def _levels_agree(self) -> Self:
        if self.kl_level == "token" and self.ratio_level == "sequence":
            raise ValueError("kl_level 'token' gives an advantage per token, which needs ratio_level 'token'")
        return self
