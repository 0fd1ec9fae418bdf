"""The health of a run: what its metrics show to be wrong is said once, with what to do about it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from trainkit.runs import symptoms
from trainkit.runs.record import Record
from trainkit.runs.symptoms import PER_COLLECTION, Finding, Seen, Series, mean

CHECKS = sorted(check.__name__ for check in (symptoms.off_policy, *symptoms.OF_TRAINING, *symptoms.OF_EVALUATION))
"""The names of all checks."""
REMEDY = "lower optimizer.lr or train.max_grad_norm, and resume from a checkpoint before this step"
"""What to do about numbers that are not finite."""


class Health:
    """Watches the metrics of a run. A check that has found something is not repeated, also not after resuming.

    Args:
        starts_on_policy: whether the ratio must be 1 at the first update on a collection.
        half_precision: whether the model runs under mixed precision.
    """

    def __init__(self, *, starts_on_policy: bool = True, half_precision: bool = False) -> None:
        self.starts_on_policy, self.half_precision = starts_on_policy, half_precision
        self.seen = Seen()
        self.steps: dict[str, list[float]] = {}
        """The metrics `PER_COLLECTION` of the steps on the collection at hand."""
        self.told: list[str] = []
        """The checks that have found something."""

    def trained(self, metrics: Mapping[str, float]) -> list[Finding]:
        """Add the metrics of a step, and return what is newly found."""
        first = "time/collect" in metrics  # the step is the first one on a collection
        if first:
            self.seen.add({name: mean(values) for name, values in self.steps.items()})
            self.steps = {}
        for name in PER_COLLECTION:
            if name in metrics:
                self.steps.setdefault(name, []).append(metrics[name])
        self.seen.add({name: value for name, value in metrics.items() if name not in PER_COLLECTION})
        findings = [check(self.seen) for check in symptoms.OF_TRAINING]
        if first and self.starts_on_policy:
            findings.append(symptoms.off_policy(metrics, self.half_precision))
        return self._new(findings)

    def evaluated(self, metrics: Mapping[str, float]) -> list[Finding]:
        """Add the metrics of an evaluation, and return what is newly found."""
        self.seen.add(metrics)
        return self._new([check(self.seen) for check in symptoms.OF_EVALUATION])

    def _new(self, findings: Iterable[Finding | None]) -> list[Finding]:
        new = [finding for finding in findings if finding is not None and finding.check not in self.told]
        self.told += [finding.check for finding in new]
        return new

    def state_dict(self) -> dict[str, Any]:
        """Return what is remembered of the metrics, and the checks that have found something."""
        series = {name: asdict(series) for name, series in self.seen.items()}
        return {"series": series, "steps": {k: list(v) for k, v in self.steps.items()}, "told": list(self.told)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.seen = Seen({name: Series(**series) for name, series in state["series"].items()})
        self.steps = {name: list(values) for name, values in state["steps"].items()}
        self.told = list(state["told"])


def found_in(record: Record) -> list[dict[str, Any]]:
    """Return what the health monitor has found in a run, as in ``health.jsonl``; if it was off, what it would find.

    Raises:
        ConfigError, DataError: it is not the directory of a run, or cannot be read.
    """
    finite = list(_not_finite(record))
    if record.setting("train", "health") not in ("off", False):
        return [*record.findings, *finite]
    own_sampler = record.setting("rollout", "engine") == "local" and not record.setting("rollout", "staleness")
    half = record.setting("train", "mixed_precision") in ("bf16", "fp16")
    health, found = Health(starts_on_policy=own_sampler, half_precision=half), []
    for line in record.metrics:
        metrics = {name: float(value) for name, value in line.items() if isinstance(value, int | float)}
        evaluated = any(name.startswith("eval/") for name in metrics)
        findings = health.evaluated(metrics) if evaluated else health.trained(metrics)
        found += [{"step": line.get("step"), "check": each.check, "message": each.message} for each in findings]
    return [*found, *finite]


def _not_finite(record: Record) -> Iterator[dict[str, Any]]:
    """Yield the first step of each loss, gradient norm and reward that is NaN or infinite."""
    for name, values in record.series.items():
        if name.startswith("loss/") or name in ("train/grad_norm", "reward/mean", "eval/reward"):
            steps = [step for step, value in values.items() if not math.isfinite(value)]
            if steps:
                yield {"step": steps[0], "check": "finite", "message": f"{name} is {values[steps[0]]}; {REMEDY}"}
