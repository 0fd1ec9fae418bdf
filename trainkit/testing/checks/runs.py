"""Checks about runs: equal ones are equal, nothing around them is touched, steps are what the loop says they are."""

from __future__ import annotations

import math
import re
from typing import Any

import torch
from torch import Tensor

from trainkit.data import Batch, Rollouts
from trainkit.metrics import Mean, Std
from trainkit.testing.checks.fields import variants
from trainkit.testing.checks.tools import require_same_weights, weights
from trainkit.testing.checks.traces import (
    CLOCK,
    LOOPS_OWN,
    into_next_collection,
    metric_lines,
    optimizer_memory,
    printed,
    require_same_lines,
    same_tensors,
    seeded_generators,
    with_dropout,
)
from trainkit.testing.conformance import Bench, check, require
from trainkit.trainer.base import Verdict

NAME = re.compile(r"[a-z][a-z0-9_]*(/[a-z0-9_@=.-]+)+")
OF_ROLLOUTS = ("rollout/", "reward/")
"""How those begin that trainkit records with rollouts: in a tiny run, means of small numbers may well be equal."""


@check()
def determinism(bench: Bench) -> None:
    """Two runs with one seed give bit-equal weights and metrics, and another seed gives others.

    What cannot be run again cannot be found wrong; and a seed that reaches nothing makes ten runs one.
    """
    changes = into_next_collection(bench)
    one, again, other = (bench.learnt(**changes, train__seed=seed) for seed in (1, 1, 2))
    require_same_weights(weights(one), weights(again), "the weights of two runs with one seed")
    require_same_lines(metric_lines(one.run_dir), metric_lines(again.run_dir), "two runs with one seed")
    here, there = weights(one), weights(other)
    require(any(not torch.equal(here[name], there[name]) for name in here), "runs with seeds 1 and 2 end alike")
    logged = [metric_lines(each.run_dir) for each in (one, other)]
    require(logged[0] != logged[1], "runs with seeds 1 and 2 log the same numbers at every step")


@check()
def global_rng(bench: Bench) -> None:
    """The global generators of torch, numpy and Python are left as they were, and have no influence.

    Randomness that others share makes a run depend on everything that was drawn before it: on the user's program, on
    evaluations, on what another plugin does.
    """
    changes = {**into_next_collection(bench), **with_dropout(bench), "train__eval_interval": 2}
    ended = []
    for seed in (5, 6):
        with seeded_generators(seed) as touched:
            ended.append(bench.learnt(**changes))
            require(not touched(), f"a run draws from the global generators of {', '.join(touched())}, or seeds them")
    one, other = ended
    require_same_weights(weights(one), weights(other), "the weights of runs that found other global generators")
    require_same_lines(
        metric_lines(one.run_dir), metric_lines(other.run_dir), "runs that found other global generators"
    )


class _Untouched:
    """Copies of tensors by name, to be compared with what has become of them."""

    def __init__(self, what: str, value: Any) -> None:
        self.what, self.now = what, _tensors(value)
        self.before = {name: tensor.detach().clone() for name, tensor in self.now.items()}

    def require(self) -> None:
        """Fail if one of them has changed in place."""
        changed = [name for name, tensor in self.now.items() if not same_tensors([tensor], [self.before[name]])]
        require(not changed, f"{self.what} is changed in place: {', '.join(changed[:3])}")


def _tensors(value: Any) -> dict[str, Tensor]:
    if isinstance(value, Tensor):
        return {"scores": value}
    if isinstance(value, Rollouts):
        known = {name: getattr(value, name) for name in ("logprobs", "entropy", "hidden", "terminated")}
        return {**value.sequences.flatten(), **{name: x for name, x in known.items() if x is not None}}
    return dict(value.flatten()) if isinstance(value, Batch) else {}


def _guard(trainer: Any, name: str, what: str) -> None:
    """Let ``trainer.name(*arguments)`` fail the check if it changes its arguments."""
    honest = getattr(trainer, name)

    def guarded(*arguments: Any) -> Any:
        kept = [_Untouched(what, argument) for argument in arguments]
        result = honest(*arguments)
        for each in kept:
            each.require()
        return result

    setattr(trainer, name, guarded)


@check()
def batch_is_frozen(bench: Bench) -> None:
    """Experience is a frozen dataclass, and nothing that gets a batch, or rollouts and their scores, changes them.

    A collection is gone over several times, and rollouts are shown to observers: what one step writes into its batch
    the next one learns from.
    """
    trainer = bench.trainer()
    rows = repr(trainer.pipeline.rows)
    _guard(trainer, "prepare_experience", "what prepare_experience gets")
    if bench.subject.samples_text:
        _guard(trainer, "experience", "what experience gets")
    trainer.collect()
    require(repr(trainer.pipeline.rows) == rows, "rows of the dataset are changed while experience is made of them")
    batch = trainer.store.experience
    parameters = getattr(type(batch), "__dataclass_params__", None)
    require(
        parameters is not None and parameters.frozen,
        f"{type(batch).__name__} is no frozen dataclass; write @dataclass(frozen=True) above it",
    )
    given = _Untouched("the batch that prepare_step gets", batch)
    with torch.no_grad():
        prepared = trainer.prepare_step(batch).to(trainer.accelerator.device)
    given.require()
    given, own = (_Untouched("the batch that loss gets", each) for each in (batch, prepared))
    trainer.loss(prepared)[0].backward()
    given.require()
    own.require()


# ------------------------------------------------------------------------------------------------------------ metrics


def _require_records(metrics: dict[str, Any]) -> None:
    for name, metric in metrics.items():
        require(NAME.fullmatch(name), f"a metric is called {name!r}; write group/name in lower case, as loss/policy")
        own = name.startswith(LOOPS_OWN)
        require(not own, f"the metric {name!r} has a name of the loop's own, as {', '.join(LOOPS_OWN)} are")
        require(isinstance(metric, Mean | Std), f"the metric {name!r} is a {type(metric).__name__}, no Mean or Std")
        tensors = metric.tensors()
        require(not any(x.requires_grad for x in tensors), f"the metric {name!r} is not detached from the graph")
        require(all(x.dim() == 0 for x in tensors), f"the metric {name!r} holds more than scalars")


def _heard(trainer: Any) -> list[list[str]]:
    """The names that every call of `loss` gives, filled as the run goes; what is recorded on the way is checked."""
    losses: list[list[str]] = []
    loss, record, fill = trainer.loss, trainer.record, trainer.fill_store
    filling = False

    def heard_loss(batch: Any) -> Any:
        value, found = loss(batch)
        _require_records(found)
        losses.append(sorted(found))
        return value, found

    def heard_record(metrics: Any) -> None:
        if filling:
            _require_records(metrics)
        record(metrics)

    def heard_fill() -> None:
        nonlocal filling
        filling = True
        try:
            fill()
        finally:
            filling = False

    trainer.loss, trainer.record, trainer.fill_store = heard_loss, heard_record, heard_fill
    return losses


@check()
def metric_names(bench: Bench) -> None:
    """Metrics are detached `Mean` or `Std` records, called ``group/name``, and every loss gives the same ones.

    They are added over micro-batches and processes by name: a plain number is averaged wrongly, a name that is missing
    on one process leaves the others waiting, and one with a graph keeps every step's memory.
    """
    trainer = bench.trainer(**into_next_collection(bench), train__microbatch_size=3)
    names = _heard(trainer)
    trainer.learn()
    for at, found in enumerate(names):
        differ = sorted({*found} ^ {*names[0]})
        require(not differ, f"loss number {at + 1} of a run gives other metrics than the first: {', '.join(differ)}")


@check()
def metrics_vary(bench: Bench) -> None:
    """No metric is constant by construction: each takes two values within some short run.

    A number that never moves is believed until somebody needs it: a clip fraction that is always 0, a KL that is
    measured against the policy itself.
    """
    values: dict[str, int] = {}
    moving = {**into_next_collection(bench, steps=8), "optimizer.lr": 0.03}
    for settings in variants(bench):
        trainer = bench.learnt(**{**moving, **settings})
        for name, seen in _values(trainer).items():
            values[name] = max(values.get(name, 0), len(seen))
    constant = sorted(name for name, number in values.items() if number < 2)
    require(
        not constant,
        f"{', '.join(constant)} {'has' if len(constant) == 1 else 'have'} one value at every step, at a learning rate "
        "of 0.03 and whatever else is set; if it does move under some settings, name these in tiny_contexts",
    )


def _values(trainer: Any) -> dict[str, set[str]]:
    """What each metric of training that is the algorithm's has been in a run."""
    found: dict[str, set[str]] = {}
    others = (*LOOPS_OWN, *OF_ROLLOUTS, *CLOCK)
    for line in metric_lines(trainer.run_dir, training=True):
        for name, value in line.items():
            if name != "step" and not name.startswith(others):
                found.setdefault(name, set()).add(repr(value))
    return found


# -------------------------------------------------------------------------------------------------------------- steps


@check()
def clipping(bench: Bench) -> None:
    """The gradient is clipped to ``train.max_grad_norm`` at every step.

    Clipping that holds for the first step or the first epoch only lets the one large gradient through that it is there
    for (S-22).
    """
    limit, used = 1e-4, list[float]()
    trainer = bench.trainer(**into_next_collection(bench), train__max_grad_norm=limit)
    trainer.optimizer.optimizer.register_step_pre_hook(lambda *_: used.append(_gradient_norm(trainer)))
    trainer.learn()
    before = [line["train/grad_norm"] for line in metric_lines(trainer.run_dir, training=True) if _made(line)]
    require(len(used) == len(before) > 0, f"{len(used)} optimizer steps are made, and {len(before)} are logged")
    require(max(before) > limit, f"no gradient is above {limit}: the largest norm is {max(before):.3g}")
    above = [at + 1 for at, norm in enumerate(used) if norm > limit * 1.01]
    require(not above, f"the norm is up to {max(used):.3g} where it is clipped to {limit}, at step {above[:3]}")


def _made(line: dict[str, Any]) -> bool:
    return "train/grad_norm" in line and not line.get("train/skipped")


def _gradient_norm(trainer: Any) -> float:
    norms = [p.grad.norm() for p in trainer.unwrapped.parameters() if p.grad is not None]
    return float(torch.stack(norms).norm()) if norms else 0.0


@check()
def skipped_steps(bench: Bench) -> None:
    """A step that `judge` leaves out counts, and moves neither weights nor what the optimizer or trainer remembers.

    A guard that logs and then steps all the same is none, and Adam's moments or weight decay go on where only the
    gradient was set to zero (S-21).
    """
    for verdict in (Verdict.SKIP, Verdict.STOP):
        _leave_out(bench, verdict)


def _leave_out(bench: Bench, verdict: Verdict) -> None:
    trainer = bench.collected(scheduler__name="linear", optimizer__weight_decay=0.5, optimizer__lr=0.06)
    batch, verdicts = trainer.store.experience, {1: verdict, 3: verdict}
    trainer.judge = lambda _: verdicts.get(trainer.progress.step + 1, Verdict.STEP)
    start, own = weights(trainer), printed(trainer.state_dict())
    what = f"weights before and after a step that was left out by Verdict.{verdict.name}"
    found = trainer.update(batch)
    require("train/skipped" in found and found["train/skipped"].compute() == 1, "a step left out is not logged as such")
    require_same_weights(start, weights(trainer), what)
    require(not trainer.optimizer.state, "the optimizer has a state after a step that was left out")
    require(printed(trainer.state_dict()) == own, "state_dict() has changed in a step that was left out")
    trainer.update(batch)
    moved, moments = weights(trainer), optimizer_memory(trainer)
    require(any(not torch.equal(start[name], moved[name]) for name in start), "a step that is made moves no weight")
    trainer.update(batch)
    require_same_weights(moved, weights(trainer), what)
    require(same_tensors(moments, optimizer_memory(trainer)), "the optimizer's moments move in a step left out")
    left = [name for name, p in trainer.unwrapped.named_parameters() if p.grad is not None and p.grad.any()]
    require(not left, f"a gradient stays behind in {', '.join(left[:3])}")
    require(trainer.progress.step == 3, f"three steps, two of them left out, count as {trainer.progress.step}")
    rate = trainer.optimizer.param_groups[0]["lr"]
    require(math.isclose(rate, 0.03), f"the rate is {rate:.3g} after three of six steps of a linear schedule from 0.06")


@check()
def schedule(bench: Bench) -> None:
    """Learning rates follow the schedule from its first value on.

    Stepping the schedule first loses the peak rate and ends one step early (S-54).
    """
    used: list[float] = []
    trainer = bench.trainer(scheduler__name="linear", optimizer__lr=1e-3, train__total_steps=4)
    inner = trainer.optimizer.optimizer
    inner.register_step_pre_hook(lambda optimizer, *_: used.append(optimizer.param_groups[0]["lr"]))
    trainer.learn()
    expected = [1e-3, 0.75e-3, 0.5e-3, 0.25e-3]
    alike = len(used) == 4 and all(math.isclose(a, b) for a, b in zip(used, expected, strict=True))
    require(alike, f"a linear schedule over four steps from 1e-3 gives {[f'{rate:.3g}' for rate in used]}")
