"""Fingerprints of what a run learns from, by which a run that resumes recognises it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Fingerprints = dict[str, str]
"""A short hash by what it is of, in words for a message."""


def of_rows(rows: Sequence[Mapping[str, Any]]) -> Fingerprints:
    """Return the fingerprint of each column of the data. Of what is neither plain data nor bytes, the type counts."""
    hashes: dict[str, Any] = {}
    for index, row in enumerate(rows):
        for name, value in row.items():
            digest = hashes.setdefault(name, hashlib.sha256())
            digest.update(f"{index} {json.dumps(value, default=_plain, skipkeys=True)}\n".encode())
    return {f"the column {name!r} of the data": digest.hexdigest()[:16] for name, digest in hashes.items()}


def _plain(value: Any) -> Any:
    """Return an array or tensor as a list, a hash of bytes and images, and anything else as the name of its type."""
    if isinstance(value, bytes) or hasattr(value, "convert"):  # a PIL.Image
        return hashlib.sha256(value if isinstance(value, bytes) else value.tobytes()).hexdigest()
    return value.tolist() if hasattr(value, "tolist") else type(value).__qualname__


def of_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the fingerprint of what decides the ids of a text: tokens, their merges, and the chat template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = {} if backend is None else json.loads(backend.to_str())
    own_rules = {name: value for name, value in rules.items() if name not in ("padding", "truncation")}  # set by calls
    parts = [own_rules or tokenizer.get_vocab(), tokenizer.eos_token_id, tokenizer.chat_template]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def of_maker(maker: Any) -> str:
    """Return the name of the class or function that makes environments, or of the class of an object that does."""
    named = maker if hasattr(maker, "__qualname__") else type(maker)
    return f"{named.__module__}.{named.__qualname__}"


def differing(before: Mapping[str, str], now: Mapping[str, str]) -> Iterable[str]:
    """Yield what differs between two runs' fingerprints, or is only in one of them."""
    return (name for name in dict.fromkeys([*before, *now]) if before.get(name) != now.get(name))
