"""Random walks, online DPO: SFT of a small model on walks, then DPO on the best and the worst of its sampled walks.

Run as ``trainkit examples run online_dpo_randomwalks``, or ``python examples/online_dpo_randomwalks/run.py``.
"""

from __future__ import annotations

from pathlib import Path

from trainkit.examples import option_parser, positive, run_stage, show
from trainkit.plugins import load_file

HERE = Path(__file__).parent
WALKS = HERE.parent / "randomwalks"


def main(argv: list[str] | None = None) -> None:
    """Run SFT and the online method, and show what the latter changed."""
    parser = option_parser("online_dpo_randomwalks", __doc__)
    methods = ["online_dpo", "best_of_k"]
    parser.add_argument(
        "--method", choices=methods, default=methods[0], help="the method after SFT (default: online_dpo)"
    )
    parser.add_argument("--steps", type=positive, help="number of steps after SFT (default: that of the YAML file)")
    parser.add_argument("--sft-epochs", type=positive, help="number of SFT epochs (default: that of its YAML file)")
    options = parser.parse_args(argv)
    task = load_file(WALKS / "task.py")

    sft = run_stage(WALKS / "sft.yaml", options, task.sft(options.seed), {"train.epochs": options.sft_epochs})
    changes = {"model.model_path": sft.model, "train.total_steps": options.steps}
    online = run_stage(HERE / f"{options.method}.yaml", options, task.ppo(options.seed), changes)

    before, after = online.evaluations.metrics[0], online.evaluations.metrics[-1]
    rows = [("mean optimality", before["eval/optimality"], after["eval/optimality"])]
    show("random walks", [f"before {options.method}", f"after {options.method}"], rows, [sft, online], options)


if __name__ == "__main__":
    main()
