"""Checks of shardings: two processes that divide a model train as two that do not."""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator
from pydantic import TypeAdapter

from trainkit.config import ShardingEntry
from trainkit.errors import ConfigError
from trainkit.plugins import available_trainers, get_sharding
from trainkit.testing.trainers import tiny_trainer
from trainkit_kit.checking import check
from trainkit_kit.checks.tools import require_close, require_same_weights
from trainkit_kit.failures import require
from trainkit_kit.launching import launch
from trainkit_kit.subjects import Bench, Subject

SAME = 1e-5
"""How much weights may differ after six steps."""
LIMIT, PER_CASE = 120.0, 20.0
"""Seconds within which two processes make a few runs, also if what divides the model takes long to import; and how many
more for each algorithm."""


def _accepted(bench: Bench, *, online: bool = False) -> list[str]:
    """Return the installed algorithms that the sharding accepts.

    Raises:
        CheckError: there is none; says what it answers for the first one.
    """
    entry: Any = TypeAdapter(ShardingEntry).validate_python(bench.subject.entry)
    made = get_sharding(bench.subject.name).made(Accelerator(), None if isinstance(entry, str) else entry)
    found, told = [], []
    for name in available_trainers():
        if online and not Subject(name).rewarded:
            continue
        try:
            made.check(tiny_trainer(name, bench.place()).config)
            found.append(name)
        except ConfigError as error:
            told.append(str(error))
    require(found, f"it accepts no installed algorithm: {told[0] if told else 'none is installed'}")
    return found


def _asked(bench: Bench, what: str, method: str) -> list[dict[str, Any]]:
    given = {"what": what, "sharding": bench.subject.entry, "method": method}
    return launch(bench.subject.name, bench.place(), given, LIMIT)


@check(kind="sharding")
def trains_as_replicas(bench: Bench) -> None:
    """Check that every algorithm it accepts ends as with replicated processes, up to 1e-5 after six steps.

    Gradients are clipped and accumulated over unequal micro-batches, and `judge` skips a step. An optimizer that is
    made before the model is divided trains copies. A norm of one process's part clips too little. Gradients of a
    skipped step that stay are added to those of the next.
    """
    cases: dict[str, Any] = {method: (method, {}) for method in _accepted(bench)}
    given = {"what": "ends", "sharding": bench.subject.entry, "cases": cases}
    said = launch(bench.subject.name, bench.place(), given, LIMIT + len(cases) * PER_CASE)
    for method in cases:
        one, other = (each[method]["divided"] for each in said)
        require_same_weights(one, other, f"{method}: weights of two processes")
        for name, tensor in said[0][method]["replicated"].items():
            what = f"{method}: {name} of processes that hold the whole model and of those that divide it"
            require_close(tensor.float(), one[name].float(), what, rtol=0.0, atol=SAME)


@check(kind="sharding")
def fails_together(bench: Bench) -> None:
    """Check that a loss of one process that is not finite stops all, before weights or the optimizer change.

    A process that goes on alone waits for the others for ever, and a step with the gradient of a part of them is lost.
    """
    said = _asked(bench, "fails", _accepted(bench)[0])
    require(all(each["error"] for each in said), "a loss that is not finite on one process does not stop all")
    for each in said:
        require_same_weights(each["before"]["weights"], each["after"]["weights"], "weights before and after that step")
    _require_same_state(said[0]["before"], said[0]["after"], "the optimizer's state before and after that step")


@check(kind="sharding")
def checkpoints_are_whole(bench: Bench) -> None:
    """Check that checkpoints are those of replicated processes: each can be resumed with the other, bit for bit.

    A checkpoint in parts can only be read by as many processes. One without the optimizer's state goes on with another.
    """
    said = _asked(bench, "resumes", _accepted(bench)[0])
    for then, found in said[0].items():
        where = f"a checkpoint that was read by {then} processes"
        require_same_weights(found["written"]["weights"], found["read"]["weights"], f"weights of {where}")
        _require_same_state(found["written"], found["read"], f"the optimizer's state of {where}")
    one, other = (said[0][then]["end"]["weights"] for then in ("replicated", "divided"))
    for name in one:
        what = f"{name}, three steps after a checkpoint of the other kind,"
        require_close(one[name].float(), other[name].float(), what, rtol=0.0, atol=SAME)


def _require_same_state(one: dict[str, Any], other: dict[str, Any], what: str) -> None:
    states = one["optimizer"], other["optimizer"]
    require(states[0] and states[0].keys() == states[1].keys(), f"{what} is not that of the same parameters")
    for index, values in states[0].items():
        require_same_weights(values, states[1][index], what)


@check(kind="sharding")
def samples_alone(bench: Bench) -> None:
    """Check that processes which sample unequally often draw what replicated processes draw.

    Responses end at different lengths, and environments take different numbers of turns. Processes that gather weights
    for every forward pass then wait for each other for ever.
    """
    said = _asked(bench, "draws", _accepted(bench, online=True)[0])
    for each in said:
        for one, other in zip(each["replicated"], each["divided"], strict=True):
            require(one.equal(other), "the same seeds sample other ids than with replicated processes")
