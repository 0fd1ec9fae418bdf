"""Random walks, online DPO: a small model learns walks by SFT, then the best of its own walks against the worst.

Run as ``trainkit examples run online_dpo_randomwalks``, or ``python examples/online_dpo_randomwalks/run.py``.
"""

from __future__ import annotations

from pathlib import Path

from trainkit.examples import option_parser, positive, run_stage, show
from trainkit.plugins import load_file

HERE = Path(__file__).parent
WALKS = HERE.parent / "randomwalks"


def main(argv: list[str] | None = None) -> None:
    """Run both trainings, then say what the second changed."""
    parser = option_parser("online_dpo_randomwalks", __doc__)
    methods = ["online_dpo", "best_of_k"]
    parser.add_argument("--method", choices=methods, default=methods[0], help="what follows SFT (default: online_dpo)")
    parser.add_argument("--steps", type=positive, help="steps after SFT, instead of what the method's YAML file says")
    parser.add_argument("--sft-epochs", type=positive, help="SFT epochs, instead of what its YAML file says")
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
