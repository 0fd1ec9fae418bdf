"""The architecture: arrows point down only, the core knows no plugin, and light doors stay light."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PLUGINS = (ROOT / "plugins", ROOT / "examples/plugins")
FLOORS = {
    "trainkit.errors": 0, "trainkit.functional": 0, "trainkit.metrics": 0, "trainkit.data": 0, "trainkit.seeding": 0,
    "trainkit.config": 1, "trainkit.files": 1, "trainkit.guard": 1, "trainkit.hookspecs": 1, "trainkit.inspection": 1,
    "trainkit.plugins": 1, "trainkit.probe": 1, "trainkit.registry": 1,
    "trainkit.backend": 2,
    "trainkit.chat": 2, "trainkit.formats": 2,
    "trainkit.pipeline": 2, "trainkit.store": 2, "trainkit.sampling": 2, "trainkit.stepping": 2, "trainkit.rewards": 2,
    "trainkit.models": 2,
    "trainkit.trainer": 3, "trainkit.trackers": 3,
    "trainkit.api": 4, "trainkit.cli": 4, "trainkit.examples": 4, "trainkit.templates": 4,
    "trainkit.testing": 4, "trainkit.__main__": 4,
    "trainkit._templates": 4,  # plugins, as authors begin them
    "trainkit": 5,  # the public names; loaded lazily, so importable from anywhere
}  # fmt: skip
HEAVY = {"torch": 0, "transformers": 2, "safetensors": 2, "accelerate": 3, "typer": 4}
"""Third-party packages, and the lowest floor that may import them when it is imported."""
PUBLIC = (
    "trainkit",
    "trainkit.functional",
    "trainkit.models",
    "trainkit.metrics",
    "trainkit.testing",
    "trainkit.errors",
    "trainkit.rewards",
    "trainkit.seeding",
)


def floor_of(module: str) -> int:
    while module not in FLOORS:
        module = module.rpartition(".")[0]
        assert module, "a module outside trainkit"
    return FLOORS[module]


def sources(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.py") if "tests" not in path.relative_to(folder).parts)


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path, *, lazy: bool = True) -> Iterator[tuple[int, str]]:
    """(line, module) of every import; without ``lazy`` only those that run when the module is imported."""

    def walk(node: ast.AST) -> Iterator[tuple[int, str]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            if not lazy and isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if isinstance(child, ast.Import):
                yield from ((child.lineno, alias.name) for alias in child.names)
            elif isinstance(child, ast.ImportFrom) and child.module:
                inner = [f"{child.module}.{alias.name}" for alias in child.names]
                yield from ((child.lineno, name if name in FLOORS else child.module) for name in inner)
            yield from walk(child)

    return walk(ast.parse(path.read_text(encoding="utf-8")))


def test_every_module_of_the_core_has_a_floor() -> None:
    for path in sources(ROOT / "trainkit"):
        assert floor_of(module_name(path)) >= 0
        assert module_name(path).split(".")[1:2] == [] or ".".join(module_name(path).split(".")[:2]) in FLOORS


def test_arrows_point_down_only() -> None:
    wrong = []
    for path in sources(ROOT / "trainkit"):
        here = floor_of(module_name(path))
        for line, target in imports(path, lazy=False):
            if target.startswith("trainkit.") and floor_of(target) > here:
                wrong.append(
                    f"{path.relative_to(ROOT)}:{line} (floor {here}) imports {target} (floor {floor_of(target)})"
                )
    assert wrong == []


def test_heavy_packages_stay_on_their_floors() -> None:
    wrong = []
    for path in sources(ROOT / "trainkit"):
        here = floor_of(module_name(path))
        for line, target in imports(path, lazy=False):
            package = target.split(".")[0]
            free_of_torch = here in (1, 5) and package in HEAVY
            if free_of_torch or HEAVY.get(package, here) > here:
                wrong.append(f"{path.relative_to(ROOT)}:{line} (floor {here}) imports {package}")
    assert wrong == []


def test_the_core_imports_no_plugin_and_no_plugin_imports_another() -> None:
    plugins = {path.stem for place in PLUGINS for path in place.glob("*/trainkit_*")}
    assert {"trainkit_ppo", "trainkit_sft", "trainkit_ddpo", "trainkit_grpo"} <= plugins
    wrong = []
    for path in [path for place in (ROOT / "trainkit", *PLUGINS) for path in sources(place)]:
        for line, target in imports(path):
            if target.split(".")[0] in plugins - {path.stem, path.parent.name}:
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {target}")
    assert wrong == []


def test_plugins_use_public_names_only() -> None:
    wrong = []
    for path in [path for place in (*PLUGINS, ROOT / "trainkit/_templates") for path in sources(place)]:
        for line, target in imports(path):
            if target.split(".")[0] == "trainkit" and target not in PUBLIC:
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {target}")
    assert wrong == []


def test_tests_of_strangers_use_public_names_only() -> None:
    tests = sorted((ROOT / "examples/plugins").glob("*/tests/*.py"))
    assert len(tests) >= 3
    named = {target for path in tests for _, target in imports(path) if target.split(".")[0] == "trainkit"}
    assert named <= {*PUBLIC, "trainkit.testing.bandit", "trainkit.testing.trainers"}


@pytest.mark.parametrize(
    "statement", ["import trainkit", "import trainkit.cli", "from trainkit.plugins import discover; discover()"]
)
def test_light_doors_import_no_torch(statement: str) -> None:
    heavy = "sorted({'torch', 'transformers', 'accelerate', 'trainkit_ppo', 'trainkit_sft'} & set(sys.modules))"
    found = subprocess.run(
        [sys.executable, "-c", f"import sys; {statement}; print({heavy})"], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "[]"
