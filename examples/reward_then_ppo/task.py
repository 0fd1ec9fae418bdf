"""A learnt reward: pairs of walks, of which the shorter is preferred, and a reward model trained on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from trainkit.models import RewardModel
from trainkit.plugins import load_file
from trainkit.testing import character_tokenizer

walks = load_file(Path(__file__).parents[1] / "randomwalks" / "task.py")

RIVALS = 8
"""Number of walks from the same start, and of invalid walks, that each walk is compared with."""


def pairs(task: Any, seed: int) -> list[dict[str, str]]:
    """Return pairs of a walk with others from its start, and with invalid ones.

    The walk with the higher optimality is preferred; walks of equal optimality are no pair. Without invalid walks, the
    policy could exploit that the reward model was not trained on them.
    """
    rng = np.random.default_rng(seed)
    by_start: dict[str, list[str]] = {}
    for walk in task.walks:
        if walk[0] in task.shortest:
            by_start.setdefault(walk[0], []).append(walk)
    found: dict[tuple[str, str], None] = {}
    for group in by_start.values():
        for walk in group:
            for rival in [*rng.choice(group, RIVALS), *(_broken(walk, rng) for _ in range(RIVALS))]:
                better, worse = sorted((walk, str(rival)), key=task.optimality, reverse=True)
                if task.optimality(better) > task.optimality(worse) and len(worse) > 1:
                    found[better, worse] = None
    return [{"prompt": better[0], "chosen": better[1:], "rejected": worse[1:]} for better, worse in found]


def _broken(walk: str, rng: np.random.Generator) -> str:
    """Return the walk with a later letter removed or replaced, or with a jump to the goal."""
    at = int(rng.integers(1, len(walk)))
    if rng.random() < 0.5:
        return walk[:at] + walks.LETTERS[walks.GOAL]
    return walk[:at] + str(rng.choice(["", *walks.LETTERS])) + walk[at + 1 :]


def reward(seed: int = 1) -> dict[str, Any]:
    """Return arguments of ``trainkit.train`` for the reward model; every tenth pair is held out."""
    found = pairs(walks.RandomWalks.generate(seed), seed)
    return {
        "samples": [pair for index, pair in enumerate(found) if index % 10],
        "eval_samples": found[::10],
        "tokenizer": character_tokenizer(walks.LETTERS),
    }


def ppo(seed: int, reward_model: str) -> dict[str, Any]:
    """Return arguments of ``trainkit.train`` for PPO with the learnt reward; the exact reward is a metric."""
    return {**walks.ppo(seed), "reward_fn": RewardModel.from_pretrained(reward_model)}
