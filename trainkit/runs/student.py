"""Student's distribution of t."""

from __future__ import annotations

import math


def within(t: float, freedom: int) -> float:
    """Return the probability that a variable of Student's distribution is between ``-t`` and ``t``.

    Source: Abramowitz & Stegun 1964, 26.7.3 and 26.7.4.
    """
    angle, odd = math.atan(abs(t) / math.sqrt(freedom)), freedom % 2
    term, total = math.cos(angle) if odd else 1.0, 0.0
    for at in range(1, freedom // 2 + 1):
        total += term
        term *= math.cos(angle) ** 2 * (2 * at - 1 + odd) / (2 * at + odd)
    total *= math.sin(angle)
    return 2 / math.pi * (angle + total) if odd else total


def quantile(probability: float, freedom: int) -> float:
    """Return the ``t`` with `within` equal to ``probability``, by bisection."""
    low, high = 0.0, 1.0
    while within(high, freedom) < probability:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if within(middle, freedom) < probability else (low, middle)
    return high
