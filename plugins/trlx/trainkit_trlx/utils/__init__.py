"""Utilities of trlX."""

from __future__ import annotations

import copy
import math
import os
import random
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import StrEnum
from importlib import import_module
from itertools import count
from typing import Any

import numpy as np
import torch
from torch.optim import lr_scheduler

from trainkit_migrate import refusing

__all__ = [
    "Clock",
    "OptimizerName",
    "SchedulerName",
    "filter_non_scalars",
    "get_git_tag",
    "get_optimizer_class",
    "get_scheduler_class",
    "infinite_dataloader",
    "print_rank_0",
    "set_seed",
    "significant",
    "to_device",
    "tree_map",
]


class OptimizerName(StrEnum):
    """The names of optimizers."""

    ADAM = "adam"
    ADAMW = "adamw"
    ADAM_8BIT_BNB = "adam_8bit_bnb"
    ADAMW_8BIT_BNB = "adamw_8bit_bnb"
    SGD = "sgd"


class SchedulerName(StrEnum):
    """The names of schedules."""

    COSINE_ANNEALING = "cosine_annealing"
    LINEAR = "linear"


def get_optimizer_class(name: OptimizerName) -> Any:
    """Return the class of torch, or of bitsandbytes, for a name of an optimizer.

    Raises:
        ValueError: there is none of this name.
        ImportError: bitsandbytes is not installed, which has those of 8 bits.
    """
    name = _named(name, OptimizerName, "optimizer")
    if name.endswith("_8bit_bnb"):
        try:
            module = import_module("bitsandbytes.optim")
        except ImportError as error:
            raise ImportError(f"{name} needs bitsandbytes, which is not installed: pip install bitsandbytes") from error
        return module.Adam8bit if name == OptimizerName.ADAM_8BIT_BNB else module.AdamW8bit
    return {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[name]


def get_scheduler_class(name: SchedulerName) -> Any:
    """Return the class of torch for a name of a schedule.

    Raises:
        ValueError: there is none of this name.
    """
    name = _named(name, SchedulerName, "schedule")
    return {"cosine_annealing": lr_scheduler.CosineAnnealingLR, "linear": lr_scheduler.LinearLR}[name]


def _named(name: str, known: type[StrEnum], what: str) -> Any:
    if name not in list(known):
        raise ValueError(f"{name!r} is no {what} of trlX; it has {', '.join(known)}")
    return known(name)


def set_seed(seed: int) -> None:
    """Seed `random`, NumPy and torch with ``seed`` plus the rank of the process."""
    seed += int(os.environ.get("RANK", 0))
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    torch.cuda.manual_seed(seed)


def significant(x: Any, ndigits: int = 2) -> Any:
    """Round a number to ``ndigits`` digits after the leading one; return anything else as it is."""
    if isinstance(x, torch.Tensor):
        x = x.item()
    if not isinstance(x, int | float) or math.isnan(x) or x == 0:
        return x
    return round(x, ndigits - math.floor(math.log10(abs(x))))


class Clock:
    """A stopwatch that counts samples."""

    def __init__(self) -> None:
        self.start = time.time()
        self.total_time = 0.0
        self.total_samples = 0

    def tick(self, samples: int = 0) -> float:
        """Return the seconds since the last call, and count ``samples`` for `get_stat`."""
        end = time.time()
        delta, self.start = end - self.start, end
        if samples:
            self.total_time += delta
            self.total_samples += samples
        return delta

    def get_stat(self, n_samp: int = 1000, reset: bool = False) -> float:
        """Return the seconds that ``n_samp`` samples take."""
        seconds = self.total_time * n_samp / self.total_samples
        if reset:
            self.total_samples, self.total_time = 0, 0.0
        return seconds


def tree_map(f: Callable[[Any], Any], tree: Any) -> Any:
    """Apply ``f`` to the leaves of nested lists, tuples, dictionaries and dataclasses."""
    if is_dataclass(tree) and not isinstance(tree, type):
        made = copy.copy(tree)  # with what else it has
        vars(made).update({each.name: tree_map(f, getattr(tree, each.name)) for each in fields(tree)})
        return made
    if hasattr(tree, "items"):
        return type(tree)({key: tree_map(f, value) for key, value in tree.items()})
    if isinstance(tree, list | tuple):
        return type(tree)(tree_map(f, value) for value in tree)
    return f(tree)


def to_device(tree: Any, device: Any, non_blocking: bool = False) -> Any:
    """Move the tensors of a tree to a device."""
    return tree_map(lambda x: x.to(device, non_blocking=non_blocking), tree)


def filter_non_scalars(xs: Mapping[str, Any]) -> dict[str, float]:
    """Return the values that are numbers, as floats."""
    found = {}
    for key, value in xs.items():
        try:
            found[key] = float(value)
        except (TypeError, ValueError):
            continue
    return found


def infinite_dataloader(dataloader: Iterable[Any], sampler: Any = None) -> Iterator[Any]:
    """Yield the batches of a loader again and again; ``sampler.set_epoch`` is called before each pass."""
    for epoch in count():
        if sampler is not None:
            sampler.set_epoch(epoch)
        yield from dataloader


def get_git_tag() -> tuple[str, str]:
    """Return the short hash of the commit with its date, and the branch; ``unknown`` outside of a repository."""
    try:
        commit = subprocess.check_output(["git", "log", "--format=%h/%as", "-n1"], stderr=subprocess.DEVNULL)
        branch = subprocess.check_output(["git", "rev-parse", "--abbrev-ref", "HEAD"], stderr=subprocess.DEVNULL)
    except (subprocess.CalledProcessError, OSError):
        return "unknown", "unknown"
    return commit.decode().strip(), branch.decode().strip()


def print_rank_0(*message: Any) -> None:
    """Print on the first process."""
    if int(os.environ.get("RANK", 0)) == 0:
        print(*message)


__getattr__ = refusing(__name__)
