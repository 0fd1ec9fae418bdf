"""SFT with the interface of trlX."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainkit import get_trainer
from trainkit_trlx.data.method_configs import MethodConfig, register_method
from trainkit_trlx.trainer import register_trainer
from trainkit_trlx.trainer.accelerate_base_trainer import Offline

Trainer: Any = get_trainer("sft")


@dataclass
@register_method
class SFTConfig(MethodConfig):
    """Settings of SFT."""

    gen_kwargs: dict[str, Any]


@register_trainer
class AccelerateSFTTrainer(Offline, Trainer):  # type: ignore[misc]
    """Trainer of SFT."""
