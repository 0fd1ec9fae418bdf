"""The architecture: arrows point down only, and the core knows no plugin."""

from __future__ import annotations

import ast
import graphlib
import importlib
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
PLUGINS = (ROOT / "plugins", ROOT / "examples/plugins")
KIT = "trainkit_kit"
"""The conformance kit: it looks into trainkit, with which it is released, and `trainkit plugins check` runs it."""
TEMPLATES = ROOT / "trainkit/plugins/_templates"
WINGS = {"trainkit_migrate", "trainkit_report", "trainkit_sweep", "trainkit_tools"}
"""Commands of trainkit in distributions of their own. They are released with the core, and read more of it than
plugins may."""
SPINE = (
    "security", "errors", "version", "plain", "functional", "metrics", "seeding", "tables",  # the ground
    "plugins", "config", "data", "models", "rollouts", "runs", "trainer", "testing",
    "api", "examples", "cli",
    "__init__",  # the public names
)  # fmt: skip
"""The rooms, files and folders directly under ``trainkit/``: each imports only rooms that stand before it."""
ARROWS = 61
"""Arrows of imports that run when a module is loaded, at most."""
HEAVY = {"torch": "functional", "transformers": "data", "safetensors": "models", "accelerate": "models", "typer": "cli"}
"""Third-party packages, and the first room of the spine that may import them when it is loaded."""
LIGHT = ("errors", "plugins", "config", "api", "examples", "cli", "__init__")
"""Rooms that import neither torch nor what imports it when they are loaded."""
PUBLIC = (
    "trainkit",
    "trainkit.data",
    "trainkit.errors",
    "trainkit.functional",
    "trainkit.metrics",
    "trainkit.models",
    "trainkit.plugins",
    "trainkit.rollouts",
    "trainkit.runs",
    "trainkit.seeding",
    "trainkit.testing",
)


def sources(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.py") if "tests" not in path.relative_to(folder).parts)


def rooms() -> set[str]:
    return {path.stem for path in (ROOT / "trainkit").iterdir() if path.suffix == ".py" or any(path.glob("*.py"))}


def core() -> Iterator[tuple[str, Path]]:
    """(room, file) of the core, without what authors begin plugins with."""
    for path in sources(ROOT / "trainkit"):
        inside = path.relative_to(ROOT / "trainkit")
        if "_templates" not in inside.parts:
            yield inside.parts[0].removesuffix(".py"), path


def room_of(module: str, name: str = "") -> str:
    """The room that ``module`` is in, or that ``from trainkit import name`` names."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else name if name in SPINE else "__init__"


@cache
def imports(path: Path) -> list[tuple[int, str, str, str]]:
    """(line, module, imported name, kind) of every import; the kind is ``loading``, ``lazy`` or ``typing``."""

    def walk(node: ast.AST, kind: str) -> Iterator[tuple[int, str, str, str]]:
        for child in ast.iter_child_nodes(node):
            inner = kind
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) and child in node.body:
                inner = "typing"
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and kind == "loading":
                inner = "lazy"
            if isinstance(child, ast.Import):
                yield from ((child.lineno, alias.name, "", inner) for alias in child.names)
            elif isinstance(child, ast.ImportFrom) and child.module:
                yield from ((child.lineno, child.module, alias.name, inner) for alias in child.names)
            if not isinstance(child, ast.expr):
                yield from walk(child, inner)

    return [*walk(ast.parse(path.read_text(encoding="utf-8")), "loading")]


def arrows(kind: str) -> dict[tuple[str, str], str]:
    """The ordered pairs of rooms with an import of that kind, and where one stands."""
    found = {}
    for here, path in core():
        for line, module, name, how in imports(path):
            if how == kind and module.split(".")[0] == "trainkit" and room_of(module, name) != here:
                found[here, room_of(module, name)] = f"{path.relative_to(ROOT)}:{line}"
    return found


def test_every_room_of_the_core_stands_in_the_spine() -> None:
    assert rooms() == set(SPINE)
    assert len(SPINE) == len(set(SPINE)) == 20


@pytest.mark.parametrize("kind", ["loading", "lazy", "typing"])
def test_arrows_point_down_only(kind: str) -> None:
    """So there are no circles either, not even of imports inside functions or for type checkers."""
    found = arrows(kind)
    wrong = [f"{place}: {a} imports {b}" for (a, b), place in found.items() if SPINE.index(b) >= SPINE.index(a)]
    assert wrong == []
    assert kind != "loading" or len(found) <= ARROWS, "a new arrow between rooms; is it needed?"


def test_plugins_need_errors_and_the_version_alone() -> None:
    assert {b for kind in ("loading", "lazy", "typing") for a, b in arrows(kind) if a == "plugins"} == {
        "errors",
        "version",
    }


def test_heavy_packages_stay_in_their_rooms() -> None:
    wrong = []
    for here, path in core():
        for line, module, _, kind in imports(path):
            package = module.split(".")[0]
            if kind == "loading" and package in HEAVY:
                low = SPINE.index(here) < SPINE.index(HEAVY[package])
                if low or (here in LIGHT and package != "typer"):
                    wrong.append(f"{path.relative_to(ROOT)}:{line} imports {package}")
    assert wrong == []


def required(path: Path) -> set[str]:
    """The packages of the distributions that the plugin of a file requires; of the core, none."""
    project = next(above / "pyproject.toml" for above in path.parents if (above / "pyproject.toml").is_file())
    lines = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["dependencies"]
    return {re.split(r"[^\w-]", line)[0].replace("-", "_") for line in lines}


def test_the_core_imports_no_plugin_and_plugins_only_those_that_they_require() -> None:
    plugins = {path.stem for place in PLUGINS for path in place.glob("*/trainkit_*")}
    assert {"trainkit_ppo", "trainkit_sft", "trainkit_ddpo", "trainkit_reinforce_pp"} <= plugins
    wrong = []
    for path in [path for place in (ROOT / "trainkit", *PLUGINS) for path in sources(place)]:
        for line, target, *_ in imports(path):
            runs_the_kit = path.match("trainkit/cli/plugins.py") and target.split(".")[0] == KIT
            others = plugins - {path.stem, *path.parts} - required(path.parent)
            if target.split(".")[0] in others and not runs_the_kit:
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {target}")
    assert wrong == []


@pytest.fixture
def public_names(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "docs/site")
    return importlib.import_module("public_names")


def test_plugins_use_public_names_only(public_names: ModuleType) -> None:
    exported = {module: public_names.exported(module) for module in public_names.MODULES if module != KIT}
    checked = [path for place in (*PLUGINS, TEMPLATES) for path in sources(place) if not {*WINGS, KIT} & {*path.parts}]
    assert {"trainkit_ppo", "trainkit_sft", "trainer", "sampler", "tracker"} <= {path.parent.name for path in checked}
    wrong = []
    for path in checked:
        for line, target, name, _ in imports(path):
            public = target in PUBLIC and (not name or name in exported[target] or f"{target}.{name}" in PUBLIC)
            if target.split(".")[0] == "trainkit" and not public:
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {name} of {target}")
    assert wrong == []


def test_tests_of_strangers_use_public_names_only() -> None:
    tests = sorted((ROOT / "examples/plugins").glob("*/tests/*.py"))
    assert len(tests) >= 2
    named = {target for path in tests for _, target, *_ in imports(path) if target.split(".")[0] == "trainkit"}
    assert named <= {*PUBLIC, "trainkit.testing.trainers"}


def test_modules_of_a_plugin_import_each_other_in_one_direction() -> None:
    """For type checkers too."""
    for package in sorted(path for place in PLUGINS for path in place.glob("*/trainkit_*") if path.is_dir()):
        names = {path: ".".join(path.relative_to(package.parent).with_suffix("").parts) for path in sources(package)}
        modules = {path: name.removesuffix(".__init__") for path, name in names.items()}
        graph = {
            name: {
                target
                for _, module, imported, _ in imports(path)
                for target in (module, f"{module}.{imported}")
                if target in modules.values() and target != name
            }
            for path, name in modules.items()
        }
        graphlib.TopologicalSorter(graph).prepare()  # raises a CycleError


def test_the_page_about_algorithms_names_the_public_modules(public_names: ModuleType) -> None:
    text = (ROOT / "docs/write-an-algorithm.md").read_text(encoding="utf-8")
    (listed,) = re.findall(r"^\* Import from (.*?) only,", text, flags=re.MULTILINE | re.DOTALL)
    parts = {module for module in public_names.MODULES if module.startswith("trainkit.testing.")}
    assert {*re.findall(r"`([\w.]+)`", listed), "trainkit.plugins.hookspecs", KIT, *parts} == {*public_names.MODULES}
