"""new_plugin: a tracker that keeps the newest value of every metric of a run in one file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trainkit import AcceleratedLoop, PluginConfig, hookimpl, register_tracker


class NewPluginConfig(PluginConfig):
    """The settings of new_plugin."""

    file: str = "new_plugin.json"
    """The file in the run's directory: for each metric its newest value, and the step of that value."""


@register_tracker("new_plugin", NewPluginConfig)
class NewPlugin:
    """The tracker. A run makes one, on its main process."""

    def __init__(self, settings: NewPluginConfig) -> None:
        self.settings = settings

    @hookimpl
    def on_train_begin(self, trainer: AcceleratedLoop[Any]) -> None:
        """Remove the values logged after the checkpoint that this run resumes from."""
        kept = {name: seen for name, seen in self._read(trainer).items() if seen["step"] <= trainer.progress.step}
        self._write(trainer, kept)

    @hookimpl
    def log_metrics(self, trainer: AcceleratedLoop[Any], step: int, metrics: dict[str, float]) -> None:
        """Store the newest values."""
        newest = {name: {"step": step, "value": value} for name, value in metrics.items()}
        self._write(trainer, self._read(trainer) | newest)

    def _path(self, trainer: AcceleratedLoop[Any]) -> Path | None:
        """Return where the file is; None if evaluate() is called before a run."""
        return None if trainer.run_dir is None else trainer.run_dir / self.settings.file

    def _read(self, trainer: AcceleratedLoop[Any]) -> dict[str, Any]:
        path = self._path(trainer)
        if path is None or not path.exists():
            return {}
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found

    def _write(self, trainer: AcceleratedLoop[Any], newest: dict[str, Any]) -> None:
        if path := self._path(trainer):
            path.write_text(json.dumps(newest, indent=1), encoding="utf-8")
