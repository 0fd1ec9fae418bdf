"""Configurations and scripts of other frameworks for trainkit."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trainkit.errors import ConfigError, printable

EXIT_OF_MIGRATE = "Exit code: 0 if all settings or names have a counterpart, 1 if one has none."


def migrate(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A configuration (.yml) or script (.py) of trlX.", show_default=False)
    ],
    processes: Annotated[int, typer.Option(min=1, help="Processes that train: trlX gives sizes for each.")] = 1,
) -> None:
    """Print a configuration of another framework as one of trainkit, or what to change in a script, as a patch.

    What has no effect or no counterpart is said on standard error, with the reason and what to write instead.
    """
    if file.suffix == ".py":
        _migrate_script(file)
        return
    from trainkit.config import TRLConfig
    from trainkit.migrating import translate
    from trainkit.plain import read_yaml, to_yaml

    given = read_yaml(file)
    if "method" not in given or not {"model", "train", "tokenizer"} & given.keys():
        raise ConfigError(
            f"{str(file)!r} should have the sections of trlX: method, model, train; it has {', '.join(given)}"
        )
    found = translate("trlx", given, processes=processes)
    for remark in found.remarks:
        typer.echo(printable(f"{file}: {remark}"), err=True)
    for remark in found.overrides:
        typer.echo(printable(f"{file}: {remark.field} is set by a trainer of your own: {remark.text}"), err=True)
    for remark in found.refused:
        typer.echo(printable(f"{file}: {remark.field} has no counterpart: {remark.text}"), err=True)
    if not found.refused:
        TRLConfig.from_dict(found.config)
    typer.echo(to_yaml({name: found.config[name] for name in TRLConfig.model_fields if name in found.config}), nl=False)
    if found.refused:
        raise typer.Exit(1)


def _migrate_script(file: Path) -> None:
    from difflib import unified_diff

    from trainkit.migrating import rewritten

    try:
        text = file.read_text(encoding="utf-8")
        found = rewritten(text)
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the script {str(file)!r}: {error}") from None
    for remark in found.refused:
        typer.echo(printable(f"{file}:{remark}"), err=True)
    before, after = text.splitlines(keepends=True), found.text.splitlines(keepends=True)
    typer.echo("".join(unified_diff(before, after, str(file), str(file))), nl=False)
    if found.refused:
        raise typer.Exit(1)
