"""Three doors to one run: Python, YAML through the command line, and the example runner end bit-identical."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import trainkit
from tables import table
from trainkit.cli import app
from trainkit.config import TRLConfig

EXAMPLE = Path(__file__).parents[1] / "examples" / "randomwalks"
SEED, STEPS, EPOCHS = 3, 5, 1


@pytest.fixture(scope="module")
def task() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("randomwalks_task", EXAMPLE / "task.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(__import__("sys").modules, spec.name, module)  # its dataclass looks its own module up
        spec.loader.exec_module(module)
        yield module


def through_python(root: Path, task: ModuleType) -> None:
    changes = {"train.seed": SEED, "train.run_dir": str(root / "sft"), "train.epochs": EPOCHS}
    trainkit.train(config=TRLConfig.load_yaml(EXAMPLE / "sft.yaml").update(changes), **task.sft(SEED))
    changes = {
        "train.seed": SEED,
        "train.run_dir": str(root / "ppo"),
        "train.total_steps": STEPS,
        "model.model_path": str(root / "sft" / "model"),
    }
    trainkit.train(config=TRLConfig.load_yaml(EXAMPLE / "ppo.yaml").update(changes), **task.ppo(SEED))


def through_the_command_line(root: Path) -> None:
    for name, changes in (
        ("sft", [f"train.epochs={EPOCHS}"]),
        ("ppo", [f"train.total_steps={STEPS}", f"model.model_path={root / 'sft' / 'model'}"]),
    ):
        arguments = ["train", str(EXAMPLE / f"{name}.yaml"), "--task", f"{EXAMPLE / 'task.py'}:{name}"]
        arguments += [*changes, f"train.seed={SEED}", f"train.run_dir={root / name}"]
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output


def through_the_example_runner(root: Path) -> None:
    arguments = ["--seed", str(SEED), "--run-dir", str(root), "--steps", str(STEPS), "--sft-epochs", str(EPOCHS)]
    result = CliRunner().invoke(app, ["examples", "run", "randomwalks", *arguments])
    assert result.exit_code == 0, result.output
    for told in ("optimality", "samples per second", "tensorboard --logdir", "a walk from"):
        assert told in result.output


@pytest.mark.slow
def test_three_doors_end_bit_identical(tmp_path: Path, task: ModuleType) -> None:
    through_python(tmp_path / "python", task)
    through_the_command_line(tmp_path / "cli")
    through_the_example_runner(tmp_path / "example")
    found = {path.name for path in (tmp_path / "cli" / "ppo").iterdir()}
    assert {"config.yaml", "metrics.jsonl", "samples.jsonl", "model", "tensorboard"} <= found
    for stage in ("sft", "ppo"):
        ends = [
            load_file(tmp_path / door / stage / "model" / "model.safetensors") for door in ("python", "cli", "example")
        ]
        for other in ends[1:]:
            assert other.keys() == ends[0].keys()
            assert all(torch.equal(ends[0][name], other[name]) for name in other)


@table("seed", [1, 2])
def test_walks_and_optimality_are_what_the_task_says(seed: int, task: ModuleType) -> None:
    walks = task.RandomWalks.generate(seed)
    graph = walks.graph
    assert len(graph) == 21
    assert min(dict(graph.out_degree()).values()) >= 1
    assert list(graph.successors(0)) == [0], "the goal is absorbing"
    assert len(walks.walks) == 1000
    for walk in walks.walks:
        nodes = [ord(letter) - ord("a") for letter in walk]
        assert len(nodes) <= 11
        assert nodes[0] != 0
        assert all(graph.has_edge(a, b) for a, b in pairwise(nodes))
        assert 0 not in nodes[:-1], "a walk ends at the goal"
    for start in walks.starts:  # breadth-first search by hand, against networkx
        frontier, steps = {ord(start) - ord("a")}, 0
        while 0 not in frontier:
            frontier, steps = {b for a in frontier for b in graph.successors(a)}, steps + 1
        assert steps == walks.shortest[start] < 10


def test_optimality_by_hand(task: ModuleType) -> None:
    """On b → c → a and b → a: the shortest from b takes 1 step, so 2 steps are worth (10 − 2)/(10 − 1)."""
    graph = task.nx.DiGraph([(0, 0), (1, 2), (2, 0), (1, 0), (2, 1)])
    walks = task.RandomWalks(graph, [], {"b": 1, "c": 1})
    table = {
        "ba": 1.0,
        "bca": 8 / 9,
        "bcaa": 8 / 9,
        "bc": 0.0,
        "cab": 0.0,
        "bx": 0.0,
        "bb": 0.0,
        "a": 0.0,
        "bcbcba": 5 / 9,
    }
    assert {walk: walks.optimality(walk) for walk in table} == pytest.approx(table)
    assert walks.optimality("bc" * 5 + "a") == 0.0  # ten steps are as good as none
