"""Prompts that several rows have: whether the models run them once, however few and short the rows of a test are."""

from __future__ import annotations

import math

import pytest

from trainkit.plugins import get_trainer
from trainkit.trainer import sharing


def exist(name: str) -> bool:
    """Return whether several rows of an algorithm have the same prompt."""
    cls = get_trainer(name)
    return bool(getattr(cls, "group", None)) or "pairs" in cls.inputs


def share(patch: pytest.MonkeyPatch, shares: bool) -> None:
    """Share prompts wherever it is possible, or nowhere; by default it is done where it pays."""
    patch.setattr(sharing, "GAIN", math.inf if shares else -math.inf)
