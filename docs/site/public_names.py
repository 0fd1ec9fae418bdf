"""The public names: what plugins may use, and what the reference describes; read from the sources."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
MODULES = (
    "trainkit",
    "trainkit.functional",
    "trainkit.metrics",
    "trainkit.data",
    "trainkit.models",
    "trainkit.rollouts",
    "trainkit.plugins",
    "trainkit.plugins.hookspecs",
    "trainkit.runs",
    "trainkit.trainer",
    "trainkit.seeding",
    "trainkit.errors",
    "trainkit.testing",
    "trainkit.testing.trainers",
    "trainkit_kit",
)
"""The public modules."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def tree(module: str) -> ast.Module | None:
    """Return the syntax tree of a module of trainkit or of its kit; None if there is no such module."""
    package, *_ = parts = module.split(".")
    place = (ROOT / "plugins/kit" if package == "trainkit_kit" else ROOT).joinpath(*parts)
    for file in (place.with_suffix(".py"), place / "__init__.py"):
        if package in ("trainkit", "trainkit_kit") and file.is_file():
            return ast.parse(file.read_text(encoding="utf-8"))
    return None


def statements(body: list[ast.stmt]) -> Iterator[tuple[ast.stmt, str]]:
    """Yield each statement, also those under ``if TYPE_CHECKING``, with the string after it that describes it."""
    for statement, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(statement, ast.If):
            yield from statements(statement.body)
        described = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        text = after.value.value if described else ""  # type: ignore[union-attr]
        yield statement, first_paragraph(text) if isinstance(text, str) else ""


def targets(statement: ast.stmt) -> list[str]:
    """Return the names that a statement defines in its module or class."""
    if isinstance(statement, Function | ast.ClassDef):
        return [statement.name]
    if isinstance(statement, ast.AnnAssign):
        return [statement.target.id] if isinstance(statement.target, ast.Name) else []
    if isinstance(statement, ast.Assign):
        return [target.id for target in statement.targets if isinstance(target, ast.Name)]
    return []


def exported(module: str) -> list[str]:
    """Return the public names of a module."""
    source = tree(module)
    assert source is not None, module
    for statement, _ in statements(source.body):
        if targets(statement) == ["__all__"]:
            return sorted(ast.literal_eval(statement.value))  # type: ignore[attr-defined]
    found = []
    for statement, about in statements(source.body):
        if about or isinstance(statement, Function | ast.ClassDef):
            found += [name for name in targets(statement) if not name.startswith("_")]
    return sorted(set(found))


def first_paragraph(text: str | None) -> str:
    """Return the first paragraph of a docstring, in one line."""
    return " ".join((text or "").strip().partition("\n\n")[0].split())


def listed_elsewhere(name: str) -> bool:
    """Return whether a package below ``trainkit`` exports a name too; the members of a class are listed there."""
    return any(name in exported(module) for module in MODULES if module != "trainkit")
