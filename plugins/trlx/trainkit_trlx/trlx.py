"""The entry point, `train`."""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from trainkit.errors import ConfigError, DataError, describe
from trainkit_trlx.data.configs import TRLConfig, say_once
from trainkit_trlx.data.default_configs import default_ilql_config, default_ppo_config, default_sft_config
from trainkit_trlx.pipeline.offline_pipeline import checked_prompts
from trainkit_trlx.trainer.functions import known_arguments
from trainkit_trlx.utils import set_seed
from trainkit_trlx.utils.loading import get_pipeline, get_trainer

REMOVED = {
    "logit_mask": "write config.train.trainer_kwargs = {'logit_mask': mask}",
    "split_token": "give samples as lists of messages, [prompt, output]",
    "model_provider": "give a model as model_path, or override get_arch of a trainer of your own",
    "tokenizer": "write config.train.trainer_kwargs = {'tokenizer': tokenizer}",
}
"""Arguments of earlier versions and of trainkit, and what to write instead."""


def train(
    model_path: str | Any | None = None,
    reward_fn: Callable[..., list[float]] | None = None,
    dataset: Iterable[Any] | None = None,
    samples: list[Any] | None = None,
    rewards: list[float] | None = None,
    prompts: list[Any] | None = None,
    eval_prompts: list[Any] | None = None,
    metric_fn: Callable[..., dict[str, Any]] | None = None,
    config: TRLConfig | None = None,
    stop_sequences: list[str] | None = None,
    **removed: Any,
) -> Any:
    """Train a model online with a reward function, or offline on samples, and return the trainer, as trlX does.

    Args:
        model_path: a hub id, a directory or a transformers config; set as ``config.model.model_path``.
        reward_fn: ``reward_fn(samples, prompts, outputs, tokenizer, **columns)`` returns one number per sample, or one
            list of numbers per sample for dense rewards.
        dataset: ``(samples, rewards)``; deprecated in trlX.
        samples: strings, or lists of messages that alternate between prompt and output.
        rewards: one number per sample.
        prompts: strings, or dicts with a ``prompt`` and further columns.
        eval_prompts: prompts of evaluations; by default the first of ``prompts``, or of samples the beginning token.
        metric_fn: ``metric_fn(samples, prompts, outputs, **columns)`` returns a dict of numbers or lists.
        config: the configuration; by default that of PPO with ``reward_fn``, of ILQL with ``rewards``, else of SFT.
        stop_sequences: strings that end a response.
        **removed: arguments of earlier versions; each is refused with what to write instead.

    Raises:
        ConfigError: there is nothing to train on, the trainer learns from something else, or an argument or a setting
            has no counterpart in trainkit; says what to write instead.
        DataError: there is not one reward for each sample, or prompts or samples cannot be used.
    """
    for name in removed:
        allowed = ", ".join(each for each in inspect.signature(train).parameters if each != "removed")
        raise ConfigError(f"train() has no {name}: {REMOVED.get(name, f'it takes {allowed}')}")
    samples, rewards = _samples(samples, rewards, dataset)
    if config is None:
        warnings.warn("no config is given: the default one of the algorithm is used", stacklevel=2)
        offline = default_sft_config if rewards is None else default_ilql_config
        config = default_ppo_config() if reward_fn else offline()
    if (reward_fn is None) == (samples is None):
        raise ConfigError(
            f"{'neither' if samples is None else 'each'} of reward_fn and samples is given; give train() reward_fn, to "
            "score what is sampled, or samples to learn from"
        )
    if not isinstance(config, TRLConfig):
        raise ConfigError(f"config should be a TRLConfig; given {describe(config)}; write TRLConfig.from_dict(config)")
    if model_path is not None:
        config.model.model_path = model_path
    config.check_kinds()
    set_seed(config.train.seed)
    make = get_trainer(config.train.trainer)
    trainer = make(
        config=config,
        reward_fn=reward_fn,
        metric_fn=metric_fn,
        stop_sequences=stop_sequences or [],
        **known_arguments(make, config.train.trainer_kwargs, "train.trainer_kwargs"),
    )
    _check_data(make, config, reward_fn, rewards)
    batch = config.train.batch_size * int(os.environ.get("WORLD_SIZE", 1))
    if reward_fn is None:
        given = (samples,) if rewards is None else (samples, rewards)
        trainer.make_experience(*given, config.train.seq_length)
        if eval_prompts is None and _room(config) > 0:
            eval_prompts = [_beginning(trainer)] * batch
    else:
        prompts = [_beginning(trainer)] * batch if prompts is None else checked_prompts(prompts)
        eval_prompts = prompts[:batch] if eval_prompts is None else eval_prompts
        trainer.add_prompt_pipeline(_pipeline(config, prompts, trainer))
    if eval_prompts is None:
        say_once("there are no evaluations: give eval_prompts, and a max_new_tokens below train.seq_length")
    else:
        trainer.add_eval_pipeline(_pipeline(config, eval_prompts, trainer))
    trainer.learn()
    return trainer


def _samples(samples: Any, rewards: Any, dataset: Any) -> tuple[Any, Any]:
    """Return samples and rewards, if there is one reward for each sample.

    Raises:
        ConfigError: ``dataset`` is no pair.
        DataError: there are more or fewer rewards than samples, or they are no lists.
    """
    if dataset is not None:
        warnings.warn(
            "dataset=(samples, rewards) is deprecated; give samples= and rewards=", FutureWarning, stacklevel=3
        )
        pair = tuple(dataset)
        if len(pair) != 2:
            raise ConfigError(f"dataset should be (samples, rewards); given {len(pair)} items")
        samples, rewards = pair
    samples, rewards = (list(each) if isinstance(each, Iterator) else each for each in (samples, rewards))
    for name, each in (("samples", samples), ("rewards", rewards)):
        if isinstance(each, str) or not isinstance(each, Iterable | None):
            raise DataError(f"{name} should be a list, with an entry for each sample; given {describe(each)}")
    if rewards is not None and samples is not None and len(samples) != len(rewards):
        raise DataError(f"there are {len(samples)} samples and {len(rewards)} rewards; give one reward for each")
    return samples, rewards


def _check_data(trainer: Any, config: TRLConfig, reward_fn: Any, rewards: Any) -> None:
    """Raise a `ConfigError` if a trainer of trainkit's algorithms learns from something else than what is given."""
    inputs = getattr(getattr(trainer, "trainer_class", None), "inputs", None)
    if inputs is None:  # a trainer with a loop of its own
        return
    given = (
        ("reward_fn", "prompts")
        if reward_fn is not None
        else ("samples", *(["rewards"] if rewards is not None else []))
    )
    if set(given) != set(inputs):
        raise ConfigError(
            f"train.trainer is {config.train.trainer!r}, which learns from {' and '.join(inputs)}; given "
            f"{' and '.join(given)}. Give these, or name another trainer and its method"
        )


def _beginning(trainer: Any) -> str:
    """Return the token that responses without a prompt begin after."""
    token = trainer.tokenizer.bos_token or trainer.tokenizer.eos_token
    if token is None:
        raise DataError(
            "no prompts are given, and the tokenizer has no beginning token to start responses from; give prompts, or "
            "eval_prompts where samples are learnt from"
        )
    return str(token)


def _room(config: TRLConfig) -> int:
    """Return how many tokens are left for a prompt; none if the number is not positive."""
    found = getattr(config.method, "gen_kwargs", {}).get("max_new_tokens", 0)
    return config.train.seq_length - (max(found) if isinstance(found, list) else int(found))


def _pipeline(config: TRLConfig, prompts: list[Any], trainer: Any) -> Any:
    """Return prompts that leave room for a response within ``train.seq_length``."""
    room = _room(config)
    if room < 1:
        raise ConfigError(
            f"method.gen_kwargs.max_new_tokens leaves no room for a prompt within {config.train.seq_length} tokens; "
            "lower it, or raise train.seq_length"
        )
    special = config.model.model_arch_type == "seq2seq"
    return get_pipeline(config.train.pipeline)(prompts, room, trainer.tokenizer, add_special_tokens=special)
