"""What plugins may use is written down, and cannot change without the version saying so."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import trainkit
from tables import table

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/plugin-api.md"


@cache
def api() -> ModuleType:
    """docs/make_plugin_api.py."""
    spec = importlib.util.spec_from_file_location("make_plugin_api", ROOT / "docs/make_plugin_api.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


@cache
def listed() -> dict[str, Any]:
    """The public names, by path."""
    return {name.path: name for name in api().names()}


# ------------------------------------------------------------------------------------------------------- the page


def test_the_api_of_plugins_changes_only_with_the_version() -> None:
    fault = api().objection(PAGE.read_text(encoding="utf-8"), trainkit.__version__, list(listed().values()))
    assert not fault, fault


def test_the_page_says_what_the_sources_say() -> None:
    expected = api().document(trainkit.__version__, api().names())
    assert PAGE.read_text(encoding="utf-8") == expected, "docs/plugin-api.md is stale; run `make api`"


def test_the_version_of_the_sources_is_the_one_that_is_imported() -> None:
    assert api().present_version() == trainkit.__version__


def test_what_a_page_lists_is_read_back_from_it() -> None:
    page = api().document("1.2.3", api().names())
    assert api().written(page) == ("1.2.3", {path: name.signature for path, name in listed().items()})


# ---------------------------------------------------------------------------------------------------- the listing


def has(owner: Any, name: str) -> bool:
    """Whether a class has an attribute or a field."""
    fields = {**getattr(owner, "__dataclass_fields__", {}), **getattr(owner, "model_fields", {})}
    annotated = {key for cls in owner.__mro__ for key in vars(cls).get("__annotations__", {})}
    return hasattr(owner, name) or name in fields or name in annotated


def test_every_listed_name_is_there() -> None:
    for path, name in listed().items():
        place, _, member = path.partition("#")
        module, _, top = place.rpartition(".")
        found = getattr(importlib.import_module(module), top)
        assert not member or name.signature.startswith("self.") or has(found, member), path


def test_every_listed_name_is_described() -> None:
    assert [path for path, name in listed().items() if "#" not in path and not name.about] == []


def test_all_that_a_module_exports_is_listed() -> None:
    for module in api().MODULES:
        for name in getattr(importlib.import_module(module), "__all__", []):
            assert f"{module}.{name}" in listed()


def test_the_page_about_plugins_names_the_public_modules() -> None:
    text = (ROOT / "docs/plugins.md").read_text(encoding="utf-8")
    (said,) = re.findall(r"^\* Import from (.*?) only,", text, flags=re.MULTILINE | re.DOTALL)
    parts = {module for module in api().MODULES if module.startswith("trainkit.testing.")}
    assert {*re.findall(r"`([\w.]+)`", said), "trainkit.plugins.hookspecs", *parts} == {*api().MODULES}


def dotted(node: ast.expr) -> str:
    """``a.b.c`` as it is written; empty for anything else."""
    if isinstance(node, ast.Attribute):
        owner = dotted(node.value)
        return f"{owner}.{node.attr}" if owner else ""
    return node.id if isinstance(node, ast.Name) else ""


def used_names(file: Path) -> list[str]:
    """What a module uses of trainkit: imported by name, or written out behind ``import trainkit``."""
    found = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "trainkit":
            found += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute) and dotted(node).startswith("trainkit."):
            found.append(dotted(node))
    return found


@table("place", ["plugins/*/trainkit_*", "examples/plugins/*", "trainkit/plugins/_templates/*"])
def test_plugins_use_listed_names_only(place: str) -> None:
    broken = ROOT / "examples/plugins/broken"  # whose errors are wanted
    roots = [path for path in ROOT.glob(place) if path != broken]
    files = [file for root in roots for file in (root.rglob("*.py") if root.is_dir() else [root])]
    used = {(file.relative_to(ROOT), name) for file in files if file.suffix == ".py" for name in used_names(file)}
    assert len({name for _, name in used}) >= 10
    assert sorted((str(file), name) for file, name in used if name not in {*listed(), *api().MODULES}) == []


def test_overloads_properties_and_class_methods_are_told_apart() -> None:
    shown = {
        "trainkit.register_trainer": "register_trainer(name: str) -> Callable[[C], C]; register_trainer(name: C) -> C",
        "trainkit.trainer.BaseRLTrainer#passes": "property passes: int | None",
        "trainkit.trainer.BaseRLTrainer#loss": "abstract loss(batch: Any) -> tuple[Tensor, Metrics]",
        "trainkit.trainer.PreparedTrainer#tiny_arguments": "classmethod tiny_arguments() -> dict[str, Any]",
        "trainkit.trainer.BaseRLTrainer#config": "self.config",
        "trainkit.metrics.Mean": "@dataclass(frozen=True) class Mean",
        "trainkit.functional.kl_k1": "kl_k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor",
    }
    assert {path: listed()[path].signature for path in shown} == shown


# ------------------------------------------------------------------------------------------------------- the rule

BEFORE = ["first(x: int) -> int", "second()"]
ADDED = [*BEFORE, "third()"]
GONE = BEFORE[:1]
CHANGED = ["first(x: float) -> int", "second()"]


def some(signatures: list[str]) -> list[Any]:
    return [api().Name(f"trainkit.errors.{s.partition('(')[0]}", s, "It is there.") for s in signatures]


@table(
    "now, version, rule",
    [
        (BEFORE, "0.1.3", ""),
        (BEFORE, "0.1.4", ""),
        (ADDED, "0.1.3", "an addition raises at least the patch number"),
        (ADDED, "0.1.4", ""),
        (ADDED, "0.2.0", ""),
        (GONE, "0.1.4", "what is gone or has changed raises the minor number"),
        (GONE, "0.2.0", ""),
        (CHANGED, "0.1.4", "what is gone or has changed raises the minor number"),
        (CHANGED, "0.2.0", ""),
        (CHANGED, "1.0.0", ""),
    ],
)
def test_before_1_an_addition_raises_the_patch_and_a_break_the_minor_number(
    now: list[str], version: str, rule: str
) -> None:
    fault = api().objection(api().document("0.1.3", some(BEFORE)), version, some(now))
    assert (rule in fault) if rule else (fault == "")


def test_from_1_on_a_break_raises_the_major_number() -> None:
    page = api().document("1.1.3", some(BEFORE))
    assert "raises the major number" in api().objection(page, "1.2.0", some(CHANGED))
    assert api().objection(page, "2.0.0", some(CHANGED)) == ""
    assert api().objection(page, "1.1.4", some(ADDED)) == ""


def test_an_objection_says_what_differs_and_what_to_do() -> None:
    now = ["first(x: float) -> int", "third()"]
    fault = api().objection(api().document("0.1.0", some(BEFORE)), "0.1.0", some(now))
    assert "  added: trainkit.errors.third\n" in fault
    assert "  removed: trainkit.errors.second\n" in fault
    assert "  changed: trainkit.errors.first: first(x: int) -> int -> first(x: float) -> int\n" in fault
    assert "Raise __version__ in trainkit/__init__.py and run `make api`" in fault


# ----------------------------------------------------------------------------------------------------- the script


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the script writes in this test."""
    monkeypatch.setattr(api(), "DOCUMENT", tmp_path / "plugin-api.md")
    return tmp_path / "plugin-api.md"


def test_the_script_starts_afresh_where_there_is_no_page(page: Path) -> None:
    assert api().main() is None
    assert page.read_text(encoding="utf-8") == PAGE.read_text(encoding="utf-8")


def test_the_script_refuses_a_change_that_the_version_does_not_say(page: Path) -> None:
    old = api().document(trainkit.__version__, [*api().names(), *some(["gone_tomorrow()"])])
    page.write_text(old, encoding="utf-8")
    assert "removed: trainkit.errors.gone_tomorrow" in api().main()
    assert page.read_text(encoding="utf-8") == old


def test_the_script_renews_what_is_said_about_names_at_any_version(page: Path) -> None:
    page.write_text(PAGE.read_text(encoding="utf-8").replace("The exception tree.", "Errors."), encoding="utf-8")
    assert api().main() is None
    assert page.read_text(encoding="utf-8") == PAGE.read_text(encoding="utf-8")
