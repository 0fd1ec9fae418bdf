"""A run's directory: checkpoints, exports and their model cards, the lock, provenance, trackers, SIGTERM."""

from trainkit.runs.checkpoint import find_fault, newest_whole, read_state, write_state
from trainkit.runs.lock import RunLock
from trainkit.runs.provenance import Maker
from trainkit.runs.trackers import default_trackers

__all__ = ["Maker", "RunLock", "default_trackers", "find_fault", "newest_whole", "read_state", "write_state"]
