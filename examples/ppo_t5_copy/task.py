"""Copying: the encoder reads a word, the decoder has to output the same word.

The letters of a word are distinct and in any order, so each output letter depends on the position in the prompt.
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
    """The words of one seed; words for training and for evaluation do not overlap."""

    trained: list[str]
    evaluated: list[str]

    @classmethod
    def generate(cls, seed: int) -> Copying:
        """Draw words with distinct letters, without duplicates."""
        rng = random.Random(seed)
        words: dict[str, None] = {}
        while len(words) < TRAINED + EVALUATED:
            words["".join(rng.sample(LETTERS, rng.randint(SHORTEST, LONGEST)))] = None
        drawn = list(words)
        return cls(drawn[:TRAINED], drawn[TRAINED:])

    def reward(self, prompts: list[str], outputs: list[str], **_: Any) -> list[float]:
        """Return the share of positions at which the output has the letter of the prompt."""
        return [
            sum(a == b for a, b in zip(prompt, output, strict=False)) / max(len(prompt), len(output))
            for prompt, output in zip(prompts, outputs, strict=True)
        ]

    def metric(self, prompts: list[str], outputs: list[str], **_: Any) -> dict[str, list[float]]:
        """Return 1 for each output that is equal to the prompt, else 0."""
        return {"exact": [float(prompt == output) for prompt, output in zip(prompts, outputs, strict=True)]}


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per letter, which ends prompts with EOS, as T5's tokenizer does."""
    made = character_tokenizer(LETTERS)
    made.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"$A {EOS}", pair=None, special_tokens=[(EOS, made.eos_token_id)]
    )
    return made


def sft(seed: int = 1) -> dict[str, Any]:
    """Return arguments of ``trainkit.train`` for SFT: (word, word) pairs."""
    task = Copying.generate(seed)
    return {
        "samples": [(word, word) for word in task.trained],
        "eval_prompts": task.evaluated,
        "metric_fn": task.metric,
        "tokenizer": tokenizer(),
    }


def ppo(seed: int = 1) -> dict[str, Any]:
    """Return arguments of ``trainkit.train`` for PPO."""
    task = Copying.generate(seed)
    return {
        "reward_fn": task.reward,
        "prompts": task.trained,
        "eval_prompts": task.evaluated,
        "metric_fn": task.metric,
        "tokenizer": tokenizer(),
    }
