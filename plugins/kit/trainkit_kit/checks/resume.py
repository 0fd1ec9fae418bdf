"""Checks of resuming: nothing that training depends on may be lost."""

from __future__ import annotations

import inspect
import shutil
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

from trainkit.data import Pipeline
from trainkit_kit.checking import check
from trainkit_kit.checks.fields import variants
from trainkit_kit.checks.tools import require_same_weights, weights
from trainkit_kit.checks.traces import (
    into_next_collection,
    metric_lines,
    optimizer_memory,
    printed,
    require_same_lines,
    same_tensors,
    with_dropout,
)
from trainkit_kit.failures import require
from trainkit_kit.subjects import Bench


@check()
def resume_every_step(bench: Bench) -> None:
    """Check that a run resumed after any of its steps ends bit-equal to one that never stopped: weights, state, log.

    A restart that loses Adam's moments, a generator's state, an adaptive coefficient, or the position in the epoch or
    in the schedule changes the rest of the training, and nothing reports it.

    Causes: an attribute that is not in `state_dict` or `remembers`; a random generator of one's own; a counter that
    begins again.
    """
    changes = {**into_next_collection(bench), **with_dropout(bench), "scheduler__name": "linear"}
    straight = bench.learnt(**changes, train__save_interval=1, train__keep_checkpoints=100)
    last = straight.progress.step
    asked = changes["train.total_steps"]
    require(last == asked, f"a run of {asked} steps ends after {last}")
    for at in range(1, last):
        place = bench.place()
        saved = Path("checkpoints") / f"step_{at:08d}"
        shutil.copytree(straight.run_dir / saved, place / saved)
        resumed = bench.learnt(place, **changes, train__resume="auto")
        _require_same_end(straight, resumed, f"a run resumed after step {at} and one that never stopped", after=at)


def _require_same_end(straight: Any, resumed: Any, what: str, after: int) -> None:
    here, there = (metric_lines(each.run_dir, after=after) for each in (straight, resumed))
    require_same_lines(here, there, what)
    require_same_weights(weights(straight), weights(resumed), f"the weights of {what}")
    alike = same_tensors(optimizer_memory(straight), optimizer_memory(resumed))
    require(alike, f"the state of the optimizer differs between {what}")
    require(printed(straight.state_dict()) == printed(resumed.state_dict()), f"state_dict() differs between {what}")
    ends = [{k: v for k, v in asdict(each.progress).items() if k != "seconds"} for each in (straight, resumed)]
    require(ends[0] == ends[1], f"{what} end at {ends[0]} and {ends[1]}")


@check()
def state_is_complete(bench: Bench) -> None:
    """Check that `state_dict` survives a checkpoint unchanged and holds every attribute that a run changes.

    A controller's coefficient, a running standard deviation or a target that is not saved is reset by every restart.
    Comparing resumed runs reveals this only for state that has changed before the restart.

    Causes: an attribute that is assigned in `prepare_experience` or `after_step` and not saved; a `load_state_dict`
    that forgets a key.
    """
    changes = {**into_next_collection(bench), "optimizer.lr": 0.01}
    for settings in variants(bench):
        trainer = _with_few_prompts(bench.trainer(**{**changes, **settings}))
        before = _attributes(trainer)
        trainer.learn()
        path = trainer.save(bench.place())
        again = _with_few_prompts(bench.trainer(**{**changes, **settings}))
        again.load(path)
        under = f" under {settings}" if settings else ""
        alike = printed(trainer.state_dict()) == printed(again.state_dict())
        require(alike, f"state_dict() gives {trainer.state_dict()!r:.200} before a checkpoint and "
                       f"{again.state_dict()!r:.200} after{under}")  # fmt: skip
        here, there = _attributes(trainer), _attributes(again)
        lost = [name for name in here if before.get(name) != here[name] != there.get(name)]
        require(
            not lost,
            f"the attribute {' and '.join(map(repr, lost))} of the trainer changes in a run and is not in its "
            f"state_dict(){under}: add it to `remembers`, or implement state_dict and load_state_dict. What is not "
            "needed after a collection belongs in the batch",
        )


def _with_few_prompts(trainer: Any) -> Any:
    """Give a trainer that samples two prompts only, so that what it remembers of each grows; return the trainer."""
    if trainer.online:
        trainer.add_prompt_pipeline(Pipeline(trainer.pipeline.rows[:2], seed=trainer.config.train.seed))
    return trainer


def _attributes(trainer: Any) -> dict[str, Any]:
    """Return the trainer's attributes as text, without those of the loop and without cached properties."""
    others = _not_its_own(trainer)
    return {name: printed(value) for name, value in vars(trainer).items() if name not in others}


def _not_its_own(trainer: Any) -> set[str]:
    from trainkit_kit.reinforce import attributes_of_the_loop

    cached = inspect.getmembers_static(type(trainer), lambda member: isinstance(member, cached_property))
    return {*attributes_of_the_loop(), *(name for name, _ in cached)}
