"""Counts how heavy the code is: lines, members of a trainer, frames from `learn` to a token, files, long functions.

    python benchmarks/weight.py [--json FILE]

It trains six steps of a tiny PPO, on a CPU, and reads the sources.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
import tempfile
import traceback
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
CORE = ROOT / "trainkit"
GENERATED = ("errors.md",)
"""Pages of which a program writes a part."""


def lines(paths: Iterable[Path]) -> int:
    """Return the lines of files."""
    return sum(path.read_text(encoding="utf-8").count("\n") for path in paths)


def sources(folder: Path, *, tests: bool = False) -> list[Path]:
    """Return the Python files of a folder; those in a folder ``tests`` only if asked for."""
    return [path for path in sorted(folder.rglob("*.py")) if tests or "tests" not in path.relative_to(folder).parts]


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Return the functions and methods that a file defines."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    yield from (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def duplicates() -> list[str]:
    """Return the names of classes and functions that several modules of the core define at their top level."""
    homes = defaultdict(set)
    for path in sources(CORE):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].add(path)
    return sorted(name for name, paths in homes.items() if len(paths) > 1)


def complex_functions() -> int:
    """Return how many functions of the core have a McCabe complexity above 10."""
    rule = ["--isolated", "--select", "C901", "--config", "lint.mccabe.max-complexity=10", "--output-format", "json"]
    said = subprocess.run([sys.executable, "-m", "ruff", "check", *rule, str(CORE)], capture_output=True, check=False)
    return len(json.loads(said.stdout))


def of_a_run() -> dict[str, Any]:
    """Return the members of a trainer, the frames to a token and to the loss, and the files that six steps enter."""
    import torch

    from trainkit.testing.trainers import tiny_trainer

    torch.set_num_threads(1)
    entered, seen = set[tuple[str, str]](), dict[str, list[str]]()

    def frames() -> list[str]:
        stack = [frame for frame in traceback.extract_stack() if frame.filename.startswith(str(CORE))]
        return [f"{Path(frame.filename).relative_to(CORE)}:{frame.name}" for frame in stack]

    with tempfile.TemporaryDirectory() as folder:
        trainer = tiny_trainer("ppo", Path(folder) / "run")
        members = [name for name in {*dir(trainer)} - {*dir(object)} if not re.match(r"__\w+__$|_abc_impl", name)]
        loss, model = trainer.loss, trainer.models.load_policy().model

        def sampled(*_: Any) -> None:
            stack = frames()
            if any("respond" in frame for frame in stack):  # not in a probe of the engine
                seen.setdefault("frames to a token", stack)

        model.base_model.register_forward_pre_hook(sampled)

        def measured(batch: Any) -> Any:
            seen.setdefault("frames to the loss", frames())
            return loss(batch)

        trainer.loss = measured

        def enter(frame: Any, event: str, _: Any) -> None:
            if event == "call" and frame.f_code.co_filename.startswith(str(CORE)):
                entered.add((frame.f_code.co_filename, frame.f_code.co_qualname))

        sys.setprofile(enter)
        trainer.learn()
        sys.setprofile(None)
    return {
        "members of a trainer": len(members),
        "public members": sum(not name.startswith("_") for name in members),
        **{name: len(stack) for name, stack in seen.items()},
        "files to a token": len({frame.split(":")[0] for frame in seen["frames to a token"]}),
        "files of six steps": len({path for path, _ in entered}),
        "functions of six steps": len(entered),
    }


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="a file to write the figures to")
    options = parser.parse_args()
    os.environ["ACCELERATE_USE_CPU"] = "true"
    plugins = {path.name: lines(sources(path)) for path in sorted((ROOT / "plugins").iterdir()) if path.is_dir()}
    pages = [page for page in sorted((ROOT / "docs").glob("**/*.md")) if page.name not in GENERATED]
    written = [node for path in sources(CORE) for node in functions(path)]
    figures = {
        "lines of the core": lines(sources(CORE)),
        **{f"lines of {name}": count for name, count in plugins.items() if count},
        "lines of tests": lines(sources(ROOT / "tests", tests=True))
        + lines(path for path in sources(ROOT / "plugins", tests=True) if "tests" in path.parts),
        **of_a_run(),
        "functions with McCabe > 10": complex_functions(),
        "functions of more than 60 lines": sum((node.end_lineno or 0) - node.lineno >= 60 for node in written),
        "names with several definitions": len(duplicates()),
        "pages": len(pages),
        "lines of pages": lines(pages),
        "words of pages": sum(len(page.read_text(encoding="utf-8").split()) for page in pages),
    }
    for name, value in figures.items():
        print(f"{value:8}  {name}")
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
