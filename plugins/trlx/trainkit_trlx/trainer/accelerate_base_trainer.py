"""What the trainers of trlX have in common."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Iterable
from functools import cached_property, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

import trainkit
from trainkit import hookimpl
from trainkit.errors import ConfigError
from trainkit.migrating import framework, translate_sampling
from trainkit.runs import free_directory
from trainkit_trlx.data.configs import TRLConfig, say_once
from trainkit_trlx.models.modeling_base import base_from, checkpoint
from trainkit_trlx.trainer import register_trainer

if TYPE_CHECKING:
    from torch import Tensor


log = logging.getLogger(__name__)


def taking(function: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """Return a function that is called with those of its arguments alone that ``function`` takes.

    Functions for trlX need not take the tokenizer or further columns: it did not pass them everywhere.
    """
    if function is None:
        return None
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return function

    @wraps(function)
    def called(**given: Any) -> Any:
        return function(**{name: value for name, value in given.items() if name in parameters})

    return called


def prefixed(metric_fn: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """Return a metric function whose metrics have ``metrics/`` before their names, as trlX logs them."""
    if metric_fn is None:
        return None
    called = taking(metric_fn)
    assert called is not None
    return lambda **given: {f"metrics/{name}": values for name, values in called(**given).items()}


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
        translated, model = config.translated(), config.model.model_path
        if sharding is not None:
            translated = translated.evolve(train={"sharding": sharding})
        if hasattr(model, "model_type") and hasattr(model, "to_dict"):  # a transformers config: random weights
            translated = translated.evolve(
                model={"model_path": {**model.to_diff_dict(), "model_type": model.model_type}}
            )
        elif isinstance(model, str) and checkpoint(model):
            kwargs["model"] = self.from_checkpoint(model, config.model.model_arch_type == "seq2seq")
            translated = translated.evolve(model={"model_path": None})
        elif not isinstance(model, str):
            kwargs["model"] = model
        if translated.train.resume is None and int(os.environ.get("WORLD_SIZE", 1)) == 1:
            translated = translated.evolve(train={"run_dir": free_directory(config.train.checkpoint_dir)})
        self._observer = Observer()
        callbacks = [self._observer, *kwargs.pop("callbacks", ())]
        super().__init__(  # type: ignore[call-arg]
            translated,
            reward_fn=taking(reward_fn),
            metric_fn=prefixed(metric_fn),
            logit_mask=None if logit_mask is None else ~logit_mask.bool(),
            stop_sequences=stop_sequences or None,
            callbacks=callbacks,
            **kwargs,
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
        """Return the model that trlX has saved in a directory, as the argument ``model`` of trainkit's trainer."""
        auto = AutoModelForSeq2SeqLM if seq2seq else AutoModelForCausalLM
        base = base_from(path, checkpoint(path), auto)
        return base if base is not path else auto.from_pretrained(path)

    @cached_property
    def model(self) -> Any:
        """The model that is trained, as trlX has it: with a value head or heads of ILQL around a language model."""
        return cast(Any, self).unwrapped.model

    def add_prompt_pipeline(self, pipeline: Any) -> None:
        """Set the prompts to train on: a `PromptPipeline`, or the prompts."""
        cast(Any, super()).add_prompt_pipeline(getattr(pipeline, "given", pipeline))

    def add_eval_pipeline(self, eval_pipeline: Any) -> None:
        """Set the prompts of evaluations: a `PromptPipeline`, or the prompts."""
        cast(Any, super()).add_eval_pipeline(getattr(eval_pipeline, "given", eval_pipeline))

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
        """
        self._observer.log_fn, self._observer.save_fn, self._observer.eval_fn = log_fn, save_fn, eval_fn
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
