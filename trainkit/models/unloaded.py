"""How models are made: by which process, on which device, and how they are run to find out what they are like."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar

import torch
from accelerate.utils import broadcast_object_list
from torch import nn

T = TypeVar("T")
Precision = Callable[[], AbstractContextManager[Any]]

_loads: ContextVar[bool | None] = ContextVar("loads", default=None)
"""Whether this process loads weights; None outside of `loaded_by_some`."""


@contextmanager
def loaded_by_some(loads: bool) -> Iterator[None]:
    """Load weights inside the block only on some processes; models of the others are on torch's ``meta`` device.

    All processes make the same models in it, in the same order.

    Args:
        loads: whether this process loads them; the main process does.
    """
    token = _loads.set(loads)
    try:
        yield
    finally:
        _loads.reset(token)


_sized: ContextVar[bool] = ContextVar("sized", default=False)
"""Whether models are made from their configurations alone."""


@contextmanager
def without_weights() -> Iterator[None]:
    """Make models inside the block from their configurations, without reading weights."""
    token = _sized.set(True)
    try:
        yield
    finally:
        _sized.reset(token)


def reads_weights() -> bool:
    """Return whether models that are made now read weights from files, in this process or another."""
    return not _sized.get()


def loads_weights() -> bool:
    """Return whether models that are made now get weights in this process."""
    return _loads.get() is not False


SHARE = 4
"""A model that will be divided is tried out on its device if this many of it fit into the free memory there: it, the
copy that is its reference, and what is divided of both."""


class Trial(NamedTuple):
    """Where and in what precisions models are run to find out what they are like."""

    device: torch.device | None = None
    """The device; None: they stay where they are loaded."""
    precisions: tuple[Precision, ...] = (nullcontext,)
    """Functions that make contexts, such as that of autocast. A property holds if it holds in each."""
    divided: bool = False
    """Whether models will be divided, so that they may be larger than the memory of the device."""


_trial: ContextVar[Trial] = ContextVar("trial", default=Trial())  # noqa: B039  (it is never changed)


@contextmanager
def as_trained(trial: Trial) -> Iterator[None]:
    """Load models inside the block onto the device of a trial, and run the probes of `decided` as it says."""
    token = _trial.set(trial)
    try:
        yield
    finally:
        _trial.reset(token)


def place(model: nn.Module) -> None:
    """Move a model to the device of `as_trained`; one that will be divided only if it is small enough."""
    device, _, divided = _trial.get()
    if device is not None and loads_weights() and (not divided or SHARE * size_of(model) <= free_memory(device)):
        nn.Module.to(model, device)  # transformers refuses quantised models that are there already


def size_of(model: nn.Module) -> int:
    """Return the bytes of the model's parameters and buffers."""
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


def free_memory(device: torch.device) -> int:
    """Return the bytes that are free on a CUDA device; 0 for others."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else 0


def decided(probe: Callable[[], T], settles: Callable[[T], Any] | None = None) -> T:
    """Return what ``probe``, which runs a model, returns; in `loaded_by_some`, what it returns on the main process.

    Args:
        probe: a function that runs a model.
        settles: whether an answer is final. The probe is run in each precision of `as_trained` until one is; without
            this function in the first alone.
    """
    mine = None
    if loads_weights():
        for precision in _trial.get().precisions:
            with precision():
                mine = probe()
            if settles is None or settles(mine):
                break
    if _loads.get() is None:
        return mine  # type: ignore[return-value]
    answers: list[Any] = [mine]
    broadcast_object_list(answers)
    return answers[0]  # type: ignore[no-any-return]
