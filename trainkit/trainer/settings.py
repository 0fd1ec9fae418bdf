"""Settings that do not fit each other or the config of the model, found before anything is loaded."""

from __future__ import annotations

import logging
from typing import Any, TypeVar

from transformers import PreTrainedConfig

from trainkit.config import EnvironmentConfig, MethodConfig, PluginConfig, TRLConfig
from trainkit.errors import ConfigError
from trainkit.models.loading import length_limit
from trainkit.plugins.discovery import ACCELERATE_TRACKERS, without_disabled
from trainkit.plugins.hooks import entry_name

log = logging.getLogger(__name__)

Config = TRLConfig[Any]
T = TypeVar("T", bound=MethodConfig)


def without_disabled_plugins(config: TRLConfig[T], *, logs: bool) -> TRLConfig[T]:
    """Return the configuration, and so the record of the run, without disabled plugins; log them if ``logs``."""
    named = map(entry_name, [*config.plugins, *config.train.trackers])
    usable, messages = without_disabled([name for name in named if name not in ACCELERATE_TRACKERS])
    plugins, trackers = (
        [entry for entry in entries if entry_name(entry) in {*usable, *ACCELERATE_TRACKERS}]
        for entries in (config.plugins, config.train.trackers)
    )
    for message in messages if logs else ():
        log.warning("%s", message)
    if plugins == config.plugins and trackers == config.train.trackers:
        return config
    train = config.train.model_copy(update={"trackers": trackers})
    return config.model_copy(update={"plugins": plugins, "train": train})


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
        field, value = ("temperature", "0") if rollout.temperature == 0 else ("top_k", "1")
        raise ConfigError(
            f"rollout.{field} is {value}: greedy responses have no distribution to learn on, and all responses to "
            "a prompt are the same. Give a temperature > 0, and a top_k of 0, for all tokens, or more than 1; for "
            "greedy evaluation set rollout.eval_kwargs.temperature to 0"
        )


def changed_settings(config: Config) -> list[str]:
    """Return which settings of engine, staleness and correction differ from their defaults."""
    rollout = config.rollout
    keys = ("engine", "staleness", "correction", "correction_level", "correction_cap")
    return [f"rollout.{key}" for key in keys if getattr(rollout, key) != type(rollout).model_fields[key].default]


def check_environment(config: Config, environment: object, inputs: tuple[str, ...]) -> None:
    """Raise a `ConfigError` if settings of environments have no effect, or the algorithm uses no environment.

    Args:
        config: the settings.
        environment: makes environments; None: there is none.
        inputs: what the algorithm learns from; nothing if it has declared that it takes no environments.
    """
    if environment is not None:
        if not inputs:
            raise ConfigError(
                f"{config.method.name!r} does not learn from environments; give a reward function instead"
            )
        if not {"reward_fn", "environment"} & {*inputs}:
            raise ConfigError(
                f"{config.method.name!r} learns from {' and '.join(inputs)}, not from the rewards of an environment"
            )
        return
    default = EnvironmentConfig()
    changed = [f"environment.{key}" for key, value in config.environment if value != getattr(default, key)]
    for key in ("max_turns", "max_episode_tokens"):
        if getattr(config.rollout, key) != type(config.rollout).model_fields[key].default:
            changed.append(f"rollout.{key}")
    if changed:
        are, them = ("is", "it") if len(changed) == 1 else ("are", "them")
        raise ConfigError(f"{' and '.join(changed)} {are} set, and there is no environment; give one, or remove {them}")


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
