"""The documentation site: every page is in it, its reference is complete, and what its tables say is in the sources."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

import pytest

import trainkit
from pages import DOCUMENTS, name_of, prose, spans, tables
from trainkit import errors
from trainkit.plain import read_yaml
from trainkit_migrate import FRAMEWORKS

ROOT = Path(__file__).parents[1]
SITE = ROOT / "docs/site"
HOSTS = {"docs.ray.io", "docs.vllm.ai", "github.com", "optuna.org", "tenacity.readthedocs.io", "www.deepspeed.ai"}
"""The hosts that documents link to; tests do not ask them."""


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The generator of the reference pages, which needs no MkDocs."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    spec = importlib.util.spec_from_file_location("reference", SITE / "reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ----------------------------------------------------------------------------------------------------- the pages


def leaves(nav: Any) -> Iterator[str]:
    """The pages of a navigation."""
    for part in nav.values() if isinstance(nav, dict) else nav if isinstance(nav, list) else ():
        yield from leaves(part)
    if isinstance(nav, str):
        yield nav


def test_every_page_is_in_the_navigation_once() -> None:
    named = [page for page in leaves(read_yaml(SITE / "mkdocs.yml")["nav"]) if page.endswith(".md")]
    assert len(named) == len(set(named))
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert pages - set(named) == set(), "add the page to nav in docs/site/mkdocs.yml"


def test_the_site_loads_nothing_from_elsewhere() -> None:
    config = read_yaml(SITE / "mkdocs.yml")
    assert config["theme"]["font"] is False
    for asset in [*config["extra"]["polyfills"], *config["extra_css"]]:
        assert (SITE / "theme" / asset).is_file()


def test_hosts_that_pages_link_to_are_known() -> None:
    """Of links within the site `make docs` reports those that lead nowhere."""
    for document in DOCUMENTS:
        for link in re.findall(r"\]\(([^)\s]+)\)", prose(document)):
            assert "://" not in link or urlsplit(link).hostname in HOSTS, (
                f"{link} in {name_of(document)}: add the host?"
            )


# ------------------------------------------------------------------------------------------------- the reference


def test_the_reference_describes_every_setting(reference: ModuleType) -> None:
    pages = reference.setting_pages()
    for section, cls in reference._sections().items():
        for name, field in cls.model_fields.items():
            assert f"{{ #{section}.{name} }}" in pages["reference/settings.md"]
            assert field.description
    for plugin in reference.plugins():
        for name in reference.entries(plugin):
            page = pages["reference/methods.md" if reference.trains(plugin) else "reference/plugins.md"]
            assert f"## {name} {{ #{name} }}" in page
            for field in trainkit.get_trainer(name).method_class.model_fields if reference.trains(plugin) else ():
                assert field == "name" or f"{{ #method.{name}.{field} }}" in page


def test_the_reference_says_type_bounds_and_default(reference: ModuleType) -> None:
    page = reference.setting_pages()["reference/settings.md"]
    found = page.partition("{ #rollout.top_p }")[2].partition("###")[0]
    assert "`float, > 0, ≤ 1`, default `1.0`" in found


def test_settings_that_descriptions_name_are_links(reference: ModuleType) -> None:
    text = "Set `train.seed` and `train.seed: 2`, not `trainkit.seed` or [`train.seed`](x).\n# `train.seed`\n"
    assert reference.link_settings(text, "s.md") == (
        "Set [`train.seed`](s.md#train.seed) and [`train.seed: 2`](s.md#train.seed), not `trainkit.seed` or "
        "[`train.seed`](x).\n# `train.seed`\n"
    )


def test_the_reference_has_every_command(reference: ModuleType) -> None:
    page = reference.command_page()
    for command in ("train", "config check", "plugins check", "examples run", "doctor", "runs", "export", "new-plugin"):
        assert f" trainkit {command}\n" in page
    assert "Error" not in page


def test_every_public_method_of_a_public_class_is_on_a_page(reference: ModuleType) -> None:
    """Also one that the class inherits from a class that is not public, such as `AccelerateRLTrainer.generate`."""
    shown = {name: page for page in reference.api_pages().values() for name in re.findall(r"^::: (\S+)", page, re.M)}
    classes = {
        f"{module}.{name}": getattr(importlib.import_module(module), name, None)
        for module in reference.MODULES[1:]
        for name in reference.exported(module)
    }
    public = {cls: path for path, cls in classes.items() if isinstance(cls, type)}
    for cls, path in public.items():
        block = shown.get(path, "").partition(f"::: {path}\n")[2].partition(":::")[0]
        module, _, name = path.rpartition(".")
        assert block or f"- {name}\n" in shown[module], path
        for base in cls.__mro__:
            own = vars(base).items() if base.__module__.startswith("trainkit.") else ()
            methods = {n: value for n, value in own if inspect.isfunction(value) and not n.startswith("_")}
            assert [n for n, method in methods.items() if not method.__doc__] == [], base  # those have no place on it
            listed = {*re.findall(r"\w+", block.partition("inherited_members:")[2])}
            assert base in public or "true" in listed or {*methods} <= listed, path
    assert "inherited_members: true" in shown["trainkit.trainer.AccelerateRLTrainer"]


# ------------------------------------------------------------------------------------------------------- errors


@cache
def messages() -> tuple[str, ...]:
    """The texts in the sources of trainkit; what differs from message to message is `…`."""
    found = []
    for path in [*(ROOT / "trainkit").rglob("*.py"), *(ROOT / "plugins").glob("*/trainkit_*/**/*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(str(v.value) if isinstance(v, ast.Constant) else "…" for v in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return tuple(found)


def quoted() -> list[str]:
    return [name for table in tables(ROOT / "docs/errors.md") if table.header == "message" for name in table.names]


def test_the_messages_of_the_page_of_errors_are_those_of_the_sources() -> None:
    for message in quoted():
        pieces = [piece.strip() for piece in message.split("…") if piece.strip()]
        pattern = re.compile(".*?".join(map(re.escape, pieces)), flags=re.DOTALL)
        assert max(map(len, pieces)) >= 5, message
        assert any(pattern.search(text) for text in messages()), message


def test_the_page_of_errors_has_every_class_and_its_exit_code() -> None:
    (table,) = (table for table in tables(ROOT / "docs/errors.md") if table.header == "trainkit.errors")
    classes = {name: cls for name, cls in vars(errors).items() if isinstance(cls, type) and issubclass(cls, Exception)}
    assert table.names == list(classes)
    assert len(quoted()) >= 30
    for row in table.rows[1:]:
        assert row[1] == ("2" if issubclass(classes[spans(row[0])[0]], errors.ConfigError) else "1")


def test_the_table_of_other_names_is_what_the_messages_know() -> None:
    (table,) = (table for table in tables(ROOT / "docs/coming-from-trl.md") if table.header == "other names")
    listed = {}
    for others, own in table.rows:
        section = "method." if own.endswith("in `method`") else ""
        listed.update(dict.fromkeys(spans(others), section + spans(own)[0]))
    known = tomllib.loads((ROOT / "trainkit/config/names.toml").read_text(encoding="utf-8"))
    assert listed == {name: own for name, own in known.items() if isinstance(own, str)}


def test_the_tables_of_migrating_are_those_of_the_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT / "docs"), *sys.path])
    make_migrating = importlib.import_module("make_migrating")
    texts = {page.name: page.read_text(encoding="utf-8") for page in make_migrating.PAGES}
    stale = [name for name, text in texts.items() if make_migrating.written(text) != text]
    assert stale == [], "run make tables"
    tabled = set(re.findall(r"<!-- table: ([\w-]+)", "".join(texts.values())))
    assert {*FRAMEWORKS, "names"} <= tabled
