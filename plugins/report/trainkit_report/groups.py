"""Runs that differ by their seed alone: their metrics over the steps, with the spread over the seeds."""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from os.path import commonpath
from pathlib import Path
from typing import Any

from trainkit.config import differences
from trainkit.errors import DataError, TrainkitError
from trainkit.runs.record import Record, find_runs
from trainkit_report.lines import Line, line_over_steps, mean

log = logging.getLogger(__name__)

NOT_COMPARED = ("train.seed", "train.run_dir", "train.resume", "train.trackers")
"""Settings that runs of one group may differ in."""


@dataclass(frozen=True)
class Group:
    """Runs that differ by their seed alone, or one run. ``name`` is how they are called."""

    name: str
    runs: Sequence[Record]

    @property
    def seeds(self) -> list[Any]:
        """The seeds of the runs."""
        return [run.setting("train", "seed") for run in self.runs]

    @cached_property
    def metrics(self) -> list[str]:
        """The names of the metrics that any of the runs has recorded, in the order in which they first appear."""
        return list(dict.fromkeys(name for run in self.runs for name in run.series))

    def line(self, metric: str, most: int) -> Line | None:
        """Return a metric of the runs as `line_over_steps`; None if none of them has it."""
        series = [run.series[metric] for run in self.runs if metric in run.series]
        return line_over_steps(self.name, series, most) if series else None

    def not_finite(self, metric: str) -> int:
        """Return how many recorded values of a metric are NaN or infinite."""
        series = [run.series.get(metric, {}) for run in self.runs]
        return sum(not math.isfinite(value) for each in series for value in each.values())

    def final(self, metric: str) -> dict[Any, float]:
        """Return the final value of a metric by seed: of the last evaluation, or the mean of the last tenth of steps.

        Runs without a finite one are skipped.
        """
        found = {}
        for run in self.runs:
            values = list(run.series.get(metric, {}).values())
            last = values[-1:] if metric.startswith("eval/") else values[-max(1, len(values) // 10) :]
            value = mean(last)
            if math.isfinite(value):
                found[run.setting("train", "seed")] = value
        return found


def grouped(runs: Iterable[Record]) -> list[Group]:
    """Return runs in groups that differ by their seed alone; a seed that is there twice begins another group."""
    parts: list[list[Record]] = []
    for run in runs:
        same = (part for part in parts if not differing(part[0], run) and _seed(run) not in map(_seed, part))
        part = next(same, None)
        if part is None:
            parts.append([run])
        else:
            part.append(run)
    everything = [run.path for part in parts for run in part]
    return [Group(name_of(part, everything), part) for part in parts]


def differing(first: Record, second: Record) -> list[tuple[str, Any, Any]]:
    """Return path and values of the settings in which two runs differ, except for `NOT_COMPARED`."""
    return [found for found in differences(first.config, second.config) if not found[0].startswith(NOT_COMPARED)]


def runs_at(places: Iterable[Path]) -> list[Record]:
    """Return the runs that directories are, or have in them.

    Raises:
        DataError: there is none, or it has recorded no metrics yet.
        ConfigError, DataError: no run can be read. Others than those that can are left out, with a warning.
    """
    found: dict[Path, Record] = {}
    for place in places:
        if not place.is_dir():
            what = f"{str(place)!r} is a file" if place.is_file() else f"there is no directory {str(place)!r}"
            raise DataError(f"{what}; give the directory of a run, or one that holds runs")
        runs = list(find_runs(place))
        if not runs and (place / "config.yaml").is_file():  # it ended before its first step
            runs = [Record(place)]
        if not runs:
            raise DataError(f"{str(place)!r} is no run and holds none; the directory of a run has a config.yaml")
        found |= {run.path.resolve(): run for run in runs}
    faults: dict[Path, TrainkitError] = {}
    for path, run in found.items():
        try:
            run.checked()
            _ = run.series, run.findings
        except TrainkitError as error:
            faults[path] = error
    if faults and len(faults) == len(found):
        raise next(iter(faults.values()))
    for path, fault in faults.items():
        log.warning("the run %s is left out: %s", found.pop(path).path, fault)
    if not any(run.series for run in found.values()):
        names = ", ".join(str(run.path) for run in found.values())
        raise DataError(f"no metrics have been recorded in {names}; a run records them from its first step on")
    return list(found.values())


def spread(values: Iterable[float]) -> float:
    """Return the unbiased standard deviation; NaN with fewer than two values."""
    known = list(values)
    return statistics.stdev(known) if len(known) > 1 else math.nan


def _seed(run: Record) -> Any:
    return run.setting("train", "seed")


def name_of(part: Sequence[Record], everything: Sequence[Path]) -> str:
    """Return the path of a group's runs, without the beginning that the paths of all runs share."""
    paths = [run.path.absolute() for run in part]
    place = Path(commonpath(paths))
    above = Path(commonpath([path.absolute().parent for path in everything]))
    inside = place != above and place.is_relative_to(above)
    shown = str(place.relative_to(above)) if inside else place.resolve().name
    return shown if len(part) == 1 else f"{shown} ({len(part)} seeds)"
