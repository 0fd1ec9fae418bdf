"""RFT with the interface of trlX."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainkit import get_trainer
from trainkit_trlx.data.method_configs import MethodConfig, register_method
from trainkit_trlx.trainer import register_trainer
from trainkit_trlx.trainer.accelerate_base_trainer import Online

Trainer: Any = get_trainer("rft")


@dataclass
@register_method
class RFTConfig(MethodConfig):
    """Settings of RFT."""

    gen_kwargs: dict[str, Any]
    start_percentile: float = 0.7
    end_percentile: float = 0.95
    n_improve_steps: int = 4
    n_generations_per_prompt: int = 32


@register_trainer
class AccelerateRFTTrainer(Online, Trainer):  # type: ignore[misc]
    """Trainer of RFT."""
