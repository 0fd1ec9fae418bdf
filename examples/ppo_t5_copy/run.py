"""Copying with T5: SFT of a small encoder-decoder on copies of words, then PPO until it copies new words.

Run as ``trainkit examples run ppo_t5_copy``, or ``python examples/ppo_t5_copy/run.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainkit.examples import Evaluations, option_parser, positive, run_stage, show
from trainkit.plugins import load_file

HERE = Path(__file__).parent


def main(argv: list[str] | None = None) -> None:
    """Run SFT and PPO, and show what PPO changed."""
    parser = option_parser("ppo_t5_copy", __doc__)
    parser.add_argument("--steps", type=positive, help="number of PPO steps (default: that of ppo.yaml)")
    parser.add_argument("--sft-epochs", type=positive, help="number of SFT epochs (default: that of sft.yaml)")
    options = parser.parse_args(argv)
    task = load_file(HERE / "task.py")

    sft = run_stage(HERE / "sft.yaml", options, task.sft(options.seed), {"train.epochs": options.sft_epochs})
    changes = {"model.model_path": sft.model, "train.total_steps": options.steps}
    ppo = run_stage(HERE / "ppo.yaml", options, task.ppo(options.seed), changes)
    show("copying with T5", ["before PPO", "after PPO"], _rows(ppo.evaluations), [sft, ppo], options)


def _rows(evaluations: Evaluations) -> Iterator[tuple[Any, ...]]:
    """Yield the metrics of the first and last evaluation side by side, and a few copies of each."""
    before, after = evaluations.metrics[0], evaluations.metrics[-1]
    yield "letters in place", before["eval/reward"], after["eval/reward"]
    yield "words copied", before["eval/exact"], after["eval/exact"]
    for first, last in list(zip(evaluations.samples[0], evaluations.samples[-1], strict=True))[:3]:
        yield f"a copy of {first['prompt']}", first["output"], last["output"]


if __name__ == "__main__":
    main()
