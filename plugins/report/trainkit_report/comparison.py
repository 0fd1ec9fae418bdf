"""Two runs, or two groups of runs that differ by their seeds, compared: settings, final metrics, and a paired test."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from trainkit.errors import DataError, suggest
from trainkit.runs.record import Record, main_metric
from trainkit.runs.student import quantile, within
from trainkit_report.groups import Group, differing, grouped, name_of

LEVEL = 0.05
"""The error of the first kind of the test, and one minus the level of its interval."""
FEW = 5
"""Seeds from which on a paired test shows more than large differences."""


@dataclass(frozen=True)
class Paired:
    """The differences ``second − first`` over the seeds that both have, with the paired t test.

    Source: Student 1908. The interval and ``p`` (two-sided) are NaN with fewer than two pairs.
    """

    differences: Sequence[float]

    @property
    def mean(self) -> float:
        """The mean difference."""
        return statistics.fmean(self.differences) if self.differences else math.nan

    @property
    def error(self) -> float:
        """The standard error of the mean difference."""
        count = len(self.differences)
        return statistics.stdev(self.differences) / math.sqrt(count) if count > 1 else math.nan

    @property
    def p(self) -> float:
        """The probability of a mean at least this far from 0 if the differences are normal with mean 0.

        NaN if all differences are the same, except 0: they say nothing about the spread over seeds.
        """
        if len(self.differences) < 2:
            return math.nan
        if self.error <= abs(self.mean) * 1e-9:  # but for rounding, they are equal
            return 1.0 if self.mean == 0 else math.nan
        return 1 - within(self.mean / self.error, len(self.differences) - 1)

    @property
    def interval(self) -> tuple[float, float]:
        """The confidence interval of the mean difference, at the level 0.95."""
        if len(self.differences) < 2:
            return math.nan, math.nan
        half = self.error * quantile(1 - LEVEL, len(self.differences) - 1)
        return self.mean - half, self.mean + half


@dataclass(frozen=True)
class Comparison:
    """Two groups of runs, and the metric that the verdict is about."""

    first: Group
    second: Group
    metric: str

    @property
    def settings(self) -> list[tuple[str, Any, Any]]:
        """Path and both values of the settings in which they differ; ``...``: not set."""
        return differing(self.first.runs[0], self.second.runs[0])

    @property
    def metrics(self) -> list[str]:
        """The metrics of both, those of evaluations and the verdict's first, without times."""
        common = [name for name in self.first.metrics if name in self.second.metrics and "time" not in name]
        return sorted(common, key=lambda name: (name != self.metric, not name.startswith("eval/"), name))

    @property
    def evaluated(self) -> list[str]:
        """Those of `metrics` that are of evaluations."""
        return [name for name in self.metrics if name.startswith("eval/")]

    @property
    def others(self) -> list[str]:
        """Those of `metrics` that are of training."""
        return [name for name in self.metrics if not name.startswith("eval/")]

    def paired(self, metric: str) -> Paired:
        """Return the differences of the final values over the seeds that both have."""
        before, after = self.first.final(metric), self.second.final(metric)
        return Paired([after[seed] - before[seed] for seed in before if seed in after])

    def verdict(self) -> str:
        """Return what the test says about the metric, in a sentence."""
        test, a, b = self.paired(self.metric), self.first.name, self.second.name
        count = len(test.differences)
        if count == 0:
            missing = f"no seed in common with a finite {self.metric}"
            return f"No verdict: {a} and {b} have {missing}; run both with the same seeds"
        if count == 1:
            return (
                f"No verdict: {a} and {b} have one seed in common, so the spread over seeds is not known "
                f"({self.metric} differs by {test.mean:+.4g}); run both with more seeds"
            )
        if math.isnan(test.p):
            return (
                f"No verdict: {self.metric} of {b} differs from that of {a} by {test.mean:+.4g} with each of {count} "
                "seeds, so the spread over seeds is not known; run both with more seeds"
            )
        low, high = test.interval
        told = (
            f"{test.mean:+.4g}, 95 % interval {low:+.4g} to {high:+.4g}, "
            f"p = {test.p:.2g}, paired t test over {count} seeds"
        )
        if test.p >= LEVEL:
            return f"No difference shown: {self.metric} of {b} against {a}: {told}"
        return f"{self.metric} of {b} is {'higher' if test.mean > 0 else 'lower'} than of {a}: {told}"

    def notes(self) -> Iterator[str]:
        """Yield what makes the comparison less than fair."""
        if self.first.runs[0].method != self.second.runs[0].method:
            yield "The methods differ: compare metrics of evaluations; losses of different methods do not compare."
        for group in (self.first, self.second):
            states = {run.state for run in group.runs} - {"done"}
            if states:
                yield f"{group.name}: a run is {', '.join(sorted(states))}, so its final values may not be final."
        steps = {max(run.step for run in group.runs) for group in (self.first, self.second)}
        if len(steps) > 1:
            yield f"The numbers of steps differ: {' and '.join(map(str, sorted(steps)))}."
        count = len(self.paired(self.metric).differences)
        if 1 < count < FEW:
            yield f"The test assumes normal differences; with {count} seeds it can only show large ones."


def compare(first: Sequence[Record], second: Sequence[Record], metric: str | None = None) -> Comparison:
    """Return the comparison of two runs, or groups of runs that differ by their seeds.

    Args:
        first: the runs of the one side.
        second: the runs of the other side.
        metric: what the verdict is about; None for the first metric of evaluations that both have.

    Raises:
        DataError: the runs of a side differ in more than the seed, or the two have no such metric in common.
    """
    sides = [_one_group(side) for side in (first, second)]
    everything = [run.path for run in (*first, *second)]
    sides = [Group(name_of(side.runs, everything), side.runs) for side in sides]
    common = [name for name in sides[0].metrics if name in sides[1].metrics]
    if metric is not None and metric not in common:
        raise DataError(
            f"no metric {metric!r} is in both{suggest(metric, common)}; both have {', '.join(common) or 'none'}"
        )
    chosen = metric or main_metric(common)
    if chosen is None:
        raise DataError(f"{sides[0].name} and {sides[1].name} have no metric in common, so they cannot be compared")
    return Comparison(sides[0], sides[1], chosen)


def _one_group(runs: Sequence[Record]) -> Group:
    groups = grouped(runs)
    if len(groups) == 1:
        return groups[0]
    differ = differing(groups[0].runs[0], groups[1].runs[0])
    what = f"{differ[0][0]} ({differ[0][1]!r} and {differ[0][2]!r})" if differ else "nothing, and have the same seed"
    raise DataError(
        f"{groups[0].runs[0].path} and {groups[1].runs[0].path} are to be one side of a comparison, and differ in "
        f"{what}; runs of one side differ by their seed alone. `trainkit report` shows many different ones"
    )
