"""The reference pages: settings from their classes, commands from their help, and the names of the public modules."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import os
import re
import sys
import tomllib
import types
import typing
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "docs/site")]

from public_names import MODULES, exported, first_paragraph, listed_elsewhere, tree  # noqa: E402

TRAINER = "trainkit.trainer.AccelerateRLTrainer"
"""The class of a run, on a page of its own with everything that it inherits."""
API = {name: f"reference/api/{name}.md" for name in (*MODULES, TRAINER)}
"""The public modules and the class of a run, and their pages."""
BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


# ------------------------------------------------------------------------------------------------------ plugins


@cache
def entries(plugin: str) -> dict[str, str]:
    """Return the names that a directory of plugins/ registers, with the kind of each."""
    from trainkit.plugins.discovery import GROUPS

    project = tomllib.loads((ROOT / "plugins" / plugin / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = project.get("entry-points", {})
    return {name: kind for kind, group in GROUPS.items() for name in groups.get(group, {})}


def trains(plugin: str) -> bool:
    """Return whether a directory of plugins/ holds an algorithm."""
    return "trainer" in entries(plugin).values()


def plugins() -> list[str]:
    """Return the directories of plugins/, in the order of the alphabet."""
    return sorted(path.parent.name for path in (ROOT / "plugins").glob("*/pyproject.toml"))


# ------------------------------------------------------------------------------------------------------ settings


def settings() -> set[str]:
    """Return every setting that all algorithms have, as ``section.field``."""
    from trainkit import TRLConfig

    return {f"{name}.{field}" for name, section in _sections().items() for field in section.model_fields} | {
        name for name in TRLConfig.model_fields
    }


def _sections() -> dict[str, Any]:
    """Return the classes of the sections that all algorithms have."""
    from trainkit import TRLConfig

    fields = TRLConfig.model_fields.items()
    return {name: field.annotation for name, field in fields if name not in ("method", "plugins")}


def setting_pages() -> dict[str, str]:
    """Return the pages of the settings: of the sections, of the algorithms, and of the other plugins."""
    from trainkit import get_trainer
    from trainkit.plugins import get_hooks
    from trainkit.plugins.registry import PARTS, get_part

    sections = [
        f"## {name} {{ #{name} }}\n\n{first_paragraph(cls.__doc__)}\n" + "".join(_fields(cls, name))
        for name, cls in _sections().items()
    ]
    methods, others = [], []
    for plugin in plugins():
        page = f"[trainkit-{plugin}](../{'algorithms' if trains(plugin) else 'plugins'}/{plugin}.md)"
        for name, kind in entries(plugin).items():
            head = f"## {name} {{ #{name} }}\n\nOf {page}. "
            if trains(plugin):
                cls: Any = get_trainer(name).method_class
                methods.append(head + _suggested(cls) + "".join(_fields(cls, f"method.{name}")))
                continue
            part = next((part for part in PARTS if part.kind == kind), None)
            hooks = None if part else get_hooks(name)
            found: Any = get_part(part, name).settings if part else hooks and hooks.settings
            where = f"In `{part.key}`.\n" if part else "In `plugins`.\n"
            others.append(head + where + "".join(_fields(found, f"{name}") if found else ["\nIt has no settings.\n"]))
    boosted = "---\nsearch:\n  boost: 4\n---\n\n"  # who searches for the name of a setting looks for its description
    return {
        "reference/settings.md": boosted + _page("Settings", SECTIONS, sections),
        "reference/methods.md": boosted + _page("Settings of methods", METHODS, methods),
        "reference/plugins.md": _page("Settings of plugins", OTHERS, others),
    }


SECTIONS = """\
The sections that every configuration has beside `method`, generated from their classes. [Configuration](../config.md)
describes how they are written, merged and checked. `trainkit config METHOD` prints them with the defaults of a method.
"""
METHODS = """\
The section `method` of each algorithm, generated from its class. Some algorithms have defaults of their own for other
sections, which are named first.
"""
OTHERS = """\
The settings of the plugins that are not algorithms, generated from their classes. An entry in the configuration is the
name, or a mapping with the name and settings.
"""


def _page(title: str, head: str, parts: list[str]) -> str:
    return f"# {title}\n\n{head}\n" + "\n".join(parts)


def _suggested(cls: Any) -> str:
    """Return the defaults of other sections that an algorithm brings, as a sentence."""
    found = [f"`{s}.{f}: {_literal(v)}`" for s, fields in cls.section_defaults.items() for f, v in fields.items()]
    return link_settings(f"Defaults in other sections: {', '.join(found)}.\n", "settings.md") if found else "\n"


def _fields(cls: Any, owner: str) -> Iterator[str]:
    """Yield a heading, the type with its bounds and default, and the description, for each field of a section."""
    for name, field in cls.model_fields.items():
        if name != "name" or owner in ("optimizer", "scheduler"):
            about = link_settings(field.description or "", "" if owner in _sections() else "settings.md")
            title = f"{owner}.{name}" if owner in _sections() else name
            yield f"\n### {title} {{ #{owner}.{name} }}\n\n{_kind(field)}\n\n{about}\n"


def _kind(field: FieldInfo) -> str:
    """Return the type of a field, its bounds and its default."""
    bounds = [
        f"{sign} {getattr(mark, bound)}"
        for mark in field.metadata
        for bound, sign in BOUNDS.items()
        if getattr(mark, bound, None) is not None
    ]
    kind = ", ".join([_type(field.annotation), *bounds])
    if field.is_required():
        return f"`{kind}`, required"
    return f"`{kind}`, default `{_literal(field.get_default(call_default_factory=True))}`"


def _type(annotation: Any) -> str:
    """Return an annotation as it is written in the source."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _type(arguments[0])
    if origin in (typing.Union, types.UnionType):
        return " | ".join(dict.fromkeys(map(_type, arguments)))
    if origin is typing.Literal:
        return " | ".join(map(_literal, arguments))
    if origin is not None:
        return f"{origin.__name__}[{', '.join(map(_type, arguments))}]"
    return {type(None): "null", Any: "any", Ellipsis: "..."}.get(annotation) or str(annotation.__name__)


def _literal(value: Any) -> str:
    """Return a value as it is written in YAML, on one line."""
    return json.dumps(value, ensure_ascii=False, default=str)


@cache
def _setting_spans() -> re.Pattern[str]:
    """Return the pattern of a setting of a section in backquotes, outside of links and headings."""
    names = "|".join(sorted((re.escape(name) for name in settings() if "." in name), key=len, reverse=True))
    return re.compile(rf"(?<![\[`])`(({names})(?:[:=] ?[^`]*)?)`(?![`\]])")


def link_settings(text: str, page: str) -> str:
    """Return a text in which every setting in backquotes, such as `train.seed`, is a link to its description."""
    lines = text.splitlines(keepends=True)
    return "".join(
        line if line.startswith("#") else _setting_spans().sub(lambda m: f"[`{m[1]}`]({page}#{m[2]})", line)
        for line in lines
    )


# ------------------------------------------------------------------------------------------------------ commands


def command_page() -> str:
    """Return the page of the command line: the help of every command."""
    import typer.main
    from typer.testing import CliRunner

    from trainkit.cli import app

    os.environ.update(TERMINAL_WIDTH="100", COLUMNS="100", NO_COLOR="1")
    runner = CliRunner()

    def described(path: list[str], command: Any) -> Iterator[str]:
        name = " ".join(["trainkit", *path])
        shown = runner.invoke(app, [*path, "--help"], prog_name="trainkit").stdout.strip()
        yield f"{'#' * min(3, len(path) + 2)} {name}\n\n```text\n{shown}\n```\n"
        inside = command.everything() if not path else getattr(command, "commands", {})
        for sub, below in inside.items():
            yield from described([*path, sub], below)

    return _page("Command line", "The help of every command.\n", list(described([], typer.main.get_command(app))))


# ------------------------------------------------------------------------------------------------------ Python


def api_pages() -> dict[str, str]:
    """Return a page for each public module, and one that lists them; mkdocstrings fills them from the docstrings."""
    rows = []
    found = {}
    for module in MODULES:
        source = tree(module)
        assert source is not None
        about = first_paragraph(ast.get_docstring(source))
        rows.append(f"| [`{module}`]({module}.md) | {about} |\n")
        names = [name for name in exported(module) if tree(f"{module}.{name}") is None]
        own = [name for name in names if not (module == "trainkit" and listed_elsewhere(name))]
        apart = {name: also for name in own if (also := inherited(f"{module}.{name}"))}
        plain = [name for name in own if name not in apart and f"{module}.{name}" != TRAINER]
        listed = "".join(f"            - {name}\n" for name in plain)
        found[API[module]] = f"::: {module}\n    options:\n        members:\n{listed}"
        for name, also in apart.items():
            if f"{module}.{name}" != TRAINER:
                options = f"heading_level: 2\n        inherited_members: {also}"
                found[API[module]] += f"\n::: {module}.{name}\n    options:\n        {options}\n"
        if other := sorted(set(names) - set(own)):
            links = ", ".join(f"[`{name}`][{_home(name)}.{name}]" for name in other)
            found[API[module]] += f"\nAlso exported, and described in the packages that define them: {links}.\n"
    about = "the trainer that `trainkit.train` returns, and its methods"
    rows.append(f"| [`{TRAINER}`]({TRAINER}.md) | {about} |\n")
    found[API[TRAINER]] = f"::: {TRAINER}\n    options:\n        inherited_members: true\n"
    table = f"| module | content |\n|---|---|\n{''.join(rows)}"
    found["reference/api/index.md"] = _page("Python API", API_HEAD, [table])
    return found


API_HEAD = """\
The public modules, generated from their docstrings. A name that is not listed may change without notice. The version
of trainkit is that of this API: a removal or a changed signature raises its middle number.
"""


def inherited(path: str) -> list[str]:
    """Return the methods and properties that a class inherits from classes that are not public, and have no page."""
    module, _, name = path.rpartition(".")
    classes = getattr(getattr(importlib.import_module(module), name, None), "__mro__", ())
    public = {name for module in MODULES for name in exported(module)}
    hidden = (vars(c) for c in classes if c.__module__.startswith("trainkit.") and c.__name__ not in public)
    members = {name: value for each in hidden for name, value in each.items() if not name.startswith("_")}
    return sorted(name for name, value in members.items() if isinstance(value, property) or inspect.isroutine(value))


def _home(name: str) -> str:
    """Return the public module below ``trainkit`` that lists a name."""
    return next(module for module in MODULES if module != "trainkit" and name in exported(module))


def pages() -> dict[str, str]:
    """Return every page of the reference."""
    return {**setting_pages(), "reference/cli.md": command_page(), **api_pages(), "reference/index.md": INDEX}


INDEX = """\
# Reference

| page | content |
|---|---|
| [Settings](settings.md) | every setting of the sections that all algorithms have |
| [Settings of methods](methods.md) | the settings of each algorithm, and its defaults in other sections |
| [Settings of plugins](plugins.md) | the settings of engines, shardings, and plugins with hooks |
| [Command line](cli.md) | every command with its arguments and options |
| [Python API](api/index.md) | every public name, with what it takes, returns and raises |
| [Errors](../errors.md) | the exception classes, and what to do about frequent messages |
"""
