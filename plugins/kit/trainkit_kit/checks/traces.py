"""What runs log, keep and draw, in forms in which two runs can be compared."""

from __future__ import annotations

import hashlib
import json
import random
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from trainkit.plugins import hookimpl
from trainkit_kit.checks.tools import require_same_weights, weights
from trainkit_kit.failures import require
from trainkit_kit.subjects import Bench

LOOPS_OWN = ("train/", "eval/", "loss/total", "time/collect", "time/update")
"""Prefixes of the names of the loop's own metrics."""
CLOCK = ("time/", "eval/time")
"""Prefixes of the names of metrics that depend on the clock."""


def timeless(metrics: dict[str, Any]) -> dict[str, Any]:
    """Return metrics without those that depend on the clock."""
    return {name: value for name, value in metrics.items() if not name.startswith(CLOCK)}


def metric_lines(run_dir: Path, *, training: bool = False, after: int = 0) -> list[dict[str, Any]]:
    """Return what a run logged after step ``after``, without times; with ``training``, without evaluations."""
    path = run_dir / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    kept = [timeless(line) for line in lines if line["step"] > after]
    return [line for line in kept if not (training and any(name.startswith("eval/") for name in line))]


def require_same_lines(one: list[dict[str, Any]], other: list[dict[str, Any]], what: str) -> None:
    """Fail unless two logs are bit-equal; ``what`` names the two runs."""
    require(len(one) == len(other), f"{what} have {len(one)} and {len(other)} lines of metrics")
    for here, there in zip(one, other, strict=True):
        differ = sorted(name for name in {*here, *there} if repr(here.get(name)) != repr(there.get(name)))
        require(not differ, f"{what} differ at step {here['step']} in {', '.join(differ[:3])}")


def require_resumes(bench: Bench, after: int, **changes: Any) -> None:
    """Fail unless a run that is stopped and resumed after a step ends bit-equal to one that never stopped."""
    straight, place = bench.learnt(**changes), bench.place()
    bench.learnt(place, **changes, train__total_steps=after)
    resumed = bench.learnt(place, **changes, train__resume="auto")
    require_same_weights(weights(straight), weights(resumed), "the weights of a resumed and of an uninterrupted run")
    lines = [metric_lines(each.run_dir, training=True) for each in (straight, resumed)]
    require_same_lines(lines[0], lines[1], "a resumed and an uninterrupted run")


def optimizer_memory(trainer: Any) -> list[Tensor]:
    """Return a copy of the optimizer's state: Adam's step counts and moments."""
    kept = (value for state in trainer.optimizer.state.values() for value in state.values())
    return [value.detach().clone() for value in kept if isinstance(value, Tensor)]


def same_tensors(one: Iterable[Tensor], other: Iterable[Tensor]) -> bool:
    """Return whether two lists of tensors are bit-equal, NaN being equal to NaN."""
    here, there = list(one), list(other)
    return len(here) == len(there) and all(
        a.dtype == b.dtype and torch.equal(a.nan_to_num(123.0), b.nan_to_num(123.0)) and _same_nan(a, b)
        for a, b in zip(here, there, strict=True)
    )


def _same_nan(one: Tensor, other: Tensor) -> bool:
    return bool(torch.equal(one.isnan(), other.isnan())) if one.is_floating_point() else True


# -------------------------------------------------------------------------------------------------- global generators


@contextmanager
def seeded_generators(seed: int) -> Iterator[Callable[[], list[str]]]:
    """Seed the global generators of torch, numpy and Python within the context, and restore them afterwards.

    Yields a function that returns the names of those that have been drawn from or seeded again.
    """
    before = (torch.get_rng_state(), np.random.get_state(), random.getstate())
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    start = _states()
    try:
        yield lambda: [name for name, state in _states().items() if state != start[name]]
    finally:
        torch.set_rng_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])


def _states() -> dict[str, Any]:
    return {
        "torch": torch.get_rng_state().tolist(),
        "numpy.random": repr(np.random.get_state(legacy=False)),
        "random": random.getstate(),
    }


# -------------------------------------------------------------------------------------------------- values as text

_NAMED = (type, FunctionType, BuiltinFunctionType, MethodType, ModuleType)


def printed(value: Any) -> str:
    """Return a value as text, so that equal states have equal texts, whatever objects they are made of."""
    return "".join(_print(value, []))


def _print(value: Any, above: list[int]) -> Iterator[str]:
    if value is None or isinstance(value, bool | int | float | str | bytes):
        yield f"{value!r},"
    elif isinstance(value, _NAMED):
        yield f"{getattr(value, '__qualname__', value.__name__)},"
    elif id(value) in above or len(above) > 20:
        yield "...,"
    else:
        yield f"{type(value).__name__}("
        for part in _parts(value):
            yield from _print(part, [*above, id(value)])
        yield "),"


def _parts(value: Any) -> list[Any]:
    """Return the parts of an object's state."""
    if isinstance(value, Tensor):
        return [str(value.dtype), list(value.shape), value.detach().cpu().flatten().tolist()]
    if isinstance(value, np.ndarray):
        return [str(value.dtype), value.tolist()]
    if isinstance(value, torch.Generator):
        return [value.get_state()]
    if isinstance(value, np.random.Generator):
        return [value.bit_generator.state]
    if isinstance(value, random.Random):
        return [value.getstate()]
    if isinstance(value, nn.Module):
        return [value.state_dict()]
    if isinstance(value, Mapping):
        return [part for item in value.items() for part in item]
    if isinstance(value, set | frozenset):
        return sorted(map(printed, value))
    if isinstance(value, list | tuple | deque):
        return list(value)
    own = dict(getattr(value, "__dict__", {}))
    slots = [name for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ())]
    return [part for item in own.items() for part in item] + [getattr(value, name, None) for name in slots]


# ----------------------------------------------------------------------------------------------- the course of a run


class _EnoughError(Exception):
    """A difference has been found, and the run can end."""


class Course:
    """What a run does and ends with, as notes in order, without what depends on the clock.

    Args:
        trainer: a trainer before its run.
        other: the course of another run; this run ends as soon as its course differs.
    """

    def __init__(self, trainer: Any, other: Course | None = None) -> None:
        self.trainer, self.other, self.notes = trainer, other, list[str]()
        self.losses = 0

    @property
    def differs(self) -> bool:
        """Whether the course differs from the other one, as far as it goes."""
        return self.other is not None and self.notes != self.other.notes[: len(self.notes)]

    def learn(self) -> Self:
        """Run the trainer and note what it does."""
        trainer, loss, reward = self.trainer, self.trainer.loss, self.trainer.reward_fn

        def counted(batch: Any) -> Any:
            if self.differs:
                raise _EnoughError
            self.losses += 1
            return loss(batch)

        def watched(**given: Any) -> Any:
            self.notes.append(f"scored in the main thread: {threading.current_thread() is threading.main_thread()}")
            return reward(**given)

        trainer.loss = counted
        trainer.reward_fn = reward and watched
        trainer.hooks.register(self)
        try:
            trainer.learn()
        except _EnoughError:
            return self
        digest = hashlib.sha256()
        for name, tensor in trainer.unwrapped.state_dict().items():
            digest.update(f"{name} {tensor.dtype}".encode() + tensor.detach().cpu().float().numpy().tobytes())
        self.notes.append(digest.hexdigest())
        return self

    @hookimpl
    def on_experience(self, experience: Any, rollouts: list[Any]) -> None:
        """Note what was sampled."""
        self.notes.append(f"{len(experience)} rows from {[output for part in rollouts for output in part.outputs]}")

    @hookimpl
    def log_metrics(self, step: int, metrics: dict[str, float]) -> None:
        """Note the loop's own metrics, and how often the loss was computed; other metrics have no effect."""
        felt = {name: value for name, value in timeless(metrics).items() if name.startswith(LOOPS_OWN)}
        self.notes.append(json.dumps({"step": step, "losses": self.losses, **felt}))

    @hookimpl
    def on_evaluate(self, samples: list[dict[str, Any]]) -> None:
        """Note what an evaluation sampled."""
        self.notes.append(repr([{k: v for k, v in each.items() if not isinstance(v, Tensor)} for each in samples]))


# ------------------------------------------------------------------------------------------------- kinds of tiny runs


def with_dropout(bench: Bench) -> dict[str, Any]:
    """Return changes that enable dropout in the tiny model, by whatever fields its config has for it."""
    if not bench.subject.language:
        return {}
    from transformers import AutoConfig

    fields = dict(bench.trainer().config.model.model_path)
    known = AutoConfig.for_model(**fields).to_dict()
    rates = {name: 0.1 for name, value in known.items() if "drop" in name and isinstance(value, float)}
    return {"model": {**fields, **rates}, "model__disable_dropout": False}


def into_next_collection(bench: Bench, steps: int = 6) -> dict[str, Any]:
    """Return changes for a run of about ``steps`` steps with uneven batches that reaches a second collection."""
    trainer = bench.trainer()
    rows, passes = trainer.experience_rows, trainer.passes
    if not trainer.online or passes == 1:
        return {"train.batch_size": 6, "train.total_steps": steps}
    return {"train.batch_size": max(rows * 3 // 4, 1), "train.total_steps": max(steps, 2 * passes + 2)}
