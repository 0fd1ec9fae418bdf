"""Dialogues about capitals and rivers, in which the assistant uses the user's name and the style of the system message.

The tokenizer is trained on the dialogues; its chat template marks the assistant's tokens.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

Message = dict[str, str]

NAMES = ["Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hana", "Ivo", "June", "Kai", "Lena", "Max", "Nina", "Otto"]
CAPITALS = {
    "France": "Paris", "Japan": "Tokyo", "Peru": "Lima", "Kenya": "Nairobi", "Norway": "Oslo", "Cuba": "Havana",
    "Egypt": "Cairo", "Greece": "Athens", "Nepal": "Kathmandu", "Chile": "Santiago", "Canada": "Ottawa",
    "Poland": "Warsaw",
}  # fmt: skip
RIVERS = {
    "Paris": "the Seine", "Cairo": "the Nile", "Warsaw": "the Vistula", "Ottawa": "the Ottawa", "Lima": "the Rimac",
    "Santiago": "the Mapocho",
}  # fmt: skip
MANNERS = {"Be brief.": "{answer}.", "Be polite.": "It is {answer}, {name}."}
DIALOGUES, HELD_OUT = 1200, 60
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def dialogue(draw: random.Random) -> list[Message]:
    """Return a dialogue: a greeting with a name, and one to four questions."""
    name, manner = draw.choice(NAMES), draw.choice(list(MANNERS))
    messages = [
        {"role": "system", "content": manner},
        {"role": "user", "content": f"Hello, I am {name}."},
        {"role": "assistant", "content": f"Hello, {name}!"},
    ]
    for _ in range(draw.randint(1, 4)):
        question, answer = _question(draw)
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": MANNERS[manner].format(answer=answer, name=name)})
    return messages


def _question(draw: random.Random) -> tuple[str, str]:
    if draw.random() < 0.3:
        city, river = draw.choice(list(RIVERS.items()))
        return f"Which river runs through {city}?", river
    country, city = draw.choice(list(CAPITALS.items()))
    return f"What is the capital of {country}?", city


def tokenizer_of(dialogues: Iterable[list[Message]]) -> PreTrainedTokenizerFast:
    """Train a byte-pair tokenizer on the dialogues, with a token for each role and a chat template."""
    special = ["<eos>", "<pad>", "<|system|>", "<|user|>", "<|assistant|>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((m["content"] for messages in dialogues for m in messages), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<eos>",
        pad_token="<pad>",
        additional_special_tokens=special[2:],
        chat_template=TEMPLATE,
    )


def right_answers(outputs: list[str], answer: list[str], **_: Any) -> dict[str, list[float]]:
    """Return 1 for each output that is exactly the answer, else 0."""
    return {"right": [float(output == expected) for output, expected in zip(outputs, answer, strict=True)]}


def sft(seed: int) -> dict[str, Any]:
    """Return arguments of `trainkit.train`; evaluations use the loss and the last answer of held-out dialogues."""
    draw = random.Random(seed)
    dialogues = [dialogue(draw) for _ in range(DIALOGUES + HELD_OUT)]
    known, held_out = dialogues[HELD_OUT:], dialogues[:HELD_OUT]
    return {
        "samples": [{"messages": messages} for messages in known],
        "eval_samples": [{"messages": messages} for messages in held_out],
        "eval_prompts": [{"prompt": messages[:-1], "answer": messages[-1]["content"]} for messages in held_out],
        "metric_fn": right_answers,
        "tokenizer": tokenizer_of(known),
    }
