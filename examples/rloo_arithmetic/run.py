"""Arithmetic: SFT of a small model on a few sums with answers, then RLOO with a verifiable reward until it adds.

Run as ``trainkit examples run rloo_arithmetic``, or ``python examples/rloo_arithmetic/run.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainkit.examples import Evaluations, option_parser, positive, run_stage, show
from trainkit.plugins import load_file

HERE = Path(__file__).parent


def main(argv: list[str] | None = None) -> None:
    """Run SFT and RLOO, and show what RLOO changed."""
    parser = option_parser("rloo_arithmetic", __doc__)
    parser.add_argument("--steps", type=positive, help="number of RLOO steps (default: that of rloo.yaml)")
    parser.add_argument("--sft-epochs", type=positive, help="number of SFT epochs (default: that of sft.yaml)")
    options = parser.parse_args(argv)
    task = load_file(HERE / "task.py")

    sft = run_stage(HERE / "sft.yaml", options, task.sft(options.seed), {"train.epochs": options.sft_epochs})
    changes = {"model.model_path": sft.model, "train.total_steps": options.steps}
    rloo = run_stage(HERE / "rloo.yaml", options, task.rloo(options.seed), changes)
    show("held-out sums", ["before RLOO", "after RLOO"], _rows(rloo.evaluations), [sft, rloo], options)


def _rows(evaluations: Evaluations) -> Iterator[tuple[Any, ...]]:
    """Yield the metrics of the first and last evaluation side by side, and a few answers, in usual digit order."""
    for name in ("accuracy", "reward"):
        yield name, evaluations.metrics[0][f"eval/{name}"], evaluations.metrics[-1][f"eval/{name}"]
    for before, after in list(zip(evaluations.samples[0], evaluations.samples[-1], strict=True))[:3]:
        yield before["prompt"], before["output"][::-1], after["output"][::-1]


if __name__ == "__main__":
    main()
