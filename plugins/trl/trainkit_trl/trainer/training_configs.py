"""Where TRL 0.7 has the configuration of reward modelling."""

from trainkit_migrate import refusing
from trainkit_trl.trainer.reward_config import RewardConfig

__all__ = ["RewardConfig"]

__getattr__ = refusing(__name__)
