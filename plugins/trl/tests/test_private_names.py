"""The adapters, and what comes with them, stand on public names of the core and of the plugins alone."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

PLUGINS = Path(__file__).parents[2]
OF_OTHERS = {"_name_or_path", "_hf_peft_config_loaded", "_actions", "_trial_id"}
"""Private names of transformers, of argparse and of optuna, which have no public ones for the same."""
ACCESS = ("getattr", "hasattr", "setattr", "delattr")


def modules(adapter: str) -> Iterator[tuple[str, ast.Module]]:
    """Yield the modules of an adapter with their syntax trees."""
    root = PLUGINS / adapter / f"trainkit_{adapter}"
    for file in sorted(root.rglob("*.py")):
        parts = file.relative_to(root.parent).with_suffix("").parts
        yield ".".join(parts).removesuffix(".__init__"), ast.parse(file.read_text("utf-8"))


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def read(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the private names that are read as attributes, by `getattr` and its kin, or imported."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            yield node.lineno, node.attr
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ACCESS:
            for given in node.args[1:2]:
                if isinstance(given, ast.Constant) and is_private(str(given.value)):
                    yield node.lineno, str(given.value)
        if isinstance(node, ast.ImportFrom):
            home = (node.module or "").split(".")
            yield from ((node.lineno, alias.name) for alias in node.names if is_private(alias.name))
            yield from ((node.lineno, part) for part in home if is_private(part))


def defined(tree: ast.AST) -> set[str]:
    """Return the private names that a module defines: functions, variables, and attributes of its own objects."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name):
            found |= {node.attr} if node.value.id in ("self", "cls") else set()
    return {name for name in found if is_private(name)}


@pytest.mark.parametrize("adapter", ["trl", "trlx", "migrate", "sweep", "ddpo"])
def test_no_private_name_is_read_that_the_adapter_does_not_define(adapter: str) -> None:
    trees = dict(modules(adapter))
    own = set[str]().union(*map(defined, trees.values())) | OF_OTHERS
    foreign = [f"{name}:{line}: {read_name}" for name, tree in trees.items() for line, read_name in read(tree)
               if read_name not in own]  # fmt: skip
    assert foreign == []
    assert len(trees) > 12, "the modules are found"


@pytest.mark.parametrize("adapter", ["trl", "trlx", "migrate", "sweep", "ddpo"])
def test_no_class_overrides_a_private_name_of_another_distribution_of_trainkit(adapter: str) -> None:
    package, overridden, seen = f"trainkit_{adapter}", [], 0
    for name, _ in modules(adapter):
        for cls in vars(importlib.import_module(name)).values():
            if not inspect.isclass(cls) or cls.__module__ != name:
                continue
            seen += 1
            bases = [each for each in cls.__mro__[1:] if each.__module__.startswith("trainkit")
                     and each.__module__.partition(".")[0] != package]  # fmt: skip
            overridden += [
                f"{name}.{cls.__name__}.{each} of {base.__module__}"
                for each in vars(cls) if is_private(each) and not each.startswith("_abc")
                for base in bases if each in vars(base)
            ]  # fmt: skip
    assert overridden == []
    assert seen > 8, "the classes are found"
