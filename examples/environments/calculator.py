"""A calculator: the model answers sums and products of numbers that it cannot compute, with a tool that can.

Supervised fine-tuning shows conversations, in most of which the assistant answers at once, and wrongly. PPO learns to
call the tool every time, and to copy numbers without mistakes.
"""

from __future__ import annotations

import operator
import random
import re
from typing import Any

from transformers import PreTrainedTokenizerFast

from trainkit.data import Row
from trainkit.rollouts import Turn
from trainkit.testing import character_tokenizer

Message = dict[str, str]

SIGNS = {"plus": "+", "times": "*"}
OPERATORS = {"+": operator.add, "*": operator.mul}
CALL = re.compile(r"calc\((\d{1,4})([+*])(\d{1,4})\)")
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: "
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
DIALOGUES, WITH_TOOL, EVALUATED = 2400, 0.3, 200


def calculate(output: str) -> str | None:
    """Return the result of a call of the tool, e.g. ``calc(12+34)``; None if the output is something else."""
    call = CALL.fullmatch(output)
    return str(OPERATORS[call[2]](int(call[1]), int(call[3]))) if call else None


def question(draw: random.Random) -> tuple[str, str, str]:
    """Return a question, the call that answers it, and the answer."""
    word, a, b = draw.choice([*SIGNS]), draw.randint(10, 99), draw.randint(10, 99)
    sign = SIGNS[word]
    return f"{a} {word} {b}", f"calc({a}{sign}{b})", str(OPERATORS[sign](a, b))


class Calculator:
    """A conversation: a question, calls of the tool with their results, and an answer, which is paid 1 if it is right.

    The question follows from the row's ``episode_seed``, so that no prompts are needed.
    """

    def __init__(self, row: Row) -> None:
        self.question, _, self.answer = question(random.Random(row["episode_seed"]))

    def reset(self) -> list[Message]:
        """Return the conversation so far: the question."""
        return [{"role": "user", "content": self.question}]

    def step(self, output: str) -> Turn:
        """Answer a call with its result; anything else is the answer, and ends the episode."""
        result = calculate(output)
        if result is None:
            return Turn(reward=float(output == self.answer), done=True)
        return Turn([{"role": "tool", "content": result}])


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of characters, with one token for each word, and with a chat template."""
    made = character_tokenizer("0123456789+*() :\n")
    made.add_tokens(["user", "assistant", "tool", "calc", *SIGNS])
    made.chat_template = TEMPLATE
    return made


def metric(turns: list[list[dict[str, Any]]], **_: Any) -> dict[str, list[float]]:
    """Return 1 for each episode with the right answer, else 0, and the same for a call of the tool."""
    return {
        "right": [float(episode[-1]["reward"]) for episode in turns],
        "tool": [float(len(episode) > 1) for episode in turns],
    }


def shown(draw: random.Random) -> list[Message]:
    """Return a conversation in which the assistant either calls the tool or answers at once with a random number."""
    asked, call, answer = question(draw)
    messages = [{"role": "user", "content": asked}]
    if draw.random() >= WITH_TOOL:
        return [*messages, {"role": "assistant", "content": str(draw.randint(20, 9801))}]
    called = [{"role": "assistant", "content": call}, {"role": "tool", "content": answer}]
    return [*messages, *called, {"role": "assistant", "content": answer}]


def sft(seed: int = 1) -> dict[str, Any]:
    """Return arguments of ``trainkit.train`` for SFT on conversations."""
    draw = random.Random(seed)
    return {"tokenizer": tokenizer(), "samples": [shown(draw) for _ in range(DIALOGUES)]}


def ppo(seed: int = 1) -> dict[str, Any]:  # noqa: ARG001  (as in the other games)
    """Return arguments of ``trainkit.train`` for PPO; the environment gives the questions."""
    return {
        "tokenizer": tokenizer(), "environment": Calculator, "eval_prompts": [{}] * EVALUATED, "metric_fn": metric,
    }  # fmt: skip
