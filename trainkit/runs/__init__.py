"""A run's directory: checkpoints, exports and their model cards, the lock, provenance, trackers, SIGTERM.

What the package exports is imported when it is first used, so that `trainkit.runs.record` needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainkit.plugins import lazy_names

if TYPE_CHECKING:
    from trainkit.runs.checkpoint import find_fault, newest_whole, read_state, write_state
    from trainkit.runs.lock import RunLock
    from trainkit.runs.provenance import Maker
    from trainkit.runs.record import Record, find_runs, free_directory
    from trainkit.runs.trackers import default_trackers

__all__ = [
    "Maker",
    "Record",
    "RunLock",
    "default_trackers",
    "find_fault",
    "find_runs",
    "free_directory",
    "newest_whole",
    "read_state",
    "write_state",
]
__getattr__, __dir__ = lazy_names(__name__, __all__, "record", "lock", "provenance", "checkpoint", "trackers")
