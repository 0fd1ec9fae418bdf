"""new_plugin: keeps the newest value of every metric of a run in one file."""

from __future__ import annotations

import json
from typing import Any

from trainkit import AcceleratedLoop, hookimpl

FILE = "new_plugin.json"
"""The file in the run directory: by metric, its newest value and the step that it is of."""


@hookimpl
def on_train_begin(trainer: AcceleratedLoop[Any]) -> None:
    """Forget what a killed run wrote after the checkpoint that this one goes on from."""
    _write(trainer, {name: seen for name, seen in _read(trainer).items() if seen["step"] <= trainer.progress.step})


@hookimpl
def log_metrics(trainer: AcceleratedLoop[Any], step: int, metrics: dict[str, float]) -> None:
    """Take the values over; trainkit calls this on the main process alone."""
    _write(trainer, _read(trainer) | {name: {"step": step, "value": value} for name, value in metrics.items()})


def _read(trainer: AcceleratedLoop[Any]) -> dict[str, Any]:
    if trainer.run_dir is None or not (trainer.run_dir / FILE).exists():
        return {}
    found: dict[str, Any] = json.loads((trainer.run_dir / FILE).read_text(encoding="utf-8"))
    return found


def _write(trainer: AcceleratedLoop[Any], newest: dict[str, Any]) -> None:
    if trainer.run_dir is not None:  # there is none before a run, when somebody calls evaluate()
        (trainer.run_dir / FILE).write_text(json.dumps(newest, indent=1), encoding="utf-8")
