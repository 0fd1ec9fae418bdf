"""new_plugin: a command that prints the step of a run with the best evaluation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from trainkit.errors import DataError


def new_plugin(
    run: Annotated[Path, typer.Argument(help="The directory of a run.")],
    metric: Annotated[str, typer.Option(help="The metric, as it is logged.")] = "eval/reward",
) -> None:
    """Print the step of a run at which a metric was best, and its value there."""
    step, value = best(run, metric)
    typer.echo(f"{metric} is best at step {step}: {value:.4g}")


def best(run: Path, metric: str) -> tuple[int, float]:
    """Return the step at which a metric of a run was best, and its value there.

    Raises:
        DataError: the directory holds no run, or one without this metric; the command line prints it as one sentence.
    """
    try:
        lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise DataError(
            f"{str(run)!r} is no run that can be read: {error.strerror}; give the directory of one"
        ) from error
    values = {line["step"]: line[metric] for line in map(json.loads, lines) if metric in line}
    if not values:
        raise DataError(f"{str(run)!r} has no {metric!r}; give another metric of its metrics.jsonl")
    step = max(values, key=lambda step: values[step])
    return step, values[step]
