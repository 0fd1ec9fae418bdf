"""Scripts of other frameworks with their imports changed to those of the adapters."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from trainkit.errors import ConfigError, suggest
from trainkit.migrating.tables import FRAMEWORKS, Framework, framework


@dataclass
class Rewritten:
    """A script whose imports are changed."""

    text: str
    """The source."""
    refused: list[str] = field(default_factory=list)
    """Names without counterpart, each after its line."""


def rewritten(text: str) -> Rewritten:
    """Return a script with its imports of another framework changed to those of the adapter.

    Raises:
        SyntaxError: it is not Python.
        ConfigError: it imports no framework that has an adapter, or the adapter is not installed.
    """
    found, lines, before = Rewritten(text), text.splitlines(keepends=True), text
    for name in FRAMEWORKS:
        about = framework(name)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import | ast.ImportFrom):
                for number in range(node.lineno - 1, node.end_lineno or node.lineno):
                    lines[number] = _changed(lines[number], about)
                found.refused += _missing(node, about)
    found.text = "".join(lines)
    if found.text == before:
        raise ConfigError(f"the script imports none of {', '.join(framework(name).package for name in FRAMEWORKS)}")
    return found


def _changed(line: str, about: Framework) -> str:
    """Return a line of an import statement with the package of the adapter; the name that it binds stays."""
    package, adapter = about.package, about.adapter
    line = re.sub(rf"^(\s*from\s+){package}\b", rf"\1{adapter}", line)
    line = re.sub(rf"(\bimport\s+(?:.*,\s*)?){package}(?=\s*(?:,|$|#))", rf"\1{adapter} as {package}", line)
    return re.sub(rf"(\bimport\s+){package}\.(\S+)(?=\s+as\b)", rf"\1{adapter}.\2", line)


def _missing(node: ast.Import | ast.ImportFrom, about: Framework) -> Iterator[str]:
    """Yield what an import asks for that the adapter does not have."""
    asked = [(node.module or "", [alias.name for alias in node.names])] if isinstance(node, ast.ImportFrom) else []
    asked += [(alias.name, []) for alias in node.names] if isinstance(node, ast.Import) else []
    for module, names in asked:
        if module.split(".")[0] != about.package:
            continue
        known = _names(module.replace(about.package, about.adapter, 1))
        if known is None:
            yield f"{node.lineno}: {about.adapter} has no module {module.partition('.')[2]!r}"
            continue
        for name in names:
            if name != "*" and name not in known and _names(f"{about.adapter}.{name}") is None:
                yield f"{node.lineno}: {about.adapter} has no {name!r} in {module!r}{suggest(name, known)}"


@cache
def _names(module: str) -> frozenset[str] | None:
    """Return the names that a module of an adapter defines or imports, read from its source; None if there is none."""
    package, _, inside = module.partition(".")
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        distribution = package.replace("_", "-")
        raise ConfigError(
            f"{distribution} is not installed, which has the names of the script; pip install {distribution}"
        )
    place = Path(next(iter(spec.submodule_search_locations))).joinpath(*inside.split(".") if inside else ())
    files = [file for file in (place / "__init__.py", place.with_suffix(".py")) if file.is_file()]
    if not files:
        return None
    found: set[str] = set()
    for node in ast.parse(files[0].read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return frozenset(found)
