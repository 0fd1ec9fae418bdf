"""Guess the number: the model guesses a secret number, and is told whether it is higher or lower.

Supervised fine-tuning shows games of a player who guesses at random what earlier answers have not excluded. PPO learns
to guess in the middle, since four guesses are then enough for fifteen numbers.
"""

from __future__ import annotations

import random
from typing import Any

from transformers import PreTrainedTokenizerFast

from trainkit.data import Row
from trainkit.rollouts import Turn
from trainkit.testing import character_tokenizer

NUMBERS, GUESSES = range(1, 16), 4
PROMPT = "guess:\n"
GAMES = 4000


class Guess:
    """A game. The right guess is paid 1 and ends it. A guess that an earlier answer has excluded costs 0.25.

    The secret is a column of the row; ``rollout.max_turns`` is the number of guesses.
    """

    def __init__(self, row: Row) -> None:
        self.secret: int = row["secret"]
        self.possible = NUMBERS

    def reset(self) -> str:
        """Return the prompt, which is the same in all games."""
        return PROMPT

    def step(self, output: str) -> Turn:
        """Answer a guess. What is no number costs 1 and ends the game."""
        if not output.isdecimal():
            return Turn(reward=-1.0, done=True)
        guess = int(output)
        if guess == self.secret:
            return Turn(reward=1.0, done=True)
        cost = 0.0 if guess in self.possible else -0.25
        first, last = self.possible[0], self.possible[-1]
        if guess < self.secret:
            self.possible = range(max(first, guess + 1), last + 1)
            return Turn("higher\n", cost)
        self.possible = range(first, min(last, guess - 1) + 1)
        return Turn("lower\n", cost)


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token for each number and each answer."""
    made = character_tokenizer("gues:\n0123456789")
    made.add_tokens([*map(str, NUMBERS), "higher", "lower"])
    return made


def metric(turns: list[list[dict[str, Any]]], **_: Any) -> dict[str, list[float]]:
    """Return 1 for each game that was won, else 0."""
    return {"won": [float(game[-1]["reward"] == 1.0) for game in turns]}


def shown(draw: random.Random) -> list[str]:
    """Return the turns of a game of random guesses that no answer has excluded: [prompt, output, prompt, ...]."""
    game, turns = Guess({"secret": draw.choice(NUMBERS)}), [PROMPT]
    for _ in range(GUESSES):
        guess = str(draw.choice(game.possible))
        answer = game.step(guess)
        turns += [f"{guess}\n", str(answer.observation)]
        if answer.done:
            break
    return turns[:-1]


def sft(seed: int = 1) -> dict[str, Any]:
    """Return arguments of ``trainkit.train`` for SFT on random games."""
    draw = random.Random(seed)
    return {"tokenizer": tokenizer(), "samples": [shown(draw) for _ in range(GAMES)]}


def ppo(seed: int = 1) -> dict[str, Any]:  # noqa: ARG001  (as in the other games)
    """Return arguments of ``trainkit.train`` for PPO. Evaluations play a game for every secret number."""
    secrets = [{"secret": number} for number in NUMBERS]
    return {
        "tokenizer": tokenizer(), "environment": Guess, "prompts": secrets, "eval_prompts": secrets,
        "metric_fn": metric,
    }  # fmt: skip
