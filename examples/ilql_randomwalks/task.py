"""Random walks, offline: walks with their optimality, from which a model learns to find shorter ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainkit.plugins import load_file
from trainkit.testing import character_tokenizer

walks = load_file(Path(__file__).parents[1] / "randomwalks" / "task.py")


def ilql(seed: int = 1) -> dict[str, Any]:
    """Return arguments of ``trainkit.train``: walks as (start, rest) pairs, their optimality, and evaluation starts."""
    task = walks.RandomWalks.generate(seed)
    return {
        "samples": [(walk[:1], walk[1:]) for walk in task.walks],
        "rewards": task.reward(task.walks),
        "eval_prompts": task.starts * 10,
        "metric_fn": task.metric,
        "tokenizer": character_tokenizer(walks.LETTERS),
    }
