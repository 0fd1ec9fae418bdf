"""Pairs of random walks: SFT of a small model on walks, then DPO on pairs of walks, of which the shorter is preferred.

Run as ``trainkit examples run dpo_randomwalks``, or ``python examples/dpo_randomwalks/run.py``.
"""

from __future__ import annotations

from pathlib import Path

from trainkit.examples import option_parser, positive, run_stage, show
from trainkit.plugins import load_file

HERE = Path(__file__).parent
WALKS = HERE.parent / "randomwalks"
SHOWN = {
    "mean optimality": "eval/optimality",
    "pairs ranked correctly": "eval/rewards/accuracies",
    "log π of the shorter": "eval/logps/chosen",
    "log π of the longer": "eval/logps/rejected",
}


def main(argv: list[str] | None = None) -> None:
    """Run SFT and DPO, and show what DPO changed."""
    parser = option_parser("dpo_randomwalks", __doc__)
    parser.add_argument("--steps", type=positive, help="number of DPO steps (default: that of dpo.yaml)")
    parser.add_argument("--sft-epochs", type=positive, help="number of SFT epochs (default: that of its YAML file)")
    options = parser.parse_args(argv)
    walks, task = load_file(WALKS / "task.py"), load_file(HERE / "task.py")

    sft = run_stage(WALKS / "sft.yaml", options, walks.sft(options.seed), {"train.epochs": options.sft_epochs})
    changes = {"model.model_path": sft.model, "train.total_steps": options.steps}
    dpo = run_stage(HERE / "dpo.yaml", options, task.dpo(options.seed), changes)

    before, after = dpo.evaluations.metrics[0], dpo.evaluations.metrics[-1]
    rows = [(what, before[name], after[name]) for what, name in SHOWN.items()]
    show("pairs of random walks", ["before DPO", "after DPO"], rows, [sft, dpo], options)


if __name__ == "__main__":
    main()
