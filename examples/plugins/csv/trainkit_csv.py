"""Writes the metrics of a run to ``metrics.csv`` in its directory, one number per line: ``step,metric,value``."""

from __future__ import annotations

import csv
from typing import Any

from trainkit import hookimpl

NAME, HEADER = "metrics.csv", "step,metric,value\n"


@hookimpl
def on_train_begin(trainer: Any) -> None:
    """Remove lines that a killed run wrote after the checkpoint that this run resumes from; they are written again."""
    if not trainer.accelerator.is_main_process:  # this hook is called on every process, `log_metrics` on one
        return
    path = trainer.run_dir / NAME
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    last = trainer.progress.step or -1  # the evaluation before the first step is made again
    kept = [line for line in lines[1:] if line.endswith("\n") and int(line.split(",")[0]) <= last]
    if lines != [HEADER, *kept]:
        whole = path.with_name(f".{NAME}")
        whole.write_text("".join([HEADER, *kept]), encoding="utf-8")
        whole.replace(path)


@hookimpl
def log_metrics(trainer: Any, step: int, metrics: dict[str, float]) -> None:
    """Append a line for each metric, if the trainer has a run directory."""
    if trainer.run_dir is not None:
        with (trainer.run_dir / NAME).open("a", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows((step, *item) for item in metrics.items())
