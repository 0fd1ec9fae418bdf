"""The rollout store: the experience of one collection, for any algorithm."""

from __future__ import annotations

import json
from collections.abc import Iterator
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
    """Experience of one collection, on the CPU: pushed in parts, read as seeded shuffled minibatches."""

    def __init__(self) -> None:
        self._parts: list[B] = []

    def __len__(self) -> int:
        return sum(len(part) for part in self._parts)

    def push(self, batch: B) -> None:
        """Add the rows of ``batch``."""
        self._parts.append(batch.to("cpu"))

    def clear(self) -> None:
        """Remove all rows."""
        self._parts = []

    @property
    def experience(self) -> B:
        """All rows as one batch.

        Raises:
            LookupError: the store is empty.
        """
        if not self._parts:
            raise LookupError("the store is empty; push experience first")
        if len(self._parts) > 1:
            self._parts = [type(self._parts[0]).cat(self._parts)]
        return self._parts[0]

    @experience.setter
    def experience(self, batch: B) -> None:
        self._parts = [batch.to("cpu")]

    def batches(self, size: int, generator: torch.Generator, start: int = 0, *, together: int = 1) -> Iterator[B]:
        """Yield minibatches of ``size`` rows (the last may be smaller), in the order of `shuffled`, from ``start``."""
        for rows in shuffled(len(self), generator, together=together).split(size)[start:]:
            yield self.experience.select(rows)

    def export(self, path: str | Path) -> None:
        """Write one JSON line per row: every tensor of the row as nested lists, under its dotted name.

        Hidden states (three dimensions) are omitted: they can be recomputed from the rest, and are large.
        """
        flat = {name: tensor for name, tensor in self.experience.flatten().items() if tensor.dim() < 3}
        with Path(path).open("w", encoding="utf-8") as file:
            for row in range(len(self)):
                record: dict[str, Any] = {name: tensor[row].tolist() for name, tensor in flat.items()}
                file.write(json.dumps(record) + "\n")
