"""Randomness keyed by purpose: what is drawn depends on the seed and the place in the run, on nothing drawn before.

So evaluation cannot disturb training, resuming needs no generator states, and the caller's global generators
are left as they were.
"""

from __future__ import annotations

import numbers
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from zlib import crc32

import numpy as np
import torch

from trainkit.errors import DataError, describe

Seen = Counter[tuple[int, ...]]
"""How often each (seed, prompt) has occurred."""


def derive_seed(seed: int, purpose: str, *keys: int) -> int:
    """A 63-bit seed from the run's seed, a purpose such as ``"sample"``, and places such as rank and step (F-14)."""
    state = np.random.SeedSequence([seed, crc32(purpose.encode()), *keys]).generate_state(1, np.uint64)
    return int(state[0] >> np.uint64(1))


def generator(seed: int, purpose: str, *keys: int, device: torch.device | str = "cpu") -> torch.Generator:
    """A fresh generator on ``device`` for one purpose at one place."""
    return torch.Generator(device).manual_seed(derive_seed(seed, purpose, *keys))


def check_seed(seed: Any, what: str) -> int | None:
    """The ``seed`` of a prompt as an integer from 0 on; None if it has none.

    Raises:
        DataError: it is something else; ``what`` names the prompt.
    """
    if seed is None:
        return None
    if isinstance(seed, bool) or not isinstance(seed, numbers.Integral) or seed < 0:
        raise DataError(
            f"{what} has the seed {describe(seed)}; the column 'seed' decides how a response is drawn and should be an "
            "integer from 0 on. Give one, or rename the column"
        )
    return int(seed)


def row_seeds(
    rows: Sequence[Mapping[str, Any]],
    queries: Sequence[Sequence[int]],
    purpose: str,
    *keys: int,
    seen: Seen | None = None,
) -> list[int | None]:
    """For every row with a column ``seed``, a seed that no other has: what its response is drawn with.

    It follows from the row's seed, its prompt, ``purpose`` and ``keys``, and from which of several rows with this seed
    and prompt it is; so it does not depend on the other rows.

    Args:
        rows: the rows [B].
        queries: their prompts as token ids.
        purpose: as in `derive_seed`.
        *keys: as in `derive_seed`.
        seen: the rows that were there before, if these are not the first; they are counted on.

    Raises:
        DataError: a seed is no integer.
    """
    seen = Counter() if seen is None else seen
    found: list[int | None] = []
    for index, (row, query) in enumerate(zip(rows, queries, strict=True)):
        seed = check_seed(row.get("seed"), f"prompt {index}")
        place = (seed or 0, *query)
        found.append(None if seed is None else derive_seed(seed, purpose, seen[place], *keys, *query))
        seen[place] += seed is not None
    return found


@contextmanager
def global_rng(seed: int, purpose: str, *keys: int, device: torch.device) -> Iterator[None]:
    """Within, torch's global generators are seeded for one purpose; afterwards they are as before.

    For what takes no generator: the initialisation of weights, and dropout.
    """
    devices = [device.index or 0] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(derive_seed(seed, purpose, *keys))
        yield
