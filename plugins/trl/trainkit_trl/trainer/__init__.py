"""Trainers and their configurations."""

from trainkit_migrate import refusing
from trainkit_trl.import_utils import is_diffusers_available
from trainkit_trl.trainer.base import BaseTrainer
from trainkit_trl.trainer.cpo_config import CPOConfig
from trainkit_trl.trainer.cpo_trainer import CPOTrainer
from trainkit_trl.trainer.ddpo_config import DDPOConfig
from trainkit_trl.trainer.ddpo_trainer import DDPOTrainer
from trainkit_trl.trainer.dpo_trainer import DPOTrainer
from trainkit_trl.trainer.iterative_sft_trainer import IterativeSFTTrainer
from trainkit_trl.trainer.kto_config import KTOConfig
from trainkit_trl.trainer.kto_trainer import KTOTrainer
from trainkit_trl.trainer.model_config import ModelConfig
from trainkit_trl.trainer.orpo_config import ORPOConfig
from trainkit_trl.trainer.orpo_trainer import ORPOTrainer
from trainkit_trl.trainer.ppo_config import PPOConfig
from trainkit_trl.trainer.ppo_trainer import PPOTrainer
from trainkit_trl.trainer.reward_config import RewardConfig
from trainkit_trl.trainer.reward_trainer import RewardTrainer
from trainkit_trl.trainer.sft_trainer import SFTTrainer
from trainkit_trl.trainer.utils import (
    AdaptiveKLController,
    ConstantLengthDataset,
    DataCollatorForCompletionOnlyLM,
    FixedKLController,
    RichProgressCallback,
    RunningMoments,
    compute_accuracy,
    disable_dropout_in_model,
)

__all__ = [
    "AdaptiveKLController",
    "BaseTrainer",
    "CPOConfig",
    "CPOTrainer",
    "ConstantLengthDataset",
    "DDPOConfig",
    "DDPOTrainer",
    "DPOTrainer",
    "DataCollatorForCompletionOnlyLM",
    "FixedKLController",
    "IterativeSFTTrainer",
    "KTOConfig",
    "KTOTrainer",
    "ModelConfig",
    "ORPOConfig",
    "ORPOTrainer",
    "PPOConfig",
    "PPOTrainer",
    "RewardConfig",
    "RewardTrainer",
    "RichProgressCallback",
    "RunningMoments",
    "SFTTrainer",
    "compute_accuracy",
    "disable_dropout_in_model",
    "is_diffusers_available",
]

__getattr__ = refusing(__name__)
