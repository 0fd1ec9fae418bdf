"""Checks about looking on: evaluating, exporting and observing change nothing, and observers live with every run."""

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
from trainkit.testing.checks.tools import require_same_weights, weights
from trainkit.testing.checks.traces import (
    into_next_collection,
    metric_lines,
    printed,
    require_same_lines,
    seeded_generators,
)
from trainkit.testing.conformance import Bench, check, require

# ----------------------------------------------------------------------------------------- of a trainer: it is watched


class _Nosy:
    """An observer that does what it may at every step, and draws from the global generators."""

    @hookimpl
    def on_step(self, trainer: Any) -> None:
        """Generate, read, draw."""
        if trainer.eval_rows and hasattr(trainer, "generate"):
            trainer.generate([row["prompt"] for row in trainer.eval_rows[:2]])
        trainer.unwrapped.state_dict()
        torch.rand(7)
        np.random.rand(7)
        random.random()


@contextmanager
def _compared(bench: Bench, what: str) -> Iterator[list[Any]]:
    """Gives a list for trainers; in the end fails unless each has gone like one that did nothing beside training."""
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
    """Evaluating and saving leave weights and metrics of training bit-equal.

    An evaluation that uses up training's randomness, or leaves the model in another mode, makes a run depend on how
    often somebody looks.
    """
    changes = {**into_next_collection(bench), "train__eval_interval": 1, "train__save_interval": 1}
    with _compared(bench, "evaluating and saving") as runs:
        trainer = bench.trainer(**changes, train__save_best=bench.subject.online)
        if not bench.subject.online:
            trainer.eval_samples = list(trainer.pipeline.rows)
        trainer.learn()
        runs.append(trainer)
    first, second = trainer.evaluate(), trainer.evaluate()
    differ = [name for name in first if not name.startswith("eval/time") and repr(first[name]) != repr(second[name])]
    require(not differ, f"two evaluations one after the other give another {', '.join(differ[:3])}")


@check()
def observing_is_free(bench: Bench) -> None:
    """Observers that generate, and draw from the global generators, leave weights and metrics bit-equal.

    Whoever watches a run must see the one that nobody watched.
    """
    with _compared(bench, "observers") as runs, seeded_generators(3):
        changes = into_next_collection(bench)
        runs.append(bench.learnt(**changes, callbacks=[_Nosy()], train__trackers=["tensorboard"]))


@check()
def export(bench: Bench) -> None:
    """An export is the whole trained model: transformers loads it with equal logits, and training goes on from it.

    Keys that are prefixed, missing or left over load as random weights with a warning, or heads are lost (S-19).
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
        f"the model that get_arch makes of an export has not the heads that were trained, {', '.join(heads[:3])}; give "
        "its policy to trainkit.models.load_heads",
    )
    require_same_weights(here, there, "the trained weights and those that training goes on from")


def _same(one: Tensor | None, other: Tensor) -> bool:
    return one is not None and torch.equal(one, other)


def _require_equal_logits(trainer: Any, path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    kind = AutoModelForSeq2SeqLM if trainer.model_config.is_encoder_decoder else AutoModelForCausalLM
    load: Any = kind.from_pretrained  # whose return type does not know of the second value
    loaded, info = load(path, output_loading_info=True)
    for name in ("missing_keys", "unexpected_keys"):
        require(not info[name], f"transformers loads the export with {name}: {', '.join(sorted(info[name])[:3])}")
    inputs = tiny_input(loaded)
    with torch.no_grad():
        here, there = trainer.unwrapped.model(**inputs).logits, loaded(**inputs).logits
    require(torch.equal(here, there), "the export's logits are not those of the trained model")


# ------------------------------------------------------------------------------------------- of an observer: it watches


class _Told:
    """The names of hooks that were called, in order, and what they have changed of what they were told."""

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
    """What was logged."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep it."""
        self.said.append(record.getMessage())


@contextmanager
def _complaints() -> Iterator[list[str]]:
    """Within, the list is filled with what the core says of optional observers that fail, which stops no run."""
    kept, log = _Kept(), logging.getLogger(watch.__module__)
    log.addHandler(kept)
    try:
        yield kept.said
    finally:
        log.removeHandler(kept)


@check(kind="observer")
def observer_hooks_fit(bench: Bench) -> None:
    """Every hook exists, takes arguments that it has, and lives through being called.

    A misspelt hook is never called, and nobody misses it.
    """
    hook_manager([bench.subject.name], [])
    trainer = bench.trainer(**BUSY)
    told = _Told(trainer)
    with _complaints() as said:
        trainer.learn()
    require(not said, "; ".join(said))
    missed = {*bench.subject.hooks} - {*told.names} - {"make_sampler"}
    require(not missed, f"no run calls {', '.join(sorted(missed))}")


def _files(trainer: Any) -> dict[str, str]:
    """What the core's own trackers wrote of a run."""
    lines = metric_lines(trainer.run_dir)
    samples = trainer.run_dir / "samples.jsonl"
    return {"metrics": repr(lines), "samples": samples.read_text(encoding="utf-8") if samples.exists() else ""}


def _require_same_run(one: Any, other: Any, what: str) -> None:
    require_same_weights(weights(one), weights(other), f"the weights {what}")
    here, there = _files(one), _files(other)
    differ = [name for name in here if here[name] != there[name]]
    require(not differ, f"what is written of {' and '.join(differ)} differs {what}")


@check(kind="observer")
def observer_changes_nothing(bench: Bench) -> None:
    """A run has bit-equal weights, and logs the same numbers and samples, with the observer and without it.

    Hooks observe; whoever changes numbers does so where it shows, by a method or an argument.
    """
    watched, alone = bench.trainer(**BUSY), bench.trainer(**BUSY)
    alone.hooks.unregister(bench.subject.module)
    told = _Told(watched)
    for trainer in (watched, alone):
        trainer.learn()
    require(not told.changed, f"it changes what others are told: {', '.join(dict.fromkeys(told.changed))}")
    _require_same_run(watched, alone, "with the observer and without it")


@check(kind="observer")
def observer_draws_nothing(bench: Bench) -> None:
    """The global generators of torch, numpy and Python are as they were before the run.

    The user's program draws from them too, and would go another way because somebody watched a run.
    """
    trainer = bench.trainer(**BUSY)
    with seeded_generators(5) as touched:
        trainer.learn()
        require(not touched(), f"the observer draws from the global generators of {', '.join(touched())}")


@check(kind="observer")
def observer_ends_with_the_run(bench: Bench) -> None:
    """A run that an error stops ends for the observer too, and the run can be resumed from where it was saved.

    Files that stay open, or half written, cost the part of the run that was there.
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
        require("the fourth step fails" in str(error), f"the run's own error is lost; it ends by {error}")
    require(told.names[-1] == "on_train_end", f"the last hook of a run that fails is {told.names[-1]}")
    resumed = bench.learnt(place, **BUSY, train__resume="auto")
    _require_same_run(straight, resumed, "between a run that was resumed after an error and one that never stopped")


@check(kind="observer")
def observer_resumes(bench: Bench) -> None:
    """A finished part of a run can be gone on with, in the same process and directory.

    An observer that takes a directory with files for another run's, or writes over them, breaks every restart.
    """
    straight = bench.learnt(**BUSY)
    place = bench.place()
    bench.learnt(place, **BUSY, train__total_steps=4)
    resumed = bench.learnt(place, **BUSY, train__resume="auto")
    require_same_weights(weights(straight), weights(resumed), "the weights of a resumed run and of one in one go")
    lines = [metric_lines(each.run_dir, training=True) for each in (straight, resumed)]
    require_same_lines(lines[0], lines[1], "a resumed run and one in one go")


@check(kind="observer")
def observer_runs_twice(bench: Bench) -> None:
    """Two runs in one process are two: the second leaves in its directory what the first left in its own.

    What a module keeps from one run to the next, an open file above all, gets the second run's numbers too.
    """
    first, second = bench.learnt(**BUSY), bench.learnt(**BUSY)
    _require_same_run(first, second, "between two runs in one process")
    left = [sum(path.is_file() for path in each.run_dir.rglob("*")) for each in (first, second)]
    require(left[0] == left[1], f"the first of two runs leaves {left[0]} files in its directory, the second {left[1]}")


@check(kind="observer")
def observer_on_other_processes(bench: Bench) -> None:
    """It lives through a run in which it is told no numbers, as on all processes but the main one.

    There `log_metrics` is never called, and what it should have opened is not there at the end.
    """
    trainer = bench.trainer(**BUSY)
    trainer.hooks.hook.log_metrics = trainer.hooks.subset_hook_caller("log_metrics", [bench.subject.module])
    trainer.learn()
    alone = bench.trainer(**BUSY)
    alone.hooks.unregister(bench.subject.module)
    alone.learn()
    _require_same_run(trainer, alone, "with an observer that is told no numbers and without it")
