"""Advantages: rewards standardised per prompt, or over the collection."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trainkit.metrics import PerPromptStatTracker, Rewards

__all__ = ["PerPromptStatTracker", "standardise"]


def standardise(rewards: Sequence[float]) -> Rewards:
    """Return (r − μ) / (σ + 1e-8) over a whole collection, σ biased. [B] -> [B]."""
    given = np.asarray(rewards, dtype=np.float64)
    standard: Rewards = (given - given.mean()) / (given.std() + 1e-8)
    return standard
