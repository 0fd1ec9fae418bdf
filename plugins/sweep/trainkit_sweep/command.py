"""The command: sweeps of settings."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainkit.cli.console import RemoteCode
from trainkit.errors import ConfigError, printable

if TYPE_CHECKING:
    from trainkit_sweep import Sweep

URL = "TRAINKIT_SWEEP_STORAGE"
"""The variable of the environment that may have the URL of the storage, which others could read on a command line."""


def sweep(
    file: Annotated[Path, typer.Argument(metavar="SWEEP.yaml", help="The sweep.", show_default=False)],
    workers: Annotated[
        int | None, typer.Option("--workers", min=1, metavar="N", help="Runs at the same time on this machine.")
    ] = None,
    storage: Annotated[
        str | None,
        typer.Option(
            "--storage",
            metavar="URL",
            envvar=URL,
            show_envvar=True,
            help="A database that several machines share; by default SQLite in the directory of the sweep.",
        ),
    ] = None,
    script: Annotated[
        str | None,
        typer.Option("--script", metavar="FILE.py", help="For a sweep of trlX: the script whose main(hparams) trains."),
    ] = None,
    report: Annotated[bool, typer.Option("--report", help="Only write the report of what was made so far.")] = False,
    trust_remote_code: RemoteCode = False,
) -> None:
    """Search settings with Optuna; each trial is a run of `trainkit train`, or one for each of several seeds.

    The same command continues a sweep that was interrupted or killed. The sweep writes best.yaml, a configuration,
    and report.html. A sweep names files with code: run only those that you trust.
    """
    from trainkit_sweep import read_sweep

    given = {"workers": workers, "script": script}
    found = read_sweep(file, {name: value for name, value in given.items() if value is not None})
    if trust_remote_code and found.settings.run.script is not None:
        raise ConfigError("--trust-remote-code has no effect on a script, which loads its models itself; remove it")
    url = storage or found.settings.storage
    if report:
        _require_begun(found, url)
        _write(found, url)
        return
    options = ["--trust-remote-code"] if trust_remote_code else []
    if asked := _made(found, url, options):
        typer.echo("the sweep has stopped; the same command continues it", err=True)
        raise typer.Exit(128 + asked)
    _write(found, url)


def _made(found: Sweep, url: str | None, options: list[str]) -> int:
    from trainkit_sweep import run_sweep

    try:
        found.directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"the directory {str(found.directory)!r} cannot be made: {error.strerror}; give another directory"
        ) from None
    return run_sweep(found, url, options=options)


def _require_begun(found: Sweep, url: str | None) -> None:
    if url is None and not (found.directory / "study.db").exists():
        raise ConfigError(f"there is no sweep in {str(found.directory)!r} yet; run it without --report first")


def _write(found: Sweep, url: str | None) -> None:
    """Write what was found, and print it."""
    from trainkit_sweep.progress import described, measured
    from trainkit_sweep.results import write_best, write_report
    from trainkit_sweep.study import Study

    study = Study(found, url, create=False)
    try:
        with study.reachable():
            found.directory.mkdir(parents=True, exist_ok=True)
            config, page, best = write_best(study), write_report(study), study.valid[0]
            told: list[Any] = [
                f"best: {found.settings.metric} {measured(study, best)}, trial {best.number}",
                described(study.parameters(best)),
                f"configuration: {config}",
                f"report: {page}",
            ]
    finally:
        study.close()
    typer.echo("\n".join(map(printable, told)))
