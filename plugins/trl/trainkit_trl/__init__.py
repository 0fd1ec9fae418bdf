"""The public names of TRL 0.7 and 0.8: ``from trainkit_trl import PPOConfig, PPOTrainer``, and modules of its paths.

Everything that computes is trainkit's.
"""

from trainkit_trl.core import LengthSampler, set_seed
from trainkit_trl.models import (
    AutoModelForCausalLMWithValueHead,
    AutoModelForSeq2SeqLMWithValueHead,
    PreTrainedModelWrapper,
    create_reference_model,
)
from trainkit_trl.trainer import (
    AdaptiveKLController,
    ConstantLengthDataset,
    DataCollatorForCompletionOnlyLM,
    DPOTrainer,
    FixedKLController,
    IterativeSFTTrainer,
    PPOConfig,
    PPOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTTrainer,
)

__all__ = [
    "AdaptiveKLController",
    "AutoModelForCausalLMWithValueHead",
    "AutoModelForSeq2SeqLMWithValueHead",
    "ConstantLengthDataset",
    "DPOTrainer",
    "DataCollatorForCompletionOnlyLM",
    "FixedKLController",
    "IterativeSFTTrainer",
    "LengthSampler",
    "PPOConfig",
    "PPOTrainer",
    "PreTrainedModelWrapper",
    "RewardConfig",
    "RewardTrainer",
    "SFTTrainer",
    "create_reference_model",
    "set_seed",
]
