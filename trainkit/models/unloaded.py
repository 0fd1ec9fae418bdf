"""Models of several processes of which only the main one loads the weights, before they are divided among all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from accelerate.utils import broadcast_object_list

T = TypeVar("T")

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


def decided(probe: Callable[[], T]) -> T:
    """Return what ``probe``, which runs a model, returns; in `loaded_by_one`, what it returns on the main process."""
    if _loads.get() is None:
        return probe()
    found: list[Any] = [probe() if loads_weights() else None]
    broadcast_object_list(found)
    return found[0]  # type: ignore[no-any-return]
