"""From rewards to advantages: around the moments of a prompt's own rewards, or of the collection."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Rewards = NDArray[np.float64]


def standardise(rewards: Sequence[float]) -> Rewards:
    """(r − μ) / (σ + 1e-8), σ biased, over a whole collection. [B] -> [B]."""
    given = np.asarray(rewards, dtype=np.float64)
    return (given - given.mean()) / (given.std() + 1e-8)


class PerPromptStatTracker:
    """(r − μ) / (σ + 1e-6) with the moments of the newest rewards of the same prompt (F-17; golden 10.7).

    Prompts are told apart by their text. The rewards at hand count already. Of a prompt with fewer than ``min_count``
    rewards the moments are those of all rewards at hand. Source: Black et al. 2023, appendix D.1.

    Args:
        buffer_size: rewards that are remembered of a prompt.
        min_count: rewards that a prompt needs for moments of its own.
    """

    def __init__(self, buffer_size: int, min_count: int) -> None:
        self.buffer_size, self.min_count = buffer_size, min_count
        self.rewards: dict[str, deque[float]] = {}

    def update(self, prompts: Sequence[str], rewards: Sequence[float]) -> Rewards:
        """Advantages in float64, whatever the rewards are (S-58). [B], [B] -> [B]."""
        given = np.asarray(rewards, dtype=np.float64)
        for prompt, reward in zip(prompts, given.tolist(), strict=True):
            self.rewards.setdefault(prompt, deque(maxlen=self.buffer_size)).append(reward)
        known = {prompt: np.array(self.rewards[prompt]) for prompt in set(prompts)}
        usable = {prompt: own if len(own) >= self.min_count else given for prompt, own in known.items()}
        mean = np.array([usable[prompt].mean() for prompt in prompts])
        std = np.array([usable[prompt].std() for prompt in prompts])
        return (given - mean) / (std + 1e-6)

    def get_stats(self) -> dict[str, dict[str, float]]:
        """Mean, standard deviation and count of what is remembered, by prompt."""
        known = {prompt: np.array(rewards) for prompt, rewards in self.rewards.items()}
        return {p: {"mean": float(r.mean()), "std": float(r.std()), "count": len(r)} for p, r in known.items()}

    def state_dict(self) -> dict[str, list[float]]:
        """What is remembered, oldest first, by prompt."""
        return {prompt: list(rewards) for prompt, rewards in self.rewards.items()}

    def load_state_dict(self, state: Mapping[str, Sequence[float]]) -> None:
        """Take over what `state_dict` gave."""
        self.rewards = {prompt: deque(rewards, maxlen=self.buffer_size) for prompt, rewards in state.items()}
