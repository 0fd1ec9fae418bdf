"""Measures learning on the random walks example, seed by seed: SFT, then PPO or RLOO, with the example's settings.

``python benchmarks/learning.py`` prints every seed's curve of mean optimality (sampled walks, all start nodes), the
wall time and samples per second of PPO, and whether each seed ends at 0.98 of the maximum, which is 1, or higher, and
does not fall below 0.95 in the last quarter of the run.
``--method rloo`` does the same for RLOO. With ``--constant-reward`` every walk has the same reward. The KL coefficient
is then the default, and there is no entropy bonus, which would change the policy by itself. The policy may then not
change by more than noise. ``--bandit`` uses a problem that can be enumerated instead of the walks: the policy must
reach the known optimum π* ∝ π_ref · exp(reward / β).
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import sys
import tempfile
import time
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import trainkit
from trainkit import TRLConfig
from trainkit_kit import Bandit

CONSTANT = {"ppo": {"init_kl_coef": 0.05, "ent_coef": 0.0}, "rloo": {"kl_coef": 0.05}}
"""The settings that differ under a constant reward."""
BETA, NEAR = 0.25, 0.02
"""The bandit's KL coefficient β, and the divergence from its optimum, in nats, below which it counts as reached."""
BANDIT: dict[str, dict[str, Any]] = {
    "ppo": {"name": "ppo", "init_kl_coef": BETA, "lam": 1.0, "ppo_epochs": 2},
    "rloo": {"name": "rloo", "kl_coef": BETA},
}
EXAMPLE = Path(__file__).parents[1] / "examples" / "randomwalks"
GOAL, STAYS = 0.98, 0.95
"""The least optimality at the end, and in the last quarter of a run."""
console = Console(highlight=False, soft_wrap=True)


@dataclass
class Curve:
    """A callback that keeps the mean optimality and the samples of each evaluation."""

    points: list[tuple[int, float]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    """CPU time of the process at each evaluation."""
    samples: list[list[dict[str, Any]]] = field(default_factory=list)

    @trainkit.hookimpl
    def on_evaluate(self, step: int, metrics: dict[str, float], samples: list[dict[str, Any]]) -> None:
        """Keep one evaluation."""
        self.points.append((step, metrics["eval/optimality"]))
        self.seconds.append(time.process_time())
        self.samples.append(samples)

    def settled(self) -> float:
        """Return the lowest mean optimality in the last quarter of the run."""
        end = self.points[-1][0]
        return min(value for step, value in self.points if step >= 0.75 * end)


class Divergence:
    """A callback that keeps the last mean divergence from the reference, in nats per response."""

    kl = math.nan

    @trainkit.hookimpl
    def log_metrics(self, metrics: dict[str, float]) -> None:
        """Keep the divergence, if a step logs it."""
        self.kl = metrics.get("policy/kl", self.kl)


def load_task() -> ModuleType:
    """Import the example's task from its file."""
    spec = importlib.util.spec_from_file_location("randomwalks_task", EXAMPLE / "task.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def fine_tune(task: ModuleType, seed: int, out: Path) -> str:
    """Run SFT on the walks of a seed, and return the directory of its export."""
    changes = {"train.seed": seed, "train.run_dir": str(out / f"sft-{seed}"), "train.trackers": []}
    trainkit.train(config=TRLConfig.load_yaml(EXAMPLE / "sft.yaml").update(changes), **task.sft(seed))
    return str(out / f"sft-{seed}" / "model")


def reinforce(
    name: str, task: ModuleType, seed: int, out: Path, *, method: dict[str, Any] | None = None, **replaced: Any
) -> tuple[Curve, Divergence, Any]:
    """Run SFT, then the method from its export; return the method's curve, divergence and trainer."""
    curve, divergence = Curve(), Divergence()
    changes = {
        "train.seed": seed,
        "train.run_dir": str(out / f"{name}-{seed}"),
        "model.model_path": fine_tune(task, seed, out),
        "train.trackers": [],
    }
    config = TRLConfig.load_yaml(EXAMPLE / f"{name}.yaml").update(changes).evolve(method=method or {})
    trainer = trainkit.train(config=config, callbacks=[curve, divergence], **{**task.ppo(seed), **replaced})
    return curve, divergence, trainer


def learning(name: str, seeds: list[int], out: Path) -> bool:
    """Print every seed's curve and a final table; return whether all seeds reach the goal and stay near it."""
    task, rows, passed = load_task(), [], 0
    for seed in seeds:
        curve, _, trainer = reinforce(name, task, seed, out)
        console.print(f"seed {seed}: " + "  ".join(f"{step}:{value:.3f}" for step, value in curve.points))
        good = curve.points[-1][1] >= GOAL and curve.settled() >= STAYS
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
    stayed = f">= {GOAL}, >= {STAYS} before"
    show(["seed", "after SFT", "end", "lowest, last quarter", f"{name.upper()} s", "samples/s", stayed], rows)
    console.print(f"{name}: optimality >= {GOAL} of the maximum at the end: {passed} of {len(seeds)} seeds")
    return passed == len(seeds)


def constant_reward(name: str, seeds: list[int], out: Path) -> bool:
    """Train with a reward of 1 for every walk; return whether optimality changes by at most 3 standard errors."""
    task, rows, passed = load_task(), [], 0
    for seed in seeds:
        curve, divergence, _ = reinforce(
            name,
            task,
            seed,
            out,
            method=CONSTANT[name],
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
    console.print(f"{name}: no drift under a constant reward: {passed} of {len(seeds)} seeds")
    return passed == len(seeds)


def bandit(name: str, seeds: list[int], out: Path) -> bool:
    """Print the divergence from the optimum at the start and the end of each run; return whether all reach it.

    The responses are of one letter and of two letters.
    """
    rows, passed = [], 0
    for length, seed in product((1, 2), seeds):
        problem = Bandit(length, seed=seed)
        trainer = reach_for_optimum(name, problem, seed, out)
        reference = trainer.reference.policy.model
        start = problem.divergences(reference, reference, BETA)[0]
        found = problem.divergences(trainer.unwrapped.model, reference, BETA)
        good = found[0] <= NEAR
        passed += good
        at = [str(length), str(seed), f"{start:.3f}", *(f"{kl:.5f}" for kl in found)]
        rows.append([*at, f"{trainer.progress.seconds:.1f}", "yes" if good else "NO"])
    show(["letters", "seed", "KL(π_ref‖π*)", "KL(π‖π*)", "KL(π*‖π)", f"{name.upper()} s", f"<= {NEAR} nats"], rows)
    console.print(f"{name}: within {NEAR} nats of the optimum at β = {BETA}: {passed} of {len(rows)} runs")
    return passed == len(rows)


def reach_for_optimum(name: str, problem: Bandit, seed: int, out: Path, steps: int = 400) -> Any:
    """Run the method on a bandit for ``steps`` optimizer steps, and return its trainer."""
    config = {
        "method": BANDIT[name],
        "optimizer": {"lr": 1e-3},
        "scheduler": {"name": "linear"},  # so that the noise of sampling decays
        "rollout": {"max_new_tokens": problem.length, "num_rollouts": 512, "batch_size": 512},
        "train": {"batch_size": 512, "total_steps": steps, "eval_interval": 0, "save_interval": 0, "seed": seed},
    }
    run_dir = str(out / f"bandit-{name}-{problem.length}-{seed}")
    changes = {"train.run_dir": run_dir, "train.trackers": []}
    return trainkit.train(config=TRLConfig.from_dict(config).update(changes), **problem.arguments)


def show(columns: list[str], rows: list[list[str]]) -> None:
    """Print a table."""
    table = Table(*columns)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def main() -> int:
    """Run the selected benchmark; return 1 if its goal is missed, else 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", choices=["ppo", "rloo"], default="ppo")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="the directory of the runs (default: a temporary directory)")
    other = parser.add_mutually_exclusive_group()
    other.add_argument("--constant-reward", action="store_true", help="reward every walk with 1: check for drift")
    other.add_argument("--bandit", action="store_true", help="check that the known optimum is reached")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    versions = ", ".join(f"{name} {version(name)}" for name in ("trainkit-rl", "torch", "transformers"))
    console.print(f"{versions}; {options.threads} threads")
    with tempfile.TemporaryDirectory() as temporary:
        run = constant_reward if options.constant_reward else bandit if options.bandit else learning
        return 0 if run(options.method, options.seeds, options.out or Path(temporary)) else 1


if __name__ == "__main__":
    sys.exit(main())
