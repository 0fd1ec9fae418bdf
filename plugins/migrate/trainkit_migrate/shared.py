"""What the adapters of TRL and of trlX have in common: controllers of the KL penalty, and trackers by other names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from trainkit import hookimpl
from trainkit.runs import default_trackers


class AdaptiveKLController:
    """β, adapted to a target KL. Ziegler et al. 2019, section 2.2.

    Args:
        init_kl_coef: the first β.
        target: the KL to reach.
        horizon: the time scale in responses.
    """

    def __init__(self, init_kl_coef: float, target: float, horizon: float) -> None:
        self.value, self.target, self.horizon = init_kl_coef, target, horizon

    def update(self, current: float, n_steps: int) -> None:
        """Update β ← β·(1 + clip(current/target − 1, ±0.2)·n_steps/horizon)."""
        error = min(max(current / self.target - 1, -0.2), 0.2)
        self.value *= 1 + error * n_steps / self.horizon


class FixedKLController:
    """β, which stays as it is."""

    def __init__(self, kl_coef: float) -> None:
        self.value = kl_coef

    def update(self, current: float, n_steps: int) -> None:
        """Do nothing."""


class RenamingTracker:
    """A tracker that gets the metrics of a run by other names; without ``renamed``, those of `log` alone.

    Args:
        tracker: a tracker of trainkit.
        renamed: returns metrics by the names that are logged.
    """

    def __init__(self, tracker: Any, renamed: Callable[[Mapping[str, float]], dict[str, float]] | None = None) -> None:
        self.tracker, self.renamed = tracker, renamed

    @hookimpl
    def on_train_begin(self, trainer: Any) -> None:
        """Open the tracker."""
        self.tracker.on_train_begin(trainer)

    @hookimpl
    def log_metrics(self, trainer: Any, step: int, metrics: dict[str, float]) -> None:
        """Log metrics at their step."""
        if self.renamed is not None:
            self.tracker.log_metrics(trainer, step, self.renamed(metrics))

    @hookimpl
    def on_evaluate(self, trainer: Any, step: int, samples: list[dict[str, Any]]) -> None:
        """Log the samples of an evaluation."""
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


def renaming_trackers(
    entries: list[Any], renamed: Callable[[Mapping[str, float]], dict[str, float]] | None = None
) -> list[RenamingTracker]:
    """Return the trackers that entries of ``train.trackers`` choose as those that get metrics by other names."""
    usual = len(default_trackers([]))  # the console and the files of the run, which every run has
    return [RenamingTracker(each, renamed) for each in default_trackers(entries)[usual:]]
