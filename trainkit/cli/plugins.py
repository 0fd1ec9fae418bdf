"""Listing, checking and writing plugins."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainkit.cli.console import StrictPlugins, aligned, complete_method, lines, mark
from trainkit.errors import ConfigError, PluginError, printable
from trainkit.plugins import PluginInfo
from trainkit.plugins.discovery import how_to_install
from trainkit.plugins.templates import Kind

if TYPE_CHECKING:
    from trainkit_kit.conformance import Result


def new_plugin(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Its name in configurations, e.g. my-algo.")],
    kind: Annotated[Kind, typer.Option(help="An algorithm, or what else a run can name.")] = Kind.TRAINER,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The new directory; by default ./trainkit-NAME.")
    ] = None,
) -> None:
    """Create a plugin from a template. The directory can be installed, checked and run, for you to change."""
    from trainkit.plugins import templates

    names, files = templates.new_plugin(name, kind, out)
    folder = str(out or names.distribution)
    is_command = kind == Kind.COMMAND
    called = [names.plugin.replace("_", "-"), "--help"] if is_command else ["plugins", "check", names.plugin]
    commands = [
        *([] if find_spec("trainkit_kit") else [how_to_install("trainkit-kit")]),
        shlex.join(["pip", "install", "-e", f"{folder}[dev]"]),
        shlex.join(["trainkit", *called]),
        shlex.join(["python", f"{folder}/example.py"]),
    ]
    typer.echo("\n".join([*map(str, files), "", "next:", *(f"  {command}" for command in commands)]))


EXIT_OF_LIST = (
    "Exit code: 0, whether plugins can be used or not, unless --strict-plugins is given; scripts can read that from "
    "--json."
)


def list_by_default(ctx: typer.Context) -> None:
    """List the plugins if no command follows."""
    if ctx.invoked_subcommand is None:
        list_plugins()


def list_plugins(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    try_imports: Annotated[
        bool, typer.Option("--probe", help="Import each in a process of its own, for at most two minutes.")
    ] = False,
    strict_plugins: StrictPlugins = False,
) -> None:
    """List the installed plugins, and why any of them cannot be used; none is imported in this process.

    The kind of a plugin is that of its entry-point group. A plugin that fails to import says so when it is named, in
    `trainkit plugins check`, or here with --probe.
    """
    from dataclasses import asdict

    from trainkit.plugins import discover
    from trainkit.plugins.discovery import unknown_disabled

    for _, message in unknown_disabled():
        typer.echo(f"warning: {printable(message)}", err=True)
    plugins = discover()
    if try_imports:
        from trainkit.plugins.probe import probe

        plugins = probe(plugins)
    # what a distribution says of its plugins may be anything
    rows = [{key: printable(v) if isinstance(v, str) else v for key, v in asdict(each).items()} for each in plugins]
    typer.echo(json.dumps(rows, indent=2) if as_json else plugins_table(plugins))
    if strict_plugins:
        require_sound(plugins)


def require_sound(plugins: Iterable[PluginInfo]) -> None:
    """Raise a `PluginError` if a plugin cannot be used, unless it is disabled."""
    from trainkit.plugins.discovery import reasons

    if faults := reasons(plugin for plugin in plugins if not plugin.disabled):
        raise PluginError(f"--strict-plugins, and not all plugins can be used: {'; '.join(faults)}")


def plugins_table(plugins: list[PluginInfo]) -> str:
    """Return a table with one line per plugin, followed by the reasons why some cannot be used."""
    from trainkit.plugins.discovery import reasons

    columns = ("name", "kind", "distribution", "version")
    table = [columns, *(tuple(printable(getattr(plugin, column)) for column in columns) for plugin in plugins)]
    refused = [f"cannot be used: {printable(reason)}" for reason in reasons(plugins)]
    return "\n".join([*aligned(table), *([""] if refused else []), *refused])


def check_plugin(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="An algorithm or another plugin.", autocompletion=complete_method)
    ],
    only: Annotated[list[str] | None, typer.Option(metavar="CHECK", help="Run only this check; repeatable.")] = None,
    show: Annotated[bool, typer.Option("--list", help="List the checks that apply, without running them.")] = False,
    expect_failure: Annotated[
        list[str] | None,
        typer.Option(metavar="CHECK=WHY", help="A check that is expected to fail, with the reason; repeatable."),
    ] = None,
) -> None:
    """Check a plugin in short training runs of tiny models: an algorithm, hooks, or a sampler.

    Each check is printed with what it proves. A failed check is followed by what was observed and why it matters.
    """
    try:
        from trainkit_kit import ConformanceError
        from trainkit_kit import check_plugin as run
        from trainkit_kit.conformance import checks_for, subjects_of
    except ModuleNotFoundError as error:
        if error.name != "trainkit_kit":
            raise
        how = how_to_install("trainkit-kit")
        raise PluginError(f"the checks are a distribution of their own; install it: {how}") from None

    checks = [each for subject in subjects_of(name) for each in checks_for(subject)]
    width = max(len(each.name) for each in checks)
    if show:
        for each in checks:
            typer.echo(f"{each.name:<{width}}  {each.proves}")
        return

    def tell(result: Result) -> None:
        sign = mark(result.outcome != "failed")
        typer.echo(f"{sign} {result.check.name:<{width}}  {result.seconds:5.1f} s  {result.check.proves}")

    try:
        report = run(name, only=only or None, expected_failures=_expected_failures(expect_failure or []), tell=tell)
    except ConformanceError as error:
        typer.echo(f"\n{lines(error)}")
        raise typer.Exit(1) from None
    typer.echo(f"\n{lines(report)}")


def _expected_failures(options: list[str]) -> dict[str, str]:
    """Return the checks of ``--expect-failure`` with their reasons."""
    reasons = {}
    for text in options:
        check, _, why = text.partition("=")
        if not check or not why.strip():
            raise ConfigError(f"--expect-failure is {text!r}; give CHECK=WHY, the check's name and why it fails")
        reasons[check] = why
    return reasons
