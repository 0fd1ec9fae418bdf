"""Scripts in several processes, which are forked from one that has imported everything, and so begin at once.

The processes talk through gloo, as those that a launcher starts. It does not do what a launcher does when one of them
fails: tests of that start a real one.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
import traceback
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

HERE = Path(__file__)


def run(script: Path, processes: int, *arguments: str, limit: float = 300.0, here: bool = False) -> None:
    """Run a script in so many processes; assert that all end without an error within ``limit`` seconds.

    With ``here`` they are forked from this process, which spares starting the other one, but must not have used a GPU.
    """
    with TemporaryDirectory() as folder:
        job = {"argv": [str(script), *arguments], "folder": folder, "limit": limit, "path": sys.path}
        job["environments"] = _environments(processes)
        codes = _run_here(job) if here else _server().ask(job)
        written = [(Path(folder) / f"written-{rank}").read_text(errors="replace") for rank in range(processes)]
    assert codes == [0] * processes, "\n".join(f"process {r} ({c}): {written[r][-8000:]}" for r, c in enumerate(codes))


def _run_here(job: dict[str, Any]) -> list[int | None]:
    """Run a job in children of this process, for which accelerate begins anew."""
    from trainkit_kit.launching import on_cpu

    with on_cpu():
        return _ends([_forked(job, rank) for rank in range(len(job["environments"]))], job["limit"])


def _environments(processes: int) -> list[dict[str, str]]:
    """Return the environment variables of each process, as a launcher would set them."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    both = {
        **os.environ,
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
        "PYTHONFAULTHANDLER": "1",
    }
    if processes > 1:
        both |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
        both |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} if processes > 1 else {} for rank in range(processes)]
    return [{**both, **rank} for rank in ranks]


class _Server:
    """The process that forks the others; it ends with this one."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(HERE)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        atexit.register(self.end)

    def ask(self, job: dict[str, Any]) -> list[int | None]:
        """Run a job, and return the exit codes; None if a process had to be killed."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        codes: list[int | None] = json.loads(self.process.stdout.readline())
        return codes

    def end(self) -> None:
        """End the server and what it has forked."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()


@cache
def _server() -> _Server:
    return _Server()


# --------------------------------------------------------------------------------------------------- the server process


def serve() -> None:
    """Import everything, and run jobs until there are no more."""
    import datasets  # noqa: F401
    import peft  # noqa: F401
    import torch

    from trainkit.plugins import available_trainers, get_trainer

    torch.set_num_threads(1)
    for name in available_trainers():
        get_trainer(name)
    for line in sys.stdin:
        job = json.loads(line)
        children = [_forked(job, rank) for rank in range(len(job["environments"]))]
        print(json.dumps(_ends(children, job["limit"])), flush=True)


def _forked(job: dict[str, Any], rank: int) -> int:
    """Fork a process that runs the script, with its output in a file of its own; return its id."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        written = os.open(str(Path(job["folder"]) / f"written-{rank}"), os.O_WRONLY | os.O_CREAT)
        for own, number in ((os.open(os.devnull, os.O_RDONLY), 0), (written, 1), (written, 2)):
            os.dup2(own, number)
        os.environ.clear()
        os.environ.update(job["environments"][rank])
        sys.argv[:], sys.path[:] = job["argv"], [str(Path(job["argv"][0]).parent), *job["path"]]
        runpy.run_path(job["argv"][0], run_name="__main__")
        code = 0
    except SystemExit as error:
        code = int(error.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _ends(children: list[int], limit: float) -> list[int | None]:
    """Return the exit codes; None if a process had to be killed, which the others are once one has failed."""
    end, codes = time.monotonic() + limit, dict[int, int | None].fromkeys(children)
    while None in codes.values() and time.monotonic() < end:
        for child in [child for child, code in codes.items() if code is None]:
            found, status = os.waitpid(child, os.WNOHANG)
            if found:
                codes[child] = os.waitstatus_to_exitcode(status)
                if codes[child]:
                    end = min(end, time.monotonic() + 5)
        time.sleep(0.02)
    for child in [child for child, code in codes.items() if code is None]:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return list(codes.values())


if __name__ == "__main__":
    serve()
