"""The settings of RFT."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from trainkit import MethodConfig


class RFTConfig(MethodConfig):
    """Settings of RFT. The defaults are those of trlX."""

    section_defaults: ClassVar[dict[str, Any]] = {"optimizer": {"lr": 2e-5}, "train": {"total_steps": 1000}}
    name: str = "rft"
    """The registered name."""
    rft_k: int = Field(32, ge=1)
    """Responses sampled to each prompt in a growth step."""
    n_improve_steps: int = Field(4, ge=1)
    """Epochs per growth step, its own included; in the other epochs prompts are trained on with their pools. Thresholds
    rise over as many visits to a prompt: an epoch is one visit, unless the prompt occurs several times in the data."""
    start_percentile: float = Field(0.7, ge=0, le=1)
    """Percentile of a prompt's pool that is the threshold in the first visit, as a fraction."""
    end_percentile: float = Field(0.95, ge=0, le=1)
    """The same in the last visit, after which the thresholds begin again. Between the two it changes in equal steps."""
    pool_size: int = Field(128, ge=1)
    """Distinct responses that a prompt's pool holds; those that were sampled least recently are dropped."""
