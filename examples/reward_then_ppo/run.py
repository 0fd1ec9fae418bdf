"""A learnt reward: a reward model is trained on pairs of random walks, and replaces the exact reward in PPO.

Run as ``trainkit examples run reward_then_ppo``, or ``python examples/reward_then_ppo/run.py``.
"""

from __future__ import annotations

from pathlib import Path

from trainkit.examples import option_parser, positive, run_stage, show
from trainkit.plugins import load_file

HERE = Path(__file__).parent
WALKS = HERE.parent / "randomwalks"


def main(argv: list[str] | None = None) -> None:
    """Run SFT, reward modelling and PPO, and show the learnt and the exact reward before and after PPO."""
    parser = option_parser("reward_then_ppo", __doc__)
    parser.add_argument("--steps", type=positive, help="number of PPO steps (default: that of ppo.yaml)")
    parser.add_argument("--reward-steps", type=positive, help="number of reward-model steps (default: its epochs)")
    parser.add_argument("--sft-epochs", type=positive, help="number of SFT epochs (default: that of its YAML file)")
    options = parser.parse_args(argv)
    walks, task = load_file(WALKS / "task.py"), load_file(HERE / "task.py")

    sft = run_stage(WALKS / "sft.yaml", options, walks.sft(options.seed), {"train.epochs": options.sft_epochs})
    start = {"model.model_path": sft.model}
    changes = {**start, "train.total_steps": options.reward_steps}
    reward = run_stage(HERE / "reward.yaml", options, task.reward(options.seed), changes)
    changes = {**start, "train.total_steps": options.steps}
    ppo = run_stage(HERE / "ppo.yaml", options, task.ppo(options.seed, reward.model), changes)

    before, after = ppo.evaluations.metrics[0], ppo.evaluations.metrics[-1]
    rows = [("learnt reward", "eval/reward"), ("exact reward: mean optimality", "eval/optimality")]
    accuracy = [run.metrics[at]["eval/rewards/accuracies"] for run in [reward.evaluations] for at in (0, -1)]
    show(
        "a learnt reward",
        ["before", "after"],
        [("pairs ranked correctly", *accuracy), *((what, before[name], after[name]) for what, name in rows)],
        [sft, reward, ppo],
        options,
    )


if __name__ == "__main__":
    main()
