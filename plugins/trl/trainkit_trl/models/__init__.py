"""Models with a value head."""

from trainkit.models import (
    AutoModelForCausalLMWithValueHead,
    AutoModelForSeq2SeqLMWithValueHead,
    PreTrainedModelWrapper,
    create_reference_model,
)
from trainkit_migrate import refusing
from trainkit_trl.import_utils import is_diffusers_available
from trainkit_trl.models.modeling_sd_base import (
    DDPOPipelineOutput,
    DDPOSchedulerOutput,
    DDPOStableDiffusionPipeline,
    DefaultDDPOStableDiffusionPipeline,
)
from trainkit_trl.models.utils import setup_chat_format

SUPPORTED_ARCHITECTURES = (AutoModelForCausalLMWithValueHead, AutoModelForSeq2SeqLMWithValueHead)

__all__ = [
    "SUPPORTED_ARCHITECTURES",
    "AutoModelForCausalLMWithValueHead",
    "AutoModelForSeq2SeqLMWithValueHead",
    "DDPOPipelineOutput",
    "DDPOSchedulerOutput",
    "DDPOStableDiffusionPipeline",
    "DefaultDDPOStableDiffusionPipeline",
    "PreTrainedModelWrapper",
    "create_reference_model",
    "is_diffusers_available",
    "setup_chat_format",
]

__getattr__ = refusing(__name__)
