"""Advantages: rewards standardised per prompt, or over the collection."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Rewards = NDArray[np.float64]


def standardise(rewards: Sequence[float]) -> Rewards:
    """Return (r − μ) / (σ + 1e-8) over a whole collection, σ biased. [B] -> [B]."""
    given = np.asarray(rewards, dtype=np.float64)
    standard: Rewards = (given - given.mean()) / (given.std() + 1e-8)
    return standard


class PerPromptStatTracker:
    """(r − μ) / (σ + 1e-6) with mean and deviation of the latest rewards of the same prompt (F-17; golden 10.7).

    Prompts are identified by their text. The current rewards are included. For a prompt with fewer than ``min_count``
    rewards, μ and σ are those of all current rewards. Source: Black et al. 2023, appendix D.1.

    Args:
        buffer_size: number of rewards stored per prompt.
        min_count: number of rewards needed to use a prompt's own mean and deviation.
    """

    def __init__(self, buffer_size: int, min_count: int) -> None:
        self.buffer_size, self.min_count = buffer_size, min_count
        self.rewards: dict[str, deque[float]] = {}

    def update(self, prompts: Sequence[str], rewards: Sequence[float]) -> Rewards:
        """Add the rewards, and return their advantages in float64, also for integer rewards (S-58). [B], [B] -> [B]."""
        given = np.asarray(rewards, dtype=np.float64)
        for prompt, reward in zip(prompts, given.tolist(), strict=True):
            self.rewards.setdefault(prompt, deque(maxlen=self.buffer_size)).append(reward)
        known = {prompt: np.array(self.rewards[prompt]) for prompt in set(prompts)}
        usable = {prompt: own if len(own) >= self.min_count else given for prompt, own in known.items()}
        mean = np.array([usable[prompt].mean() for prompt in prompts])
        std = np.array([usable[prompt].std() for prompt in prompts])
        standard: Rewards = (given - mean) / (std + 1e-6)
        return standard

    def get_stats(self) -> dict[str, dict[str, float]]:
        """Return mean, standard deviation and count of the stored rewards, by prompt."""
        known = {prompt: np.array(rewards) for prompt, rewards in self.rewards.items()}
        return {p: {"mean": float(r.mean()), "std": float(r.std()), "count": len(r)} for p, r in known.items()}

    def state_dict(self) -> dict[str, list[float]]:
        """Return the stored rewards, oldest first, by prompt."""
        return {prompt: list(rewards) for prompt, rewards in self.rewards.items()}

    def load_state_dict(self, state: Mapping[str, Sequence[float]]) -> None:
        """Restore the rewards that `state_dict` returned."""
        self.rewards = {prompt: deque(rewards, maxlen=self.buffer_size) for prompt, rewards in state.items()}
