"""From prompts to scored responses: the sampler, engines that generate, and calls of reward functions."""

from trainkit.rollouts.engines import Engine, EngineSampler, Request, ServedModel, Weights
from trainkit.rollouts.environments import Environment, EnvironmentMaker, Turn, check_maker
from trainkit.rollouts.episodes import Player, check_template
from trainkit.rollouts.replica import Replica
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
    Generated,
    Purpose,
    Sampler,
    Seq2SeqSampler,
    assemble,
    cut_at_stop,
    decode,
    make_sampler,
)

__all__ = [
    "CausalSampler",
    "Engine",
    "EngineSampler",
    "Environment",
    "EnvironmentMaker",
    "Generated",
    "MetricFn",
    "Player",
    "Purpose",
    "Record",
    "Replica",
    "Request",
    "RewardFn",
    "Sampler",
    "Scored",
    "Seq2SeqSampler",
    "ServedModel",
    "Turn",
    "Weights",
    "assemble",
    "call",
    "check_maker",
    "check_numbers",
    "check_scores",
    "check_template",
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
