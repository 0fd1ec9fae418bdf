"""The reference between its passes: its weights move to a file, from which whoever asks for it again gets them."""

from __future__ import annotations

import logging
import math
import mmap
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch
from torch import Tensor, nn

from trainkit.models import Reference
from trainkit.trainer import evaluation
from trainkit.trainer.sharding import Replicated

if TYPE_CHECKING:
    from trainkit.trainer.loop import AcceleratedLoop

    Trainer = AcceleratedLoop[Any]

log = logging.getLogger(__name__)

ROWS = 1024
"""Rows of experience, about, that are made at a time on a device to which the weights are moved for it."""
SMALLEST = 2**24
"""Bytes of weights from which on the reference leaves memory."""
ALIGNED = 64
"""Bytes at whose multiples tensors begin in the file, as torch aligns them in memory, so that products are the same."""


def park(trainer: Trainer) -> None:
    """Move the reference's own weights to a file without a name in the run directory, after it has made experience.

    On a CPU the tensors are then views of the file: the system reads a part of it when it is asked for, and its pages
    can leave memory again. On other devices `back` moves them there when `trainer.reference` is next read. The file is
    gone when the process ends. Experience that evaluations need the reference for is made before.
    """
    own = _leaving(trainer)
    if not own or trainer.run_dir is None:
        return
    evaluation.prepare_held_out(trainer)
    trainer.start  # noqa: B018  (checkpoints have its fingerprint, which reads all weights)
    if trainer.parked is None:
        try:
            trainer.parked = _written(own, trainer.run_dir)
        except OSError as error:
            trainer.parked = []
            log.warning("the reference stays in memory, because its weights cannot be written: %s", error)
    for parameter, view in zip(own, trainer.parked, strict=False):
        parameter.data = view


def _leaving(trainer: Trainer) -> list[nn.Parameter]:
    """Return the weights that leave memory; none if they are not to, or are few."""
    reference = trainer.models.reference
    if not (trainer.collects_once and can_leave(trainer, reference)):
        return []
    own = _own_weights(reference.policy, trainer.unwrapped)
    return own if sum(parameter.nbytes for parameter in own) >= SMALLEST else []


def steps_at_a_time(trainer: Trainer) -> int:
    """Return of how many steps' rows experience is made at a time: one, or more where weights are moved for it."""
    if trainer.accelerator.device.type == "cpu" or not _leaving(trainer):
        return 1
    world: int = trainer.parallel.world
    return math.ceil(ROWS * world / trainer.config.train.batch_size)


def can_leave(trainer: Trainer, reference: Any) -> bool:
    """Return whether the weights of the reference are needed to make experience alone, and may leave memory."""
    alone = type(reference) is Reference and type(trainer.sharding) is Replicated
    return bool(trainer.reference_makes_experience and alone)


def back(reference: Any, device: torch.device) -> None:
    """Move weights that `park` has moved to a file back to the device; on a CPU they can be read where they are."""
    policy = getattr(reference, "policy", None)
    if device.type == "cpu" or not isinstance(policy, nn.Module):
        return
    for parameter in policy.parameters():
        if parameter.device.type == "cpu":
            parameter.data = parameter.data.to(device)


def _own_weights(policy: nn.Module, trained: nn.Module) -> list[nn.Parameter]:
    """Return the weights of the reference that the trained model does not share."""
    shared = {parameter.data_ptr() for parameter in trained.parameters()}
    return [parameter for parameter in policy.parameters() if parameter.data_ptr() not in shared]


def _written(tensors: list[nn.Parameter], directory: Path) -> list[Tensor]:
    """Write tensors to a temporary file in ``directory``, and return them as views of it."""
    with tempfile.TemporaryFile(dir=directory) as file:
        starts = [_append(tensor.detach(), file) for tensor in tensors]
        file.flush()
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    return [
        torch.frombuffer(mapped, dtype=tensor.dtype, count=tensor.numel(), offset=start).view(tensor.shape)
        for tensor, start in zip(tensors, starts, strict=True)
    ]


def _append(tensor: Tensor, file: BinaryIO) -> int:
    """Write the bytes of a tensor at the next aligned place, and return it."""
    start = -(-file.tell() // ALIGNED) * ALIGNED
    file.seek(start)
    file.write(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return start
