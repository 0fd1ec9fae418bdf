"""Distillation: a divergence from a teacher on the policy's own responses, or on given ones (Agarwal et al. 2023)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainkit.plugins import lazy_names

if TYPE_CHECKING:
    from trainkit_distill.config import DistillConfig, DistillOfflineConfig, GKDConfig
    from trainkit_distill.trainer import Distillation, DistillBatch, DistillOfflineTrainer, DistillTrainer, GKDTrainer

__all__ = [
    "DistillBatch",
    "DistillConfig",
    "DistillOfflineConfig",
    "DistillOfflineTrainer",
    "DistillTrainer",
    "Distillation",
    "GKDConfig",
    "GKDTrainer",
]
__getattr__, __dir__ = lazy_names(__name__, __all__, "config", "trainer")
