"""Trackers that get metrics by TRL's names alone."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from accelerate.utils import LoggerType

from trainkit import hookimpl
from trainkit.errors import ConfigError
from trainkit.runs import default_trackers


class Tracked:
    """A tracker that a trainer of TRL gives the metrics, by TRL's names; those of the run do not reach it."""

    def __init__(self, tracker: Any) -> None:
        self.tracker = tracker

    @hookimpl
    def on_train_begin(self, trainer: Any) -> None:
        """Open the tracker."""
        self.tracker.on_train_begin(trainer)

    @hookimpl
    def on_evaluate(self, trainer: Any, step: int, samples: Any) -> None:
        """Show the samples of an evaluation."""
        self.tracker.on_evaluate(trainer, step, samples)

    @hookimpl
    def on_train_end(self, trainer: Any) -> None:
        """Close the tracker."""
        self.tracker.on_train_end(trainer)

    def opened(self, trainer: Any) -> Any:
        """Return the tracker of accelerate; None outside a run."""
        return self.tracker.opened(trainer)

    def log(self, trainer: Any, metrics: Mapping[str, float]) -> None:
        """Log metrics at the present step of a trainer of trainkit."""
        self.tracker.log_metrics(trainer, trainer.progress.step, dict(metrics))


def take_trackers(entries: list[Any], names: str = "trl") -> tuple[list[Tracked], list[Any]]:
    """Make the trackers of accelerate that are to get TRL's names, and return them and the entries that are left.

    Args:
        entries: ``train.trackers``.
        names: by which names they get metrics: ``"trl"``, or ``"trainkit"``, for which all entries are left.

    Raises:
        ConfigError: the names are of neither.
    """
    if names not in ("trl", "trainkit"):
        raise ConfigError(f"log_names should be 'trl' or 'trainkit'; given {names!r}")
    if names == "trainkit":
        return [], entries
    known = {each.value for each in LoggerType}
    taken = [each for each in entries if (each if isinstance(each, str) else each.name) in known]
    usual = len(default_trackers([]))  # the console and the files of the run, which every run has
    made = [] if int(os.environ.get("RANK", 0)) else [Tracked(each) for each in default_trackers(taken)[usual:]]
    return made, [each for each in entries if each not in taken]
