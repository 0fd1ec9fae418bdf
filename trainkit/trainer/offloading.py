"""The reference on an accelerator between its passes: its weights wait in the memory of the CPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from trainkit.models import Reference
from trainkit.trainer.base import BaseRLTrainer
from trainkit.trainer.models import Models
from trainkit.trainer.plan import Plan
from trainkit.trainer.sharding import Replicated, Sharding

ROWS = 1024
"""Rows of experience, about, that are made at a time where the weights are moved for it."""
SMALLEST = 2**24
"""Bytes of weights from which on the reference is moved."""


class ReferenceOffloading:
    """Moves the reference's own weights from an accelerator to the CPU, after it has made experience.

    `reload_reference` moves them back when `trainer.reference` is next read.

    Args:
        algorithm: whether the reference makes experience only.
        plan: whether there is one collection, and its rows.
        models: the reference.
        before: called before weights are moved, to do what reads the reference later.
    """

    def __init__(self, algorithm: BaseRLTrainer[Any], plan: Plan, models: Models, before: Callable[[], object]) -> None:
        self.algorithm, self.plan, self.models, self._before = algorithm, plan, models, before

    def offload(self) -> None:
        """Move the weights, if there are any that can be moved."""
        if not (weights := self._weights()):
            return
        self._before()
        for parameter in weights:
            parameter.data = parameter.data.to("cpu", copy=True)

    def steps_at_a_time(self) -> int:
        """Return of how many steps' rows experience is made at a time: one, or more where weights are moved for it."""
        if not self._weights():
            return 1
        return math.ceil(ROWS * self.plan.parallel.world / self.plan.config.train.batch_size)

    def _weights(self) -> list[nn.Parameter]:
        """Return the weights of the reference that are moved: those that it does not share; none if they are few."""
        reference, parallel = self.models.reference, self.models.parallel
        if not self.plan.collects_once:
            return []
        if not can_offload(self.algorithm, reference, parallel.sharding, parallel.device.type):
            return []
        shared = {parameter.data_ptr() for parameter in self.models.unwrapped.parameters()}
        weights = [parameter for parameter in reference.policy.parameters() if parameter.data_ptr() not in shared]
        return weights if sum(parameter.nbytes for parameter in weights) >= SMALLEST else []


def can_offload(algorithm: BaseRLTrainer[Any], reference: Any, sharding: Sharding, device: str) -> bool:
    """Return whether a device of this type holds the weights of the reference only while experience is made."""
    alone = type(reference) is Reference and type(sharding) is Replicated
    return bool(device != "cpu" and algorithm.reference_makes_experience and alone)


def reload_reference(reference: Any, device: torch.device) -> None:
    """Move weights that `ReferenceOffloading` has moved back to the device."""
    policy = getattr(reference, "policy", None)
    if device.type == "cpu" or not isinstance(policy, nn.Module):
        return
    for parameter in policy.parameters():
        if parameter.device.type == "cpu":
            parameter.data = parameter.data.to(device)
