"""Runs a command until it ends, or until the process that started this one ends.

It is called as ``python guard.py DIRECTORY COMMAND ...``.

The standard input is a pipe whose other end the starting process holds. The operating system closes it when that
process ends, also if it is killed. The command and all processes that it has started are then ended. If the starting
process has ended, the directory, which it cannot remove any more, is removed.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import time

PATIENCE = 15.0
"""Seconds that the command has to end by itself after SIGTERM."""


def run(directory: str, command: list[str]) -> int:
    """Run ``command``, and return its exit status."""
    parent = os.getppid()
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    while process.poll() is None:
        readable, _, _ = select.select([sys.stdin], [], [], 0.2)
        if readable and not os.read(sys.stdin.fileno(), 1):
            break
    _signal(process.pid, signal.SIGTERM)
    end = time.monotonic() + PATIENCE
    while process.poll() is None and time.monotonic() < end:
        time.sleep(0.1)
    _signal(process.pid, signal.SIGKILL)  # what the command has left behind, too
    status = process.wait()
    if os.getppid() != parent:
        shutil.rmtree(directory, ignore_errors=True)
    return status


def _signal(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], sys.argv[2:]))
