"""Random numbers keyed by purpose: they depend on the seed and the place in the run, not on earlier random numbers.

Therefore evaluation does not affect training, resuming needs no generator states, and the caller's global generators
are not changed.
"""

from __future__ import annotations

import numbers
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from trainkit.errors import DataError, describe

Seen = Counter[tuple[int, ...]]
"""Counts of the responses so far, by position, or by column ``seed`` and prompt."""


class Place(NamedTuple):
    """Where a row is in the stream of rows."""

    position: int
    """The number of the row in the stream, counted over all epochs."""
    epoch: int = 0
    """How often the stream has passed the whole dataset before."""
    row: int | None = None
    """The index of the row in the dataset, for error messages; None if it is not known."""


PLACE = "__place__"
"""Key of a row's `Place`. `Pipeline.take` adds it, and copies of the row keep it. It is no column: reward and metric
functions do not get it."""


def derive_seed(seed: int, purpose: str, *keys: int) -> int:
    """Derive a 63-bit seed from the run's seed, a purpose (``"train"``), and keys, e.g. a position or a step."""
    state = np.random.SeedSequence([seed, crc32(purpose.encode()), *keys]).generate_state(1, np.uint64)
    return int(state[0] >> np.uint64(1))


def generator(seed: int, purpose: str, *keys: int, device: torch.device | str = "cpu") -> torch.Generator:
    """Return a new generator on ``device``, seeded by `derive_seed`."""
    return torch.Generator(device).manual_seed(derive_seed(seed, purpose, *keys))


SEEDED = {"seed": "how a response is sampled", "episode_seed": "the random numbers of an environment"}
"""The columns of rows that are seeds, and what they decide."""


def check_seed(seed: Any, what: str, column: str = "seed") -> int | None:
    """Return the ``seed`` of a prompt as a non-negative integer; None if it has none.

    Raises:
        DataError: the seed is something else; ``what`` names the prompt.
    """
    if seed is None:
        return None
    if isinstance(seed, bool) or not isinstance(seed, numbers.Integral) or seed < 0:
        raise DataError(
            f"{what} has the {column} {describe(seed)}; the column {column!r} decides {SEEDED[column]} and should be "
            "a non-negative integer. Give one, or rename the column"
        )
    return int(seed)


def response_seeds(
    seed: int,
    purpose: str,
    rows: Sequence[Mapping[str, Any]],
    queries: Sequence[Sequence[int]],
    seen: Seen | None = None,
) -> list[int]:
    """Return the seed of each row's response; the random numbers of its first turn are those of ``turn_seed(s, 0)``.

    It is derived from the run's seed, ``purpose``, the row's position in the stream of rows (`PLACE`), and the number
    of the response among those of this position. A column ``seed`` of the row replaces the run's seed and the position;
    the epoch still counts, so that every epoch has responses of its own. A row without a place, which is not of the
    stream, is identified by its prompt, or by its prompt and its column ``seed``. The other rows, the process and the
    division into calls have no effect.

    Args:
        seed: the run's seed.
        purpose: as in `derive_seed`.
        rows: the rows [B].
        queries: their prompts as token ids.
        seen: counts of the responses before these, if these are not the first; updated in place.

    Raises:
        DataError: a column ``seed`` is not a non-negative integer.
    """
    seen = Counter() if seen is None else seen
    seeds: list[int] = []
    for index, (row, query) in enumerate(zip(rows, queries, strict=True)):
        given_seed, place = check_seed(row.get("seed"), f"prompt {index}"), row.get(PLACE)
        key = (-1 if given_seed is None else given_seed, *query) if place is None else (place.position, place.epoch)
        number = seen[key]
        seen[key] += 1
        if given_seed is not None:
            seeds.append(derive_seed(given_seed, purpose, number, 0 if place is None else place.epoch))
        elif place is not None:
            seeds.append(derive_seed(seed, purpose, place.position, number))
        else:
            seeds.append(derive_seed(seed, f"{purpose} prompt", number, *query))
    return seeds


def episode_seeds(
    seed: int, purpose: str, rows: Sequence[Mapping[str, Any]], queries: Sequence[Sequence[int]]
) -> list[int]:
    """Return the seed of each row's environment, as `response_seeds`, but the same for all responses to a row.

    Responses to one row are compared with each other, so their environments must set the same task. A column
    ``episode_seed`` of a row is its seed: an episode that is played again.
    """
    seeds = []
    for row, query in zip(rows, queries, strict=True):
        given_seed = row.get("episode_seed")
        seeds.append(
            response_seeds(seed, f"{purpose} environment", [row], [query])[0] if given_seed is None else given_seed
        )
    return seeds


def branch_seeds(
    seed: int,
    purpose: str,
    rows: Sequence[Mapping[str, Any]],
    queries: Sequence[Sequence[int]],
    prefixes: Sequence[Sequence[int]],
    seen: Seen,
) -> list[int]:
    """Return the seed of another ending of each row's response, which begins with the token ids of its prefix.

    It is derived from what identifies the row, as in `response_seeds`, the ids of the prefix, and the number of the
    ending among those of the same row and prefix. ``seen`` counts them, and is updated in place.
    """
    seeds = []
    for row, query, prefix in zip(rows, queries, prefixes, strict=True):
        of_row = response_seeds(seed, f"{purpose} branch", [row], [query])[0]
        number = seen[of_row, *prefix]
        seen[of_row, *prefix] += 1
        seeds.append(derive_seed(of_row, "ending", number, *prefix))
    return seeds


def placed(rows: Iterable[Mapping[str, Any]], first: int = 0) -> list[dict[str, Any]]:
    """Return the rows with places from position ``first`` on; rows with a column ``seed`` get none."""
    copies = [{key: value for key, value in row.items() if key != PLACE} for row in rows]
    return [
        row if row.get("seed") is not None else {**row, PLACE: Place(first + index, row=index)}
        for index, row in enumerate(copies)
    ]


def turn_seed(response: int, turn: int) -> int:
    """Return the seed of one turn of a response, from the response's seed; a response of one turn has turn 0."""
    return derive_seed(response, "turn", turn)


ROUNDS = 10
"""Rounds of Philox4x32, as Salmon et al. 2011 recommend."""
WORD = 0xFFFFFFFF
"""The lower 32 bits."""


def philox(counter: Sequence[Tensor], key: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return four random words per counter and key: Philox4x32-10, a function without state.

    Words are integers in [0, 2³²) in int64 tensors: four [*] of ``counter`` and two [*] of ``key``, which are
    broadcast. Integer arithmetic is exact, so the words are the same on all devices. Source: Salmon, Moraes, Dror, Shaw
    2011, *Parallel random numbers: as easy as 1, 2, 3*.
    """
    c0, c1, c2, c3 = torch.broadcast_tensors(*counter)
    k0, k1 = key
    for _ in range(ROUNDS):
        left, right = 0xD2511F53 * c0, 0xCD9E8D57 * c2  # below 2⁶⁴; int64 keeps the same bits
        c0, c1, c2, c3 = (right >> 32) & WORD ^ c1 ^ k0, right & WORD, (left >> 32) & WORD ^ c3 ^ k1, left & WORD
        k0, k1 = (k0 + 0x9E3779B9) & WORD, (k1 + 0xBB67AE85) & WORD
    return c0, c1, c2, c3


def uniforms(seeds: Tensor, count: int) -> Tensor:
    """Return random numbers in [0, 1), of which number t in row b follows from (``seeds[b]``, t) alone.

    int64 [B] -> float32 [B, count], multiples of 2⁻²⁴, on the device of ``seeds``.
    """
    at, zero = torch.arange(count, device=seeds.device), torch.zeros((), dtype=torch.long, device=seeds.device)
    key = seeds.unsqueeze(1)
    word, *_ = philox((at.expand(len(seeds), count), zero, zero, zero), (key & WORD, (key >> 32) & WORD))
    return (word >> 8).float() / (1 << 24)


def remember_generators(*, of_torch: bool = True) -> Callable[[], None]:
    """Return a function that sets the global generators back to their states of this moment.

    These are the generators of Python, of NumPy and, unless ``of_torch`` is False, of torch.
    """
    python, array = random.getstate(), np.random.get_state()
    cpu = torch.get_rng_state() if of_torch else None
    devices = torch.cuda.get_rng_state_all() if of_torch and torch.cuda.is_initialized() else None

    def restore() -> None:
        random.setstate(python)
        np.random.set_state(array)
        if cpu is not None:
            torch.set_rng_state(cpu)
        if devices is not None:
            torch.cuda.set_rng_state_all(devices)

    return restore


@contextmanager
def global_rng(seed: int, purpose: str, *keys: int, device: torch.device) -> Iterator[None]:
    """Seed torch's global generators for one purpose within the context; restore them afterwards.

    This is for code that takes no generator: the initialisation of weights, and dropout.
    """
    derived = derive_seed(seed, purpose, *keys)
    if device.type == "cpu":  # fork_rng and torch.manual_seed visit all kinds of devices, which takes longer
        before = torch.get_rng_state()
        torch.default_generator.manual_seed(derived)
        try:
            yield
        finally:
            torch.set_rng_state(before)
        return
    devices = [device.index or 0] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(derived)
        yield
