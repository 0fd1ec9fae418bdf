"""Requests to end a run: SIGTERM, which schedulers send before they kill a process, and calls of `trainer.stop`.

After SIGTERM, a run saves as soon as it can, and exits with 143. After `trainer.stop`, it ends like a finished run.
"""

from __future__ import annotations

import faulthandler
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

EXIT_CODE = 128 + signal.SIGTERM


class Stop:
    """What this process was asked to end the run by."""

    asked = False
    """Whether it has received SIGTERM."""
    reason = ""
    """The reason that `trainer.stop` was called with; empty if it was not called."""
    limit: float | None = None
    """Seconds without progress after which the stacks of all threads are written; None: never."""
    moved = 0.0
    """When the run last made progress."""

    def progressed(self) -> None:
        """Note that the run makes progress."""
        self.moved = time.monotonic()
        if self.limit is not None and sys.__stderr__ is not None:
            with suppress(OSError):  # it has no file descriptor
                faulthandler.dump_traceback_later(self.limit, file=sys.__stderr__)

    def _ask(self, signum: int, frame: FrameType | None) -> None:
        self.asked = True
        if self.limit is not None and time.monotonic() - self.moved >= self.limit:
            raise SystemExit(EXIT_CODE)  # the other processes have waited in vain


@contextmanager
def watched(stop: Stop, limit: float | None) -> Iterator[None]:
    """Write the stacks of all threads if `Stop.progressed` is not called for ``limit`` seconds inside the block."""
    stop.limit = limit
    stop.progressed()
    try:
        yield
    finally:
        stop.limit = None
        if limit is not None:
            faulthandler.cancel_dump_traceback_later()


def lost(error: BaseException) -> bool:
    """Return whether an error in a collective operation says that another process has ended, or does not answer."""
    from torch.distributed import DistError

    return isinstance(error, DistError) or (type(error) is RuntimeError and "gloo" in str(error))


@contextmanager
def sigterm_noted(stop: Stop, wanted: bool) -> Iterator[None]:
    """Record SIGTERM in ``stop`` instead of ending the process, if ``wanted`` and in the main thread."""
    stop.asked = False
    if not wanted or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, stop._ask)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
