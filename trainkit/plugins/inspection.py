"""The contents of a plugin's module, read from its source. The module is not imported, so none of its code runs."""

from __future__ import annotations

import ast
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

TRAINER, ENGINE, SHARDING, SAMPLER, TRACKER, HOOKS = "trainer", "engine", "sharding", "sampler", "tracker", "hooks"
KINDS = (TRAINER, ENGINE, SHARDING, SAMPLER, TRACKER, HOOKS)
UNKNOWN = "?"
_REGISTERING = {"register_engine": ENGINE, "register_sharding": SHARDING, "register_tracker": TRACKER}
"""Decorators of classes, and the kind of what they register."""
LAZY = "lazy_names"
"""The function whose call says from which of its modules a package exports names."""
_MARKS = ("register_trainer", "register_hooks", "hookimpl", *_REGISTERING)


@dataclass(frozen=True)
class Reading:
    """What was found in a module, or why nothing was."""

    kind: str = UNKNOWN
    """``trainer``, ``engine``, ``sharding``, ``sampler`` (provides one), ``tracker`` (is registered as one), ``hooks``
    (has other hooks); several are joined by commas."""
    fault: str = ""
    """Why the import cannot succeed; empty if the source shows no reason."""


def read_module(module: str, name: str) -> Reading:
    """Return the kind of the plugin called ``name``, from the source of ``module`` and of its package's modules.

    Of the package, the modules that ``module`` imports are read. Their source shows decorators and calls of
    ``register_trainer``, classes decorated by ``register_engine``, ``register_sharding``, ``register_hooks`` or
    ``register_tracker``, and functions marked ``hookimpl``, which count if no class is registered. A module that does
    not exist or parse is a fault.
    """
    found: set[str] = set()
    registered: set[str] = set()
    waiting, seen = [module], {module}
    while waiting:
        current = waiting.pop()
        try:
            tree = _parse(current)
        except ModuleNotFoundError as error:
            if current == module:
                return Reading(fault=str(error))
            continue  # an attribute of a package, or a module from an import hook
        except SyntaxError as error:
            where = f" (line {error.lineno})" if error.lineno else ""
            return Reading(fault=f"{current} does not parse: {error.msg}{where}")
        if tree is not None:
            kinds, classes = _shown(tree, name)
            found |= kinds
            registered |= classes
            inner = [target for target in _imports(tree, current) if target not in seen]
            waiting += inner
            seen |= {*inner}
    found = (found & {TRAINER}) | registered if registered else found
    return Reading(", ".join(kind for kind in KINDS if kind in found) or UNKNOWN)


def _parse(module: str) -> ast.Module | None:
    """Return the module's syntax tree, or None if there is no source to read."""
    spec = _find(module)
    read = getattr(spec.loader, "get_source", None) if spec else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # these warnings are for the author of the plugin, not for its users
        try:
            source: str | None = read(module) if read else None
            return None if source is None else _tree(source)
        except ImportError:
            return None
        except (ValueError, RecursionError, MemoryError) as error:  # not text, or not parseable
            raise SyntaxError(f"{type(error).__name__}: {error}") from error


def absent_import(module: str) -> str:
    """Return the first module that ``module`` imports outside of any block and that is not there; empty if all are.

    Of a package, also what those of its modules import that it imports lazily.
    """
    waiting, seen = [module], {module}
    while waiting:
        current = waiting.pop()
        try:
            tree = _parse(current)
        except (ModuleNotFoundError, SyntaxError):
            continue
        if tree is not None:
            if absent := _absent(tree):
                return absent
            inner = {target for target in _imports(tree, current) if target not in seen}
            waiting += sorted(inner)
            seen |= inner
    return ""


def _absent(tree: ast.Module) -> str:
    for node in tree.body:
        named = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            named = [node.module]
        for other in named:
            try:
                if find_spec(other.partition(".")[0]) is None:
                    return other
            except ValueError:  # a module without a spec, made by hand
                continue
    return ""


@lru_cache(maxsize=256)
def _tree(source: str) -> ast.Module:
    tree = ast.parse(source)
    tree.marked = any(mark in source for mark in _MARKS)  # type: ignore[attr-defined]
    return tree


@lru_cache(maxsize=256)
def _nodes(tree: ast.Module) -> list[ast.AST]:
    """Return all nodes of a tree, which is walked through once."""
    return list(ast.walk(tree))


@lru_cache(maxsize=256)
def _shown(tree: ast.Module, name: str) -> tuple[frozenset[str], frozenset[str]]:
    """Return the kinds that the tree shows of the plugin called ``name``, and those of its registered classes."""
    if not tree.marked:  # type: ignore[attr-defined]  # walking through a tree takes ten times as long
        return frozenset(), frozenset()
    marks = _marks(tree)
    return frozenset(_kinds(tree, name, marks)), frozenset(_registered(tree, name, marks))


def files_of(module: str) -> list[Path]:
    """Return the Python files of the package that ``module`` is in, or the file of the module."""
    try:
        spec = _find(module.partition(".")[0])
    except ModuleNotFoundError:
        return []
    if spec is None or not spec.origin:
        return []
    file = Path(spec.origin)
    return [file] if spec.submodule_search_locations is None else sorted(file.parent.rglob("*.py"))


_found: ContextVar[dict[str, ModuleSpec | None] | None] = ContextVar("_found", default=None)
"""What was found inside `found_once`, by the names of packages."""


@contextmanager
def found_once() -> Iterator[None]:
    """Look for every package only once inside the block, because each of the many paths of imports is searched."""
    token = _found.set({})
    try:
        yield
    finally:
        _found.reset(token)


def _find(module: str) -> ModuleSpec | None:
    """Return the module's spec, or None if it cannot be determined.

    Raises:
        ModuleNotFoundError: there is no such module.
    """
    top, *rest = module.split(".")
    found = _found.get()
    try:
        spec = found[top] if found is not None and top in found else find_spec(top)
    except ValueError:  # a module without a spec, made by hand
        return None
    if found is not None:
        found[top] = spec
    path = top
    for part in rest:
        if spec is None:
            break
        path, places = f"{path}.{part}", spec.submodule_search_locations
        spec = None if places is None else _find_inside(path, places)
    if spec is None:
        raise ModuleNotFoundError(f"there is no module {path!r}")
    return spec


def _find_inside(module: str, places: Sequence[str]) -> ModuleSpec | None:
    for finder in sys.meta_path:
        if found := finder.find_spec(module, places, None):
            return found
    return None


def _marks(tree: ast.Module) -> dict[str, str]:
    """Return the names by which the module calls trainkit's decorators, and the decorators."""
    return {mark: mark for mark in _MARKS} | {
        alias.asname: alias.name
        for node in _nodes(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname and alias.name in _MARKS
    }


def _kinds(tree: ast.Module, name: str, marks: dict[str, str]) -> Iterator[str]:
    """Yield the kinds of the plugin called ``name`` that the trainers and functions of the tree show."""
    if any(_registers(node, name, marks) for node in _nodes(tree)):
        yield TRAINER
    yield from _hook_kinds(tree.body, marks)


def _registered(tree: ast.Module, name: str, marks: dict[str, str]) -> Iterator[str]:
    """Yield the kinds of the classes that the tree registers as ``name``, except trainers."""
    for node in _nodes(tree):
        if isinstance(node, ast.ClassDef):
            calls = [d for d in node.decorator_list if isinstance(d, ast.Call) and _may_name(d, name)]
            how = {_mark(call.func, marks) for call in calls}
            yield from (kind for mark, kind in _REGISTERING.items() if mark in how)
            if "register_hooks" in how and "register_tracker" not in how:
                yield from {*_hook_kinds(node.body, marks)} or {HOOKS}  # its hooks may be inherited


def _hook_kinds(body: Sequence[ast.stmt], marks: dict[str, str]) -> Iterator[str]:
    """Yield the kind of each function that is marked ``hookimpl``."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            called = [d.func if isinstance(d, ast.Call) else d for d in node.decorator_list]
            if any(_mark(d, marks) == "hookimpl" for d in called):
                yield SAMPLER if node.name == "make_sampler" else HOOKS


def _registers(node: ast.AST, name: str, marks: dict[str, str]) -> bool:
    """Return whether the node registers a trainer called ``name``, by its class's name or by a call with a name."""
    if isinstance(node, ast.ClassDef):
        bare = [d for d in node.decorator_list if not isinstance(d, ast.Call)]
        return node.name.lower() == name and any(_mark(d, marks) == "register_trainer" for d in bare)
    return isinstance(node, ast.Call) and _mark(node.func, marks) == "register_trainer" and _may_name(node, name)


def _mark(node: ast.expr, marks: dict[str, str]) -> str | None:
    """Return which of trainkit's decorators the expression names, or None."""
    return marks.get(_last(node))


def _last(node: ast.expr) -> str:
    """Return the last part of a dotted name; empty for other expressions."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _may_name(call: ast.Call, name: str) -> bool:
    """Return whether the call's first argument is ``name``, or has a value that is only known at run time."""
    first = call.args[0] if call.args else None
    return not isinstance(first, ast.Constant) or str(first.value).lower() == name


def _imports(tree: ast.Module, module: str) -> Iterator[str]:
    """Yield the modules of its own package that ``module`` imports at top level, or exports lazily."""
    top = module.split(".")[0]
    package = module if _is_package(module) else module.rpartition(".")[0]
    for node in tree.body:
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and _last(node.value.func) == LAZY:
            given = [str(each.value) for each in node.value.args[2:] if isinstance(each, ast.Constant)]
            targets = [f"{package}.{name}" for name in given]
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - (node.level - 1)] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            targets = [base, *(f"{base}.{alias.name}" for alias in node.names)]
        else:
            continue
        yield from (target for target in targets if target.split(".")[0] == top)


def exists(module: str) -> bool:
    """Return whether there is a module of that name; import nothing."""
    try:
        return _find(module) is not None
    except ModuleNotFoundError:
        return False


def _is_package(module: str) -> bool:
    try:
        spec = _find(module)
    except ModuleNotFoundError:
        return False
    return spec is not None and spec.submodule_search_locations is not None
