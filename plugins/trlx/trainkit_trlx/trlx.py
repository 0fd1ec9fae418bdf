"""The entry point, `train`."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable
from typing import Any

from trainkit_trlx.data.configs import TRLConfig
from trainkit_trlx.data.default_configs import default_ilql_config, default_ppo_config, default_sft_config
from trainkit_trlx.utils import set_seed
from trainkit_trlx.utils.loading import get_pipeline, get_trainer


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
        eval_prompts: prompts of evaluations; by default the first of ``prompts``.
        metric_fn: ``metric_fn(samples, prompts, outputs, **columns)`` returns a dict of numbers or lists.
        config: the configuration; by default that of PPO with ``reward_fn``, of ILQL with ``rewards``, else of SFT.
        stop_sequences: strings that end a response.

    Raises:
        ValueError: there is nothing to train on, or there is not one reward for each sample.
        ConfigError: a setting has no counterpart in trainkit; says what to write instead.
    """
    if dataset is not None:
        warnings.warn(
            "dataset=(samples, rewards) is deprecated; give samples= and rewards=", FutureWarning, stacklevel=2
        )
        samples, rewards = dataset
    if config is None:
        warnings.warn("no config is given: the default one of the algorithm is used", stacklevel=2)
        default = default_ppo_config if reward_fn else default_ilql_config if rewards else default_sft_config
        config = default()
    if reward_fn is None and samples is None:
        raise ValueError("train() needs reward_fn, to score what is sampled, or samples; give one of the two")
    if reward_fn is not None and samples is not None:
        raise ValueError("reward_fn and samples are both given, and samples would not be used; give one of the two")
    if rewards is not None and samples is not None and len(samples) != len(rewards):
        raise ValueError(f"there are {len(samples)} samples and {len(rewards)} rewards; give one reward for each")
    set_seed(config.train.seed)
    if model_path is not None:
        config.model.model_path = model_path
    trainer = get_trainer(config.train.trainer)(
        config=config,
        reward_fn=reward_fn,
        metric_fn=metric_fn,
        stop_sequences=stop_sequences or [],
        **config.train.trainer_kwargs,
    )
    batch = config.train.batch_size * int(os.environ.get("WORLD_SIZE", 1))
    if reward_fn is None:
        given = (samples,) if rewards is None else (samples, rewards)
        trainer.make_experience(*given, config.train.seq_length)
    else:
        prompts = trainer.default_prompts()[:batch] if prompts is None else prompts
        eval_prompts = prompts[:batch] if eval_prompts is None else eval_prompts
        trainer.add_prompt_pipeline(_pipeline(config, prompts, trainer))
    if eval_prompts is not None:
        trainer.add_eval_pipeline(_pipeline(config, eval_prompts, trainer))
    trainer.learn()
    return trainer


def _pipeline(config: TRLConfig, prompts: list[Any], trainer: Any) -> Any:
    longest = config.train.seq_length - trainer.config.rollout.max_new_tokens
    special = config.model.model_arch_type == "seq2seq"
    return get_pipeline(config.train.pipeline)(prompts, longest, trainer.tokenizer, add_special_tokens=special)
