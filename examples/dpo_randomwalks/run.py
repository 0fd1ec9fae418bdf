"""Pairs of random walks: SFT of a small model on walks, then DPO on pairs of walks, of which the shorter is preferred.

With ``--method kto``, KTO takes the place of DPO: it learns from the same walks, labelled as desirable or undesirable.

Run as ``trainkit examples run dpo_randomwalks``, or ``python examples/dpo_randomwalks/run.py``.
"""

from __future__ import annotations

from pathlib import Path

from trainkit.examples import option_parser, positive, run_stage, show
from trainkit.plugins import load_file

HERE = Path(__file__).parent
WALKS = HERE.parent / "randomwalks"
SHOWN = {
    "dpo": {
        "mean optimality": "eval/optimality",
        "pairs ranked correctly": "eval/rewards/accuracies",
        "log π of the shorter": "eval/logps/chosen",
        "log π of the longer": "eval/logps/rejected",
    },
    "kto": {
        "mean optimality": "eval/optimality",
        "walks on the right side": "eval/rewards/accuracies",
        "log π of the shorter": "eval/logps/desirable",
        "log π of the longer": "eval/logps/undesirable",
    },
}


def main(argv: list[str] | None = None) -> None:
    """Run SFT and DPO or KTO, and show what the latter changed."""
    parser = option_parser("dpo_randomwalks", __doc__)
    parser.add_argument("--method", choices=[*SHOWN], default="dpo", help="the method after SFT (default: dpo)")
    parser.add_argument("--steps", type=positive, help="number of steps after SFT (default: that of the YAML file)")
    parser.add_argument("--sft-epochs", type=positive, help="number of SFT epochs (default: that of its YAML file)")
    options = parser.parse_args(argv)
    walks, task = load_file(WALKS / "task.py"), load_file(HERE / "task.py")

    sft = run_stage(WALKS / "sft.yaml", options, walks.sft(options.seed), {"train.epochs": options.sft_epochs})
    changes = {"model.model_path": sft.model, "train.total_steps": options.steps}
    arguments = {"dpo": task.dpo, "kto": task.kto}[options.method](options.seed)
    learnt = run_stage(HERE / f"{options.method}.yaml", options, arguments, changes)

    before, after = learnt.evaluations.metrics[0], learnt.evaluations.metrics[-1]
    rows = [(what, before[name], after[name]) for what, name in SHOWN[options.method].items()]
    name = options.method.upper()
    show("pairs of random walks", [f"before {name}", f"after {name}"], rows, [sft, learnt], options)


if __name__ == "__main__":
    main()
