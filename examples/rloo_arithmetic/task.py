"""Addition of two numbers: the sums, how they are split, and the reward of an answer.

The least significant digit of the answer comes first, as in addition on paper, so that a carry is known when it is
needed.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from trainkit.testing import character_tokenizer

LARGEST, HELD_OUT, SHOWN = 49, 250, 200


def split(seed: int) -> tuple[list[dict[str, str]], list[dict[str, str]], list[dict[str, str]]]:
    """Split all sums into three disjoint parts: held out, with answers (for SFT), and without (for RLOO)."""
    numbers = range(LARGEST + 1)
    problems = [{"prompt": f"{a:02}+{b:02}=", "answer": f"{a + b:02}"[::-1]} for a in numbers for b in numbers]
    drawn = [problems[i] for i in np.random.default_rng(seed).permutation(len(problems))]
    return drawn[:HELD_OUT], drawn[HELD_OUT : HELD_OUT + SHOWN], drawn[HELD_OUT + SHOWN :]


def reward(outputs: list[str], answer: list[str], **_: Any) -> list[float]:
    """Return the share of correct digits of each answer, 0 if the number of digits differs."""
    return [
        sum(a == b for a, b in zip(output, right, strict=True)) / len(right) if len(output) == len(right) else 0.0
        for output, right in zip(outputs, answer, strict=True)
    ]


def metric(outputs: list[str], answer: list[str], **_: Any) -> dict[str, list[float]]:
    """Return 1 for each answer that is entirely correct, else 0."""
    return {"accuracy": [float(output == right) for output, right in zip(outputs, answer, strict=True)]}


def _judged(seed: int) -> dict[str, Any]:
    held_out, _, _ = split(seed)
    return {"eval_prompts": held_out, "metric_fn": metric, "tokenizer": character_tokenizer("0123456789+=")}


def sft(seed: int = 1) -> dict[str, Any]:
    """Return arguments of ``trainkit.train`` for SFT on a few sums, which teaches the format of answers."""
    _, shown, _ = split(seed)
    return {**_judged(seed), "samples": [(problem["prompt"], problem["answer"]) for problem in shown]}


def rloo(seed: int = 1) -> dict[str, Any]:
    """Return arguments of ``trainkit.train`` for RLOO, with the share of correct digits as reward."""
    _, _, asked = split(seed)
    return {**_judged(seed), "prompts": asked, "reward_fn": reward}
