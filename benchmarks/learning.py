"""Does it learn? The random walks of the example, seed by seed: SFT, then PPO, with the example's own settings.

``python benchmarks/learning.py`` prints every seed's curve of mean optimality (sampled walks, all start nodes), PPO's
wall time and samples per second, and whether each seed reaches 0.95 of the maximum, which is 1, and stays there.
``--constant-reward`` gives every walk the same reward instead, at PPO's default price of divergence and without the
entropy bonus, which is a force of its own: nothing may change beyond noise.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import sys
import tempfile
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import trainkit
from trainkit import TRLConfig

EXAMPLE = Path(__file__).parents[1] / "examples" / "randomwalks"
GOAL = 0.95
console = Console(highlight=False, soft_wrap=True)


@dataclass
class Curve:
    """A callback: mean optimality by step, and the samples of the first and the last evaluation."""

    points: list[tuple[int, float]] = field(default_factory=list)
    samples: list[list[dict[str, Any]]] = field(default_factory=list)

    @trainkit.hookimpl
    def on_evaluate(self, step: int, metrics: dict[str, float], samples: list[dict[str, Any]]) -> None:
        """Keep one evaluation."""
        self.points.append((step, metrics["eval/optimality"]))
        self.samples.append(samples)

    def settled(self) -> float:
        """The lowest value in the last quarter of the run."""
        end = self.points[-1][0]
        return min(value for step, value in self.points if step >= 0.75 * end)


class Divergence:
    """A callback: the last mean divergence from the reference, nats per response."""

    kl = math.nan

    @trainkit.hookimpl
    def log_metrics(self, metrics: dict[str, float]) -> None:
        """Keep it where a step logs it."""
        self.kl = metrics.get("policy/kl", self.kl)


def load_task() -> ModuleType:
    """The example's task, imported from its file."""
    spec = importlib.util.spec_from_file_location("randomwalks_task", EXAMPLE / "task.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def fine_tune(task: ModuleType, seed: int, out: Path) -> str:
    """SFT on the walks of a seed; the directory of its export."""
    changes = {"train.seed": seed, "train.run_dir": str(out / f"sft-{seed}"), "train.trackers": []}
    trainkit.train(config=TRLConfig.load_yaml(EXAMPLE / "sft.yaml").update(changes), **task.sft(seed))
    return str(out / f"sft-{seed}" / "model")


def reinforce(
    task: ModuleType, seed: int, out: Path, model: str, *, method: dict[str, Any] | None = None, **replaced: Any
) -> tuple[Curve, Divergence, Any]:
    """PPO from an export; its curve, its divergence and its trainer."""
    curve, divergence = Curve(), Divergence()
    changes = {
        "train.seed": seed,
        "train.run_dir": str(out / f"ppo-{seed}"),
        "model.model_path": model,
        "train.trackers": [],
    }
    config = TRLConfig.load_yaml(EXAMPLE / "ppo.yaml").update(changes).evolve(method=method or {})
    trainer = trainkit.train(config=config, callbacks=[curve, divergence], **{**task.ppo(seed), **replaced})
    return curve, divergence, trainer


def learning(seeds: list[int], out: Path) -> bool:
    """Every seed's curve and a closing table; whether all reach the goal and stay."""
    task, rows, passed = load_task(), [], 0
    for seed in seeds:
        curve, _, trainer = reinforce(task, seed, out, fine_tune(task, seed, out))
        console.print(f"seed {seed}: " + "  ".join(f"{step}:{value:.3f}" for step, value in curve.points))
        good = curve.settled() >= GOAL
        passed += good
        at = trainer.progress
        rows.append(
            [
                str(seed),
                f"{curve.points[0][1]:.3f}",
                f"{curve.points[-1][1]:.3f}",
                f"{curve.settled():.3f}",
                f"{at.seconds:.1f}",
                f"{at.samples / at.seconds:.0f}",
                "yes" if good else "NO",
            ]
        )
    stayed = f">= {GOAL} and stayed"
    show(["seed", "after SFT", "end", "lowest, last quarter", "PPO s", "samples/s", stayed], rows)
    console.print(f"optimality >= {GOAL} of the maximum, to the end: {passed} of {len(seeds)} seeds")
    return passed == len(seeds)


def constant_reward(seeds: list[int], out: Path) -> bool:
    """The same PPO, every walk worth 1: mean optimality must not move by more than three standard errors."""
    task, rows, passed = load_task(), [], 0
    for seed in seeds:
        curve, divergence, _ = reinforce(
            task,
            seed,
            out,
            fine_tune(task, seed, out),
            method={"init_kl_coef": 0.05, "ent_coef": 0.0},
            reward_fn=lambda samples, **_: [1.0] * len(samples),
        )
        values = [torch.tensor([s["optimality"] for s in samples]) for samples in curve.samples]
        error = math.sqrt(sum(float(v.var()) / len(v) for v in (values[0], values[-1])))
        moved = float(values[-1].mean() - values[0].mean())
        good = abs(moved) <= 3 * error
        passed += good
        rows.append(
            [
                str(seed),
                f"{float(values[0].mean()):.3f}",
                f"{float(values[-1].mean()):.3f}",
                f"{moved:+.3f} ± {error:.3f}",
                f"{divergence.kl:.4f}",
                "yes" if good else "NO",
            ]
        )
    show(
        ["seed", "before", "after", "change ± standard error", "KL at the end (nats)", "within 3 standard errors"], rows
    )
    console.print(f"no drift under a constant reward: {passed} of {len(seeds)} seeds")
    return passed == len(seeds)


def show(columns: list[str], rows: list[list[str]]) -> None:
    """Print a table."""
    table = Table(*columns)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def main() -> int:
    """Run what was asked for; 1 if it fell short."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="where runs go (default: a temporary directory)")
    parser.add_argument(
        "--constant-reward", action="store_true", help="every walk is worth 1: show that nothing drifts"
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    versions = ", ".join(f"{name} {version(name)}" for name in ("trainkit", "torch", "transformers"))
    console.print(f"{versions}; {options.threads} threads")
    with tempfile.TemporaryDirectory() as temporary:
        run = constant_reward if options.constant_reward else learning
        return 0 if run(options.seeds, options.out or Path(temporary)) else 1


if __name__ == "__main__":
    sys.exit(main())
