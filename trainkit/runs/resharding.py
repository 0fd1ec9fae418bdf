"""What the processes of a run hold: their parts, and how these are divided anew among other processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from trainkit.data import Batch
from trainkit.errors import CheckpointError

B = TypeVar("B", bound=Batch)
T = TypeVar("T")


def own_items(parts: Sequence[Sequence[T]], rank: int, world: int) -> list[T]:
    """Return the items of process ``rank`` of ``world``.

    Of the items in order, process r of W has numbers r, r + W, r + 2W, ... ``parts`` are those of the processes before,
    equally many each.

    Raises:
        CheckpointError: the processes cannot have equally many.
    """
    whole = [item for items in zip(*parts, strict=True) for item in items]
    if len(whole) % world:
        raise CheckpointError(
            f"the checkpoint holds {len(whole)} prompts or rows, which {world} processes cannot share equally; resume "
            f"with {len(parts)} processes, or another number that divides {len(whole)}"
        )
    return whole[rank::world]


def own_rows(parts: Sequence[B], each: int, rank: int, world: int) -> B:
    """Return the rows of process ``rank`` of ``world``, where ``each`` adjacent rows belong to one item.

    Raises:
        CheckpointError: as `own_items`.
    """
    starts = [sum(len(part) for part in parts[:index]) for index in range(len(parts))]
    items = [range(start, start + len(part), each) for start, part in zip(starts, parts, strict=True)]
    mine = torch.tensor(own_items(items, rank, world))
    return type(parts[0]).cat(parts).select((mine.unsqueeze(1) + torch.arange(each)).flatten())


def local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this process holds; all of it, if it is not divided among the processes."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def divided_like(part: Any, whole: Tensor) -> Tensor:
    """Return ``whole``, which every process has, divided among the processes as ``part`` is, or not at all."""
    if not hasattr(part, "to_local"):
        return whole
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole.to(part.device), part.device_mesh, part.placements, src_data_rank=None)
