"""What the commands share: errors as messages, marks, common options."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from trainkit.errors import TRACEBACK, ConfigError, TrainkitError, printable

RemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        help="Let code that comes with the model run. Read it first.",
    ),
]
StrictPlugins = Annotated[
    bool, typer.Option("--strict-plugins", help="End with an error if an installed plugin cannot be used.")
]


def complete_method(incomplete: str) -> list[str]:
    """Return the names of algorithms that begin with what was typed, for the completion of a shell."""
    from trainkit.plugins import available_trainers

    return [name for name in available_trainers() if name.startswith(incomplete.lower())]


MEANT = {"validate": "config check", "check": "config check", "lint": "config check", "version": "--version"}
"""What is meant by names that are no commands."""


class ExplainedErrors(TyperGroup):
    """A command group that prints the message of a `TrainkitError` instead of its traceback.

    An error of another process is printed by that process.
    """

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that the arguments begin with.

        Raises:
            typer.BadParameter: there is none, or another usage error; names the command that a file or the name of an
                algorithm stands for.
        """
        try:
            return super().resolve_command(ctx, args)
        except TrainkitError:
            raise
        except Exception as error:
            from trainkit.plugins import is_registered
            from trainkit.plugins.discovery import is_installed

            name = args[0] if args else ""
            if name.endswith((".yaml", ".yml")):
                error.message += f" Give trainkit train {name}"  # type: ignore[attr-defined]
            elif name in MEANT:
                error.message += f" Give trainkit {MEANT[name]}"  # type: ignore[attr-defined]
            elif is_registered(name) or is_installed(name, ""):
                error.message += f" Give trainkit train CONFIG.yaml; trainkit config show {name} prints one"  # type: ignore[attr-defined]
            raise

    def invoke(self, ctx: Any) -> Any:
        """Run the command; errors end it with exit code 1, those of a configuration with 2, as wrong usage does."""
        try:
            return super().invoke(ctx)
        except TrainkitError as error:
            if ctx.params.get("traceback"):
                raise
            if not error.from_other_rank:
                typer.echo(message(error), err=True)
            raise typer.Exit(2 if isinstance(error, ConfigError) else 1) from error


class WithOverrides(TyperCommand):
    """A command with overrides of a configuration. Options that other frameworks have are said to be overrides."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments.

        Raises:
            typer.BadParameter: an option is unknown, or another usage error; names the override to write instead.
        """
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            if option := getattr(error, "option_name", ""):
                error.message += _as_override(option, given)  # type: ignore[attr-defined]
            raise


def _as_override(option: str, given: list[str]) -> str:
    """Return what to write instead of an option that the command does not have."""
    from trainkit.config import dotted, note

    if option in ("--config", "--config-file", "--config_file", "-c"):
        return ". The configuration file is given without an option: trainkit train CONFIG.yaml"
    if not option.startswith("--"):  # click takes the letters of -lr for options
        option = next((argument for argument in given if argument.startswith(option)), option)
    name = option.rpartition(".")[2].lstrip("-")  # of Lightning's command line: --trainer.max_epochs
    if not (meant := dotted(option) or dotted(name)):
        return f". {told[0].upper()}{told[1:]}" if (told := note(name)) else ""
    if meant[0].startswith("--"):
        return f". Give {meant[0]}"
    at = next((index for index, argument in enumerate(given) if argument.partition("=")[0] == option), len(given))
    value = given[at].partition("=")[2] if at < len(given) else ""
    value = value or next(iter(given[at + 1 : at + 2]), "") or (name if name in ("bf16", "fp16") else "VALUE")
    value = f"'[{value}]'" if meant == ["train.trackers"] else value
    return f". Settings are given as key=value: {' or '.join(f'{key}={value}' for key in meant)}"


def message(error: TrainkitError) -> str:
    """Return the text of an error for the console."""
    hint = f"\n({TRACEBACK}=1 shows the traceback)" if error.__cause__ is not None else ""
    return f"{type(error).__name__}: {lines(error)}{hint}"


def lines(text: object) -> str:
    """Return ``text`` without control characters, except for line breaks: it may quote data and user code."""
    return "\n".join(map(printable, str(text).split("\n")))


def aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield rows of a table as lines, with columns as wide as their longest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()


def mark(good: bool) -> str:
    """Return a tick or a cross, or + or - if the console's encoding lacks them."""
    marks = "✓✗".encode(sys.stdout.encoding or "ascii", "replace").decode(sys.stdout.encoding or "ascii")
    return (marks if "?" not in marks else "+-")[0 if good else 1]
