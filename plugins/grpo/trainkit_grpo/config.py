"""The settings of GRPO."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from trainkit import GroupSize, MethodConfig


class GRPOConfig(MethodConfig):
    """Settings of GRPO. By default the loss is a mean over tokens, without a KL penalty; the README says why."""

    section_defaults: ClassVar[dict[str, Any]] = {"optimizer": {"lr": 1e-6}, "train": {"total_steps": 1000}}

    name: str = "grpo"
    """The registered name."""
    group_size: GroupSize = 8
    """G: responses per prompt; advantages are relative to this group."""
    grpo_epochs: int = Field(1, ge=1)
    """μ: passes over each collection of rollouts."""
    kl_coef: float = Field(0.0, ge=0)
    """β: weight of the KL penalty in the loss, per nat of KL from the reference. 0: no penalty and no reference."""
    scale: Literal["group", "batch", "none"] = "group"
    """Divide advantages by the standard deviation of the rewards of the group, of the collection, or not at all."""
    average: Literal["tokens", "responses", "constant"] = "tokens"
    """A mean over tokens; over responses, of their means; or over responses, of their sums / `max_new_tokens`."""
    surrogate: Literal["clip", "cispo"] = "clip"
    """Clip the objective, as PPO does, or the weight of log π, so that every token has a gradient (CISPO)."""
    ratio_level: Literal["token", "sequence"] = "token"
    """Whether the ratio is that of a token, or the geometric mean of the ratios of a response's tokens (GSPO)."""
    cliprange: float = Field(0.2, gt=0)
    """ε: the ratio is clipped to at least 1 − ε; no effect in the first step on a collection. From 1 on: no limit."""
    cliprange_high: float | None = Field(None, gt=0)
    """ε_high: the ratio is clipped to at most 1 + ε_high. None: ε."""
    dynamic_sampling: bool = False
    """Replace groups whose rewards are all equal by those of further prompts, up to `rollout.max_refills` times."""

    reward_weights: dict[str, float] | None = Field(None, min_length=1)
    """Weights, by name, of numbers that the reward function returns besides the score, or of ``reward``, the score.
    Each is scaled within its group, and their sum in the collection (GDPO). None: only the score is learnt from."""

    @model_validator(mode="after")
    def _rewards_are_scaled(self) -> Self:
        if self.reward_weights is not None and self.scale != "group":
            raise ValueError(f"reward_weights (GDPO) need scale 'group'; given {self.scale!r}")
        if any(not math.isfinite(weight) for weight in (self.reward_weights or {}).values()):
            raise ValueError(f"reward_weights should be finite numbers; given {self.reward_weights!r}")
        return self

    @model_validator(mode="after")
    def _sequences_have_one_ratio(self) -> Self:
        if self.ratio_level == "sequence" and (self.average, self.surrogate) != ("responses", "clip"):
            given = f"given {self.average!r} and {self.surrogate!r}"
            raise ValueError(f"ratio_level 'sequence' (GSPO) needs average 'responses' and surrogate 'clip'; {given}")
        return self
