"""Word problems of two steps: stories with numbers, worked answers, and a reward for the result and for the form.

The prompts are conversations, so that an instruct model with a chat template can be trained.
"""

from __future__ import annotations

import random
import re
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

NAMES = ["Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Hana", "Ivo", "June", "Kai", "Lena", "Max", "Nina", "Otto"]
THINGS = ["apples", "books", "cards", "coins", "eggs", "marbles", "pencils", "shells", "stamps", "tickets"]
STORIES = (
    ("{name} has {a} {things}. {name} finds {b} more and gives {c} away.", "{a} + {b} = {m}, {m} - {c} = {n}"),
    ("{name} has {a} bags with {b} {things} in each. {name} loses {c} of them.", "{a} * {b} = {m}, {m} - {c} = {n}"),
    ("{name} has {a} bags with {b} {things} in each, and buys {c} more.", "{a} * {b} = {m}, {m} + {c} = {n}"),
    ("{name} had {a} {things}, gave {b} to a friend and {c} to a sister.", "{a} - {b} = {m}, {m} - {c} = {n}"),
)
"""A story, and its worked answer: ``m`` is the result of the first step, and ``n`` that of the second."""
HELD_OUT, ASKED = 100, 2000
SHOWN = {"two layers": 1000, "pretrained": 200}
"""Worked answers; a model that can read needs fewer."""
RESULT = re.compile(r"The answer is (-?\d+)\.$")
WORTH = 0.2
"""The part of the form in the score; the rest is that of the result."""
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %} <answer> {% generation %}"
    "{{ message['content'] }}{{ eos_token }}{% endgeneration %}{% else %}{{ message['content'] }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %} <answer> {% endif %}"
)


def problem(draw: random.Random) -> dict[str, Any]:
    """Return a problem: the ``prompt``, the worked answer as ``completion``, and the number ``answer``."""
    at, name, things = draw.randrange(len(STORIES)), draw.choice(NAMES), draw.choice(THINGS)
    a, b, c = draw.randint(2, 9), draw.randint(2, 9), draw.randint(1, 4)
    if at == 3:  # what is given away was there
        a += 20
    m = (a + b, a * b, a * b, a - b)[at]
    n = m + c if at == 2 else m - c
    numbers = {"a": a, "b": b, "c": c, "m": m, "n": n}
    story, worked = (text.format(name=name, things=things, **numbers) for text in STORIES[at])
    question = f"{story} How many {things} does {name} have now?"
    return {
        "prompt": [{"role": "user", "content": question}],
        "completion": [{"role": "assistant", "content": f"{worked}. The answer is {n}."}],
        "answer": n,
    }


def split(seed: int, shown: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[dict[str, Any]]]:
    """Return disjoint problems: held out, ``shown`` with worked answers (for SFT), and without (for GRPO)."""
    draw, found = random.Random(seed), dict[str, dict[str, Any]]()
    while len(found) < HELD_OUT + shown + ASKED:
        made = problem(draw)
        found[made["prompt"][0]["content"]] = made
    drawn = list(found.values())
    asked = [{key: each[key] for key in ("prompt", "answer")} for each in drawn]
    return asked[:HELD_OUT], drawn[HELD_OUT : HELD_OUT + shown], asked[HELD_OUT + shown :]


def parts(outputs: list[str], answer: list[int], **_: Any) -> dict[str, list[float]]:
    """Return the two parts of the reward of each response: whether its form is right, and whether its result is."""
    found = [RESULT.search(output.strip()) for output in outputs]
    right = [match is not None and int(match[1]) == number for match, number in zip(found, answer, strict=True)]
    return {"result": list(map(float, right)), "form": [float(match is not None) for match in found]}


def reward(outputs: list[str], answer: list[int], **_: Any) -> dict[str, list[float]]:
    """Return the score of each response, 1 at most, and its parts."""
    found = parts(outputs, answer)
    pairs = zip(found["result"], found["form"], strict=True)
    return {"score": [(1 - WORTH) * result + WORTH * form for result, form in pairs], **found}


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of the words and digits of the problems, for a model from random weights."""
    known = [message["content"] for row in split(0, 200)[1] for message in (*row["prompt"], *row["completion"])]
    made = Tokenizer(models.WordLevel(unk_token="<unk>"))
    digits, spaces = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.Metaspace(prepend_scheme="never")
    made.pre_tokenizer = pre_tokenizers.Sequence([digits, spaces, pre_tokenizers.Punctuation()])
    made.decoder = decoders.Metaspace(prepend_scheme="never")
    special = ["<unk>", "<eos>", "<pad>", "<answer>"]
    made.train_from_iterator(known, trainers.WordLevelTrainer(special_tokens=special, show_progress=False))
    names = {f"{name}_token": f"<{name}>" for name in ("unk", "eos", "pad")}
    return PreTrainedTokenizerFast(tokenizer_object=made, chat_template=TEMPLATE, **names)


def _parts(seed: int, model: str | None) -> tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the arguments that both stages have, the problems with worked answers, and those without."""
    held_out, worked, asked = split(seed, SHOWN["pretrained" if model else "two layers"])
    return {"eval_prompts": held_out, **({} if model else {"tokenizer": tokenizer()})}, worked, asked


def sft(seed: int = 1, model: str | None = None) -> dict[str, Any]:
    """Return arguments of ``trainkit.train`` for SFT on a few worked answers, which teaches their form.

    Args:
        seed: draws the problems.
        model: a pretrained model with a tokenizer of its own; None: the tokenizer is `tokenizer`.
    """
    judged, worked, _ = _parts(seed, model)
    samples = [{key: row[key] for key in ("prompt", "completion")} for row in worked]
    return {**judged, "samples": samples, "metric_fn": parts}


def grpo(seed: int = 1, model: str | None = None) -> dict[str, Any]:
    """Return arguments of ``trainkit.train`` for GRPO, with a reward for the result and for the form."""
    judged, _, asked = _parts(seed, model)
    return {**judged, "prompts": asked, "reward_fn": reward}
