"""Where a run's numbers and samples go: hook plugins like any other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.hookspecs import hookimpl

if TYPE_CHECKING:
    from trainkit.trainer.accelerate import AccelerateRLTrainer

    Trainer = AccelerateRLTrainer[Any]


class JsonLines:
    """``metrics.jsonl`` and ``samples.jsonl`` in the run directory."""

    @hookimpl
    def log_metrics(self, trainer: Trainer, step: int, metrics: dict[str, float]) -> None:
        """Add a line of metrics."""
        _append(trainer.run_dir, "metrics.jsonl", [{"step": step, **metrics}])

    @hookimpl
    def on_evaluate(self, trainer: Trainer, step: int, metrics: dict[str, float], samples: list[dict[str, Any]]) -> None:
        """Add a line per evaluated sample."""
        _append(trainer.run_dir, "samples.jsonl", [{"step": step, **sample} for sample in samples])


def _append(run_dir: Path | None, name: str, records: list[dict[str, Any]]) -> None:
    if run_dir is None:
        return
    with (run_dir / name).open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def default_trackers(names: list[str]) -> list[object]:
    """The trackers of a run."""
    return [JsonLines()]
