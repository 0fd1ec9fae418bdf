"""Requests to end a run: SIGTERM, which schedulers send before they kill a process, and calls of `trainer.stop`.

After SIGTERM, a run saves as soon as it can, and exits with 143. After `trainer.stop`, it ends like a finished run.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

EXIT_CODE = 128 + signal.SIGTERM


class Stop:
    """What this process was asked to end the run by."""

    asked = False
    """Whether it has received SIGTERM."""
    reason = ""
    """The reason that `trainer.stop` was called with; empty if it was not called."""

    def _ask(self, signum: int, frame: FrameType | None) -> None:
        self.asked = True


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
