"""The lock on a run's directory: one process at a time writes there."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import socket
import time
import weakref
from datetime import datetime
from pathlib import Path
from typing import Any

from trainkit.errors import ConfigError, describe

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

log = logging.getLogger(__name__)

NAME = "run.lock"
BRIEFLY = 0.1
"""Seconds after which a lock is tried again: `is_held` takes it for a moment."""


class RunLock:
    """A lock on ``run_dir``, held until it is released or nothing refers to it any more.

    The directory is created if it does not exist. The kernel holds the lock for this process, so it ends with the
    process, however that ends: a lock file left by a killed process locks nothing. Processes forked from this one do
    not hold the lock.

    Raises:
        ConfigError: the directory is locked already, names the process; or it cannot be created.
    """

    def __init__(self, run_dir: Path) -> None:
        try:
            made = [place for place in (run_dir, *run_dir.parents) if not place.exists()]
            run_dir.mkdir(parents=True, exist_ok=True)
        except (OSError, ValueError) as error:  # a ValueError: a NUL in the path
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"the directory {describe(str(run_dir))} cannot be used: {reason}; give another train.run_dir"
            ) from error
        self._handle = _acquire(run_dir)
        self.release = weakref.finalize(self, _release, self._handle, run_dir / NAME, made)
        """Release the lock; remove its file, and the directories that were created if they are still empty."""
        _held.add(self)

    def _abandon(self) -> None:
        self.release.detach()
        os.close(self._handle)


_held: weakref.WeakSet[RunLock] = weakref.WeakSet()


def _forget() -> None:
    """Close the locks in a forked process: they are the parent's, and must end with the parent."""
    for lock in list(_held):
        if lock.release.alive:
            lock._abandon()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def is_held(run_dir: Path) -> bool:
    """Return whether a process holds the lock on ``run_dir``; on systems without locks, whether there is its file."""
    try:
        handle = os.open(run_dir / NAME, os.O_RDONLY)
    except OSError:
        return False
    try:
        if fcntl is not None:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)  # for a moment; `_acquire` tries twice
            return False
    except OSError:
        return True
    finally:
        os.close(handle)
    return True


def _acquire(run_dir: Path) -> int:
    path = run_dir / NAME
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        if not _lock_patiently(handle, path):
            holder = _holder(handle)
            os.close(handle)
            if holder.get("pid") == os.getpid() and gc.collect() and not path.exists():
                continue  # it was held by a trainer of this process that nothing refers to any more
            raise ConfigError(_in_use(run_dir, holder))
        if path.exists() and os.path.samestat(os.fstat(handle), path.stat()):
            break
        os.close(handle)  # the holder removed the file before it was locked here: this lock has no effect
    me = {"pid": os.getpid(), "host": socket.gethostname(), "since": f"{datetime.now():%Y-%m-%d %H:%M:%S}"}
    os.ftruncate(handle, 0)
    os.write(handle, json.dumps(me).encode())
    return handle


def _lock_patiently(handle: int, path: Path) -> bool:
    """Return whether the file is locked now, at the second try if it was locked at the first."""
    if _lock(handle, path):
        return True
    time.sleep(BRIEFLY)
    return _lock(handle, path)


def _lock(handle: int, path: Path) -> bool:
    """Return whether the file is locked now. Where the system or disk has no locks, warn and return True."""
    try:
        if fcntl is None:
            raise OSError("this system has no fcntl")
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        log.warning("%s cannot be locked (%s); make sure that no other process uses the directory", path, error)
    return True


def _holder(handle: int) -> dict[str, Any]:
    try:
        return dict(json.loads(os.read(handle, 4096)))
    except (ValueError, TypeError):  # the holder has not written it yet
        return {}


def _in_use(run_dir: Path, holder: dict[str, Any]) -> str:
    said = "process {pid} on {host} since {since}".format_map({"pid": "?", "host": "?", "since": "?", **holder})
    own = " (this process, another trainer)" if holder.get("pid") == os.getpid() else ""
    return f"{run_dir} is in use by {said}{own}; wait until it ends, stop it, or give another train.run_dir"


def _release(handle: int, path: Path, made: list[Path]) -> None:
    with contextlib.suppress(OSError):  # the directory may have been removed
        path.unlink()
    os.close(handle)
    with contextlib.suppress(OSError):  # a directory may not be empty
        for place in made:
            place.rmdir()
