"""Configurations."""

from __future__ import annotations

import re
import textwrap
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from trainkit.config import PluginConfig, TRLConfig


def show_config(
    method: Annotated[str, typer.Argument(metavar="METHOD", help="An algorithm's name, or that of another plugin.")],
) -> None:
    """Print an algorithm's defaults, or the entry of another plugin with its settings, as YAML with comments."""
    from trainkit.config import default_config
    from trainkit.plugins import get_hooks, is_registered
    from trainkit.plugins.discovery import is_installed
    from trainkit.plugins.registry import PARTS, available_parts, get_part

    name = method.lower()
    if part := next((part for part in PARTS if name in available_parts(part)), None):
        section, key = part.key.split(".")
        head = [f"{section}:", f"  {key}:\n    name: {name}"]
        typer.echo(entry_yaml(head, get_part(part, name).settings), nl=False)
        return
    hooks = get_hooks(method) if is_installed(method.lower(), "") else None
    if hooks is None or is_registered(method):
        typer.echo(annotated_yaml(default_config(method)), nl=False)
    else:
        head = ["train:", f"  trackers:\n  - name: {name}"] if hooks.tracker else [f"plugins:\n- name: {name}"]
        typer.echo(entry_yaml(head, hooks.settings), nl=False)


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
