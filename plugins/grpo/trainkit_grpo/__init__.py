"""GRPO (Shao et al. 2024), and by its settings Dr. GRPO, DAPO, GSPO and CISPO, whose sources are in the README."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainkit.plugins import lazy_names

if TYPE_CHECKING:
    from trainkit_grpo.config import GRPOConfig
    from trainkit_grpo.trainer import GRPOBatch, GRPORollouts, GRPORows, GRPOTrainer

__all__ = ["GRPOBatch", "GRPOConfig", "GRPORollouts", "GRPORows", "GRPOTrainer"]
__getattr__, __dir__ = lazy_names(__name__, __all__, "config", "trainer")
