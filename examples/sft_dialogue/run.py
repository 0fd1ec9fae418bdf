"""Dialogues: SFT of a small model on conversations in packed rows, until it answers as an assistant.

Run as ``trainkit examples run sft_dialogue``, or ``python examples/sft_dialogue/run.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainkit.examples import Evaluations, option_parser, positive, run_stage, show
from trainkit.plugins import load_file

HERE = Path(__file__).parent
SHOWN = 4


def main(argv: list[str] | None = None) -> None:
    """Run SFT, and show what it changed."""
    parser = option_parser("sft_dialogue", __doc__)
    parser.add_argument("--steps", type=positive, help="number of steps (default: that of sft.yaml)")
    options = parser.parse_args(argv)
    task = load_file(HERE / "task.py")

    sft = run_stage(HERE / "sft.yaml", options, task.sft(options.seed), {"train.total_steps": options.steps})

    show("held-out dialogues", ["before", "after"], _rows(sft.evaluations), [sft], options)


def _rows(evaluations: Evaluations) -> Iterator[tuple[Any, ...]]:
    """Yield the metrics of the first and last evaluation side by side, and a few answers of each."""
    before, after = evaluations.metrics[0], evaluations.metrics[-1]
    yield "loss per token of the assistant", before["eval/loss/nll"], after["eval/loss/nll"]
    yield "right answers", before["eval/right"], after["eval/right"]
    pairs = zip(evaluations.samples[0], evaluations.samples[-1], strict=True)
    shown = {last["prompt"].rpartition("<|user|>")[2]: (first, last) for first, last in pairs}
    for first, last in list(shown.values())[:SHOWN]:
        manner = last["prompt"].split("<|")[1].removeprefix("system|>")
        question = last["prompt"].removesuffix("<|assistant|>").rpartition("<|user|>")[2]
        yield f"{manner} {question}", repr(first["output"][:20]), last["output"]


if __name__ == "__main__":
    main()
