"""Shapes and colours: GRPO of a tiny model that reads images, from random weights, on questions about drawn images.

Run as ``trainkit examples run shapes``, or ``python examples/shapes/run.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainkit.examples import Evaluations, option_parser, positive, run_stage, show
from trainkit.plugins import load_file

HERE = Path(__file__).parent


def main(argv: list[str] | None = None) -> None:
    """Run GRPO, and show the accuracy on held-out images before and after it."""
    parser = option_parser("shapes", __doc__)
    parser.add_argument("--steps", type=positive, help="number of GRPO steps (default: that of grpo.yaml)")
    options = parser.parse_args(argv)
    task = load_file(HERE / "task.py")
    changes = {"model.model_path": task.MODEL, "train.total_steps": options.steps}
    grpo = run_stage(HERE / "grpo.yaml", options, task.grpo(options.seed), changes)
    show("held-out images", ["before GRPO", "after GRPO"], _rows(grpo.evaluations), [grpo], options)


def _rows(evaluations: Evaluations) -> Iterator[tuple[Any, ...]]:
    """Yield the accuracy of the first and the last evaluation side by side, and a few answers."""
    before, after = evaluations.metrics[0], evaluations.metrics[-1]
    yield "accuracy", before["eval/accuracy"], after["eval/accuracy"]
    for first, last in list(zip(evaluations.samples[0], evaluations.samples[-1], strict=True))[:4]:
        yield first["prompt"], first["output"], last["output"]


if __name__ == "__main__":
    main()
