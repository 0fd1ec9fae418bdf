"""The models that trainers use: loading, policies, heads, model classes with a value head, and frozen references."""

from trainkit.models.adapters import adapter_config, has_adapter, make_peft_config, with_adapter, without_adapter
from trainkit.models.backend import use_fast_exact_matmul
from trainkit.models.critic import ValueBranch
from trainkit.models.fitting import cache_bytes
from trainkit.models.images import image_inputs, image_token
from trainkit.models.joined import different_prompts
from trainkit.models.loading import (
    check_adapter_dropout,
    context_length,
    disable_dropout,
    load_model,
    load_tokenizer,
    make_policy,
)
from trainkit.models.packing import check_packing
from trainkit.models.policy import (
    CausalPolicy,
    Divergence,
    Policy,
    TokenOutputs,
    in_chunks,
    load_heads,
    response_logprobs,
)
from trainkit.models.reference import Frozen, Reference, create_reference_model
from trainkit.models.reward import RewardModel, Scorer, load_scorer
from trainkit.models.seq2seq import Seq2SeqPolicy
from trainkit.models.value_head import ValueHead, state_width
from trainkit.models.wrappers import (
    AutoModelForCausalLMWithValueHead,
    AutoModelForSeq2SeqLMWithValueHead,
    PreTrainedModelWrapper,
    arguments_of_today,
    unwrap_model_for_generation,
)

__all__ = [
    "AutoModelForCausalLMWithValueHead",
    "AutoModelForSeq2SeqLMWithValueHead",
    "CausalPolicy",
    "Divergence",
    "Frozen",
    "Policy",
    "PreTrainedModelWrapper",
    "Reference",
    "RewardModel",
    "Scorer",
    "Seq2SeqPolicy",
    "TokenOutputs",
    "ValueBranch",
    "ValueHead",
    "adapter_config",
    "arguments_of_today",
    "cache_bytes",
    "check_adapter_dropout",
    "check_packing",
    "context_length",
    "create_reference_model",
    "different_prompts",
    "disable_dropout",
    "has_adapter",
    "image_inputs",
    "image_token",
    "in_chunks",
    "load_heads",
    "load_model",
    "load_scorer",
    "load_tokenizer",
    "make_peft_config",
    "make_policy",
    "response_logprobs",
    "state_width",
    "unwrap_model_for_generation",
    "use_fast_exact_matmul",
    "with_adapter",
    "without_adapter",
]
