"""Checks of runs: they are reproducible and change nothing outside; their metrics and steps are right."""

from __future__ import annotations

import math
import re
from typing import Any

import torch
from torch import Tensor

from trainkit.data import Batch, Rollouts
from trainkit.metrics import Mean, Std
from trainkit.trainer.base import Verdict
from trainkit_kit.checking import check
from trainkit_kit.checks.fields import variants
from trainkit_kit.checks.tools import require_same_weights, weights
from trainkit_kit.checks.traces import (
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
from trainkit_kit.failures import require
from trainkit_kit.subjects import Bench

NAME = re.compile(r"[a-z][a-z0-9_]*(/[a-z0-9_@=.-]+)+")
OF_ROLLOUTS = ("rollout/", "reward/", "environment/")
"""Prefixes of the metrics that trainkit records with rollouts; in a tiny run they may be constant by chance."""


@check()
def determinism(bench: Bench) -> None:
    """Check that two runs with one seed give bit-equal weights and metrics, and a run with another seed does not.

    A run that cannot be repeated cannot be debugged; and if the seed has no effect, ten runs are the same run.

    Causes: a global or unseeded generator; the order of a set; a model that is not made in `get_arch`.
    """
    changes = into_next_collection(bench)
    one, again, other = (bench.learnt(**changes, train__seed=seed) for seed in (1, 1, 2))
    require_same_weights(weights(one), weights(again), "the weights of two runs with one seed")
    require_same_lines(metric_lines(one.run_dir), metric_lines(again.run_dir), "two runs with one seed")
    here, there = weights(one), weights(other)
    require(
        any(not torch.equal(here[name], there[name]) for name in here), "runs with seeds 1 and 2 end with equal weights"
    )
    logged = [metric_lines(each.run_dir) for each in (one, other)]
    require(logged[0] != logged[1], "runs with seeds 1 and 2 log the same numbers at every step")


@check()
def global_rng(bench: Bench) -> None:
    """Check that a run leaves the global generators of torch, numpy and Python as they were, and ignores them.

    Shared generators make a run depend on everything that was drawn before: by the user's program, by evaluations, by
    other plugins.

    Causes: `torch.rand`, `random` or `numpy.random` without a generator (use `trainkit.seeding`); `manual_seed`.
    """
    changes = {**into_next_collection(bench), **with_dropout(bench), "train__eval_interval": 2}
    ended = []
    for seed in (5, 6):
        with seeded_generators(seed) as touched:
            ended.append(bench.learnt(**changes))
            require(not touched(), f"a run draws from the global generators of {', '.join(touched())}, or seeds them")
    one, other = ended
    require_same_weights(weights(one), weights(other), "the weights of runs with differently seeded global generators")
    require_same_lines(
        metric_lines(one.run_dir), metric_lines(other.run_dir), "runs with differently seeded global generators"
    )


class _Untouched:
    """Copies of tensors by name, to check later that the tensors have not changed."""

    def __init__(self, what: str, value: Any) -> None:
        self.what, self.now = what, _tensors(value)
        self.before = {name: tensor.detach().clone() for name, tensor in self.now.items()}

    def require(self) -> None:
        """Fail if one of the tensors has changed in place."""
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
    """Make ``trainer.name(*arguments)`` fail the check if it changes its arguments."""
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
    """Check that experience is a frozen dataclass, and that batches, rollouts and scores are not changed in place.

    A collection is iterated over several times, and observers get the rollouts: what one step writes into its batch,
    the next step learns from.

    Causes: an operation with a trailing underscore, or `x[...] = `, on a tensor of the batch; a dataclass without
    `frozen=True`.
    """
    trainer = bench.trainer()
    rows = repr(trainer.pipeline.rows)
    _guard(trainer, "prepare_experience", "the argument of prepare_experience")
    if bench.subject.samples_text:
        _guard(trainer, "experience", "an argument of experience")
    trainer.collect()
    require(repr(trainer.pipeline.rows) == rows, "rows of the dataset are changed while experience is made from them")
    batch = trainer.store.experience
    parameters = getattr(type(batch), "__dataclass_params__", None)
    require(
        parameters is not None and parameters.frozen,
        f"{type(batch).__name__} is not a frozen dataclass; write @dataclass(frozen=True) above it",
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
        require(NAME.fullmatch(name), f"a metric is named {name!r}; write group/name in lower case, as loss/policy")
        own = name.startswith(LOOPS_OWN)
        require(not own, f"the name of the metric {name!r} is reserved for the loop, as are {', '.join(LOOPS_OWN)}")
        require(isinstance(metric, Mean | Std), f"the metric {name!r} is a {type(metric).__name__}, not a Mean or Std")
        tensors = metric.tensors()
        require(not any(x.requires_grad for x in tensors), f"the metric {name!r} is not detached from the graph")
        require(all(x.dim() == 0 for x in tensors), f"the metric {name!r} holds tensors that are not scalars")


def _heard(trainer: Any) -> list[list[str]]:
    """Return a list that collects the metric names of every call of `loss`; recorded metrics are checked, too."""
    losses: list[list[str]] = []
    loss, record, fill = trainer.loss, trainer.recorder.record, trainer.collector.fill
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

    trainer.loss, trainer.recorder.record, trainer.collector.fill = heard_loss, heard_record, heard_fill
    return losses


@check()
def metric_names(bench: Bench) -> None:
    """Check that metrics are detached `Mean` or `Std` records named ``group/name``, the same ones from every loss.

    They are merged over micro-batches and processes by name: a plain number is averaged wrongly, a name that is missing
    on one process blocks the others, and a metric that holds a graph keeps the memory of every step.

    Causes: a tensor or float instead of `Mean.of`; a metric under a condition; values that are not detached.
    """
    trainer = bench.trainer(**into_next_collection(bench), train__microbatch_size=3)
    names = _heard(trainer)
    trainer.learn()
    for at, found in enumerate(names):
        differ = sorted({*found} ^ {*names[0]})
        require(not differ, f"loss number {at + 1} of a run has other metrics than the first: {', '.join(differ)}")


@check()
def metrics_vary(bench: Bench) -> None:
    """Check that no metric is constant by construction: each takes two values within some short run.

    A metric that never changes is trusted until it is needed: a clip fraction that is always 0, a KL that is measured
    against the policy itself.

    Causes: a metric of constants; a comparison of a tensor with itself; a setting reported as a metric.
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
        "of 0.03 and whatever else is set; if it changes under some settings, declare these as contexts",
    )


def _values(trainer: Any) -> dict[str, set[str]]:
    """Return the values in a run of each training metric of the algorithm."""
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
    """Check that the gradient is clipped to ``train.max_grad_norm`` at every step.

    Clipping that works only in the first step or epoch misses the one large gradient that it is meant for.

    Causes: a gradient that is changed after `update` clipped it; an optimizer step of one's own.
    """
    limit, used = 1e-4, list[float]()
    trainer = bench.trainer(**into_next_collection(bench), train__max_grad_norm=limit)
    trainer.models.build()
    trainer.optimizer.optimizer.register_step_pre_hook(lambda *_: used.append(_gradient_norm(trainer)))
    trainer.learn()
    before = [line["train/grad_norm"] for line in metric_lines(trainer.run_dir, training=True) if _made(line)]
    require(
        len(used) == len(before) > 0,
        f"{len(used)} optimizer steps are made, and the gradient norms of {len(before)} are logged",
    )
    require(max(before) > limit, f"no gradient norm is above {limit}: the largest is {max(before):.3g}")
    above = [at + 1 for at, norm in enumerate(used) if norm > limit * 1.01]
    require(not above, f"the gradient norm is up to {max(used):.3g} instead of at most {limit}, at steps {above[:3]}")


def _made(line: dict[str, Any]) -> bool:
    return "train/grad_norm" in line and not line.get("train/skipped")


def _gradient_norm(trainer: Any) -> float:
    norms = [p.grad.norm() for p in trainer.unwrapped.parameters() if p.grad is not None]
    return float(torch.stack(norms).norm()) if norms else 0.0


@check()
def skipped_steps(bench: Bench) -> None:
    """Check that a step that `judge` skips is counted, and changes neither weights nor optimizer nor trainer state.

    A guard that logs and then steps anyway has no effect. If only the gradient is set to zero, Adam's moments and
    weight decay still change the weights.

    Causes: `judge` or `after_step` that changes state before the verdict; an optimizer step of one's own.
    """
    for verdict in (Verdict.SKIP, Verdict.STOP):
        _leave_out(bench, verdict)


def _leave_out(bench: Bench, verdict: Verdict) -> None:
    trainer = bench.collected(scheduler__name="linear", optimizer__weight_decay=0.5, optimizer__lr=0.06)
    batch, verdicts = trainer.store.experience, {1: verdict, 3: verdict}
    trainer.judge = lambda _: verdicts.get(trainer.progress.step + 1, Verdict.STEP)
    start, own = weights(trainer), printed(trainer.state_dict())
    what = f"weights before and after a step skipped by Verdict.{verdict.name}"
    found = trainer.update(batch)
    require(
        "train/skipped" in found and found["train/skipped"].compute() == 1,
        "a skipped step is not logged as train/skipped",
    )
    require_same_weights(start, weights(trainer), what)
    require(not trainer.optimizer.state, "the optimizer has a state after a skipped step")
    require(printed(trainer.state_dict()) == own, "state_dict() has changed in a skipped step")
    trainer.update(batch)
    moved, moments = weights(trainer), optimizer_memory(trainer)
    require(any(not torch.equal(start[name], moved[name]) for name in start), "a step that is made changes no weight")
    trainer.update(batch)
    require_same_weights(moved, weights(trainer), what)
    require(same_tensors(moments, optimizer_memory(trainer)), "the optimizer's moments change in a skipped step")
    left = [name for name, p in trainer.unwrapped.named_parameters() if p.grad is not None and p.grad.any()]
    require(not left, f"after a skipped step there is a gradient left in {', '.join(left[:3])}")
    require(trainer.progress.step == 3, f"three steps, two of them skipped, count as {trainer.progress.step}")
    rate = trainer.optimizer.param_groups[0]["lr"]
    require(
        math.isclose(rate, 0.03),
        f"the learning rate is {rate:.3g} after 3 of 6 steps of a linear schedule from 0.06; it should be 0.03",
    )


@check()
def schedule(bench: Bench) -> None:
    """Check that learning rates follow the schedule from its first value.

    Stepping the schedule before the optimizer loses the peak rate and ends one step early.

    Causes: a scheduler of one's own; parameter groups that are made anew.
    """
    used: list[float] = []
    trainer = bench.trainer(scheduler__name="linear", optimizer__lr=1e-3, train__total_steps=4)
    trainer.models.build()
    inner = trainer.optimizer.optimizer
    inner.register_step_pre_hook(lambda optimizer, *_: used.append(optimizer.param_groups[0]["lr"]))
    trainer.learn()
    expected = [1e-3, 0.75e-3, 0.5e-3, 0.25e-3]
    alike = len(used) == 4 and all(math.isclose(a, b) for a, b in zip(used, expected, strict=True))
    require(alike, f"a linear schedule over four steps from 1e-3 gives the rates {[f'{rate:.3g}' for rate in used]}")
