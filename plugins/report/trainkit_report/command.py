"""The commands: reports and comparisons of runs, and the page that is served while they go on."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainkit.cli.console import aligned
from trainkit.errors import DataError, printable

if TYPE_CHECKING:
    from trainkit_report.comparison import Comparison
    from trainkit_report.groups import Group

MOST = 20
"""Metrics in the table of a comparison at most; the page has all of them."""


def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Directories of runs, or directories that hold runs.")
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", help="The file to write; by default report.html, in the directory of one run, or here."),
    ] = None,
    title: Annotated[str | None, typer.Option("--title", help="The heading; by default the names of the runs.")] = None,
) -> None:
    """Write a page of HTML about runs: curves, evaluations, samples, findings, timing, configuration, versions.

    The page needs no other file and no network. Runs that differ by their seed alone are one curve, with a band.
    """
    from trainkit_report.groups import runs_at
    from trainkit_report.report import report as written

    found = runs_at(runs)
    _write(out or (found[0].path if len(found) == 1 else Path()) / "report.html", written(found, title))


def compare(
    first: Annotated[Path, typer.Argument(metavar="A", help="A run, or a directory with runs of several seeds.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="What it is compared with.")],
    metric: Annotated[
        str | None, typer.Option("--metric", help="What the verdict is about; by default the reward of evaluations.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Write a report of both to this file, too.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Compare two runs, or two groups of seeds: settings, curves, final metrics, and a paired test over the seeds."""
    from trainkit_report.comparison import compare as compared
    from trainkit_report.groups import runs_at
    from trainkit_report.report import report as written

    sides = [runs_at([first]), runs_at([second])]
    found = compared(sides[0], sides[1], metric)
    typer.echo(json.dumps(_plain(found), indent=2) if as_json else "\n".join(map(printable, _text(found))))
    if out is not None:
        _write(out, written([*sides[0], *sides[1]], f"{found.first.name} and {found.second.name}", found))


def watch(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Directories of runs, or directories that hold runs.")
    ],
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="The port; 0 for a free one.")] = 8765,
) -> None:
    """Serve a page about runs while they go on, or after it: the report of them, rollouts, and responses by token.

    The page is read-only, and this machine alone can open it; it needs no network and no JavaScript.
    """
    from trainkit_report.watch import Server

    server = Server(runs, port)
    typer.echo(f"{server.url} shows {', '.join(printable(str(run)) for run in runs)}; Ctrl-C ends it")
    typer.echo(
        f"from another machine: ssh -L {server.port}:127.0.0.1:{server.port} THIS_MACHINE, then the same address"
    )
    with suppress(KeyboardInterrupt):
        server.serve_forever()
    server.server_close()


def served(places: Sequence[Path], port: int = 0) -> Any:
    """Return a server of the page about runs that has begun in a thread; `trainkit.runs.history.watched` calls it."""
    from trainkit_report.watch import Server

    return Server(places, port).start()


def _write(path: Path, page: str) -> None:
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror}; name another file by --out") from error
    typer.echo(f"wrote {printable(str(path))} ({len(page.encode()) / 1000:.0f} kB)", err=True)


def _text(found: Comparison) -> Iterator[str]:
    from trainkit_report.charts import text_chart

    yield f"A: {found.first.name}"
    yield f"B: {found.second.name}"
    yield from ("", "settings that differ:")
    yield from _settings(found)
    lines = [line for group in (found.first, found.second) if (line := group.line(found.metric, 60))]
    yield from ("", f"{found.metric} over the steps (A and B, * both):")
    yield from text_chart(lines, "AB")
    several = max(len(group.runs) for group in (found.first, found.second)) > 1
    spread = ", mean ± standard deviation over the seeds; p of each metric by itself" if several else ""
    yield from ("", f"final values{spread}:")
    yield from _table(found)
    yield ""
    yield from found.notes()
    yield f"{found.verdict()}."


def _settings(found: Comparison) -> Iterator[str]:
    for path, first, second in found.settings:
        yield f"  {path}: {_setting(first)} -> {_setting(second)}"
    if not found.settings:
        yield "  none"


def _setting(value: Any) -> str:
    return "(not set)" if value is ... else json.dumps(value, default=str)


def _table(found: Comparison) -> Iterator[str]:
    rows = [("metric", "A", "B", "B - A", "p")]
    for metric in found.metrics[:MOST]:
        test = found.paired(metric)
        difference = "" if math.isnan(test.mean) else f"{test.mean:+.4g}"
        p = "" if math.isnan(test.p) else f"{test.p:.2g}"
        rows.append((metric, _mean(found.first, metric), _mean(found.second, metric), difference, p))
    yield from (f"  {row}" for row in aligned(rows))
    if len(found.metrics) > MOST:
        yield f"  and {len(found.metrics) - MOST} more metrics; --json has all of them"


def _mean(group: Group, metric: str) -> str:
    from trainkit.tables import number
    from trainkit_report.groups import spread

    values = list(group.final(metric).values())
    if not values:
        return "not finite"
    deviation = f" ± {spread(values):.2g}" if len(values) > 1 else ""
    return f"{number(sum(values) / len(values))}{deviation}"


def _plain(found: Comparison) -> dict[str, Any]:
    def known(value: float) -> float | None:
        return value if math.isfinite(value) else None

    metrics = {}
    for metric in found.metrics:
        test = found.paired(metric)
        metrics[metric] = {
            "a": {str(seed): value for seed, value in found.first.final(metric).items()},
            "b": {str(seed): value for seed, value in found.second.final(metric).items()},
            "difference": known(test.mean),
            "interval": [known(bound) for bound in test.interval],
            "p": known(test.p),
        }
    return {
        "a": found.first.name,
        "b": found.second.name,
        "settings": {path: [_given(first), _given(second)] for path, first, second in found.settings},
        "metric": found.metric,
        "verdict": found.verdict(),
        "notes": list(found.notes()),
        "metrics": metrics,
    }


def _given(value: Any) -> Any:
    return None if value is ... else value
