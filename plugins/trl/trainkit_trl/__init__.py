"""The public names of TRL 0.7 and 0.8: ``from trainkit_trl import PPOConfig, PPOTrainer``, and modules of its paths.

Everything that computes is trainkit's.
"""

from trainkit_migrate import refuse_modules, refusing
from trainkit_trl.commands.cli_utils import DpoScriptArguments, SftScriptArguments, TrlParser, init_zero_verbose
from trainkit_trl.core import LengthSampler, set_seed
from trainkit_trl.environment import TextEnvironment, TextHistory
from trainkit_trl.extras import BestOfNSampler
from trainkit_trl.import_utils import (
    is_bitsandbytes_available,
    is_diffusers_available,
    is_npu_available,
    is_peft_available,
    is_pil_available,
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
    setup_chat_format,
)
from trainkit_trl.trainer import (
    AdaptiveKLController,
    ConstantLengthDataset,
    CPOConfig,
    CPOTrainer,
    DataCollatorForCompletionOnlyLM,
    DDPOConfig,
    DDPOTrainer,
    DPOTrainer,
    FixedKLController,
    IterativeSFTTrainer,
    KTOConfig,
    KTOTrainer,
    ModelConfig,
    ORPOConfig,
    ORPOTrainer,
    PPOConfig,
    PPOTrainer,
    RewardConfig,
    RewardTrainer,
    RichProgressCallback,
    SFTTrainer,
)
from trainkit_trl.trainer.utils import get_kbit_device_map, get_peft_config, get_quantization_config

__all__ = [
    "SUPPORTED_ARCHITECTURES",
    "AdaptiveKLController",
    "AutoModelForCausalLMWithValueHead",
    "AutoModelForSeq2SeqLMWithValueHead",
    "BestOfNSampler",
    "CPOConfig",
    "CPOTrainer",
    "ConstantLengthDataset",
    "DDPOConfig",
    "DDPOPipelineOutput",
    "DDPOSchedulerOutput",
    "DDPOStableDiffusionPipeline",
    "DDPOTrainer",
    "DPOTrainer",
    "DataCollatorForCompletionOnlyLM",
    "DefaultDDPOStableDiffusionPipeline",
    "DpoScriptArguments",
    "FixedKLController",
    "IterativeSFTTrainer",
    "KTOConfig",
    "KTOTrainer",
    "LengthSampler",
    "ModelConfig",
    "ORPOConfig",
    "ORPOTrainer",
    "PPOConfig",
    "PPOTrainer",
    "PreTrainedModelWrapper",
    "RewardConfig",
    "RewardTrainer",
    "RichProgressCallback",
    "SFTTrainer",
    "SftScriptArguments",
    "TextEnvironment",
    "TextHistory",
    "TrlParser",
    "create_reference_model",
    "get_kbit_device_map",
    "get_peft_config",
    "get_quantization_config",
    "init_zero_verbose",
    "is_bitsandbytes_available",
    "is_diffusers_available",
    "is_npu_available",
    "is_peft_available",
    "is_pil_available",
    "is_wandb_available",
    "is_xpu_available",
    "set_seed",
    "setup_chat_format",
]

__getattr__ = refusing(__name__)
refuse_modules(__name__)
