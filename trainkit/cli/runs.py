"""Listing runs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainkit.cli.console import aligned
from trainkit.errors import DataError, TrainkitError, printable

if TYPE_CHECKING:
    from trainkit.runs import Record

UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


def list_runs(
    directory: Annotated[Path, typer.Argument(metavar="[DIR]", help="Where to look, up to four levels deep.")] = Path(
        "runs"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List the runs in a directory: method, steps, state, main metric, size, and the checks that found something.

    The metric is the reward of evaluations, or the first of their other metrics; of a run without evaluations, the
    reward or the loss of training. The state is running if a process holds the lock of the run, done if its model is
    exported, stopped if it ended before, and killed if its process has ended and left the lock behind.
    """
    from trainkit.runs import find_runs

    if not directory.is_dir():
        raise DataError(f"there is no directory {str(directory)!r}; give the one that your runs are in")
    rows = [_row(run, directory) for run in find_runs(directory)]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
    elif rows:
        typer.echo("\n".join(_table(rows)))
    else:
        typer.echo(f"no runs in {printable(str(directory))}")


def _row(run: Record, directory: Path) -> dict[str, Any]:
    """Return what is listed of a run; of one that cannot be read, why."""
    from trainkit.runs.health import found_in
    from trainkit.runs.record import main_metric

    row: dict[str, Any] = {"run": str(run.path.relative_to(directory))}
    try:
        run.checked()
        total, seed = run.setting("train", "total_steps"), run.setting("train", "seed")
        metric = main_metric(run.series)
        finite = [value for value in run.series.get(metric or "", {}).values() if math.isfinite(value)]
        written = [file.stat().st_mtime for file in run.path.iterdir() if file.suffix in (".jsonl", ".yaml")]
        changed = datetime.fromtimestamp(max(written))
        return row | {
            "method": run.method,
            "seed": seed,
            "step": run.step,
            "total_steps": total,
            "state": run.state,
            "metric": metric,
            "value": finite[-1] if finite else None,
            "bytes": sum(file.lstat().st_size for file in run.path.rglob("*") if file.is_file()),
            "health": sorted({str(each.get("check")) for each in found_in(run)}),
            "changed": f"{changed:%Y-%m-%d %H:%M}",
            "error": "",
        }
    except (TrainkitError, OSError) as error:
        return row | {"error": printable(str(error))}


def _table(rows: list[dict[str, Any]]) -> Iterator[str]:
    columns = ("run", "method", "seed", "steps", "state", "metric", "last", "size", "changed", "health")
    table = [columns, *(_cells(row) for row in rows if not row["error"])]
    yield from aligned(table)
    for row in rows:
        if row["error"]:
            yield printable(f"{row['run']} cannot be read: {row['error']}")


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    from trainkit.tables import number

    total = "" if row["total_steps"] is None else f"/{row['total_steps']}"
    last = "-" if row["value"] is None else number(row["value"])
    unit, size = next((unit, size) for unit, size in UNITS if row["bytes"] >= size or unit == "kB")
    found = (row["run"], row["method"], row["seed"], f"{row['step']}{total}", row["state"], row["metric"], last)
    cells = (*found, f"{row['bytes'] / size:.1f} {unit}", row["changed"], ", ".join(row["health"]))
    return tuple("-" if cell in (None, "") else printable(str(cell)) for cell in cells)
