"""PPO: proximal policy optimisation of a language model with a critic and a KL penalty.

Schulman et al. 2017 (the algorithm), Ziegler et al. 2019 (for language models).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainkit.plugins import lazy_names

if TYPE_CHECKING:
    from trainkit_ppo.config import PPOConfig
    from trainkit_ppo.trainer import KLController, PPOBatch, PPORollouts, PPOTrainer, followed

__all__ = ["KLController", "PPOBatch", "PPOConfig", "PPORollouts", "PPOTrainer", "followed"]
__getattr__, __dir__ = lazy_names(__name__, __all__, "config", "trainer")
