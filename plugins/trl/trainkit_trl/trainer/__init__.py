"""Trainers and their configurations."""

from trainkit.migrating import refusing
from trainkit_trl.trainer.ppo_config import PPOConfig
from trainkit_trl.trainer.ppo_trainer import PPOTrainer
from trainkit_trl.trainer.utils import AdaptiveKLController, FixedKLController, RunningMoments

__all__ = ["AdaptiveKLController", "FixedKLController", "PPOConfig", "PPOTrainer", "RunningMoments"]

__getattr__ = refusing(__name__)
