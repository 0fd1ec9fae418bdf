"""Settings that do not fit each other or the config of the model, found before anything is loaded."""

from __future__ import annotations

import logging
from typing import Any

from transformers import PreTrainedConfig

from trainkit.config import PluginConfig, TRLConfig
from trainkit.errors import ConfigError
from trainkit.models.loading import length_limit

log = logging.getLogger(__name__)

Config = TRLConfig[Any]


def check_split(config: Config, k: int, world: int) -> None:
    """Raise a `ConfigError` if ``world`` processes with ``k`` responses per prompt cannot share the rows equally."""
    if config.train.batch_size % world:
        raise ConfigError(
            f"train.batch_size is {config.train.batch_size}, which {world} processes cannot share equally; "
            "give a multiple"
        )
    if config.rollout.num_rollouts % (world * k):
        who = "one process" if world == 1 else f"{world} processes"
        raise ConfigError(
            f"rollout.num_rollouts is {config.rollout.num_rollouts}, which {who} with {k} responses "
            f"per prompt cannot share equally; give a multiple of {world * k}"
        )


def check_distribution(config: Config) -> None:
    """Raise a `ConfigError` if an online algorithm would sample without a distribution to learn on."""
    rollout = config.rollout
    if rollout.temperature == 0 or rollout.top_k == 1:
        field, given = ("temperature", "0") if rollout.temperature == 0 else ("top_k", "1")
        raise ConfigError(
            f"rollout.{field} is {given}: greedy responses have no distribution to learn on, and all responses to "
            "a prompt are the same. Give a temperature > 0, and a top_k of 0, for all tokens, or more than 1; for "
            "greedy evaluation set rollout.eval_kwargs.temperature to 0"
        )


def check_run(config: Config) -> None:
    """Raise a `ConfigError` if the settings of evaluations or of a plugin do not fit the others.

    A warm-up that is longer than the run is logged.
    """
    steps, warmup = config.train.total_steps, config.scheduler.warmup_steps
    if steps and warmup > steps:
        log.warning(
            "scheduler.warmup_steps is %d, and the run ends after %d steps (train.total_steps), before the rate "
            "is reached",
            warmup,
            steps,
        )
    if best := config.train.save_best:
        config.check_metric("eval/reward" if isinstance(best, bool) else best.metric, "train.save_best")
    for entry in (*config.plugins, *config.train.trackers):
        if isinstance(entry, PluginConfig):
            entry.check(config)


def check_length(config: Config, model: PreTrainedConfig, virtual: int, *, online: bool) -> int | None:
    """Return the largest number of tokens of prompt and response together, or of each if they are read separately.

    Args:
        config: the settings.
        model: the config of the model.
        virtual: how many virtual tokens it reads before them.
        online: whether responses are sampled.

    Raises:
        ConfigError: `train.seq_length` is beyond the model's context, or responses leave no room for a prompt.
    """
    limit, room = length_limit(model, config.train.seq_length, virtual), config.rollout.max_new_tokens
    if limit and online and room >= limit:
        what = "the decoder's start token" if model.is_encoder_decoder else "a prompt"
        raise ConfigError(
            f"rollout.max_new_tokens is {room}, which leaves no room for {what} within {limit} tokens; lower it"
        )
    return limit
