"""RLOO: REINFORCE with a leave-one-out baseline over the k responses of each prompt.

Kool et al. 2019 (the estimator), Ahmadian et al. 2024 (for language models).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainkit.plugins import lazy_names

if TYPE_CHECKING:
    from trainkit_rloo.config import RLOOConfig
    from trainkit_rloo.trainer import RLOOBatch, RLOORollouts, RLOORows, RLOOTrainer

__all__ = ["RLOOBatch", "RLOOConfig", "RLOORollouts", "RLOORows", "RLOOTrainer"]
__getattr__, __dir__ = lazy_names(__name__, __all__, "config", "trainer")
