"""What the trainers of trlX have in common."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

import trainkit
from trainkit import hookimpl
from trainkit.errors import ConfigError, describe
from trainkit.runs import free_directory
from trainkit_migrate import framework, translate_sampling
from trainkit_trlx.data.configs import TRLConfig, say_once
from trainkit_trlx.models.modeling_base import base_from, checkpoint
from trainkit_trlx.pipeline.offline_pipeline import checked_prompts
from trainkit_trlx.trainer import register_trainer

if TYPE_CHECKING:
    from torch import Tensor


log = logging.getLogger(__name__)


def taking(function: Callable[..., Any] | None, what: str) -> Callable[..., Any] | None:
    """Return a function that is called with those of its arguments alone that ``function`` takes.

    Functions for trlX need not take the tokenizer or further columns: it did not pass them everywhere.

    Args:
        function: takes its arguments by their names.
        what: the argument that the function is, for messages.

    Raises:
        ConfigError: it is no function.
    """
    if function is None:
        return None
    if not callable(function):
        raise ConfigError(f"{what} should be a function of samples, prompts and outputs; given {describe(function)}")
    parameters = inspect.signature(function).parameters.values()
    named = [each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    whole = any(each.kind is each.VAR_KEYWORD for each in parameters)
    needed = [each.name for each in parameters if each.default is each.empty and each.name in named]

    @wraps(function)
    def called(**given: Any) -> Any:
        if missing := [name for name in needed if name not in given]:
            raise TypeError(
                f"{what} takes {', '.join(missing)}, and there is none: it is called with {', '.join(given)}, by name "
                "(and with the columns of prompts that are dicts); rename its arguments"
            )
        return function(**(given if whole else {name: given[name] for name in named if name in given}))

    return called


def prefixed(metric_fn: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """Return a metric function whose metrics have ``metrics/`` before their names, as trlX logs them."""
    called = taking(metric_fn, "metric_fn")
    if metric_fn is None or called is None:
        return None

    @wraps(metric_fn)
    def measured(**given: Any) -> Any:
        found = called(**given)
        if not isinstance(found, Mapping):
            return found  # refused by trainkit
        return {f"metrics/{name}": values for name, values in found.items()}

    return measured


def forbidding(logit_mask: Any) -> Any:
    """Return a mask of trlX, in which True forbids, as one of trainkit, in which True allows; None for None.

    Raises:
        ConfigError: it is no table of booleans, or forbids all tokens somewhere, so that it probably has the opposite
            sense.
    """
    if logit_mask is None:
        return None
    allowed = "a bool tensor of shape [V, V], a row for each previous token, or [V]; True = forbidden"
    try:
        given = torch.as_tensor(logit_mask)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"logit_mask should be {allowed}; given {describe(logit_mask)}: {error}") from error
    if given.dim() not in (1, 2) or given.shape[0] != given.shape[-1]:
        raise ConfigError(f"logit_mask should be {allowed}; given {given.dtype} {tuple(given.shape)}")
    forbidden = given.bool()
    if not torch.equal(forbidden.to(given.dtype), given):
        raise ConfigError(
            f"logit_mask should be {allowed}; given {given.dtype} with other values than 0 and 1; write what is "
            "forbidden, such as scores < 0"
        )
    if forbidden.all(-1).any():
        raise ConfigError(
            "logit_mask is True at every token after some token, and True = forbidden, as in trlX; if it should mean "
            "allowed, give ~logit_mask, else leave at least EOS False there"
        )
    return ~forbidden


def taking_one(function: Any, what: str, argument: str) -> Any:
    """Return a function that `learn` calls, if it takes one argument.

    Raises:
        ConfigError: it is no function, or takes other arguments.
    """
    if function is None:
        return None
    try:
        inspect.signature(function).bind(None)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{what} is called with one argument, {argument}; given {describe(function)}: {error}"
        ) from error
    return function


class Observer:
    """Calls the functions that `learn` of trlX takes."""

    def __init__(self) -> None:
        self.log_fn: Callable[[dict[str, float]], Any] | None = None
        self.save_fn: Callable[[str], Any] | None = None
        self.eval_fn: Callable[[dict[str, float]], Any] | None = None

    @hookimpl
    def log_metrics(self, metrics: dict[str, float]) -> None:
        """Call ``log_fn`` with the metrics."""
        if self.log_fn is not None:
            self.log_fn(metrics)

    @hookimpl
    def on_save(self, path: Path) -> None:
        """Call ``save_fn`` with the directory of the checkpoint."""
        if self.save_fn is not None:
            self.save_fn(str(path))

    @hookimpl
    def on_evaluate(self, metrics: dict[str, float]) -> None:
        """Call ``eval_fn`` with the metrics of the evaluation."""
        if self.eval_fn is not None:
            self.eval_fn(metrics)


class OfTrlx:
    """The arguments and methods of trlX, before a trainer of trainkit in the order of inheritance.

    Args:
        config: the configuration of trlX.
        reward_fn: scores samples.
        metric_fn: measures samples at evaluations.
        logit_mask: bool [V, V] (row: the previous token), True = forbidden, unlike in trainkit.
        stop_sequences: strings that end a response.
        train_mode: without effect.
        sharding: how the model is divided among processes, ``train.sharding`` of trainkit; trlX left it to accelerate.
        **kwargs: arguments of trainkit's trainer, such as ``tokenizer``.
    """

    if TYPE_CHECKING:
        model_config: Any
        config: trainkit.TRLConfig[Any]
        tokenizer: Any

    def __init__(
        self,
        config: TRLConfig,
        reward_fn: Callable[..., Any] | None = None,
        metric_fn: Callable[..., Any] | None = None,
        logit_mask: Tensor | None = None,
        stop_sequences: list[str] | None = None,
        train_mode: bool = False,
        sharding: Any = None,
        **kwargs: Any,
    ) -> None:
        if not isinstance(config, TRLConfig):
            raise ConfigError(
                f"config should be a TRLConfig; given {describe(config)}; write TRLConfig.from_dict(config)"
            )
        translated, model = config.translated(metric_fn is not None), config.model.model_path
        if sharding is not None:
            translated = translated.evolve(train={"sharding": sharding})
        if hasattr(model, "model_type") and hasattr(model, "to_dict"):  # a transformers config: random weights
            translated = translated.evolve(
                model={"model_path": {**model.to_diff_dict(), "model_type": model.model_type}}
            )
        elif isinstance(model, str) and checkpoint(model):
            made = self.from_checkpoint(model, config.model.model_arch_type == "seq2seq")
            if made is not None:
                kwargs["model"] = made
                translated = translated.evolve(model={"model_path": None})
        elif not isinstance(model, str):
            kwargs["model"] = model
        if translated.train.resume is None and int(os.environ.get("WORLD_SIZE", 1)) == 1:
            translated = translated.evolve(train={"run_dir": free_directory(config.train.checkpoint_dir)})
        self._observer = Observer()
        callbacks = [self._observer, *kwargs.pop("callbacks", ())]
        super().__init__(  # type: ignore[call-arg]
            translated,
            reward_fn=taking(reward_fn, "reward_fn"),
            metric_fn=prefixed(metric_fn),
            logit_mask=forbidding(logit_mask),
            stop_sequences=stop_sequences or None,
            callbacks=callbacks,
            **kwargs,
        )
        found = "seq2seq" if self.model_config.is_encoder_decoder else "causal"
        if config.model.model_arch_type != found:
            log.warning(
                "model.model_arch_type is %r, and the model is trained as %r, which its own configuration says",
                config.model.model_arch_type,
                found,
            )

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Say which methods of a trainer of one's own trlX calls and trainkit does not, with those that it calls."""
        super().__init_subclass__(**kwargs)
        for path, name in framework("trlx").names.items():
            owner, _, method = path.rpartition(".")
            bases = {base.__name__ for base in cls.__mro__[1:]}
            if name.kind == "equivalent" and method in vars(cls) and owner.rpartition(".")[2] in bases:
                log.warning("%s.%s is not called; its place has %s", cls.__name__, method, name.text)

    @staticmethod
    def from_checkpoint(path: str, seq2seq: bool) -> Any:
        """Return the model that trlX has saved in a directory, as the argument ``model`` of trainkit's trainer.

        None: trainkit can load it from the directory.
        """
        base = base_from(path, checkpoint(path), AutoModelForSeq2SeqLM if seq2seq else AutoModelForCausalLM)
        return None if base is path else base

    @cached_property
    def model(self) -> Any:
        """The model that is trained, as trlX has it: with a value head or heads of ILQL around a language model."""
        return cast(Any, self).unwrapped.model

    def add_prompt_pipeline(self, pipeline: Any) -> None:
        """Set the prompts to train on: a `PromptPipeline`, or the prompts."""
        cast(Any, super()).add_prompt_pipeline(checked_prompts(getattr(pipeline, "given", pipeline)))

    def add_eval_pipeline(self, eval_pipeline: Any) -> None:
        """Set the prompts of evaluations: a `PromptPipeline`, or the prompts."""
        cast(Any, super()).add_eval_pipeline(checked_prompts(getattr(eval_pipeline, "given", eval_pipeline)))

    def generate(self, input_ids: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        """Return prompts and responses as token ids [B, T], padded with the padding id as `generate` of transformers.

        Args:
            input_ids: [B, P].
            attention_mask: [B, P], which of ``input_ids`` are real.
            **kwargs: arguments of `generate` of transformers, over those of the configuration.

        Raises:
            ConfigError: an argument has no counterpart in trainkit.
        """
        found = translate_sampling(kwargs)
        if found.refused:
            raise ConfigError("arguments without counterpart:\n  " + "\n  ".join(map(str, found.refused)))
        for remark in found.remarks:
            say_once(f"generate(): {remark}")
        rollouts = cast(Any, super()).generate(input_ids=input_ids, attention_mask=attention_mask, **found.config)
        sequences = rollouts.sequences
        real = sequences.attention_mask
        return sequences.input_ids.masked_fill(~real, self.tokenizer.pad_token_id)

    def generate_eval(self, input_ids: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        """Return what `generate` does, with the sampling settings of evaluations."""
        swept = self.config.rollout.eval_kwargs.items()
        settings = {name: value[0] if isinstance(value, list) else value for name, value in swept}
        return self.generate(input_ids, attention_mask, **{**settings, **kwargs})

    def compared(self, found: Mapping[str, float]) -> float | None:
        """Return the reward of an evaluation, or ``reward`` of the metric function; None if there is neither."""
        names = ("eval/reward", "eval/metrics/reward")
        values = [value for name in names for key, value in found.items() if key == name or key.startswith(f"{name}@")]
        if not values:
            say_once(
                "train.save_best has no effect: evaluations are compared by the reward function or by reward of "
                f"metric_fn, and have {', '.join(sorted(found))}"
            )
        return values[0] if values else None

    def load(self, directory: str | Path | None = None) -> None:
        """Restore a checkpoint, or the newest one under a directory, by default that of the run."""
        cast(Any, super()).load(directory or self.config.train.run_dir)

    def learn(
        self,
        log_fn: Callable[[dict[str, float]], Any] | None = None,
        save_fn: Callable[[str], Any] | None = None,
        eval_fn: Callable[[dict[str, float]], Any] | None = None,
    ) -> None:
        """Train to the end.

        Args:
            log_fn: called with the metrics whenever they are logged.
            save_fn: called with the directory of every checkpoint.
            eval_fn: called with the metrics of every evaluation.

        Raises:
            ConfigError: one of them takes other arguments.
        """
        self._observer.log_fn = taking_one(log_fn, "log_fn", "the metrics by their names")
        self._observer.save_fn = taking_one(save_fn, "save_fn", "the directory of the checkpoint")
        self._observer.eval_fn = taking_one(eval_fn, "eval_fn", "the metrics of the evaluation")
        cast(Any, super()).learn()


class Online(OfTrlx):
    """A trainer that learns from what it samples."""

    def make_experience(self, *arguments: Any, **named: Any) -> Any:
        """Do nothing: `learn` samples by itself. trainkit calls this method with its rollouts.

        The arguments of trlX are ``(num_rollouts, iter_count)``.
        """
        if named or all(isinstance(argument, int) for argument in arguments):
            say_once("make_experience() has no effect: learn() samples by itself, method.num_rollouts at a time")
            return None
        return cast(Any, super()).make_experience(*arguments)


class Offline(OfTrlx):
    """A trainer that learns from samples."""

    def make_experience(self, samples: Any, *arguments: Any, **named: Any) -> Any:
        """Set the samples to train on: ``(samples, seq_length)`` or ``(samples, rewards, max_length)``.

        Samples are cut to ``train.seq_length``. trainkit calls this method with one argument, its rows, and gets the
        batch of them.
        """
        if not arguments and not named:
            return cast(Any, super()).make_experience(samples)
        rewards = named.get("rewards", arguments[0] if arguments and not isinstance(arguments[0], int) else None)
        cast(Any, self).add_samples([self._turns(sample, rewards is not None) for sample in samples], rewards)
        return None

    def _turns(self, sample: Any, rewarded: bool) -> Any:
        """Return a sample as trainkit takes it: with rewards, a single string follows the beginning token."""
        if isinstance(sample, str):
            start = self.tokenizer.bos_token or self.tokenizer.eos_token
            return (start, sample) if rewarded else sample
        return tuple(sample) if isinstance(sample, Iterable) and not hasattr(sample, "keys") else sample


@register_trainer
class AccelerateRLTrainer(OfTrlx, trainkit.AccelerateRLTrainer[Any]):  # type: ignore[misc]
    """Base class of trainers of one's own, with the arguments of trlX."""
