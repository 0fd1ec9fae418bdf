"""Listing and running the examples."""

from __future__ import annotations

import ast
from typing import Annotated

import typer

from trainkit.errors import ConfigError, suggest
from trainkit.examples import find_examples
from trainkit.plugins import load_file


def list_examples() -> None:
    """List the examples with a description of each."""
    examples = find_examples()
    width = max(map(len, examples), default=0)
    for name, path in examples.items():
        about = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        typer.echo(f"{name:<{width}}  {about.partition(chr(10))[0]}")


def run_example(
    name: Annotated[str, typer.Argument(help="The example's name.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[ARGUMENTS]...", help="Arguments for it.")] = None,
) -> None:
    """Run an example; arguments after its name (`--seed 2`, `--help`) are passed to it."""
    examples = find_examples()
    if name not in examples:
        raise ConfigError(
            f"there is no example {name!r}{suggest(name, examples)}; known: {', '.join(examples) or 'none'}"
        )
    try:
        load_file(examples[name]).main(arguments or [])
    except ConfigError as error:
        if isinstance(error.__cause__, ModuleNotFoundError):
            raise ConfigError(
                f"{error}; install what the examples need: pip install 'trainkit-rl[examples]'"
            ) from error.__cause__
        raise
