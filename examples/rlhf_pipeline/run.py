"""The RLHF pipeline: SFT, a reward model, PPO with it, and DPO on the same pairs. One table compares the results.

Run as ``trainkit examples run rlhf_pipeline``, or ``python examples/rlhf_pipeline/run.py``.
"""

from __future__ import annotations

from pathlib import Path

from trainkit.examples import option_parser, positive, run_stage, show
from trainkit.plugins import load_file

HERE = Path(__file__).parent
WALKS, LEARNT = HERE.parent / "randomwalks", HERE.parent / "reward_then_ppo"
SHOWN = {"exact reward: mean optimality": "eval/optimality", "learnt reward": "eval/learnt", "tokens": "eval/length"}


def main(argv: list[str] | None = None) -> None:
    """Run SFT, reward modelling, PPO and DPO, and compare the walks."""
    parser = option_parser("rlhf_pipeline", __doc__)
    parser.add_argument(
        "--steps", type=positive, help="number of PPO and of DPO steps (default: those of their YAML files)"
    )
    parser.add_argument("--reward-steps", type=positive, help="number of reward-model steps (default: its epochs)")
    parser.add_argument("--sft-epochs", type=positive, help="number of SFT epochs (default: that of its YAML file)")
    options = parser.parse_args(argv)
    walks, task = load_file(WALKS / "task.py"), load_file(HERE / "task.py")

    sft = run_stage(WALKS / "sft.yaml", options, walks.sft(options.seed), {"train.epochs": options.sft_epochs})
    start = {"model.model_path": sft.model}
    changes = {**start, "train.total_steps": options.reward_steps}
    reward = run_stage(LEARNT / "reward.yaml", options, task.learnt.reward(options.seed), changes)
    changes = {**start, "train.total_steps": options.steps}
    ppo = run_stage(LEARNT / "ppo.yaml", options, task.ppo(options.seed, reward.model), changes)
    dpo = run_stage(HERE / "dpo.yaml", options, task.dpo(options.seed, reward.model), changes)

    found = [ppo.evaluations.metrics[0], ppo.evaluations.metrics[-1], dpo.evaluations.metrics[-1]]
    rows = [(what, *(metrics[name] for metrics in found)) for what, name in SHOWN.items()]
    show("from pairs to shorter walks", ["SFT", "PPO", "DPO"], rows, [sft, reward, ppo, dpo], options)


if __name__ == "__main__":
    main()
