"""The two processes of the check `two_processes`, and of those of shardings, which train a plugin together.

`trainkit_kit.launching` runs this module once, as ``python -m trainkit_kit.two_processes``. It reads one job
per line, starts two new processes for each job, and prints their exit codes.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from trainkit.data import Pipeline
from trainkit.metrics import compute
from trainkit.plugins import available_trainers, get_trainer
from trainkit.testing.trainers import tiny_trainer
from trainkit.trainer import AccelerateRLTrainer
from trainkit_kit.checks.tools import RUN, stepped, unequal, weights
from trainkit_kit.copying import registered
from trainkit_kit.shards import WHAT

Said = dict[str, Any]


# --------------------------------------------------------------------------------------------------- the server process


def serve() -> None:
    """Run jobs until there are no more."""
    forked = sys.platform == "linux"  # forks share what is imported; forking is unsafe on other systems
    context: Any = multiprocessing.get_context("fork" if forked else "spawn")
    for line in sys.stdin:
        job = json.loads(line)
        pair = [context.Process(target=one_of_two, args=(job, rank)) for rank in (0, 1)]
        for process in pair:
            process.start()
        print(json.dumps(_ends(pair, job["limit"])), flush=True)


def _ends(pair: list[Any], limit: float) -> list[int | None]:
    """Return the exit codes of two processes; None if a process had to be killed."""
    end = time.monotonic() + limit
    while any(process.is_alive() for process in pair) and time.monotonic() < end:
        if any(process.exitcode for process in pair):
            end = min(end, time.monotonic() + 1)  # the other one may write an error, or wait for ever
        time.sleep(0.02)
    codes = [process.exitcode for process in pair]
    for process in pair:
        process.kill()
        process.join()
    return codes


def one_of_two(job: Said, rank: int) -> None:
    """Run the job in one of the two processes, with its output in a file of its own."""
    folder = Path(job["folder"])
    with (folder / f"written-{rank}").open("wb") as written, open(os.devnull, "rb") as nothing:
        for own, number in ((nothing, 0), (written, 1), (written, 2)):
            os.dup2(own.fileno(), number)
    os.environ.clear()
    os.environ.update(job["environments"][rank])
    sys.path[:] = job["path"]
    train(job["name"], folder, rank)


# ------------------------------------------------------------------------------------------------- each of the two


class _Watched:
    """Records a trainer's first collection before and after `prepare_experience`, and the metrics recorded by it."""

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.honest, self.said = trainer, trainer.prepare_experience, Said()
        trainer.prepare_experience = self.prepare

    def prepare(self, experience: Any) -> Any:
        before = set(self.trainer.recorder.pending)
        prepared = self.honest(experience)
        if not self.said:
            new = {name: metric for name, metric in self.trainer.recorder.pending.items() if name not in before}
            self.said = {"made": experience, "prepared": prepared, "metrics": compute(new, self.trainer.reduce)}
        return prepared


def _learn(name: str, folder: Path, settings: Said) -> Said:
    """Make a whole run with evaluations and checkpoints, and return what it ended with."""
    trainer = tiny_trainer(name, folder / "run", **settings, **RUN)
    watched = _Watched(trainer)
    trainer.learn()
    return {
        "collection": watched.said,
        "weights": weights(trainer),
        "state": trainer.state_dict(),
        "steps": trainer.progress.step,
    }


def _resume(name: str, folder: Path, settings: Said) -> Said:
    """Resume that run from its first checkpoint, and return what it then ended with."""
    first = folder / "run" / "checkpoints" / f"step_{RUN['train__save_interval']:08d}"
    trainer = tiny_trainer(name, folder / "resumed", **settings, **RUN, train__resume=str(first))
    trainer.learn()
    return {"weights": weights(trainer), "state": trainer.state_dict()}


def _learn_in_shards(name: str, folder: Path, settings: Said) -> Said:
    """Make the same run with a model that the processes divide, and return its weights.

    An engine samples with a copy, so that the model stays divided while experience is made.
    """
    cls = get_trainer(name)
    apart = {"rollout__engine": registered()} if issubclass(cls, AccelerateRLTrainer) and cls.generates else {}
    changes = {**apart, **settings, "train__sharding": "fsdp2"}
    trainer = tiny_trainer(name, folder / "sharded", **changes, **RUN)
    trainer.learn()
    with trainer.sharding.unsharded():
        return weights(trainer)


def _draw(name: str, folder: Path, settings: Said) -> Any:
    """Return the experience of one prompt, which both processes get; None offline."""
    trainer = tiny_trainer(name, folder / "drawn", **settings)
    if not trainer.online:
        return None
    trainer.add_prompt_pipeline(Pipeline(trainer.pipeline.rows[:1], seed=trainer.config.train.seed))
    watched = _Watched(trainer)
    trainer.collect()
    return watched.said["made"]


def _steps(name: str, folder: Path, rank: int, given: Said) -> list[Said]:
    """Make one step from each of the given weights on the given rows, of which the first process takes fewer."""
    changes = {**given["settings"], "train__max_grad_norm": None, "train__microbatch_size": 3}
    trainer = tiny_trainer(name, folder / "stepped", **changes)
    trainer.models.build()  # made before weights are loaded
    batch, said = given["batch"].select(unequal(given["batch"])[rank]), list[Said]()
    for place in given["weights"]:
        trainer.unwrapped.load_state_dict(place)
        trainer.load_state_dict(given["state"])
        gradient, found = stepped(trainer, batch)
        said.append({"gradient": gradient, "metrics": compute(found, trainer.reduce)})
    return said


def train(name: str, folder: Path, rank: int) -> None:
    """Train in each way, and save the results in ``folder``."""
    torch.set_num_threads(1)
    if name in available_trainers():
        get_trainer(name)  # registers the classes of the given batches
    given: Said = torch.load(folder / "given.pt", map_location="cpu", weights_only=False)
    said = WHAT[given["what"]](folder, given) if "what" in given else _trained(name, folder, rank, given)
    torch.save(said, folder / f"said-{rank}.pt")
    torch.distributed.destroy_process_group()


def _trained(name: str, folder: Path, rank: int, given: Said) -> Said:
    settings = given["settings"]
    learnt = {
        "steps": _steps(name, folder, rank, given),
        "drawn": _draw(name, folder, settings),
        "run": _learn(name, folder, settings),
    }
    if given["variant"]:  # resumes and reads the divided model as the algorithm does without those settings
        return learnt
    resumed, sharded = _resume(name, folder, settings), _learn_in_shards(name, folder, settings)
    return {**learnt, "resumed": resumed, "sharded": sharded}


if __name__ == "__main__":
    serve()
