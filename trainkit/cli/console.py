"""What the commands share: errors as messages, marks, common options."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from trainkit.errors import TrainkitError, printable

TRACEBACK = "TRAINKIT_TRACEBACK"

RemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        help="Let code that comes with the model run. Read it first.",
    ),
]
StrictPlugins = Annotated[
    bool, typer.Option("--strict-plugins", help="End with an error if an installed plugin is broken or shadowed.")
]


class ExplainedErrors(TyperGroup):
    """A command group that prints the message of a `TrainkitError` instead of its traceback.

    An error of another process is printed by that process.
    """

    def invoke(self, ctx: Any) -> Any:
        """Run the command; errors end it with exit code 1."""
        try:
            return super().invoke(ctx)
        except TrainkitError as error:
            if ctx.params.get("traceback"):
                raise
            if not error.elsewhere:
                typer.echo(message(error), err=True)
            raise typer.Exit(1) from error


def message(error: TrainkitError) -> str:
    """Return the text of an error for the console."""
    hint = f"\n({TRACEBACK}=1 shows the traceback)" if error.__cause__ is not None else ""
    return f"{type(error).__name__}: {lines(error)}{hint}"


def lines(text: object) -> str:
    """Return ``text`` without control characters, except for line breaks: it may quote data and user code."""
    return "\n".join(map(printable, str(text).split("\n")))


def mark(good: bool) -> str:
    """Return a tick or a cross, or + or - if the console's encoding lacks them."""
    marks = "✓✗".encode(sys.stdout.encoding or "ascii", "replace").decode(sys.stdout.encoding or "ascii")
    return (marks if "?" not in marks else "+-")[0 if good else 1]
