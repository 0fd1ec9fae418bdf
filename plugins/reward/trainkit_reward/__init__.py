"""Reward modelling: a model that scores texts, trained on pairs of outputs of which one is preferred.

Bradley and Terry 1952 (the model); Stiennon et al. 2020 (for language models).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainkit.plugins import lazy_names

if TYPE_CHECKING:
    from trainkit.models import RewardModel
    from trainkit_reward.config import RewardConfig
    from trainkit_reward.trainer import RewardBatch, RewardTrainer, preference_loss

__all__ = ["RewardBatch", "RewardConfig", "RewardModel", "RewardTrainer", "preference_loss"]
__getattr__, __dir__ = lazy_names(__name__, __all__, "config", "trainer")
