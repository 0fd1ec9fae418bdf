"""Runs that are really killed: forked from a process that has imported everything, ended by SIGKILL, started again.

    python tests/killed.py sweep ALGORITHM DIRECTORY STEPS FIRST_KILLED_STEP STRIDE
    python tests/killed.py storm ALGORITHM DIRECTORY STEPS KILLS
    python tests/killed.py generators ALGORITHM DIRECTORY STEPS KILLS

A further argument may be a JSON object of settings, such as {"rollout__staleness": 1}. Prints one JSON object. With
``generators``, the processes of the run's engine are killed instead. The runs are compared with one by ``local``.
It is a process of its own because a fork should have one thread.
"""

from __future__ import annotations

import gc
import hashlib
import io
import json
import os
import random
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
import transformers.modeling_utils

import trainkit
from trainkit.runs import checkpoint
from trainkit.testing import tiny_gpt2
from trainkit.testing.trainers import tiny_trainer
from trainkit.trainer import accelerate

CHANGES: dict[str, Any] = {
    "model": tiny_gpt2(10, resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1),
    "model__disable_dropout": False,
    "train__batch_size": 6,
    "train__microbatch_size": 4,
    "train__save_interval": 1,
    "train__keep_checkpoints": 1,
    "train__eval_interval": 2,
    "train__resume": "auto",
}
CHANGING = ("os.mkdir", "os.rmdir", "os.remove", "os.rename", "os.chmod", "os.truncate", "os.link", "os.symlink")
"""Audit events of calls that change files, beside those of opening one to write."""


class Killer:
    """Kills this process by SIGKILL at the n-th change of a file, a write half done; 0: only counts.

    Python tells an audit hook of every opening, renaming and removing before it happens. Flushing to disk and what
    Rust writes for safetensors are wrapped.
    """

    def __init__(self, at: int) -> None:
        self.at, self.count = at, 0
        sys.addaudithook(self.audit)
        os.fsync = self.before(os.fsync)
        io.open = self.writing(io.open)
        for module, name in (
            (checkpoint, "save_file"),
            (accelerate, "save_file"),
            (transformers.modeling_utils, "safe_save_file"),
        ):
            setattr(module, name, self.saving(getattr(module, name)))

    def strikes(self) -> bool:
        self.count += 1
        return self.count == self.at

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def audit(self, event: str, args: tuple[Any, ...]) -> None:
        opened = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if (opened or event in CHANGING) and "/dev/" not in str(args[0]) and self.strikes():
            self.die()

    def before(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.strikes():
                self.die()
            return operation(*args, **kwargs)

        return call

    def writing(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        def call(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            opened = operation(file, mode, *args, **kwargs)
            if set(mode) & set("wax+") and self.strikes():
                opened.write(b'{"dict": [["st' if "b" in mode else '{"dict": [["st')
                opened.flush()
                self.die()
            return opened

        return call

    def saving(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        def call(tensors: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
            if self.strikes():
                self.die()
            found = operation(tensors, path, *args, **kwargs)
            if self.strikes():
                with open(path, "r+b", buffering=0) as file:
                    os.ftruncate(file.fileno(), os.fstat(file.fileno()).st_size // 2)
                self.die()
            return found

        return call


def digest(trainer: Any) -> str:
    """Of every bit of weights and optimizer."""
    found = hashlib.sha256()
    state = {"model": trainer.unwrapped.state_dict(), "optimizer": trainer.optimizer.state_dict()}
    packer = checkpoint.Packer()
    found.update(json.dumps(packer.pack(state)).encode())
    for name, tensor in packer.tensors.items():
        found.update(name.encode() + tensor.numpy().tobytes())
    return found.hexdigest()


def forked(work: Callable[[], object], patience: float | None = None) -> int:
    """The wait status of a child that does ``work``; after ``patience`` seconds it is killed."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            work()
            code = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(code)
    if patience is not None:
        time.sleep(patience)
        os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]


class Case:
    """One algorithm's run of some steps, and what became of copies of it that were killed."""

    def __init__(self, name: str, steps: int, root: Path) -> None:
        self.name, self.steps, self.root = name, steps, root
        self.kills = 0
        self.problems: list[str] = []

    def go(self, run_dir: Path, kill_at: int = 0, from_step: int = 0, kills: int = 0, **changes: Any) -> None:
        """Train to the end, or to the kill; events count from the end of step ``from_step`` on, of the first for -1.

        Meanwhile, up to so many ``kills`` of the engine's processes are made at random times.
        """

        class Arm:
            killer: Killer | None = None
            times: ClassVar[list[float]] = []

            @trainkit.hookimpl
            def on_step(self, step: int) -> None:
                self.times.append(time.monotonic() - started)
                if step == from_step or (from_step < 0 and self.killer is None):
                    self.killer = Killer(kill_at)

        started, arm = time.monotonic(), Arm()
        if not from_step:
            arm.killer = Killer(kill_at)
        settings = {"train__total_steps": self.steps, **CHANGES, **changes}
        trainer = tiny_trainer(self.name, run_dir, callbacks=[arm], **settings)
        done = killing(trainer, kills) if kills else []
        trainer.learn()
        count = arm.killer.count if arm.killer else 0
        found = {"digest": digest(trainer), "events": count, "kills": len(done), "times": arm.times}
        (self.root / f"{run_dir.name}.end").write_text(json.dumps(found))

    def restart(self, run_dir: Path) -> None:
        status = forked(lambda: self.go(run_dir))
        if status != 0:
            self.problems.append(f"{run_dir.name}: the restart ended with status {status}")

    def end(self, run_dir: Path) -> dict[str, Any]:
        return dict(json.loads((self.root / f"{run_dir.name}.end").read_text()))

    def compare(self, run_dir: Path, straight: Path) -> None:
        """Bits of weights, optimizer and export, every number but times, each once and in order; nothing left over.

        The card of the export has the settings, and so the engine.
        """
        for what, found in {
            "weights and optimizer": lambda d: self.end(d)["digest"],
            "export": lambda d: {p.name: p.read_bytes() for p in (d / "model").iterdir() if p.name != "README.md"},
            "metrics": numbers,
            "samples": lambda d: (d / "samples.jsonl").read_text() if (d / "samples.jsonl").exists() else "",
            "files": files,
        }.items():
            try:
                equal = found(run_dir) == found(straight)
            except OSError as error:
                self.problems.append(f"{run_dir.name}: {error}")
                continue
            if not equal:
                self.problems.append(f"{run_dir.name}: {what} differ")


def killing(trainer: Any, kills: int) -> list[int]:
    """Kill processes of the trainer's engine at random times, in a thread; the list of those that were killed."""
    killed, chance = list[int](), random.Random(kills)

    def work() -> None:
        while len(killed) < kills:
            time.sleep(chance.uniform(0.05, 1.0))
            live = [pid for pid in trainer.engine.pids if pid not in killed] if "engine" in vars(trainer) else []
            if live:
                killed.append(chance.choice(live))
                os.kill(killed[-1], signal.SIGKILL)

    threading.Thread(target=work, daemon=True).start()
    return killed


def files(run_dir: Path) -> list[str]:
    """All but checkpoints beyond the last: a kill may come before old ones are let go."""
    last = max((run_dir / "checkpoints").iterdir())
    return sorted(
        str(path.relative_to(run_dir))
        for path in run_dir.rglob("*")
        if "step_" not in str(path) or last in (path, path.parent)
    )


def numbers(run_dir: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if "time" not in k} for line in lines]


def sweep(case: Case, from_step: int, stride: int) -> dict[str, Any]:
    """Killed at every ``stride``-th change of a file after ``from_step``, and started again each time."""
    straight = case.root / "straight"
    assert forked(lambda: case.go(straight, from_step=from_step)) == 0
    events = case.end(straight)["events"]
    for at in range(1, events + 1, stride):
        run_dir = case.root / f"killed-{at}"
        status = forked(lambda run_dir=run_dir, at=at: case.go(run_dir, at, from_step))
        if not (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL):
            case.problems.append(f"{run_dir.name}: was not killed but ended with status {status}")
        case.kills += 1
        case.restart(run_dir)
        case.compare(run_dir, straight)
        shutil.rmtree(run_dir, ignore_errors=True)
    return {"events": events, "kills": case.kills, "problems": case.problems}


def storm(case: Case, kills: int) -> dict[str, Any]:
    """One run killed again and again: at random changes of files, and at random times.

    An engine takes long to start, so with one the changes are those after the first step of each part of the run.
    """
    local = CHANGES.get("rollout__engine", "local") == "local"
    first, most = (0, 90 if CHANGES.get("train__save_async") else 45) if local else (-1, 300)
    straight, run_dir = case.root / "straight", case.root / "killed"
    assert forked(lambda: case.go(straight, rollout__engine="local")) == 0
    started = time.monotonic()
    assert forked(lambda: case.go(case.root / "timed")) == 0
    lasts = time.monotonic() - started
    times = case.end(case.root / "timed")["times"]
    between = (0.0, lasts / 6) if local else (times[0], times[0] + (times[-1] - times[0]) / 6)
    chance, by_time, after = random.Random(7), 0, []
    while case.kills < kills:
        if case.kills % 3 == 2:
            patience = chance.uniform(*between)
            status = forked(lambda: case.go(run_dir), patience)
            by_time += 1
        else:
            at = chance.randint(1, most)
            status = forked(lambda at=at: case.go(run_dir, at, first))
        if status == 0:
            break  # it came to its end
        if not os.WIFSIGNALED(status):
            case.problems.append(f"a restart ended with status {status}")
            break
        case.kills += 1
        after.append(max((int(p.name[5:13]) for p in (run_dir / "checkpoints").glob("step_*")), default=0))
    case.restart(run_dir)
    case.compare(run_dir, straight)
    return {"kills": case.kills, "by time": by_time, "after steps": after, "problems": case.problems}


def generators(case: Case, kills: int) -> dict[str, Any]:
    """Runs whose engine loses processes at random times, until so many were killed."""
    straight = case.root / "straight"
    assert forked(lambda: case.go(straight, rollout__engine="local")) == 0
    runs = 0
    while case.kills < kills and not case.problems:
        runs += 1
        run_dir = case.root / f"run-{runs}"
        status = forked(lambda run_dir=run_dir, left=kills - case.kills: case.go(run_dir, kills=left))
        if status != 0:
            case.problems.append(f"{run_dir.name} ended with status {status}")
            break
        case.kills += case.end(run_dir)["kills"]
        case.compare(run_dir, straight)
    return {"kills": case.kills, "runs": runs, "problems": case.problems}


def main(what: str, name: str, root: str, steps: str, *numbers: str) -> None:
    torch.set_num_threads(1)
    if numbers[-1].startswith("{"):
        CHANGES.update(json.loads(numbers[-1]))
        numbers = numbers[:-1]
    case = Case(name, int(steps), Path(root))
    usual = {**CHANGES, "rollout__engine": "local"}  # others start threads, which a fork should not have
    trainer = tiny_trainer(name, case.root / "warm", train__total_steps=1, **usual)
    trainer.learn()  # whatever is imported late is imported now
    shutil.rmtree(case.root / "warm")
    gc.collect()
    gc.freeze()  # so that children copy less memory
    print(json.dumps({"sweep": sweep, "storm": storm, "generators": generators}[what](case, *map(int, numbers))))


if __name__ == "__main__":
    main(*sys.argv[1:])
