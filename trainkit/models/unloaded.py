"""How models are made: by which process, on which device, and how they are run to find out what they are like."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from accelerate.utils import broadcast_object_list
from torch import nn

T = TypeVar("T")
Precision = Callable[[], AbstractContextManager[Any]]

_loads: ContextVar[bool | None] = ContextVar("loads", default=None)
"""Whether this process loads weights; None outside of `loaded_by_one`."""


@contextmanager
def loaded_by_one(main: bool) -> Iterator[None]:
    """Load weights inside the block only on the main process; models of the others are on torch's ``meta`` device.

    All processes make the same models in it, in the same order.

    Args:
        main: whether this is the main process.
    """
    token = _loads.set(main)
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


_as_trained: ContextVar[tuple[torch.device | None, Precision]] = ContextVar("as_trained", default=(None, nullcontext))
"""Where models are trained, and in what precision they are run for `decided`."""


@contextmanager
def as_trained(device: torch.device | None, precision: Precision) -> Iterator[None]:
    """Load models inside the block onto the device that they are trained on, and run probes of them in ``precision``.

    Args:
        device: the device; None: they stay where they are loaded.
        precision: makes a context, such as that of autocast.
    """
    token = _as_trained.set((device, precision))
    try:
        yield
    finally:
        _as_trained.reset(token)


def place(model: nn.Module) -> None:
    """Move a model to the device of `as_trained`."""
    if (device := _as_trained.get()[0]) is not None:
        nn.Module.to(model, device)  # transformers refuses quantised models that are there already


def decided(probe: Callable[[], T]) -> T:
    """Return what ``probe``, which runs a model, returns; in `loaded_by_one`, what it returns on the main process."""
    with _as_trained.get()[1]():
        mine = probe() if loads_weights() else None
    if _loads.get() is None:
        return mine  # type: ignore[return-value]
    answers: list[Any] = [mine]
    broadcast_object_list(answers)
    return answers[0]  # type: ignore[no-any-return]
