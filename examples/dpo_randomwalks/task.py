"""Pairs of random walks: of two walks from the same start, the one that reaches the goal sooner is preferred.

For KTO, each pair is divided into two samples: the walk that is preferred is desirable, the other one undesirable.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from trainkit.plugins import load_file
from trainkit.testing import character_tokenizer

walks = load_file(Path(__file__).parents[1] / "randomwalks" / "task.py")

RIVALS = 8
"""Number of walks from the same start that each walk is compared with."""


def pairs(task: Any, seed: int) -> list[dict[str, str]]:
    """Return pairs of walks from the same start, except where both have the same length or both miss the goal."""
    rng = np.random.default_rng(seed)
    by_start: dict[str, list[str]] = {}
    for walk in task.walks:
        by_start.setdefault(walk[0], []).append(walk)
    found: dict[tuple[str, str], None] = {}
    for walk in task.walks:
        for rival in rng.choice(by_start[walk[0]], RIVALS):
            better, worse = sorted((walk, str(rival)), key=task.optimality, reverse=True)
            if task.optimality(better) > task.optimality(worse):
                found[better, worse] = None
    return [{"prompt": better[0], "chosen": better[1:], "rejected": worse[1:]} for better, worse in found]


def dpo(seed: int = 1) -> dict[str, Any]:
    """Return arguments of ``trainkit.train`` for DPO; every tenth pair is held out."""
    task = walks.RandomWalks.generate(seed)
    found = pairs(task, seed)
    return {
        "samples": [pair for index, pair in enumerate(found) if index % 10],
        "eval_samples": found[::10],
        "eval_prompts": task.starts * 10,
        "metric_fn": task.metric,
        "tokenizer": character_tokenizer(walks.LETTERS),
    }


def kto(seed: int = 1) -> dict[str, Any]:
    """Return arguments of ``trainkit.train`` for KTO: those for DPO, with the two walks of each pair as samples."""
    arguments = dpo(seed)
    return {**arguments, **{name: labelled(arguments[name]) for name in ("samples", "eval_samples")}}


def labelled(found: list[dict[str, str]]) -> list[dict[str, Any]]:
    """Return two samples for each pair, with labels."""
    sides = (("chosen", True), ("rejected", False))
    return [
        {"prompt": pair["prompt"], "completion": pair[side], "label": label} for pair in found for side, label in sides
    ]
