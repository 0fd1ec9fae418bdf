"""Arithmetic, sampled ahead: RLOO, online DPO or PPO with collections sampled by older weights, beside fresh ones.

Run as ``trainkit examples run async_arithmetic``, or ``python examples/async_arithmetic/run.py``. With ``--engine ray``
the collections are sampled in another process while the policy is trained.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import trainkit
from trainkit.examples import Stage, option_parser, positive, run_stage, show
from trainkit.plugins import load_file

HERE = Path(__file__).parent
ARITHMETIC = HERE.parent / "rloo_arithmetic"
GOAL = 0.9


class Clock:
    """A callback that notes when each evaluation ended, in seconds since the first one, and the samples until then."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.samples: list[int] = []

    @trainkit.hookimpl
    def on_evaluate(self, trainer: Any) -> None:
        """Note the time and the number of samples."""
        self.seconds.append(time.perf_counter())
        self.samples.append(trainer.progress.samples)


def main(argv: list[str] | None = None) -> None:
    """Run SFT, then the method with fresh and with older weights, and compare the two."""
    parser = option_parser("async_arithmetic", __doc__)
    parser.add_argument("--method", choices=["rloo", "online_dpo", "ppo"], default="rloo", help="(default: rloo)")
    parser.add_argument("--engine", default="local", help="what samples ahead: local or ray (default: local)")
    parser.add_argument("--staleness", type=positive, default=1, help="rollout.staleness (default: 1)")
    parser.add_argument("--steps", type=positive, help="number of steps after SFT (default: that of the YAML file)")
    parser.add_argument("--sft-epochs", type=positive, help="number of SFT epochs (default: that of sft.yaml)")
    options = parser.parse_args(argv)
    task = load_file(ARITHMETIC / "task.py")

    sft = run_stage(ARITHMETIC / "sft.yaml", options, task.sft(options.seed), {"train.epochs": options.sft_epochs})
    stages, columns = [sft], []
    for name, settings in (
        ("fresh", {}),
        ("ahead", {"rollout.staleness": options.staleness, "rollout.engine": options.engine}),
    ):
        clock = Clock()
        run = type(options)(**{**vars(options), "run_dir": options.run_dir / name})
        changes = {"model.model_path": sft.model, "train.total_steps": options.steps, **settings}
        arguments = {**task.rloo(options.seed), "callbacks": [clock]}
        stages.append(run_stage(HERE / f"{options.method}.yaml", run, arguments, changes))
        columns.append(measured(stages[-1], clock))

    rows = [(label, *(column[label] for column in columns)) for label in columns[0]]
    ahead = f"staleness {options.staleness}, {options.engine}"
    show(f"held-out sums, {options.method}", ["staleness 0", ahead], rows, stages, options)


def measured(stage: Stage, clock: Clock) -> dict[str, Any]:
    """Return what is compared: rewards, accuracy, and when the reward first reached the goal."""
    rewards = [found["eval/reward"] for found in stage.evaluations.metrics]
    reached = first_above(rewards, GOAL)
    never = "not reached"
    return {
        "reward before": rewards[0],
        "reward after": rewards[-1],
        "accuracy after": stage.evaluations.metrics[-1]["eval/accuracy"],
        f"seconds to a reward of {GOAL}": never if reached is None else clock.seconds[reached] - clock.seconds[0],
        f"samples to a reward of {GOAL}": never if reached is None else clock.samples[reached],
        "seconds in all": clock.seconds[-1] - clock.seconds[0],
    }


def first_above(values: list[float], goal: float) -> int | None:
    """Return the index of the first of ``values`` that is at least ``goal``; None if there is none."""
    return next((index for index, value in enumerate(values) if value >= goal), None)


if __name__ == "__main__":
    main()
