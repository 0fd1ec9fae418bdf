"""Starting two processes that train a plugin together.

One server process runs `trainkit_kit.two_processes` with everything imported, and forks two processes per plugin.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import IO, Any
from unittest.mock import patch

import torch
from accelerate.state import AcceleratorState, PartialState

from trainkit_kit.failures import require

LIMIT = 60.0
"""Time limit of two processes in seconds, once everything is imported, on an idle machine."""
FROM_LAUNCHERS = ("ACCELERATE_", "TORCHELASTIC_", "GROUP_", "ROLE_")
"""Prefixes of the environment variables that launchers set for their processes."""


@contextmanager
def on_cpu() -> Iterator[None]:
    """Let trainers that are made inside the block be on the CPU; those that exist must not be used there."""
    states = (AcceleratorState._shared_state, PartialState._shared_state)
    before = [dict(state) for state in states]
    for state in states:
        state.clear()
    try:
        with patch.dict(os.environ, ACCELERATE_USE_CPU="true"):
            yield
    finally:
        for state, was in zip(states, before, strict=True):
            state.clear()
            state.update(was)


def slowness() -> float:
    """Return how much longer work takes now than on an idle core, at least 1: time limits are multiplied by it."""
    started = time.perf_counter()
    sum(index * index for index in range(1_000_000))
    return max((time.perf_counter() - started) / 0.1, 1.0)


def launch(name: str, folder: Path, given: dict[str, Any], limit: float = LIMIT) -> list[dict[str, Any]]:
    """Train the plugin ``name`` in two processes from what is ``given``, and return the results of each process.

    Args:
        name: the trainer, or the sharding if ``given`` has "what".
        folder: the directory for their runs.
        given: what they read.
        limit: seconds within which they end on an idle machine; a busy one has `slowness` times as many.

    Raises:
        CheckError: a process failed, or did not end in time; the message holds what it wrote.
    """
    folder.mkdir(parents=True)
    limit *= slowness()
    torch.save(given, folder / "given.pt")
    path = [place or os.getcwd() for place in sys.path]  # so that they can import what this process can
    job = {"name": name, "folder": str(folder), "limit": limit, "path": path, "environments": _environments()}
    codes = _server().ask(job)
    ends = ["did not end" if code is None else f"ended with {code}" for code in codes]
    told = [f"process {rank} {end}: {_written(folder, rank)}" for rank, end in enumerate(ends)]
    require(codes == [0, 0], f"two processes must end without an error within {limit:g} s:\n" + "\n".join(told))
    return [torch.load(folder / f"said-{rank}.pt", map_location="cpu", weights_only=False) for rank in (0, 1)]


def _written(folder: Path, rank: int) -> str:
    path = folder / f"written-{rank}"  # one that was killed at once has written nothing
    return path.read_text(encoding="utf-8", errors="replace")[-1500:] if path.exists() else ""


def _environments() -> list[dict[str, str]]:
    """Return the environment variables of both processes, as a launcher would set them."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    both = {
        **{key: value for key, value in os.environ.items() if not key.startswith(FROM_LAUNCHERS)},
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "ACCELERATE_USE_CPU": "true",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    return [{**both, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in (0, 1)]


class _Server:
    """The server process, which starts the others; it ends with this process."""

    def __init__(self) -> None:
        path = os.pathsep.join(place or os.getcwd() for place in sys.path)
        environment = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        self.errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  (open as long as the process runs)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "trainkit_kit.two_processes"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            start_new_session=True,
        )
        atexit.register(self.end)

    def ask(self, job: dict[str, Any]) -> list[int | None]:
        """Run a job, and return the exit codes of its two processes; None if a process had to be killed."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with suppress(OSError):  # it has ended, which is reported below
            self.process.stdin.write(json.dumps(job) + "\n")
            self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            _server.cache_clear()
            self.errors.seek(0)
            written = self.errors.read().decode(errors="replace")[-1500:]
            require(False, f"no processes can be started with {sys.executable}: {written}")
        codes: list[int | None] = json.loads(answer)
        return codes

    def end(self) -> None:
        """End the server process and the processes that it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL) if hasattr(os, "killpg") else self.process.kill()
        self.process.communicate()
        self.errors.close()


@cache
def _server() -> _Server:
    return _Server()
