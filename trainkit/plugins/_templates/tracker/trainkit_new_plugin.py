"""new_plugin: a tracker that keeps the newest value of every metric of a run in one file."""

from __future__ import annotations

import json
from typing import Any

from trainkit import AcceleratedLoop, hookimpl

FILE = "new_plugin.json"
"""The file in the run's directory: for each metric its newest value, and the step of that value."""


@hookimpl
def on_train_begin(trainer: AcceleratedLoop[Any]) -> None:
    """Remove the values logged after the checkpoint that this run resumes from."""
    _write(trainer, {name: seen for name, seen in _read(trainer).items() if seen["step"] <= trainer.progress.step})


@hookimpl
def log_metrics(trainer: AcceleratedLoop[Any], step: int, metrics: dict[str, float]) -> None:
    """Store the newest values; trainkit calls this on the main process only."""
    _write(trainer, _read(trainer) | {name: {"step": step, "value": value} for name, value in metrics.items()})


def _read(trainer: AcceleratedLoop[Any]) -> dict[str, Any]:
    if trainer.run_dir is None or not (trainer.run_dir / FILE).exists():
        return {}
    found: dict[str, Any] = json.loads((trainer.run_dir / FILE).read_text(encoding="utf-8"))
    return found


def _write(trainer: AcceleratedLoop[Any], newest: dict[str, Any]) -> None:
    if trainer.run_dir is not None:  # it is None if evaluate() is called before a run
        (trainer.run_dir / FILE).write_text(json.dumps(newest, indent=1), encoding="utf-8")
