"""SIGTERM: what schedulers send before they kill. A run saves as soon as it can, and ends with exit code 143."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

EXIT_CODE = 128 + signal.SIGTERM


class Stop:
    """Whether somebody asked this process to end."""

    asked = False

    def _ask(self, signum: int, frame: FrameType | None) -> None:
        self.asked = True


@contextmanager
def sigterm_noted(stop: Stop, wanted: bool) -> Iterator[None]:
    """Within, SIGTERM is noted in ``stop`` and does nothing else, if ``wanted``; only a main thread can do that."""
    stop.asked = False
    if not wanted or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, stop._ask)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
