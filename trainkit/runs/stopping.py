"""Requests to end a run, or to save: signals, which schedulers and keyboards send, and calls of `trainer.stop`.

After SIGTERM, SIGINT or SIGHUP, a run saves as soon as it can, and exits with 143, 130 or 129. A second SIGINT ends it
at once; a second one of the others is ignored. After SIGUSR1, it saves and goes on. After `trainer.stop`, it ends like
a finished run.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

ENDING = [getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name)]
"""The signals that ask a run to save and end; the exit code is 128 and the signal's number."""
SAVING = getattr(signal, "SIGUSR1", None)
"""The signal that asks a run to save and go on."""


class Interrupted(BaseException):
    """The run was asked to end while it made what is made again when it is resumed: a collection, an evaluation."""


class Stop:
    """What this process was asked to end the run by, or to save."""

    asked = 0
    """The number of the signal that has asked to end; 0 if none has."""
    saves = False
    """Whether a signal has asked for a checkpoint that is not written yet."""
    reason = ""
    """The reason that `trainer.stop` was called with; empty if it was not called."""
    limit: float | None = None
    """Seconds without progress after which the stacks of all threads are written; None: never."""
    moved = 0.0
    """When the run last made progress."""
    _interrupts = False

    def progressed(self) -> None:
        """Note that the run makes progress."""
        self.moved = time.monotonic()
        if self.limit is not None and sys.__stderr__ is not None:
            with suppress(OSError):  # it has no file descriptor
                faulthandler.dump_traceback_later(self.limit, file=sys.__stderr__)

    def _ask(self, signum: int, frame: FrameType | None) -> None:
        if signum == SAVING:
            self.saves = True
            return
        if self.asked and signum == signal.SIGINT:
            raise KeyboardInterrupt
        first, self.asked = not self.asked, self.asked or signum
        if first and signum == signal.SIGINT:
            with suppress(OSError):
                os.write(2, b"\ninterrupted: the run saves and ends; once more ends it at once, without saving\n")
        if self.limit is not None and time.monotonic() - self.moved >= self.limit:
            raise SystemExit(128 + self.asked)  # the other processes have waited in vain
        if first and self._interrupts:
            raise Interrupted

    @contextmanager
    def interruptible(self, allowed: bool = True) -> Iterator[None]:
        """End the block as soon as the run is asked to end, if ``allowed`` and in the main thread; or else do not.

        Raises:
            Interrupted: it was asked to.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before, self._interrupts = self._interrupts, allowed
        try:
            if allowed and self.asked:
                raise Interrupted
            yield
        finally:
            self._interrupts = before


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
def signals_noted(stop: Stop, wanted: bool) -> Iterator[None]:
    """Record signals in ``stop`` instead of ending the process, if ``wanted`` and in the main thread.

    Those that the process was started to ignore stay ignored, as SIGHUP after ``nohup``.
    """
    stop.asked, stop.saves = 0, False
    if not wanted or threading.current_thread() is not threading.main_thread():
        yield
        return
    noted = [*ENDING, *([] if SAVING is None else [SAVING])]
    ignored = (None, signal.SIG_IGN)
    before = {number: signal.signal(number, stop._ask) for number in noted if signal.getsignal(number) not in ignored}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
