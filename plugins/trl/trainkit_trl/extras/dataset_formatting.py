"""Functions that make texts of conversations and instructions, by the chat template of a tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from trainkit.data import plain_messages
from trainkit_migrate import refusing

INSTRUCTION = {"prompt", "completion"}
MESSAGE = {"role", "content"}


def conversations_formatting_function(
    tokenizer: Any, messages_field: Literal["messages", "conversations"]
) -> Callable[[Mapping[str, Any]], Any]:
    """Return a function that makes the text of a row, or the texts of a batch of rows, of its conversations."""

    def text(messages: Any) -> str:
        return str(tokenizer.apply_chat_template(plain_messages(messages, "the conversation"), tokenize=False))

    def formatted(rows: Mapping[str, Any]) -> Any:
        found = rows[messages_field]
        if isinstance(found[0], Mapping):
            return text(found)
        return [text(each) for each in found]

    return formatted


def instructions_formatting_function(tokenizer: Any) -> Callable[[Mapping[str, Any]], Any]:
    """Return a function that makes the text of a row, or the texts of a batch of rows, of prompts and completions."""

    def text(prompt: str, completion: str) -> str:
        turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
        return str(tokenizer.apply_chat_template(turns, tokenize=False))

    def formatted(rows: Mapping[str, Any]) -> Any:
        prompts, completions = rows["prompt"], rows["completion"]
        if isinstance(prompts, str):
            return text(prompts, completions)
        return [text(*pair) for pair in zip(prompts, completions, strict=True)]

    return formatted


def get_formatting_func_from_dataset(dataset: Any, tokenizer: Any) -> Callable[[Mapping[str, Any]], Any] | None:
    """Return the function for a dataset with ``messages``, ``conversations``, or ``prompt`` and ``completion`` alone.

    None if it has none of them, or if its conversations are not lists of ``{"role": ..., "content": ...}``.
    """
    features = getattr(dataset, "features", None)
    if features is None:
        return None
    for name in ("messages", "conversations"):
        if name in features and _keys(features[name]) == MESSAGE:
            return conversations_formatting_function(tokenizer, name)
    return instructions_formatting_function(tokenizer) if set(features) == INSTRUCTION else None


def _keys(feature: Any) -> set[str]:
    inner = feature[0] if isinstance(feature, list) else getattr(feature, "feature", None)
    return set(inner) if isinstance(inner, Mapping) else set()


__getattr__ = refusing(__name__)
