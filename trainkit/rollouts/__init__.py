"""From prompts to scored responses: the sampler, the decoders that run the model, and calls of reward functions."""

from trainkit.rollouts.rewards import (
    MetricFn,
    Record,
    RewardFn,
    Scored,
    call,
    check_numbers,
    check_scores,
    explained,
    means,
    measure,
    metrics,
    name_of,
    score,
)
from trainkit.rollouts.sampler import (
    CausalSampler,
    Sampler,
    Seq2SeqSampler,
    assemble,
    cut_at_stop,
    decode,
    make_sampler,
)

__all__ = [
    "CausalSampler",
    "MetricFn",
    "Record",
    "RewardFn",
    "Sampler",
    "Scored",
    "Seq2SeqSampler",
    "assemble",
    "call",
    "check_numbers",
    "check_scores",
    "cut_at_stop",
    "decode",
    "explained",
    "make_sampler",
    "means",
    "measure",
    "metrics",
    "name_of",
    "score",
]
