"""Copying: an encoder reads letters, a decoder writes them again.

Each prompt has its letters once, in any order, so a model must learn which letter follows which.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from trainkit.testing import EOS, character_tokenizer

LETTERS = "abcdefghij"
SHORTEST, LONGEST = 3, 6
TRAINED, EVALUATED = 2048, 128


@dataclass(frozen=True)
class Copying:
    """The words of one seed, those of the evaluation being no others."""

    trained: list[str]
    evaluated: list[str]

    @classmethod
    def generate(cls, seed: int) -> Copying:
        """Draw words of distinct letters, none of them twice."""
        rng = random.Random(seed)
        words: dict[str, None] = {}
        while len(words) < TRAINED + EVALUATED:
            words["".join(rng.sample(LETTERS, rng.randint(SHORTEST, LONGEST)))] = None
        drawn = list(words)
        return cls(drawn[:TRAINED], drawn[TRAINED:])

    def reward(self, prompts: list[str], outputs: list[str], **_: Any) -> list[float]:
        """The share of places at which the output has the prompt's letter."""
        return [
            sum(a == b for a, b in zip(prompt, output, strict=False)) / max(len(prompt), len(output))
            for prompt, output in zip(prompts, outputs, strict=True)
        ]

    def metric(self, prompts: list[str], outputs: list[str], **_: Any) -> dict[str, list[float]]:
        """Which outputs are the prompt and nothing else."""
        return {"exact": [float(prompt == output) for prompt, output in zip(prompts, outputs, strict=True)]}


def tokenizer() -> PreTrainedTokenizerFast:
    """One token per letter; like T5's, it ends prompts with EOS."""
    made = character_tokenizer(LETTERS)
    made.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"$A {EOS}", pair=None, special_tokens=[(EOS, made.eos_token_id)]
    )
    return made


def sft(seed: int = 1) -> dict[str, Any]:
    """Arguments of ``trainkit.train`` to see copies: (word, word) pairs."""
    task = Copying.generate(seed)
    return {
        "samples": [(word, word) for word in task.trained],
        "eval_prompts": task.evaluated,
        "metric_fn": task.metric,
        "tokenizer": tokenizer(),
    }


def ppo(seed: int = 1) -> dict[str, Any]:
    """Arguments of ``trainkit.train`` to learn copying by reinforcement."""
    task = Copying.generate(seed)
    return {
        "reward_fn": task.reward,
        "prompts": task.trained,
        "eval_prompts": task.evaluated,
        "metric_fn": task.metric,
        "tokenizer": tokenizer(),
    }
