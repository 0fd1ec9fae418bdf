"""Runs the command line for a sweep, or ``main`` of a script, and ends when the sweep has ended.

It is started as ``python -m trainkit_sweep.child PID train ARGUMENTS`` or ``PID SCRIPT.py HPARAMS``.

A sweep that is killed cannot end its runs. Each asks every half second whether the sweep is still its parent.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import threading
import time

INTERVAL = 0.5
"""Seconds between two looks at the parent."""
PATIENCE = 120.0
"""Seconds that a run may take to save and end after its sweep has ended."""


def follow(parent: int) -> None:
    """Wait until the parent has ended; then ask this process to save and end, and kill it if it does not."""
    while os.getppid() == parent:
        time.sleep(INTERVAL)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(PATIENCE)
    os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))


def main() -> None:
    """Run the command line, or a script, with the arguments after the id of the parent."""
    parent = int(sys.argv.pop(1))
    threading.Thread(target=follow, args=(parent,), daemon=True).start()
    if sys.argv[1].endswith(".py"):
        sys.argv.pop(0)
        sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
        runpy.run_path(sys.argv[0], run_name="sweep")["main"](json.loads(sys.argv.pop(1)))
        return
    runpy.run_module("trainkit.cli", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
