"""The rollout store: the experience of one collection, for any algorithm."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from trainkit.data.batches import Batch

B = TypeVar("B", bound=Batch)


def shuffled(count: int, generator: torch.Generator, *, together: int = 1) -> Tensor:
    """Return the indices of ``count`` rows in random order; each ``together`` adjacent rows stay adjacent. [N]."""
    groups = torch.randperm(-(-count // together), generator=generator)
    rows = (groups.unsqueeze(1) * together + torch.arange(together)).flatten()
    return rows[rows < count]


class RolloutStore(Generic[B]):
    """Experience of one collection, on the CPU: pushed or promised in parts, read as seeded shuffled minibatches."""

    def __init__(self) -> None:
        self._parts: list[B | Callable[[], B]] = []
        self._ends: list[int] = []

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def push(self, batch: B) -> None:
        """Add the rows of ``batch``."""
        self._add(batch.to("cpu"), len(batch))

    def promise(self, rows: int, make: Callable[[], B]) -> None:
        """Add ``rows`` rows, which ``make`` makes when one of them is first read."""
        self._add(make, rows)

    def _add(self, part: B | Callable[[], B], rows: int) -> None:
        self._parts.append(part)
        self._ends.append(len(self) + rows)

    def clear(self) -> None:
        """Remove all rows."""
        self._parts, self._ends = [], []

    @contextmanager
    def emptied(self) -> Iterator[None]:
        """Hold no rows inside the block; those that there were come back after it."""
        parts, ends = self._parts, self._ends
        self.clear()
        try:
            yield
        finally:
            self._parts, self._ends = parts, ends

    def change(self, change: Callable[[B], B]) -> None:
        """Apply ``change`` to the rows that are made."""
        self._parts = [change(part) if isinstance(part, Batch) else part for part in self._parts]

    def made(self, rows: Tensor) -> Tensor:
        """Return the number of the part that holds each row [N], after making those that are promised. [N] -> [N]."""
        numbers = [bisect_right(self._ends, row) for row in rows.tolist()]
        for number in sorted({*numbers}):
            self._part(number)
        return torch.tensor(numbers, dtype=torch.long)

    def _part(self, number: int) -> B:
        part = self._parts[number]
        if not isinstance(part, Batch):
            part = self._parts[number] = part().to("cpu")
        return part

    def select(self, rows: Tensor) -> B:
        """Return the rows at the indices ``rows`` [N], as `Batch.select` does."""
        numbers, starts = self.made(rows), [0, *self._ends]
        used = numbers.unique().tolist()
        if len(used) == 1:
            return self._part(used[0]).select(rows - starts[used[0]])
        taken = [self._part(number).take(rows[numbers == number] - starts[number]) for number in used]
        return type(taken[0]).cat(taken).select(numbers.argsort(stable=True).argsort())

    @property
    def experience(self) -> B:
        """All rows as one batch; those that are promised are made.

        Raises:
            LookupError: the store is empty.
        """
        if not self._parts:
            raise LookupError("the store is empty; push experience first")
        if len(self._parts) > 1:
            made = [self._part(number) for number in range(len(self._parts))]
            self.experience = type(made[0]).cat(made)
        return self._part(0)

    @experience.setter
    def experience(self, batch: B) -> None:
        self._parts, self._ends = [batch.to("cpu")], [len(batch)]

    def batches(self, size: int, generator: torch.Generator, start: int = 0, *, together: int = 1) -> Iterator[B]:
        """Yield minibatches of ``size`` rows (the last may be smaller), in the order of `shuffled`, from ``start``."""
        for rows in shuffled(len(self), generator, together=together).split(size)[start:]:
            yield self.experience.select(rows)

    def export(self, path: str | Path) -> None:
        """Write one JSON line per row: every tensor of the row as nested lists, under its dotted name.

        Hidden states (three dimensions) and images are omitted: they can be made again, and are large.
        """
        flat = {name: tensor for name, tensor in self.experience.flatten().items() if tensor.dim() < 3}
        flat = {name: tensor for name, tensor in flat.items() if "images" not in name.split(".")}
        with Path(path).open("w", encoding="utf-8") as file:
            for row in range(len(self)):
                record: dict[str, Any] = {name: tensor[row].tolist() for name, tensor in flat.items()}
                file.write(json.dumps(record) + "\n")
