"""The same pairs of walks for two methods: a reward model for PPO, and DPO, which needs no reward model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainkit.models import RewardModel
from trainkit.plugins import load_file

learnt = load_file(Path(__file__).parents[1] / "reward_then_ppo" / "task.py")
walks = learnt.walks


class Measures:
    """Metric function of evaluations: the exact and the learnt reward of walks."""

    def __init__(self, seed: int, reward_model: str) -> None:
        self.task = walks.RandomWalks.generate(seed)
        self.model = RewardModel.from_pretrained(reward_model)

    def __call__(self, samples: list[str], **_: Any) -> dict[str, list[float]]:
        """Return both rewards of each walk."""
        return {"optimality": self.task.reward(samples), "learnt": self.model(samples)}


def ppo(seed: int, reward_model: str) -> dict[str, Any]:
    """Return arguments of ``trainkit.train`` for PPO with the learnt reward."""
    return {**learnt.ppo(seed, reward_model), "metric_fn": Measures(seed, reward_model)}


def dpo(seed: int, reward_model: str) -> dict[str, Any]:
    """Return arguments of ``trainkit.train`` for DPO on the same pairs; the reward model is only a metric."""
    starts = walks.RandomWalks.generate(seed).starts
    measured = {"eval_prompts": starts * 10, "metric_fn": Measures(seed, reward_model)}
    return {**learnt.reward(seed), **measured}
