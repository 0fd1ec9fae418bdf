"""Checks of evaluation, export and observers: they change nothing, and observers work in every kind of run."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainkit.errors import RewardError
from trainkit.models.trunk import tiny_input
from trainkit.plugins import hook_manager, hookimpl
from trainkit.plugins.guard import watch
from trainkit_kit.checking import check
from trainkit_kit.checks.tools import require_same_weights, weights
from trainkit_kit.checks.traces import (
    into_next_collection,
    metric_lines,
    printed,
    require_resumes,
    require_same_lines,
    seeded_generators,
)
from trainkit_kit.failures import require
from trainkit_kit.subjects import Bench

# ------------------------------------------------------------------------- of a trainer: being evaluated and observed


class _Nosy:
    """An observer that generates and reads the weights at every step, and draws from the global generators."""

    @hookimpl
    def on_step(self, trainer: Any) -> None:
        """Generate responses, read the weights, and draw from the global generators."""
        if trainer.eval_rows and hasattr(trainer, "generate"):
            trainer.generate([row["prompt"] for row in trainer.eval_rows[:2]])
        trainer.unwrapped.state_dict()
        torch.rand(7)
        np.random.rand(7)
        random.random()


@contextmanager
def _compared(bench: Bench, what: str) -> Iterator[list[Any]]:
    """Yield a list for trainers; fail at the end if their runs differ from a run that only trained."""
    changes = into_next_collection(bench)
    plain = bench.learnt(**changes)
    others: list[Any] = []
    yield others
    for other in others:
        require_same_weights(weights(plain), weights(other), f"the weights with and without {what}")
        here, there = (metric_lines(each.run_dir, training=True) for each in (plain, other))
        require_same_lines(here, there, f"runs with and without {what}")


@check()
def evaluation_is_free(bench: Bench) -> None:
    """Check that evaluating and saving leave the weights and metrics of training bit-equal.

    If an evaluation draws training's random numbers, or leaves the model in another mode, a run depends on how often it
    is evaluated.

    Causes: random numbers from a generator that training shares; a model left in evaluation mode; statistics that are
    updated in an evaluation.
    """
    changes = {**into_next_collection(bench), "train__eval_interval": 1, "train__save_interval": 1}
    with _compared(bench, "evaluating and saving") as runs:
        changes |= {"train__save_best": bench.subject.rewarded, "train__verify_export": True}
        trainer = bench.trainer(**changes)
        if not bench.subject.online:
            trainer.eval_samples = list(trainer.pipeline.rows)
        trainer.learn()
        runs.append(trainer)
    first, second = trainer.evaluate(), trainer.evaluate()
    differ = [name for name in first if not name.startswith("eval/time") and repr(first[name]) != repr(second[name])]
    require(not differ, f"two evaluations one after the other differ in {', '.join(differ[:3])}")


@check()
def observing_is_free(bench: Bench) -> None:
    """Check that observers that generate, and draw from the global generators, leave weights and metrics bit-equal.

    Observing a run must not change its results.

    Causes: random numbers from a global generator; state that `generate` changes.
    """
    with _compared(bench, "observers") as runs, seeded_generators(3):
        changes = into_next_collection(bench)
        runs.append(bench.learnt(**changes, callbacks=[_Nosy()], train__trackers=["tensorboard"]))


@check()
def export(bench: Bench) -> None:
    """Check that an export is the whole trained model: transformers gives equal logits, and training starts from it.

    If keys are prefixed, missing or unexpected, random weights are used with only a warning, or heads are lost.

    Causes: names of parameters with the prefix of a wrapper; heads that are not written, or not loaded by `get_arch`.
    """
    trainer = bench.learnt()
    path = trainer.save_pretrained(bench.place())
    if bench.subject.language:
        _require_equal_logits(trainer, path)
    again = bench.trainer(model__model_path=str(path))
    here, there = weights(trainer), weights(again)
    heads = [name for name, x in here.items() if not (name.startswith("model.") or _same(there.get(name), x))]
    require(
        not (bench.subject.language and heads),
        f"the model that get_arch makes from an export has not the trained heads {', '.join(heads[:3])}; give its "
        "policy to trainkit.models.load_heads",
    )
    require_same_weights(here, there, "the trained weights and those loaded from the export")


def _same(one: Tensor | None, other: Tensor) -> bool:
    return one is not None and torch.equal(one, other)


def _require_equal_logits(trainer: Any, path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    kind = AutoModelForSeq2SeqLM if trainer.model_config.is_encoder_decoder else AutoModelForCausalLM
    load: Any = kind.from_pretrained  # its declared return type lacks the second value
    loaded, info = load(path, output_loading_info=True)
    for name in ("missing_keys", "unexpected_keys"):
        require(not info[name], f"transformers loads the export with {name}: {', '.join(sorted(info[name])[:3])}")
    model = trainer.unwrapped.model
    inputs = tiny_input(loaded.to(model.device))
    with torch.no_grad():
        here, there = model(**inputs).logits, loaded(**inputs).logits
    require(torch.equal(here, there), "the logits of the export differ from those of the trained model")


# -------------------------------------------------------------------------------------- of an observer: what it does


class _Told:
    """The names of the hooks that were called, in order, and the arguments that they have changed."""

    def __init__(self, trainer: Any) -> None:
        self.names: list[str] = []
        self.changed: list[str] = []
        trainer.hooks.add_hookcall_monitoring(self._before, self._after)

    def _before(self, hook_name: str, hook_impls: Any, kwargs: dict[str, Any]) -> None:
        self.names.append(hook_name)
        self._was = self._plain(kwargs)

    def _after(self, outcome: Any, hook_name: str, hook_impls: Any, kwargs: dict[str, Any]) -> None:
        now = self._plain(kwargs)
        self.changed += [f"{name} of {hook_name}" for name in now if now[name] != self._was.get(name)]

    def _plain(self, kwargs: dict[str, Any]) -> dict[str, str]:
        return {name: printed(value) for name, value in kwargs.items() if name != "trainer"}


BUSY: dict[str, Any] = {"train__eval_interval": 2, "train__save_interval": 2, "train__keep_checkpoints": 10}
"""A run in which every hook is called."""


class _Kept(logging.Handler):
    """A handler that keeps the logged messages."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the message."""
        self.said.append(record.getMessage())


@contextmanager
def _complaints() -> Iterator[list[str]]:
    """Yield a list that is filled with the warnings about optional observers that fail, which stop no run."""
    kept, log = _Kept(), logging.getLogger(watch.__module__)
    log.addHandler(kept)
    try:
        yield kept.said
    finally:
        log.removeHandler(kept)


@check(kind="observer")
def observer_hooks_fit(bench: Bench) -> None:
    """Check that every hook exists, takes valid arguments, is called in a run, and does not fail.

    A misspelt hook is never called, and nothing reports it.
    """
    hook_manager([bench.subject.name], [])
    trainer = bench.trainer(**BUSY)
    told = _Told(trainer)
    with _complaints() as said:
        trainer.learn()
    require(not said, "; ".join(said))
    missed = {*bench.subject.hooks} - {*told.names} - {"make_sampler"}
    require(not missed, f"these hooks are not called in a run: {', '.join(sorted(missed))}")


def _files(trainer: Any) -> dict[str, str]:
    """Return what trainkit's own trackers wrote about a run."""
    lines = metric_lines(trainer.run_dir)
    samples = trainer.run_dir / "samples.jsonl"
    return {"metrics": repr(lines), "samples": samples.read_text(encoding="utf-8") if samples.exists() else ""}


def _require_same_run(one: Any, other: Any, what: str) -> None:
    require_same_weights(weights(one), weights(other), f"the weights {what}")
    here, there = _files(one), _files(other)
    differ = [name for name in here if here[name] != there[name]]
    require(not differ, f"the logged {' and '.join(differ)} differ {what}")


@check(kind="observer")
def observer_changes_nothing(bench: Bench) -> None:
    """Check that a run has bit-equal weights, and logs the same numbers and samples, with and without the observer.

    Hooks only observe. Code that changes numbers belongs where it is visible: in a method or an argument.
    """
    watched, alone = bench.trainer(**BUSY), bench.trainer(**BUSY)
    alone.hooks.unregister(bench.subject.hooks_in(alone))
    told = _Told(watched)
    for trainer in (watched, alone):
        trainer.learn()
    require(
        not told.changed, f"it changes the arguments that other hooks get: {', '.join(dict.fromkeys(told.changed))}"
    )
    _require_same_run(watched, alone, "with the observer and without it")


@check(kind="observer")
def observer_draws_nothing(bench: Bench) -> None:
    """Check that a run with the observer leaves the global generators of torch, numpy and Python as they were.

    The user's program draws from them, too, and would give other results only because a run was observed.
    """
    trainer = bench.trainer(**BUSY)
    with seeded_generators(5) as touched:
        trainer.learn()
        require(not touched(), f"the observer draws from the global generators of {', '.join(touched())}")


@check(kind="observer")
def observer_ends_with_the_run(bench: Bench) -> None:
    """Check that if an error stops a run, the observer ends, too, and the run resumes from its checkpoint.

    Files that stay open, or that are half written, lose what was recorded of the run.
    """
    straight = bench.learnt(**BUSY)
    place = bench.place()
    broken = bench.trainer(place, **BUSY)
    told, honest = _Told(broken), broken.loss

    def failing(batch: Any) -> Any:
        if broken.progress.step == 3:
            raise RewardError("the fourth step fails")
        return honest(batch)

    broken.loss = failing
    try:
        broken.learn()
    except RewardError as error:
        require("the fourth step fails" in str(error), f"the run's own error is lost; the run ends with {error}")
    require(
        told.names[-1] == "on_train_end",
        f"the last hook of a run that fails is {told.names[-1]}, and should be on_train_end",
    )
    resumed = bench.learnt(place, **BUSY, train__resume="auto")
    _require_same_run(straight, resumed, "between a run that was resumed after an error and one that never stopped")


@check(kind="observer")
def observer_resumes(bench: Bench) -> None:
    """Check that a run can be resumed in the same process and directory.

    An observer that fails on the files of the run's earlier part, or overwrites them, breaks every restart.
    """
    require_resumes(bench, 4, **BUSY)


@check(kind="observer")
def observer_runs_twice(bench: Bench) -> None:
    """Check that the second of two runs in one process leaves in its directory what the first left in its own.

    What a module keeps from one run to the next, e.g. an open file, also gets the numbers of the second run.
    """
    first, second = bench.learnt(**BUSY), bench.learnt(**BUSY)
    _require_same_run(first, second, "between two runs in one process")
    left = [sum(path.is_file() for path in each.run_dir.rglob("*")) for each in (first, second)]
    require(left[0] == left[1], f"the first of two runs leaves {left[0]} files in its directory, the second {left[1]}")


@check(kind="observer", where=lambda subject: not subject.tracker)
def observer_on_other_processes(bench: Bench) -> None:
    """Check that the observer works in a run without `log_metrics`, as on all processes but the main one.

    What `log_metrics` would have opened there does not exist at the end of the run.
    """
    trainer = bench.trainer(**BUSY)
    trainer.hooks.hook.log_metrics = trainer.hooks.subset_hook_caller("log_metrics", [bench.subject.hooks_in(trainer)])
    trainer.learn()
    alone = bench.trainer(**BUSY)
    alone.hooks.unregister(bench.subject.hooks_in(alone))
    alone.learn()
    _require_same_run(trainer, alone, "with an observer that gets no metrics and without it")
