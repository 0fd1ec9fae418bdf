"""ORPO, CPO and SimPO: learning from pairs of outputs without a reference model.

Hong, Lee, Thorne 2024 (ORPO), Xu et al. 2024 (CPO), Meng, Xia, Chen 2024 (SimPO).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainkit.plugins import lazy_names

if TYPE_CHECKING:
    from trainkit_orpo.config import CPOConfig, ORPOConfig
    from trainkit_orpo.trainer import CPOTrainer, ORPOTrainer, log_odds, odds_ratio_loss, simpo_loss

__all__ = ["CPOConfig", "CPOTrainer", "ORPOConfig", "ORPOTrainer", "log_odds", "odds_ratio_loss", "simpo_loss"]
__getattr__, __dir__ = lazy_names(__name__, __all__, "config", "trainer")
