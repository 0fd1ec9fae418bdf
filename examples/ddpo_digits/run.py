"""Digits by DDPO: a small diffusion model is trained on digits, then rewarded for compressible images or for one digit.

Run as ``trainkit examples run ddpo_digits``, or ``python examples/ddpo_digits/run.py``. The images before
and after DDPO are PNG files in the run directory.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainkit.examples import Evaluations, option_parser, positive, run_stage, show
from trainkit.plugins import load_file
from trainkit_ddpo import save_grid

HERE = Path(__file__).parent


def main(argv: list[str] | None = None) -> None:
    """Train a denoiser, then run DDPO, and show what it changed."""
    parser = option_parser("ddpo_digits", __doc__)
    task = load_file(HERE / "task.py")
    parser.add_argument("--reward", choices=sorted(task.REWARDS), default="digit", help="the reward (default: digit)")
    parser.add_argument(
        "--digit", type=int, choices=range(10), default=3, help="the digit that is rewarded (default: 3)"
    )
    parser.add_argument("--steps", type=positive, help="number of DDPO steps (default: that of ddpo.yaml)")
    parser.add_argument("--denoiser-steps", type=positive, default=600, help="number of denoiser steps (default: 600)")
    options = parser.parse_args(argv)

    model = _denoiser(task, options)
    arguments = task.reward(options.reward, options.digit)
    rl = run_stage(
        HERE / "ddpo.yaml", options, arguments, {"model.model_path": model, "train.total_steps": options.steps}
    )
    for name, samples in (("before", rl.evaluations.samples[0]), ("after", rl.evaluations.samples[-1])):
        save_grid([sample["image"] for sample in samples], options.run_dir / f"{name}.png", columns=12)
    show(f"digits, {options.reward}", ["before DDPO", "after DDPO"], _rows(rl.evaluations), [rl], options)
    print(f"images: {options.run_dir / 'before.png'} and {options.run_dir / 'after.png'}")


def _denoiser(task: Any, options: argparse.Namespace) -> str:
    """Train a denoiser, save it, and return its directory."""
    started, target = time.perf_counter(), options.run_dir / "denoiser"
    task.denoiser(options.seed, options.denoiser_steps).save_pretrained(target)
    print(f"trained the denoiser for {options.denoiser_steps} steps in {time.perf_counter() - started:.0f} s")
    return str(target)


def _rows(evaluations: Evaluations) -> Iterator[tuple[Any, ...]]:
    """Yield the metrics of the first and the last evaluation side by side."""
    before, after = evaluations.metrics[0], evaluations.metrics[-1]
    for name in sorted(after.keys() - {"eval/time"}):
        yield f"mean {name.removeprefix('eval/')}", before[name], after[name]


if __name__ == "__main__":
    main()
