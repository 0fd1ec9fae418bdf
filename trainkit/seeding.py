"""Random numbers keyed by purpose: they depend on the seed and the place in the run, not on earlier random numbers.

Therefore evaluation does not affect training, resuming needs no generator states, and the caller's global generators
are not changed.
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
"""Counts of each (seed, prompt) so far."""


def derive_seed(seed: int, purpose: str, *keys: int) -> int:
    """Derive a 63-bit seed from the run's seed, a purpose (``"sample"``), and keys such as rank and step (F-14)."""
    state = np.random.SeedSequence([seed, crc32(purpose.encode()), *keys]).generate_state(1, np.uint64)
    return int(state[0] >> np.uint64(1))


def generator(seed: int, purpose: str, *keys: int, device: torch.device | str = "cpu") -> torch.Generator:
    """Return a new generator on ``device``, seeded by `derive_seed`."""
    return torch.Generator(device).manual_seed(derive_seed(seed, purpose, *keys))


def check_seed(seed: Any, what: str) -> int | None:
    """Return the ``seed`` of a prompt as a non-negative integer; None if it has none.

    Raises:
        DataError: the seed is something else; ``what`` names the prompt.
    """
    if seed is None:
        return None
    if isinstance(seed, bool) or not isinstance(seed, numbers.Integral) or seed < 0:
        raise DataError(
            f"{what} has the seed {describe(seed)}; the column 'seed' decides how a response is sampled and should be "
            "a non-negative integer. Give one, or rename the column"
        )
    return int(seed)


def row_seeds(
    rows: Sequence[Mapping[str, Any]],
    queries: Sequence[Sequence[int]],
    purpose: str,
    *keys: int,
    seen: Seen | None = None,
) -> list[int | None]:
    """Return, for every row with a column ``seed``, a unique seed to sample its response with; None for other rows.

    It is derived from the row's seed, its prompt, ``purpose``, ``keys``, and the row's number among the rows with the
    same seed and prompt. It does not depend on the other rows.

    Args:
        rows: the rows [B].
        queries: their prompts as token ids.
        purpose: as in `derive_seed`.
        *keys: as in `derive_seed`.
        seen: counts of the rows before these, if these are not the first; updated in place.

    Raises:
        DataError: a seed is not a non-negative integer.
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
    """Seed torch's global generators for one purpose within the context; restore them afterwards.

    This is for code that takes no generator: the initialisation of weights, and dropout.
    """
    devices = [device.index or 0] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(derive_seed(seed, purpose, *keys))
        yield
