"""Showing, checking and comparing configurations."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from trainkit.cli.console import complete_method
from trainkit.cli.training import parse_overrides
from trainkit.errors import ConfigError, RegistryError, printable, suggest
from trainkit.plugins.registry import is_known

if TYPE_CHECKING:
    from trainkit.config import PluginConfig, TRLConfig

Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Changes, e.g. train.seed=2.")]


class ShowByDefault(TyperGroup):
    """A group in which the name of an algorithm or a file instead of a command means ``show``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments, with ``show`` before them if they begin with no command."""
        if args and not args[0].startswith("-") and args[0] not in self.commands:
            known = is_known(args[0]) or _is_file(args[0])
            mistyped = not known and (suggest(args[0], self.commands) or any("=" not in arg for arg in args[1:]))
            args = args if mistyped else ["show", *args]
        return super().parse_args(ctx, args)


def show_config(
    source: Annotated[
        str,
        typer.Argument(
            metavar="METHOD|FILE",
            help="An algorithm, another plugin or a tracker, or a configuration file.",
            autocompletion=complete_method,
        ),
    ],
    overrides: Overrides = None,
) -> None:
    """Print an algorithm's defaults, a plugin's or tracker's entry, or a whole configuration, as YAML with comments.

    Of a configuration file every value is printed, with where it comes from: the file and its line, the command line,
    the method's own defaults, or the defaults.
    """
    if _is_file(source):
        typer.echo(_read(source, overrides).placed_yaml(), nl=False)
        return
    from trainkit.config import default_config
    from trainkit.config.trackers import TRACKERS
    from trainkit.plugins import find_plugin, get_hooks
    from trainkit.plugins.discovery import TRACKER, kinds_of
    from trainkit.plugins.registry import HOOKED, PARTS, get_part

    name = source.lower()
    if kinds := kinds_of(name):
        find_plugin(name)  # raises an error if it is unusable
    part = next((part for part in PARTS if name in {*part.own, *part.classes} or part.kind in kinds), None)
    if part:
        section, key = part.key.split(".")
        typer.echo(entry_yaml([f"{section}:", f"  {key}:\n    name: {name}"], get_part(part, name).settings), nl=False)
    elif name in TRACKERS:
        typer.echo(entry_yaml(["train:", f"  trackers:\n  - name: {name}"], TRACKERS[name]), nl=False)
    elif kinds and kinds <= {*HOOKED}:
        head = ["train:", f"  trackers:\n  - name: {name}"] if TRACKER in kinds else [f"plugins:\n- name: {name}"]
        hooks = get_hooks(name)
        typer.echo(entry_yaml(head, hooks.settings if hooks else None), nl=False)
    else:
        typer.echo(annotated_yaml(default_config(source).update(parse_overrides(overrides or []))), nl=False)


def check_config(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The configuration file.", show_default=False)],
    overrides: Overrides = None,
) -> None:
    """Check a configuration without loading weights: all faults at once, each with its line and what is allowed.

    Of a model in a local directory the config is read, which says how long texts may be and what can be trained.
    """
    config = _read(str(file), overrides)
    from trainkit.trainer.config_check import check_config

    check_config(config)
    typer.echo(f"{printable(str(file))} is valid: {config.method.name}")


def _is_file(source: str) -> bool:
    """Return whether a configuration file or the directory of a run is meant."""
    return Path(source).suffix in (".yaml", ".yml") or Path(source).exists()


def _read(source: str, overrides: list[str] | None = None) -> TRLConfig[Any]:
    """Return the configuration in a file or of a run's directory, changed by overrides."""
    from trainkit.config import read_config

    path = Path(source)
    return read_config(path / "config.yaml" if path.is_dir() else path, parse_overrides(overrides or []))


def diff_configs(
    first: Annotated[
        str, typer.Argument(metavar="A", help="A configuration file, a run's directory, or an algorithm.")
    ],
    second: Annotated[str, typer.Argument(metavar="B", help="The other one.")],
) -> None:
    """Print the settings in which two configurations differ; nothing if they do not."""
    from trainkit.config import default_config, differences

    sides = (_read(source) if _is_file(source) else default_config(source) for source in (first, second))
    one, other = (side.to_dict() for side in sides)
    for key, a, b in differences(one, other):
        typer.echo(printable(f"{key}: {_shown(a)} -> {_shown(b)}"))


def _shown(value: Any) -> str:
    return "(not set)" if value is ... else json.dumps(value, ensure_ascii=False)


def print_schema(
    method: Annotated[
        str | None, typer.Argument(metavar="[METHOD]", help="Only this.", autocompletion=complete_method)
    ] = None,
) -> None:
    """Print the JSON Schema of configurations, by which editors complete and check them.

    Write it to a file, and name that in the first line of a configuration:
    # yaml-language-server: $schema=trainkit.schema.json
    """
    from trainkit.config.schema import COMMENT, json_schema
    from trainkit.plugins import available_trainers

    try:
        schema = json_schema([method] if method else available_trainers())
    except RegistryError as error:  # wrong usage
        raise ConfigError(str(error)) from None
    typer.echo(json.dumps(schema, indent=2))
    typer.echo(f"first line of a configuration: {COMMENT.format('FILE')}", err=True)


def entry_yaml(head: list[str], settings: type[PluginConfig] | None) -> str:
    """Return the entry of a plugin in a configuration as YAML, with comments that describe its settings.

    Args:
        head: its first lines, one piece for each level that its settings are indented; the last one has the name.
        settings: the class of its settings; None if it has none.
    """
    from trainkit.plain import to_yaml
    from trainkit.security import hidden

    lines, indent = list(head), "  " * len(head)
    for field, about in (settings.model_fields if settings else {}).items():
        if field != "name":
            lines += _comment(about.description, indent)
            given = (
                f"{field}:  # required\n"
                if about.is_required()
                else to_yaml(hidden({field: about.get_default(call_default_factory=True)}))
            )
            lines += textwrap.indent(given, indent).splitlines()
    return "\n".join(lines) + "\n"


def annotated_yaml(config: TRLConfig[Any]) -> str:
    """Return the configuration as YAML, with a comment above every field that describes it."""
    lines: list[str] = []
    section: Any = None
    for line in str(config).splitlines():
        field = re.match(r"( {2})?(\w+):", line)
        if field is None:  # inside a list, or deeper than a field
            lines.append(line)
            continue
        indent, name = field[1] or "", field[2]
        if not indent:
            section = getattr(config, name)
            lines.append("")
        owner = type(section if indent else config)
        described = getattr(owner, "model_fields", {}).get(name)
        lines += _comment(described and described.description, indent)
        lines.append(line)
    return "\n".join(lines).lstrip("\n") + "\n"


def _comment(text: str | None, indent: str) -> list[str]:
    """Return the lines of a comment in YAML; none if there is no text."""
    return textwrap.wrap(text or "", width=100, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")
