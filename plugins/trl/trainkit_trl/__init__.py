"""The public names of TRL 0.7 and 0.8: ``from trainkit_trl import PPOConfig, PPOTrainer``, and modules of its paths.

Everything that computes is trainkit's.
"""

from trainkit.migrating import refusing
from trainkit_trl.core import LengthSampler, set_seed
from trainkit_trl.environment import TextEnvironment, TextHistory
from trainkit_trl.extras import BestOfNSampler
from trainkit_trl.import_utils import (
    is_bitsandbytes_available,
    is_diffusers_available,
    is_npu_available,
    is_peft_available,
    is_wandb_available,
    is_xpu_available,
)
from trainkit_trl.models import (
    SUPPORTED_ARCHITECTURES,
    AutoModelForCausalLMWithValueHead,
    AutoModelForSeq2SeqLMWithValueHead,
    DDPOPipelineOutput,
    DDPOSchedulerOutput,
    DDPOStableDiffusionPipeline,
    DefaultDDPOStableDiffusionPipeline,
    PreTrainedModelWrapper,
    create_reference_model,
)
from trainkit_trl.trainer import (
    AdaptiveKLController,
    ConstantLengthDataset,
    DataCollatorForCompletionOnlyLM,
    DDPOConfig,
    DDPOTrainer,
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
    "SUPPORTED_ARCHITECTURES",
    "AdaptiveKLController",
    "AutoModelForCausalLMWithValueHead",
    "AutoModelForSeq2SeqLMWithValueHead",
    "BestOfNSampler",
    "ConstantLengthDataset",
    "DDPOConfig",
    "DDPOPipelineOutput",
    "DDPOSchedulerOutput",
    "DDPOStableDiffusionPipeline",
    "DDPOTrainer",
    "DPOTrainer",
    "DataCollatorForCompletionOnlyLM",
    "DefaultDDPOStableDiffusionPipeline",
    "FixedKLController",
    "IterativeSFTTrainer",
    "LengthSampler",
    "PPOConfig",
    "PPOTrainer",
    "PreTrainedModelWrapper",
    "RewardConfig",
    "RewardTrainer",
    "SFTTrainer",
    "TextEnvironment",
    "TextHistory",
    "create_reference_model",
    "is_bitsandbytes_available",
    "is_diffusers_available",
    "is_npu_available",
    "is_peft_available",
    "is_wandb_available",
    "is_xpu_available",
    "set_seed",
]

__getattr__ = refusing(__name__)
