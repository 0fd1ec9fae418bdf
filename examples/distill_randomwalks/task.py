"""Distillation on random walks: a teacher has learnt short walks, and a student that knows any walks learns from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainkit.plugins import load_file
from trainkit.testing import character_tokenizer

walks = load_file(Path(__file__).parents[1] / "randomwalks" / "task.py")

sft = walks.sft
"""The arguments for SFT of the student, on all walks."""


def teacher(seed: int = 1) -> dict[str, Any]:
    """Return arguments of ``trainkit.train`` for SFT of the teacher: of every start, the walks that are the best."""
    task = walks.RandomWalks.generate(seed)
    best: dict[str, float] = {}
    for walk in task.walks:
        best[walk[0]] = max(best.get(walk[0], 0.0), task.optimality(walk))
    chosen = [walk for walk in task.walks if 0 < task.optimality(walk) == best[walk[0]]]
    return {**sft(seed), "samples": [(walk[:1], walk[1:]) for walk in chosen]}


def distill(seed: int = 1) -> dict[str, Any]:
    """Return arguments of ``trainkit.train`` for on-policy distillation: prompts alone, without rewards."""
    task = walks.RandomWalks.generate(seed)
    return {
        "prompts": task.starts,
        "eval_prompts": task.starts * 10,
        "metric_fn": task.metric,
        "tokenizer": character_tokenizer(walks.LETTERS),
    }
