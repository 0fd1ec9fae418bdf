"""Models behind the trainers: loading, the policy's one face, its heads, the frozen reference."""

from trainkit.models.loading import context_length, disable_dropout, load_model, load_tokenizer
from trainkit.models.policy import CausalPolicy, TokenOutputs, load_heads, make_policy
from trainkit.models.reference import Reference
from trainkit.models.value_head import ValueHead

__all__ = [
    "CausalPolicy",
    "Reference",
    "TokenOutputs",
    "ValueHead",
    "context_length",
    "disable_dropout",
    "load_heads",
    "load_model",
    "load_tokenizer",
    "make_policy",
]
