"""Writes docs/plugin-api.md, the names that plugins may use, from the sources: ``python docs/make_plugin_api.py``.

It refuses where the API has changed and `trainkit.__version__` does not say so. Without a document it starts afresh.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs/plugin-api.md"
MODULES = (
    "trainkit",
    "trainkit.functional",
    "trainkit.metrics",
    "trainkit.data",
    "trainkit.models",
    "trainkit.rollouts",
    "trainkit.plugins",
    "trainkit.plugins.hookspecs",
    "trainkit.migrating",
    "trainkit.runs",
    "trainkit.trainer",
    "trainkit.seeding",
    "trainkit.errors",
    "trainkit.testing",
    "trainkit.testing.trainers",
    "trainkit.testing.bandit",
)
"""The public modules."""
TRAINERS = "trainkit.trainer."
"""Where the classes are defined whose instances' attributes are public too: plugins derive from them."""
HEAD = """\
# The API of plugins

Version {version} of trainkit.

This page is generated from the sources by `make api`. It lists the public names that plugins may use: the names in a
module's `__all__`, or if it has none, its functions, its classes, and its described constants, without a leading
underscore. For a class it lists the members that the class itself defines; see its base classes for the others. The
attributes of the instances of trainers are listed too. The members of a class that is in `trainkit` and in a package
below it are listed under the package.

The API has the version of trainkit. An addition raises at least the last number. A removal, or a change of a signature,
raises the middle number (from 1.0 on, the first). Otherwise `make api` refuses to write this page, and a test fails.
While a version is not released, its page can be removed and generated anew: without a page, `make api` compares
nothing.
"""

KINDS = {"abstractmethod": "abstract", "classmethod": "classmethod", "staticmethod": "staticmethod"}
"""Decorators of methods, and the words that stand for them."""
NAMED = re.compile(rf"(?:@\w+(?:\(.*?\))? )?(?:(?:class|property|{'|'.join(KINDS.values())}) |self\.)*(\w+)")
"""The name in a signature."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Name:
    """One public name: where it is found, how it is written, what it is."""

    path: str
    signature: str
    about: str

    @property
    def line(self) -> str:
        """The line of the document; members are indented below their class."""
        about = f": {self.about}" if self.about else ""
        return f"{'  ' * self.path.count('#')}* `{self.signature}`{about}"


# ------------------------------------------------------------------------------------------- reading the sources


@cache
def tree(module: str) -> ast.Module | None:
    """Return the syntax tree of a module of trainkit; None if there is no such module."""
    place = ROOT.joinpath(*module.split("."))
    for file in (place.with_suffix(".py"), place / "__init__.py"):
        if module.split(".")[0] == "trainkit" and file.is_file():
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


def defined(module: str, name: str) -> tuple[str, list[tuple[ast.stmt, str]]]:
    """Return the module that defines a name, and its definitions: several for overloads, none for a name of others."""
    source = tree(module)
    if source is None:
        return module, []
    if found := [(statement, about) for statement, about in statements(source.body) if name in targets(statement)]:
        return module, found
    for statement, _ in statements(source.body):
        for alias in statement.names if isinstance(statement, ast.ImportFrom) else []:
            if (alias.asname or alias.name) == name and statement.module and not tree(f"{module}.{name}"):
                return defined(statement.module, alias.name)
    return module, []


# ------------------------------------------------------------------------------------------------ describing them


def first_paragraph(text: str | None) -> str:
    """Return the first paragraph of a docstring, in one line."""
    return " ".join((text or "").strip().partition("\n\n")[0].split())


def decorators(function: Function) -> set[str]:
    """Return the last parts of the names of a function's decorators."""
    return {ast.unparse(decorator).partition("(")[0].rpartition(".")[2] for decorator in function.decorator_list}


def call(function: Function, *, bound: bool = False, name: str = "") -> str:
    """Return ``name(arguments) -> result``, without the first argument if the function is ``bound``."""
    arguments = ast.unparse(function.args)
    if bound:
        arguments = re.sub(r"^\w+(, )?(/, )?", "", arguments)
    result = f" -> {ast.unparse(function.returns)}" if function.returns and name == "" else ""
    return f"{name or function.name}({arguments}){result}"


def method(function: Function) -> str:
    """Return the signature of a method, or of a property."""
    marks = decorators(function)
    if marks & {"property", "cached_property"}:
        result = f": {ast.unparse(function.returns)}" if function.returns else ""
        return f"property {function.name}{result}"
    kinds = [word for mark, word in KINDS.items() if mark in marks]
    return " ".join([*kinds, call(function, bound="staticmethod" not in marks)])


def members(path: str, cls: ast.ClassDef, *, instances: bool) -> Iterator[Name]:
    """Yield the public members that a class defines itself, and its call; with ``instances``, their attributes too."""
    for statement, about in statements(cls.body):
        if isinstance(statement, Function):
            if statement.name == "__init__" and instances:
                yield from attributes(path, statement)
            shown = statement.name == "__call__" or not statement.name.startswith("_")
            if shown and not decorators(statement) & {"overload", "setter", "field_validator", "model_validator"}:
                text = first_paragraph(ast.get_docstring(statement))
                yield Name(f"{path}#{statement.name}", method(statement), text)
        elif isinstance(statement, ast.AnnAssign) or (isinstance(statement, ast.Assign) and about):
            for name in targets(statement):
                if not name.startswith("_"):
                    yield Name(f"{path}#{name}", ast.unparse(statement), about)


def attributes(path: str, init: Function) -> Iterator[Name]:
    """Yield the public attributes that a constructor assigns."""
    for statement, about in statements(init.body):
        annotation = f": {ast.unparse(statement.annotation)}" if isinstance(statement, ast.AnnAssign) else ""
        given = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        for target in given:
            for part in target.elts if isinstance(target, ast.Tuple) else [target]:
                if isinstance(part, ast.Attribute) and ast.unparse(part.value) == "self" and part.attr[0] != "_":
                    yield Name(f"{path}#{part.attr}", f"self.{part.attr}{annotation}", about)


def class_signature(cls: ast.ClassDef) -> str:
    """Return ``class Name(Bases)``, and the signature of the constructor if the class defines one."""
    bases = f"({', '.join(ast.unparse(base) for base in cls.bases)})" if cls.bases else ""
    frozen = [ast.unparse(mark) for mark in cls.decorator_list if "dataclass" in ast.unparse(mark)]
    (init,) = [s for s in cls.body if isinstance(s, Function) and s.name == "__init__"][-1:] or [None]
    made = f" = {call(init, bound=True, name=cls.name)}" if init else ""
    return f"{''.join(f'@{mark} ' for mark in frozen)}class {cls.name}{bases}{made}"


def names_of(module: str, name: str) -> Iterator[Name]:
    """Yield a public name of a module, and its members if it is a class."""
    home, found = defined(module, name)
    path = f"{module}.{name}"
    if tree(path) is not None and not found:
        yield Name(path, name, f"the module `{path}`.")
    functions = [statement for statement, _ in found if isinstance(statement, Function)]
    shown = [f for f in functions if "overload" in decorators(f)] or functions
    if functions:
        text = next(filter(None, (first_paragraph(ast.get_docstring(f)) for f in functions)), "")
        yield Name(path, "; ".join(map(call, shown)), text)
    for statement, about in found:
        if isinstance(statement, ast.ClassDef):
            yield Name(path, class_signature(statement), first_paragraph(ast.get_docstring(statement)))
            if not (module == "trainkit" and listed_elsewhere(name)):
                yield from members(path, statement, instances=home.startswith(TRAINERS))
        elif not isinstance(statement, Function):
            yield Name(path, ast.unparse(statement), about)


def listed_elsewhere(name: str) -> bool:
    """Return whether a package below ``trainkit`` exports a name too; the members of a class are listed there."""
    return any(name in exported(module) for module in MODULES if module != "trainkit")


def names() -> list[Name]:
    """Return the whole API, in the order of the document."""
    return [found for module in MODULES for name in exported(module) for found in names_of(module, name)]


# ------------------------------------------------------------------------------------------------- the document


def present_version() -> str:
    """Return `trainkit.__version__`, read from the source."""
    ((statement, _),) = defined("trainkit", "__version__")[1]
    return str(ast.literal_eval(statement.value))  # type: ignore[attr-defined]


def document(version: str, api: list[Name]) -> str:
    """Return the text of the page."""
    parts = [HEAD.format(version=version)]
    for module in MODULES:
        source = tree(module)
        assert source is not None
        lines = [name.line for name in api if name.path.partition("#")[0].rpartition(".")[0] == module]
        parts.append(f"## {module}\n\n{first_paragraph(ast.get_docstring(source))}\n\n" + "\n".join(lines) + "\n")
    return "\n".join(parts)


def written(text: str) -> tuple[str, dict[str, str]]:
    """Return the version of a page, and the signatures that it lists by path."""
    (version,) = re.findall(r"^Version (\S+) of trainkit", text, flags=re.MULTILINE)
    module = owner = ""
    found: dict[str, str] = {}
    for line in text.splitlines():
        if line.startswith("## "):
            module = line[3:]
        elif entry := re.match(r"( *)\* `([^`]+)`", line):
            name = NAMED.match(entry[2])
            assert name is not None, line
            owner = owner if entry[1] else f"{module}.{name[1]}"
            found[f"{owner}#{name[1]}" if entry[1] else owner] = entry[2]
    return version, found


@dataclass(frozen=True)
class Difference:
    """What the API has that a page does not list, and the other way round."""

    added: list[str]
    gone: list[str]
    changed: list[str]

    def __str__(self) -> str:
        kinds = {"added": self.added, "removed": self.gone, "changed": self.changed}
        return "\n".join(f"  {kind}: {name}" for kind, listed in kinds.items() for name in listed)


def difference(before: dict[str, str], now: dict[str, str]) -> Difference:
    """Return what differs between two listings of signatures by path."""
    both = [path for path in before if path in now and now[path] != before[path]]
    return Difference(
        added=[path for path in now if path not in before],
        gone=[path for path in before if path not in now],
        changed=[f"{path}: {before[path]} -> {now[path]}" for path in both],
    )


def objection(page: str, version: str, api: list[Name]) -> str:
    """Return why the version does not allow the changes since the given page was written; empty if it does."""
    before, listed = written(page)
    found = difference(listed, {name.path: name.signature for name in api})
    was, now = (tuple(int(number) for number in text.split(".")) for text in (before, version))
    if (found.gone or found.changed) and now[: _breaking(was)] <= was[: _breaking(was)]:
        rule = "what is gone or has changed raises the " + ("minor number" if was[0] == 0 else "major number")
    elif found.added and now <= was:
        rule = "an addition raises at least the patch number"
    else:
        return ""
    return (
        f"the API of plugins differs from {DOCUMENT.name}, which is of version {before}, and "
        f"trainkit.__version__ is {version}:\n{found}\n{rule}. Raise __version__ in trainkit/__init__.py and run `make "
        "api`; or undo it. If that version was never released, remove the page and run `make api` to start afresh"
    )


def _breaking(version: tuple[int, ...]) -> int:
    """Return how many numbers of a version, from the first, an incompatible change has to raise one of."""
    return 2 if version[0] == 0 else 1


def main() -> str | None:
    """Write the page; return the message if that is refused."""
    version, api = present_version(), names()
    if DOCUMENT.exists() and (refused := objection(DOCUMENT.read_text(encoding="utf-8"), version, api)):
        return refused
    DOCUMENT.write_text(document(version, api), encoding="utf-8")
    return None


if __name__ == "__main__":
    sys.exit(main())
