"""The reference on an accelerator between its passes: its weights wait in the memory of the CPU."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainkit.models import Reference
from trainkit.trainer import evaluation
from trainkit.trainer.sharding import Replicated

if TYPE_CHECKING:
    from trainkit.trainer.loop import AcceleratedLoop

    Trainer = AcceleratedLoop[Any]

ROWS = 1024
"""Rows of experience, about, that are made at a time where the weights are moved for it."""
SMALLEST = 2**24
"""Bytes of weights from which on the reference is moved."""


def offload_reference(trainer: Trainer) -> None:
    """Move the reference's own weights from an accelerator to the CPU, after it has made experience.

    `reload_reference` moves them back when `trainer.reference` is next read. Experience that evaluations need the
    reference for is made before.
    """
    if not (own := _offloaded(trainer)):
        return
    evaluation.prepare_held_out(trainer)
    trainer.start  # noqa: B018  (checkpoints have its fingerprint, which reads all weights)
    for parameter in own:
        parameter.data = parameter.data.to("cpu", copy=True)


def reload_reference(reference: Any, device: torch.device) -> None:
    """Move weights that `offload_reference` has moved back to the device."""
    policy = getattr(reference, "policy", None)
    if device.type == "cpu" or not isinstance(policy, nn.Module):
        return
    for parameter in policy.parameters():
        if parameter.device.type == "cpu":
            parameter.data = parameter.data.to(device)


def steps_at_a_time(trainer: Trainer) -> int:
    """Return of how many steps' rows experience is made at a time: one, or more where weights are moved for it."""
    if not _offloaded(trainer):
        return 1
    world: int = trainer.accelerator.num_processes
    return math.ceil(ROWS * world / trainer.config.train.batch_size)


def can_offload(trainer: Trainer, reference: Any, device: str) -> bool:
    """Return whether a device of this type holds the weights of the reference only while experience is made."""
    alone = type(reference) is Reference and type(trainer.sharding) is Replicated
    return bool(device != "cpu" and trainer.reference_makes_experience and alone)


def _offloaded(trainer: Trainer) -> list[nn.Parameter]:
    """Return the weights of the reference that are moved: those that it does not share; none if they are few."""
    reference = trainer.models.reference
    if not (trainer.collects_once and can_offload(trainer, reference, trainer.accelerator.device.type)):
        return []
    shared = {parameter.data_ptr() for parameter in trainer.unwrapped.parameters()}
    own = [parameter for parameter in reference.policy.parameters() if parameter.data_ptr() not in shared]
    return own if sum(parameter.nbytes for parameter in own) >= SMALLEST else []
