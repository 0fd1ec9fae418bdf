"""SIGTERM, which schedulers send before they kill a process. A run then saves as soon as it can, and exits with 143."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

EXIT_CODE = 128 + signal.SIGTERM


class Stop:
    """A flag that is set when this process receives SIGTERM."""

    asked = False

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
