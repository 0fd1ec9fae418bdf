"""Two real processes that train a plugin together, for the check of that name.

`launch` starts them, as ``python -m trainkit.testing.two_processes NAME DIRECTORY``. Each reads from the directory what
it is given, trains, and leaves there what it has to say.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from trainkit.metrics import compute
from trainkit.registry import get_trainer
from trainkit.testing.checks.tools import stepped, weights
from trainkit.testing.conformance import require
from trainkit.testing.trainers import tiny_trainer

LIMIT = 60.0
"""Seconds that both have, start included."""
FROM_LAUNCHERS = ("ACCELERATE_", "TORCHELASTIC_", "GROUP_", "ROLE_")
"""How variables begin by which launchers speak to their processes."""

Said = dict[str, Any]


# --------------------------------------------------------------------------------------------------- who starts them


def launch(name: str, folder: Path, given: Said) -> list[Said]:
    """What each of two processes says that train the plugin ``name``; both have ended.

    Raises:
        CheckError: one failed, or did not end in time; says what it wrote.
    """
    folder.mkdir(parents=True)
    torch.save(given, folder / "given.pt")
    port, started = _free_port(), []
    try:
        for rank in (0, 1):
            with (folder / f"errors-{rank}").open("wb") as errors:
                command = [sys.executable, "-m", __name__, name, str(folder)]
                environment = _environment(rank, port)
                started.append(subprocess.Popen(command, env=environment, stdout=errors, stderr=errors))
        _wait(started, folder)
    finally:
        for process in started:
            process.kill()
            process.wait()
    return [torch.load(folder / f"said-{rank}.pt", weights_only=False) for rank in (0, 1)]


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _environment(rank: int, port: int) -> dict[str, str]:
    """As a launcher would set it; plugins that are only on this process's path are found on theirs."""
    path = os.pathsep.join(place or os.getcwd() for place in sys.path)
    return {
        **{key: value for key, value in os.environ.items() if not key.startswith(FROM_LAUNCHERS)},
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PYTHONPATH": path,
        "ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1",
    }


def _wait(started: list[subprocess.Popen[bytes]], folder: Path) -> None:
    end = time.monotonic() + LIMIT
    while any(process.poll() is None for process in started) and time.monotonic() < end:
        if any(process.poll() for process in started):
            end = min(end, time.monotonic() + 1)  # the other one may have to say why, or waits for ever
        time.sleep(0.02)
    codes = [process.poll() for process in started]
    if codes == [0, 0]:
        return
    ends = ["did not end" if code is None else f"ended with {code}" for code in codes]
    wrote = [(folder / f"errors-{rank}").read_text(encoding="utf-8", errors="replace")[-1500:] for rank in (0, 1)]
    told = [f"process {rank} {ends[rank]}:\n{wrote[rank]}" for rank in (0, 1)]
    require(False, f"two processes, within {LIMIT:g} s:\n" + "\n".join(told))


# --------------------------------------------------------------------------------------------------- what each does


class _Watched:
    """Notes what `make_experience` gave for a trainer's first collection, what became of it, and its metrics."""

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.honest, self.said = trainer, trainer.prepare_experience, Said()
        trainer.prepare_experience = self.prepare

    def prepare(self, experience: Any) -> Any:
        before = set(self.trainer._pending)
        prepared = self.honest(experience)
        if not self.said:
            new = {name: metric for name, metric in self.trainer._pending.items() if name not in before}
            self.said = {"made": experience, "prepared": prepared, "metrics": compute(new, self.trainer.reduce)}
        return prepared


def _learn(name: str, folder: Path) -> Said:
    """A whole run, with evaluations and checkpoints."""
    trainer = tiny_trainer(name, folder / "run", train__eval_interval=3, train__save_interval=3)
    watched = _Watched(trainer)
    trainer.learn()
    return {
        "collection": watched.said,
        "weights": weights(trainer),
        "state": trainer.state_dict(),
        "steps": trainer.progress.step,
    }


def _draw(name: str, folder: Path) -> Any:
    """What each process makes of one prompt, the same for both; None offline."""
    trainer = tiny_trainer(name, folder / "drawn")
    if not trainer.online:
        return None
    trainer.add_prompt_pipeline(list(trainer.pipeline.rows[:1]))
    watched = _Watched(trainer)
    trainer.collect()
    return watched.said["made"]


def _step(name: str, folder: Path, rank: int) -> Said:
    """One step on rows that are given, of which the first process takes three eighths."""
    given: Said = torch.load(folder / "given.pt", weights_only=False)
    trainer = tiny_trainer(name, folder / "stepped", train__max_grad_norm=None, train__microbatch_size=3)
    trainer.policy  # noqa: B018  (made before it takes over weights)
    trainer.unwrapped.load_state_dict(given["weights"])
    trainer.load_state_dict(given["state"])
    batch = given["batch"]
    rows = torch.arange(len(batch)).tensor_split([max(3 * len(batch) // 8, 1)])[rank]
    gradient, found = stepped(trainer, batch.select(rows))
    return {"gradient": gradient, "metrics": compute(found, trainer.reduce)}


def main(name: str, folder: Path) -> None:
    """What one of the two processes does."""
    torch.set_num_threads(1)
    get_trainer(name)  # what is given are batches of its own classes
    rank = int(os.environ["RANK"])
    said = {"step": _step(name, folder, rank), "drawn": _draw(name, folder), "run": _learn(name, folder)}
    torch.save(said, folder / f"said-{rank}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
