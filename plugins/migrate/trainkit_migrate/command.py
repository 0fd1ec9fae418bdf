"""The command: configurations and scripts of other frameworks for trainkit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainkit.errors import ConfigError, describe, printable

if TYPE_CHECKING:
    from trainkit_migrate import Configured, Translation

EXIT_OF_MIGRATE = "Exit code: 0 if all settings or names have a counterpart, 1 if one has none."
WHAT = (
    "A configuration (.yml, .json) of trlX, TRL, async_rlhf, ddpo-pytorch, axolotl, accelerate or DeepSpeed, or a "
    "script (.py) of trlX, TRL, async_rlhf or ddpo-pytorch; docs/coming-from-*.md have the tables."
)


def migrate(
    file: Annotated[Path, typer.Argument(metavar="FILE", help=WHAT, show_default=False)],
    processes: Annotated[int, typer.Option(min=1, help="Processes that train: sizes are given for each.")] = 1,
    config_class: Annotated[
        str, typer.Option(metavar="NAME", help="Class of the fields in a file of TRL or async_rlhf, as DPOConfig.")
    ] = "",
) -> None:
    """Print a configuration of another framework as one of trainkit, or what to change in a script, as a patch.

    Scripts of TRL 1.x, async_rlhf and ddpo-pytorch have no adapter: the configurations that they make are printed. What
    has no effect or no counterpart is said on standard error, with the reason and what to write instead.
    """
    if file.suffix == ".py":
        _migrate_script(file, processes)
        return
    from trainkit_migrate import recognised

    given = _read(file)
    if "tune_config" in given:
        raise ConfigError(f"{file} is a sweep of trlX, which trainkit sweep {file} --script SCRIPT.py runs as it is")
    name, sections, told = recognised(given, config_class)
    if told:
        typer.echo(printable(f"{file}: {told}"), err=True)
    if _print_translated(file, name, sections, processes):
        raise typer.Exit(1)


def _read(file: Path) -> dict[str, Any]:
    """Return the content of a configuration, which has to be a mapping.

    Raises:
        ConfigError: it cannot be read, or is none.
    """
    from trainkit.plain import read_yaml
    from trainkit_migrate.recognition import READ

    if file.suffix.lower() not in ("", ".yml", ".yaml", ".json"):
        raise ConfigError(f"cannot read {str(file)!r}, which ends in {file.suffix!r}; {READ}")
    doubled: list[str] = []
    try:
        if file.suffix.lower() != ".json" or not file.is_file():
            given = read_yaml(file, doubled)
        else:
            given = json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=partial(_last, doubled=doubled))
    except ConfigError as error:
        raise ConfigError(f"{str(error).replace(', such as `method: ppo`', '')}; {READ}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not valid JSON: {error}; {READ}") from None
    for each in dict.fromkeys(doubled):  # as where the file was read
        typer.echo(printable(f"{file}: {each}"), err=True)
    if not isinstance(given, dict):
        raise ConfigError(f"{file} should hold a mapping; it holds {describe(given)}; {READ}")
    return given


def _last(pairs: list[tuple[str, Any]], doubled: list[str]) -> dict[str, Any]:
    """Return pairs as a mapping, and tell of names that are given again, of which the last counts."""
    found = dict[str, Any]()
    for name, value in pairs:
        doubled += [f"{name!r} is given twice; the second counts"] if name in found else []
        found[name] = value
    return found


def _print_translated(file: Path, name: str, given: Mapping[str, Any], processes: int) -> int:
    """Print a configuration, and its remarks on standard error; return how many fields have no counterpart."""
    from trainkit.config import TRLConfig
    from trainkit.plain import to_yaml
    from trainkit_migrate import translate

    found = translate(name, given, processes=processes)
    _print_remarks(file, found)
    if not found.refused:
        TRLConfig.from_dict({"method": "sft", **found.config})
    typer.echo(to_yaml({name: found.config[name] for name in TRLConfig.model_fields if name in found.config}), nl=False)
    return len(found.refused)


def _print_remarks(file: Path, found: Translation) -> None:
    """Print the remarks about fields on standard error."""
    for remark in found.remarks:
        typer.echo(printable(f"{file}: {remark}"), err=True)
    for remark in found.overrides:
        typer.echo(printable(f"{file}: {remark.field} is set by a trainer of your own: {remark.text}"), err=True)
    for remark in found.refused:
        typer.echo(printable(f"{file}: {remark.field} has no counterpart: {remark.text}"), err=True)


def _migrate_script(file: Path, processes: int) -> None:
    from difflib import unified_diff

    from trainkit_migrate import configured, rewritten

    try:
        text = file.read_text(encoding="utf-8")
        without_adapter = configured(text)
        found = None if without_adapter else rewritten(text)
    except (OSError, SyntaxError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read the script {str(file)!r}: {error}") from None
    if without_adapter:
        _print_configured(file, without_adapter, processes)
        return
    assert found is not None
    for remark in found.refused:
        typer.echo(printable(f"{file}:{remark}"), err=True)
    before, after = text.splitlines(keepends=True), found.text.splitlines(keepends=True)
    typer.echo("".join(unified_diff(before, after, str(file), str(file))), nl=False)
    if found.refused:
        raise typer.Exit(1)


def _print_configured(file: Path, found: Configured, processes: int) -> None:
    for change in found.changes:
        typer.echo(printable(f"{file}:{change}"), err=True)
    if not found.configs:
        told = "makes no configuration; give the YAML file with its fields to trainkit migrate"
        typer.echo(printable(f"{file}: {told}"), err=True)
    refused = found.refused
    for number, sections in enumerate(found.configs):
        typer.echo("---\n" if number else "", nl=False)
        refused += _print_translated(file, found.framework, sections, processes)
    if refused:
        raise typer.Exit(1)


app = typer.Typer(rich_markup_mode=None)
app.command(epilog=EXIT_OF_MIGRATE)(migrate)
