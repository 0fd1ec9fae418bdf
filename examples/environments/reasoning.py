"""Tasks of reasoning-gym: the model answers, and may try again if the answer is wrong.

Supervised fine-tuning shows a few questions with their answers; PPO learns from the scores of reasoning-gym. Any of its
tasks can be given as `TASK` and `SETTINGS`; a model that is trained from random weights learns only very easy ones.
"""

from __future__ import annotations

import os
import random
import string
from functools import cache
from typing import Any

from transformers import PreTrainedTokenizerFast

from trainkit.data import Row
from trainkit.errors import PluginError
from trainkit.rollouts import Turn
from trainkit.testing import character_tokenizer

try:
    import reasoning_gym
except ModuleNotFoundError as error:
    raise PluginError(
        f"this environment needs reasoning-gym ({error}); install it: pip install 'trainkit-rl[reasoning]'"
    ) from error

TASK, SETTINGS = "spell_backward", {"min_word_len": 3, "max_word_len": 4}
AGAIN = "wrong, try again:\n"
ENTRIES, HELD_OUT, SHOWN = 6000, 200, 600


@cache
def dataset(seed: int = 0) -> Any:
    """Return the dataset of the task; entry i follows from ``seed + i``."""
    return reasoning_gym.create_dataset(TASK, seed=seed, size=ENTRIES, **SETTINGS)


class Reasoning:
    """A question and two attempts. The first is paid its score, the second half of what it improves.

    The entry of the dataset is a column of the row; ``rollout.max_turns`` is the number of attempts.
    """

    def __init__(self, row: Row) -> None:
        self.entry: dict[str, Any] = row["entry"]
        self.scores: list[float] = []

    def reset(self) -> str:
        """Return the question."""
        return f"{self.entry['question']}\n"

    def step(self, output: str) -> Turn:
        """Score an attempt; the right answer ends the episode."""
        score = dataset().score_answer(output, self.entry)
        reward = max(score - max(self.scores), 0.0) / 2 if self.scores else score
        self.scores.append(score)
        return Turn(AGAIN, reward, done=score == 1.0)


def split(seed: int) -> tuple[list[Row], list[Row], list[Row]]:
    """Return rows with different questions: held out, with answers (for SFT), and without (for PPO)."""
    entries = {entry["question"]: entry for entry in dataset(seed * ENTRIES)}
    rows = [{"entry": entry} for entry in entries.values()]
    return rows[:HELD_OUT], rows[HELD_OUT : HELD_OUT + SHOWN], rows[HELD_OUT + SHOWN :]


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of characters, with one token for the text that all questions begin with, and for `AGAIN`."""
    beginning = os.path.commonprefix([entry["question"] for entry in dataset()])  # noqa: RUF071  (text, not paths)
    made = character_tokenizer(string.printable)
    made.add_tokens([beginning, AGAIN])
    return made


def metric(turns: list[list[dict[str, Any]]], entry: list[dict[str, Any]], **_: Any) -> dict[str, list[float]]:
    """Return 1 for each episode in which the first attempt was right, else 0, and the same for either attempt."""
    right = [
        [dataset().score_answer(turn["output"], asked) == 1.0 for turn in episode]
        for episode, asked in zip(turns, entry, strict=True)
    ]
    return {
        "first right": [float(attempts[0]) for attempts in right],
        "either right": [float(any(attempts)) for attempts in right],
    }


def shown(draw: random.Random, rows: list[Row], row: Row) -> list[str]:
    """Return the turns of an episode, half the time with the answer to another question as the first attempt."""
    question, answer = f"{row['entry']['question']}\n", f"{row['entry']['answer']}\n"
    wrong = f"{draw.choice(rows)['entry']['answer']}\n"
    return [question, wrong, AGAIN, answer] if wrong != answer and draw.random() < 0.5 else [question, answer]


def sft(seed: int = 1) -> dict[str, Any]:
    """Return arguments of ``trainkit.train`` for SFT on a few questions."""
    draw, (_, rows, _) = random.Random(seed), split(seed)
    return {"tokenizer": tokenizer(), "samples": [shown(draw, rows, row) for row in rows]}


def ppo(seed: int = 1) -> dict[str, Any]:
    """Return arguments of ``trainkit.train`` for PPO on the other questions, evaluated on those that are held out."""
    held_out, _, asked = split(seed)
    return {
        "tokenizer": tokenizer(), "environment": Reasoning, "prompts": asked, "eval_prompts": held_out,
        "metric_fn": metric,
    }  # fmt: skip
