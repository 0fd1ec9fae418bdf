"""Random walks: a small model learns walks by SFT from random weights, then PPO or RLOO teaches it the short ones.

Run as ``trainkit examples run randomwalks``, or ``python examples/randomwalks/run.py``.
"""

from __future__ import annotations

import argparse
from datetime import datetime
from pathlib import Path
from typing import Any

import task
from rich.console import Console
from rich.table import Table
from rich.text import Text

import trainkit
from trainkit import TRLConfig

HERE = Path(__file__).parent
METRIC = "eval/optimality"


class Evaluations:
    """A callback that keeps what every evaluation found."""

    def __init__(self) -> None:
        self.metrics: list[dict[str, float]] = []
        self.samples: list[list[dict[str, Any]]] = []

    @trainkit.hookimpl
    def on_evaluate(self, metrics: dict[str, float], samples: list[dict[str, Any]]) -> None:
        """Keep one evaluation."""
        self.metrics.append(metrics)
        self.samples.append(samples)


def main(argv: list[str] | None = None) -> None:
    """Run both trainings, then say what they changed."""
    options = _options(argv)
    run_dir = Path(options.run_dir or f"runs/randomwalks-{datetime.now():%Y%m%d-%H%M%S}")
    fine_tuning: dict[str, Any] = {"train.seed": options.seed, "train.run_dir": str(run_dir / "sft")}
    if options.sft_epochs is not None:
        fine_tuning["train.epochs"] = options.sft_epochs
    trainkit.train(config=TRLConfig.load_yaml(HERE / "sft.yaml").update(fine_tuning), **task.sft(options.seed))

    reinforcement: dict[str, Any] = {
        "train.seed": options.seed,
        "train.run_dir": str(run_dir / options.method),
        "model.model_path": str(run_dir / "sft" / "model"),
    }
    if options.steps is not None:
        reinforcement["train.total_steps"] = options.steps
    evaluations = Evaluations()
    trainer = trainkit.train(
        config=TRLConfig.load_yaml(HERE / f"{options.method}.yaml").update(reinforcement),
        callbacks=[evaluations],
        **task.ppo(options.seed),
    )
    _summarise(options.method.upper(), evaluations, trainer.progress, run_dir)


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="trainkit examples run randomwalks", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--method", choices=["ppo", "rloo"], default="ppo", help="what follows SFT (default: ppo)")
    parser.add_argument("--seed", type=int, default=1, help="draws the graph, and seeds both runs (default: 1)")
    parser.add_argument("--run-dir", help="where both runs go (default: runs/randomwalks-<date>-<time>)")
    parser.add_argument("--steps", type=_positive, help="steps after SFT, instead of what the method's YAML file says")
    parser.add_argument("--sft-epochs", type=_positive, help="SFT epochs, instead of what sft.yaml says")
    return parser.parse_args(argv)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value


def _summarise(method: str, evaluations: Evaluations, progress: Any, run_dir: Path) -> None:
    """Print the method's first and last evaluation side by side, its speed, and where everything is."""
    console = Console(highlight=False, soft_wrap=True)
    table = Table("", f"before {method}", f"after {method}", title="random walks")
    before, after = evaluations.metrics[0], evaluations.metrics[-1]
    for name in (name for name in after if name.startswith(METRIC)):
        table.add_row(f"mean {name.removeprefix('eval/')}", f"{before[name]:.3f}", f"{after[name]:.3f}")
    first, last = _first_of_each_start(evaluations.samples[0]), _first_of_each_start(evaluations.samples[-1])
    for start in list(last)[:: max(len(last) // 3, 1)][:3]:
        table.add_row(f"a walk from {start}", _shown(first[start]), _shown(last[start]))
    console.print(table)
    console.print(
        f"{method}: {progress.step} steps in {progress.seconds:.1f} s, "
        f"{progress.samples / progress.seconds:.0f} samples per second, evaluations included"
    )
    console.print(Text(f"runs: {run_dir}\nlook: tensorboard --logdir {run_dir}"))


def _first_of_each_start(samples: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    first: dict[str, dict[str, Any]] = {}
    for sample in samples:
        first.setdefault(sample["prompt"], sample)
    return first


def _shown(sample: dict[str, Any]) -> Text:
    return Text(f"{sample['prompt']}{sample['output']}  {sample['optimality']:.2f}")


if __name__ == "__main__":
    main()
