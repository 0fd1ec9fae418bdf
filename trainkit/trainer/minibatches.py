"""Minibatches over several processes: which rows make one up depends on the seed, not on the number of processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from trainkit.data import Batch

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
    experience: B, steps: Sequence[Tensor], layout: Layout, gather: Callable[[Sequence[Any]], list[Any]]
) -> Iterator[B]:
    """Yield this process's part of every minibatch.

    Args:
        experience: the rows that this process holds.
        steps: the rows of each minibatch, as numbers over all processes; the same on every process.
        layout: which process holds which rows.
        gather: as `trainkit.trainer.AcceleratedLoop.gather`; called once if rows have to be sent, on all processes.
    """
    parts = [share(rows, layout.owners(rows), layout.world) for rows in steps]
    moved = [part[layout.owners(part) != rank] for each in parts for rank, part in enumerate(each)]
    pool, at = experience, dict[int, int]()
    if any(len(rows) for rows in moved):
        pool, at = _exchanged(experience, torch.cat(moved), torch.cat([p[layout.rank] for p in parts]), layout, gather)
    for each in parts:
        mine = each[layout.rank]
        places = [at.get(row, place) for row, place in zip(mine.tolist(), layout.places(mine).tolist(), strict=True)]
        yield pool.select(torch.tensor(places))


def _exchanged(
    experience: B, moved: Tensor, mine: Tensor, layout: Layout, gather: Callable[[Sequence[Any]], list[Any]]
) -> tuple[B, dict[int, int]]:
    """Send the rows ``moved`` that this process holds; return ``experience`` with those that it gets, and their index.

    ``mine`` are the rows of this process's minibatches.
    """
    sent = moved[layout.owners(moved) == layout.rank]
    found = gather([(sent.tolist(), experience.select(layout.places(sent)))] if len(sent) else [])
    wanted = set(mine[layout.owners(mine) != layout.rank].tolist())
    parts, at = [experience], dict[int, int]()
    for rows, batch in found:
        kept = [index for index, row in enumerate(rows) if row in wanted]
        start = sum(map(len, parts))
        at |= {rows[index]: start + number for number, index in enumerate(kept)}
        if kept:
            parts.append(batch.take(torch.tensor(kept)))
    return type(experience).cat(parts), at
