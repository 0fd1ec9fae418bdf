"""Minibatches over several processes: which rows make one up depends on the seed, not on the number of processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from trainkit.data import Batch, RolloutStore

B = TypeVar("B", bound=Batch)


@dataclass(frozen=True)
class Layout:
    """Which process holds which rows of a collection.

    The prompts of a collection are numbered over all processes: process r of W holds prompts r, r + W, r + 2W, … Rows
    are numbered in the order of their prompts, ``each`` rows per prompt.
    """

    each: int
    world: int
    rank: int

    def owners(self, rows: Tensor) -> Tensor:
        """Return the process that holds each row. [N] -> [N]."""
        return rows // self.each % self.world

    def places(self, rows: Tensor) -> Tensor:
        """Return the index of each row among the rows of the process that holds it. [N] -> [N]."""
        return rows // (self.each * self.world) * self.each + rows % self.each


def share(rows: Tensor, owners: Tensor, world: int) -> list[Tensor]:
    """Divide the rows of a minibatch equally: to each process its own, and if it has too few, rows of others.

    [N], [N] -> ``world`` tensors [N / world].
    """
    quota = len(rows) // world
    own = [rows[owners == rank] for rank in range(world)]
    spare = torch.cat([mine[quota:] for mine in own])
    parts = []
    for mine in own:
        needed = max(quota - len(mine), 0)
        parts.append(torch.cat([mine[:quota], spare[:needed]]))
        spare = spare[needed:]
    return parts


def minibatches(
    store: RolloutStore[B], steps: Sequence[Tensor], layout: Layout, gather: Callable[[Sequence[Any]], list[Any]]
) -> Iterator[B]:
    """Yield this process's part of every minibatch.

    Args:
        store: the rows that this process holds.
        steps: the rows of each minibatch, as numbers over all processes; the same on every process.
        layout: which process holds which rows.
        gather: as `trainkit.trainer.AcceleratedLoop.gather`; called, on all processes, if rows have to be sent.
    """
    for rows in steps:
        store.made(layout.places(rows))  # not only this process's share, because all processes make a part together
        parts = share(rows, layout.owners(rows), layout.world)
        mine = parts[layout.rank]
        moved = torch.cat([part[layout.owners(part) != rank] for rank, part in enumerate(parts)])
        if not len(moved):
            yield store.select(layout.places(mine))
            continue
        kept, sent = (each[layout.owners(each) == layout.rank] for each in (mine, moved))
        held = [(each, store.select(layout.places(each))) if len(each) else None for each in (kept, sent)]
        found = [each for each in (held[0], *gather(held[1:])) if each is not None]
        at = torch.cat([numbers for numbers, _ in found])
        pool = type(found[0][1]).cat([batch for _, batch in found])
        yield pool.select((at == mine.unsqueeze(1)).int().argmax(1))
