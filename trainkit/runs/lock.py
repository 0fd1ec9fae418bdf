"""The lock on a run's directory: one process at a time writes there."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import socket
import weakref
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.errors import ConfigError, describe

if TYPE_CHECKING:
    from filelock import FileLock

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

log = logging.getLogger(__name__)

NAME = "run.lock"
PATIENCE = 0.1
"""Seconds for which a lock is tried again: `is_held` takes it for a moment."""


class RunLock:
    """A lock on ``run_dir``, held until it is released or nothing refers to it any more.

    The directory is created if it does not exist. The kernel holds the lock for this process, so it ends with the
    process, however that ends: a lock file left by a killed process locks nothing. Processes forked from this one do
    not hold the lock.

    Raises:
        ConfigError: the directory is locked already, names the process; or it cannot be created or written.
    """

    def __init__(self, run_dir: Path) -> None:
        try:
            created = [place for place in (run_dir, *run_dir.parents) if not place.exists()]
            run_dir.mkdir(parents=True, exist_ok=True)
            lock = _acquire(run_dir)
        except (OSError, ValueError) as error:  # a ValueError: a NUL in the path
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"the directory {describe(str(run_dir))} cannot be used: {reason}; give another train.run_dir"
            ) from error
        self.release = weakref.finalize(self, _release, lock, run_dir / NAME, created, os.getpid())
        """Release the lock; remove its file, and the directories that were created if they are still empty."""


def is_held(run_dir: Path) -> bool:
    """Return whether a process holds the lock on ``run_dir``; on systems without locks, whether there is its file."""
    try:
        handle = os.open(run_dir / NAME, os.O_RDONLY)
    except OSError:
        return False
    try:
        if fcntl is not None:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)  # several may look at once, also without write access
            return False
    except OSError:
        return True
    finally:
        os.close(handle)
    return True


def _acquire(run_dir: Path) -> FileLock:
    """Return the lock. Where the disk has no locks, warn, and return it although it is not held."""
    from filelock import FileLock, Timeout  # commands that only look at locks do without it

    path = run_dir / NAME
    lock = FileLock(path, timeout=PATIENCE, mode=0o644, thread_local=False, on_acquired=_sign)
    try:
        lock.acquire()
    except Timeout:
        holder = _holder(path)
        if holder.get("pid") == os.getpid() and gc.collect() and not path.exists():
            return _acquire(run_dir)  # it was held by a trainer of this process that nothing refers to any more
        raise ConfigError(_in_use(run_dir, holder)) from None
    except OSError as error:
        if not (path.is_file() and os.access(path, os.W_OK)):
            raise
        log.warning("%s cannot be locked (%s); make sure that no other process uses the directory", path, error)
    return lock


def _sign(handle: int) -> None:
    """Write into the lock file who holds the lock."""
    me = {"pid": os.getpid(), "host": socket.gethostname(), "since": f"{datetime.now():%Y-%m-%d %H:%M:%S}"}
    os.ftruncate(handle, 0)
    os.write(handle, json.dumps(me).encode())


def _holder(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):  # the holder has not written it yet
        return {}


def _in_use(run_dir: Path, holder: dict[str, Any]) -> str:
    said = "process {pid} on {host} since {since}".format_map({"pid": "?", "host": "?", "since": "?", **holder})
    own = " (this process, another trainer)" if holder.get("pid") == os.getpid() else ""
    return f"{run_dir} is in use by {said}{own}; wait until it ends, stop it, or give another train.run_dir"


def _release(lock: FileLock, path: Path, created: list[Path], owner: int) -> None:
    if os.getpid() != owner:  # a process forked from it, which ends
        return
    with contextlib.suppress(OSError):  # the directory may have been removed
        path.unlink()
    lock.release()
    with contextlib.suppress(OSError):  # a directory may not be empty
        for place in created:
            place.rmdir()
