"""Arithmetic: a small model sees a few sums with their answers, then RLOO teaches it to add by a verifiable reward.

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
    """Run both trainings, then say what they changed."""
    parser = option_parser("rloo_arithmetic", __doc__)
    parser.add_argument("--steps", type=positive, help="steps of RLOO, instead of what rloo.yaml says")
    parser.add_argument("--sft-epochs", type=positive, help="SFT epochs, instead of what sft.yaml says")
    options = parser.parse_args(argv)
    task = load_file(HERE / "task.py")

    sft = run_stage(HERE / "sft.yaml", options, task.sft(options.seed), {"train.epochs": options.sft_epochs})
    changes = {"model.model_path": sft.model, "train.total_steps": options.steps}
    rloo = run_stage(HERE / "rloo.yaml", options, task.rloo(options.seed), changes)
    show("sums that were never seen", ["before RLOO", "after RLOO"], _rows(rloo.evaluations), [sft, rloo], options)


def _rows(evaluations: Evaluations) -> Iterator[tuple[Any, ...]]:
    """The first and last evaluation side by side, and a few answers of each, the larger digit first."""
    for name in ("accuracy", "reward"):
        yield name, evaluations.metrics[0][f"eval/{name}"], evaluations.metrics[-1][f"eval/{name}"]
    for before, after in list(zip(evaluations.samples[0], evaluations.samples[-1], strict=True))[:3]:
        yield before["prompt"], before["output"][::-1], after["output"][::-1]


if __name__ == "__main__":
    main()
