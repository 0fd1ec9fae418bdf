"""How models run the rows of a test, however few: a prompt once or in each row, the rows joined or not."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

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


def join(patch: pytest.MonkeyPatch) -> None:
    """Join rows and share prompts wherever it is possible; by default rows are joined on GPUs."""
    share(patch, True)
    patch.setattr(sharing.PromptSharing, "_joins_by_default", True)


WAYS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "shared": partial(share, shares=True),
    "separate": partial(share, shares=False),
    "joined": join,
}
"""The ways, by name."""
