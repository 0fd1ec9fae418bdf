"""The same pairs of walks twice: as a reward model that PPO maximises, and for DPO, which needs none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainkit.models import RewardModel
from trainkit.plugins import load_file

learnt = load_file(Path(__file__).parents[1] / "reward_then_ppo" / "task.py")
walks = learnt.walks


class Measures:
    """What evaluations measure of walks: the exact reward and the learnt one."""

    def __init__(self, seed: int, reward_model: str) -> None:
        self.task = walks.RandomWalks.generate(seed)
        self.model = RewardModel.from_pretrained(reward_model)

    def __call__(self, samples: list[str], **_: Any) -> dict[str, list[float]]:
        """Both, of each walk."""
        return {"optimality": self.task.reward(samples), "learnt": self.model(samples)}


def ppo(seed: int, reward_model: str) -> dict[str, Any]:
    """Arguments of ``trainkit.train`` to maximise the learnt reward."""
    return {**learnt.ppo(seed, reward_model), "metric_fn": Measures(seed, reward_model)}


def dpo(seed: int, reward_model: str) -> dict[str, Any]:
    """Arguments of ``trainkit.train`` to learn from the reward model's pairs without it; it only measures."""
    starts = walks.RandomWalks.generate(seed).starts
    measured = {"eval_prompts": starts * 10, "metric_fn": Measures(seed, reward_model)}
    return {**learnt.reward(seed), **measured}
