"""PPO with the interface of trlX."""

from __future__ import annotations

from typing import Any

from trainkit import get_trainer
from trainkit_trlx.trainer import register_trainer
from trainkit_trlx.trainer.accelerate_base_trainer import OfTrlx

Trainer: Any = get_trainer("ppo")


@register_trainer
class AcceleratePPOTrainer(OfTrlx, Trainer):  # type: ignore[misc]
    """Trainer of PPO."""
