"""Writes the metrics of a run to a CSV file in its directory, one number per line: ``step,metric,value``."""

from __future__ import annotations

import csv
from typing import Any

from pydantic import Field

from trainkit import PluginConfig, hookimpl, register_tracker
from trainkit.errors import printable

HEADER = "step,metric,value\n"


class CSVConfig(PluginConfig):
    """What is written, and where."""

    file: str = Field("metrics.csv", pattern=r"^\w[\w.-]*$")
    """Name of the file in the directory of the run."""
    prefix: str = ""
    """Write only the metrics whose names begin with this, such as `eval/`. Empty: all."""


@register_tracker("csv", CSVConfig)
class CSV:
    """The tracker."""

    def __init__(self, settings: CSVConfig) -> None:
        self.settings = settings

    @hookimpl
    def on_train_begin(self, trainer: Any) -> None:
        """Remove lines that a killed run wrote after the checkpoint it resumes from; they are written again."""
        path = trainer.run_dir / self.settings.file
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
        last = trainer.progress.step or -1  # the evaluation before the first step is made again
        kept = [line for line in lines[1:] if line.endswith("\n") and int(line.split(",")[0]) <= last]
        if lines != [HEADER, *kept]:
            whole = path.with_name(f".{path.name}")
            whole.write_text("".join([HEADER, *kept]), encoding="utf-8")
            whole.replace(path)

    @hookimpl
    def log_metrics(self, trainer: Any, step: int, metrics: dict[str, float]) -> None:
        """Append a line for each metric, if the trainer has a run directory."""
        if trainer.run_dir is not None:
            rows = [(step, cell(n), value) for n, value in metrics.items() if n.startswith(self.settings.prefix)]
            with (trainer.run_dir / self.settings.file).open("a", encoding="utf-8", newline="") as file:
                csv.writer(file, lineterminator="\n").writerows(rows)


def cell(name: str) -> str:
    """Return the name of a metric on one line, and so that no spreadsheet reads it as a formula."""
    return "'" * printable(name).lstrip().startswith(("=", "+", "-", "@")) + printable(name)
