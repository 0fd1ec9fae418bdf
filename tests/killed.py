"""Runs that are really killed: forked from a process that has imported everything, ended by SIGKILL, started again.

    python tests/killed.py MODE ALGORITHMS DIRECTORY ARGUMENTS

A process of its own because a fork should have one thread; `faults.killed` starts it. The modes are the functions
`sweep`, `storm`, `generators`, `signals` and `disk`; ARGUMENTS is a JSON object of their arguments, and ``settings`` in
it, such as {"rollout__staleness": 1}, those of the runs. Prints one JSON object. The runs are compared with one that
was left alone, whose engine is ``local``.
"""

from __future__ import annotations

import errno
import gc
import hashlib
import json
import logging
import os
import random
import re
import select
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import trainkit
from faults import arm, counted
from runs import FULL, full
from trainkit.errors import CheckpointError
from trainkit.runs import checkpoint
from trainkit.testing.trainers import language_trainers

USUAL: dict[str, Any] = {
    "train__keep_checkpoints": 1,
    "train__eval_interval": 2,
    "train__resume": "auto",
    "rollout__engine": "local",
}


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
    child = started(work)
    if patience is not None:
        time.sleep(patience)
        os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]


def started(work: Callable[[], object]) -> int:
    """The id of a child that does ``work``, and ends as Python does."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            work()
            code = 0
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        except KeyboardInterrupt:
            code = 130
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(code)
    return child


@dataclass
class Fault:
    """What befalls a run: calls of the C library are counted once step ``after`` was made, and from the start for 0.

    For -1 they are counted once any step was made, and again whenever the run is started.
    """

    at: int = 0
    """The number of the call at which the process is killed; 0: none."""
    after: int = 0
    error: int = 0
    """With which this call and those after it fail instead, of checkpoints only, until another step was made."""
    removals: bool = False
    """Whether only calls that remove or rename are counted."""
    engine: int = 0
    """The number of processes of the engine that are killed at random times."""


class Watches:
    """Arms the fault, and notes what the run has saved and when it made its steps."""

    def __init__(self, fault: Fault, run_dir: Path, note: Path) -> None:
        self.fault, self.run_dir, self.note = fault, run_dir, note
        self.started, self.armed = time.monotonic(), False
        self.times: list[float] = []
        self.saved: dict[int, int] = {}
        if not fault.after:
            self.arm()

    def arm(self) -> None:
        self.armed = True
        where = self.run_dir / "checkpoints" if self.fault.error else self.run_dir
        arm(where, self.fault.at, error=self.fault.error, removals=self.fault.removals)

    @trainkit.hookimpl
    def on_step(self, trainer: Any, step: int) -> None:
        self.times.append(time.monotonic() - self.started)
        if self.fault.error and self.armed:
            arm(self.run_dir)  # the disk is as it was
        if step == self.fault.after or (self.fault.after < 0 and not self.armed):
            trainer.run.checkpoints.finish()  # what is saved beside the training, so that calls have the same numbers
            self.arm()

    @trainkit.hookimpl
    def on_save(self, step: int) -> None:
        self.saved[step] = counted()
        self.note.write_text(str(step))


@dataclass
class Case:
    """One algorithm's runs of some steps, and what became of those that were killed."""

    name: str
    root: Path
    settings: dict[str, Any]
    steps: int = 12
    problems: list[str] = field(default_factory=list)

    def made(self, run_dir: Path, *callbacks: object, **changes: Any) -> Any:
        given = {**USUAL, **self.settings, **changes, "train__total_steps": self.steps}
        if self.name not in language_trainers():
            given.pop("rollout__engine")
        return full(self.name, run_dir, callbacks=callbacks, **given)

    def go(self, run_dir: Path, fault: Fault | None = None, *callbacks: object, **changes: Any) -> None:
        """Train to the end, or to the kill."""
        fault = fault or Fault()
        watches = Watches(fault, run_dir, self.root / f"{run_dir.name}.saved")
        trainer = self.made(run_dir, watches, *callbacks, **changes)
        done = killing(trainer, fault.engine) if fault.engine else []
        trainer.learn()
        found = {"digest": digest(trainer), "calls": counted(), "kills": len(done), "times": watches.times}
        found |= {"saved": watches.saved, "resumed": trainer.run.resumption.messages}
        (self.root / f"{run_dir.name}.end").write_text(json.dumps(found))

    def straight(self, fault: Fault | None = None, name: str = "straight", **changes: Any) -> dict[str, Any]:
        """Run without a fault, which is only counted, and return what it ended with."""
        status = forked(lambda: self.go(self.root / name, fault, **changes))
        assert status == 0, f"the run that is left alone ended with status {status}"
        return self.end(self.root / name)

    def restart(self, run_dir: Path, **changes: Any) -> None:
        """Start a run that was killed again, which must go on from its newest checkpoint, and to its end."""
        newest = self.newest(run_dir)
        status = forked(lambda: self.go(run_dir, **changes))
        if status != 0:
            self.problems.append(f"{run_dir.name}: the restart ended with status {status}")
            return
        resumed = self.end(run_dir)["resumed"]
        if newest is not None and not (resumed and resumed[0].startswith(f"resumed from {newest} at step")):
            self.problems.append(f"{run_dir.name}: did not go on from {newest} but said {resumed}")

    def newest(self, run_dir: Path) -> Path | None:
        """The newest checkpoint. All must be complete, and there must be one if ever one was."""
        found = checkpoint.checkpoints(run_dir / "checkpoints")
        for path in found:
            if fault := checkpoint.find_fault(path):
                self.problems.append(f"{run_dir.name}: {path.name} is not complete: {fault}")
        note = self.root / f"{run_dir.name}.saved"
        saved = int(note.read_text()) if note.exists() and note.read_text() else 0
        if saved and (not found or step_of(found[-1]) < saved):
            self.problems.append(f"{run_dir.name}: the checkpoint of step {saved} was complete, and is gone")
        return found[-1] if found else None

    def end(self, run_dir: Path) -> dict[str, Any]:
        return dict(json.loads((self.root / f"{run_dir.name}.end").read_text()))

    def compare(self, run_dir: Path, straight: str = "straight") -> None:
        """Bits of weights, optimizer and exports, every number but times, each once and in order; nothing left over.

        The card of an export has the settings, and so the engine.
        """
        for what, found in {
            "weights and optimizer": lambda d: self.end(d)["digest"],
            "exports": exports,
            "metrics": numbers,
            "samples": lambda d: (d / "samples.jsonl").read_text() if (d / "samples.jsonl").exists() else "",
            "files": files,
        }.items():
            try:
                equal = found(run_dir) == found(self.root / straight)
            except OSError as error:
                self.problems.append(f"{run_dir.name}: {error}")
                continue
            if not equal:
                self.problems.append(f"{run_dir.name}: {what} differ")

    def compare_saved(self, run_dir: Path, path: Path) -> None:
        """A run that goes on from a checkpoint of another run ends with the same bits of weights and optimizer."""
        again = self.root / f"{run_dir.name}-again"
        status = forked(lambda: self.go(again, train__resume=str(path)))
        if status != 0 or self.end(again)["digest"] != self.end(self.root / "straight")["digest"]:
            self.problems.append(f"{run_dir.name}: a run from {path.name} ended with status {status}, or differs")

    def remove(self, run_dir: Path) -> None:
        """Remove a run that is as it should be."""
        if not any(problem.startswith(f"{run_dir.name}:") for problem in self.problems):
            shutil.rmtree(run_dir, ignore_errors=True)


def killing(trainer: Any, kills: int) -> list[int]:
    """Kill processes of the trainer's engine at random times, in a thread; the list of those that were killed."""
    killed, chance = list[int](), random.Random(kills)

    def work() -> None:
        while len(killed) < kills:
            time.sleep(chance.uniform(0.05, 1.0))
            started = "engine" in vars(trainer.sampling)
            live = [pid for pid in trainer.sampling.engine.pids if pid not in killed] if started else []
            if live:
                killed.append(chance.choice(live))
                os.kill(killed[-1], signal.SIGKILL)

    threading.Thread(target=work, daemon=True).start()
    return killed


def step_of(path: Path) -> int:
    return int(path.name[5:13])


def exports(run_dir: Path) -> dict[str, bytes]:
    found = [*(run_dir / "model").iterdir(), *(run_dir / "best").glob("*")]
    return {str(path.relative_to(run_dir)): path.read_bytes() for path in found if path.name != "README.md"}


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


def was_killed(status: int) -> bool:
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def chosen(calls: int, count: int, seed: int) -> list[int]:
    """``count`` of so many calls, drawn; all of them for 0."""
    every = range(1, calls + 1)
    return sorted(random.Random(seed).sample(every, min(count, calls))) if count else [*every]


def calls_of(case: Case, after: int, removals: bool = False) -> int:
    """Make the run that is left alone, and return the number of calls in the window.

    The window begins once step ``after`` was made, and ends with the run if that is its last step, or if it is 0;
    otherwise when the checkpoint of that step is complete.
    """
    end = case.straight(Fault(after=after, removals=removals))
    return int(end["calls"] if after in (0, case.steps) else end["saved"][str(after)])


def sweep(case: Case, after: int, count: int = 0, seed: int = 0, removals: bool = False) -> dict[str, Any]:
    """Runs that are killed at ``count`` calls of a window, all for 0, and started again."""
    calls = calls_of(case, after, removals)
    every = chosen(calls, count, seed)
    for at in every:
        run_dir = case.root / f"killed-{at}"
        fault = Fault(at, after, removals=removals)
        status = forked(lambda run_dir=run_dir, fault=fault: case.go(run_dir, fault))
        if not was_killed(status):
            case.problems.append(f"{run_dir.name}: was not killed but ended with status {status}")
        case.restart(run_dir)
        case.compare(run_dir)
        case.remove(run_dir)
    return {"calls": calls, "kills": len(every)}


def storm(case: Case, kills: int, seed: int) -> dict[str, Any]:
    """Runs killed again and again, at random calls and at random times, until so many kills were made.

    The first kill comes before the first checkpoint. An engine takes long to start, so with one the calls are those
    after the first step of each part of a run.
    """
    local = case.settings.get("rollout__engine", "local") == "local"
    case.straight(rollout__engine="local")
    began = time.monotonic()
    timed = case.straight(name="timed")
    lasts, times = time.monotonic() - began, timed["times"]
    between = (0.0, lasts / 6) if local else (times[0], times[0] + (times[-1] - times[0]) / 6)
    chance, done, by_time, runs, after = random.Random(seed), 0, 0, 0, list[int]()
    while done < kills and not case.problems:
        runs += 1
        run_dir, status = case.root / f"run-{runs}", -1
        while done < kills and status != 0 and not case.problems:
            if done % 3 == 2:
                patience = chance.uniform(*between)
                status = forked(lambda run_dir=run_dir: case.go(run_dir), patience)
            else:
                at = chance.randint(1, timed["calls"] // 4 if done else timed["saved"]["1"] - 1)
                fault = Fault(at, 0 if local else -1)
                status = forked(lambda run_dir=run_dir, fault=fault: case.go(run_dir, fault))
            if was_killed(status):
                by_time, done = by_time + (done % 3 == 2), done + 1
                newest = case.newest(run_dir)
                after.append(step_of(newest) if newest else 0)
            elif status != 0:
                case.problems.append(f"{run_dir.name}: a restart ended with status {status}")
        if status != 0:
            case.restart(run_dir)
        case.compare(run_dir)
        case.remove(run_dir)
    return {"kills": done, "by time": by_time, "runs": runs, "after steps": after}


def generators(case: Case, kills: int) -> dict[str, Any]:
    """Runs whose engine loses processes at random times, until so many were killed."""
    case.straight(rollout__engine="local")
    done, runs = 0, 0
    while done < kills and not case.problems:
        runs += 1
        run_dir = case.root / f"run-{runs}"
        fault = Fault(engine=kills - done)
        status = forked(lambda run_dir=run_dir, fault=fault: case.go(run_dir, fault))
        if status != 0:
            case.problems.append(f"{run_dir.name} ended with status {status}")
            break
        done += case.end(run_dir)["kills"]
        case.compare(run_dir)
    return {"kills": done, "runs": runs}


# ---------------------------------------------------------------------------------------------------- full disks


def told_of(case: Case, run_dir: Path, fault: Fault, **changes: Any) -> str:
    """Run with a fault; return the messages of errors."""
    path = case.root / f"{run_dir.name}.told"

    def work() -> None:
        note = logging.FileHandler(path)
        note.setLevel(logging.ERROR)
        logging.getLogger("trainkit").addHandler(note)
        try:
            case.go(run_dir, fault, **changes)
        except CheckpointError as error:
            path.write_text(str(error))
            sys.exit(3)

    status = forked(work)
    code = {"stop": 3, "continue": 0}[changes["train__on_save_error"]]
    if not (os.WIFEXITED(status) and os.WEXITSTATUS(status) == code):
        case.problems.append(f"{run_dir.name}: ended with status {status}, and not with code {code}")
    return path.read_text() if path.exists() else ""


def disk(case: Case, after: int, count: int = 0, seed: int = 0) -> dict[str, Any]:
    """Runs whose disk fails from a call of a save on, until another step was made: full, broken or read-only.

    Each is checked with both values of ``train.on_save_error``.
    """
    faults = list[tuple[int, int]]()
    for error in (errno.ENOSPC, errno.EIO, errno.EROFS):
        calls = int(case.straight(Fault(after=after, error=error))["saved"][str(after)])
        faults += [(at, error) for at in range(1, calls + 1)]
        shutil.rmtree(case.root / "straight")
    case.straight()
    for at, error in random.Random(seed).sample(faults, count) if count else faults:
        for policy in ("stop", "continue"):
            run_dir = case.root / f"{policy}-{at}-{errno.errorcode[error]}"
            told = told_of(case, run_dir, Fault(at, after, error), train__on_save_error=policy)
            said = rf"cannot save a checkpoint under {run_dir}/checkpoints: .*{os.strerror(error)}.* MB needed, \d+ MB"
            if told and not re.search(said, told):
                case.problems.append(f"{run_dir.name}: said {told!r}")
            if policy == "stop":
                if not told:
                    case.problems.append(f"{run_dir.name}: said nothing")
                case.restart(run_dir)
            case.compare(run_dir)
            case.remove(run_dir)
    return {"faults": 2 * (count or len(faults))}


# ------------------------------------------------------------------------------------------------------- signals


class Tells:
    """Writes the number of each step into a pipe."""

    def __init__(self, pipe: int) -> None:
        self.pipe = pipe

    @trainkit.hookimpl
    def on_step(self, step: int) -> None:
        os.write(self.pipe, bytes([step]))


class Sends:
    """Sends its own process signals at a step, and again while the checkpoint is written that they ask for."""

    def __init__(self, at: int, first: list[int], saving: list[int]) -> None:
        self.at, self.first, self.saving = at, first, saving

    @trainkit.hookimpl
    def on_step(self, step: int) -> None:
        if step != self.at:
            return
        honest = checkpoint.write_state

        def write_state(directory: Path, name: str, state: Any) -> None:
            honest(directory, name, state)
            while self.saving:
                os.kill(os.getpid(), self.saving.pop())

        checkpoint.write_state = write_state
        for number in self.first:
            os.kill(os.getpid(), number)


def signalled(case: Case, run_dir: Path, number: int, step: int, wait: float) -> tuple[int, set[int]]:
    """Send a signal some seconds after a step; return the status, and the steps whose checkpoint is soon enough."""
    reads, writes = os.pipe()

    def work() -> None:
        os.close(reads)
        case.go(run_dir, None, Tells(writes))

    child, made = started(work), 0
    os.close(writes)
    while made < step:
        made = os.read(reads, 1)[0]
    time.sleep(wait)
    before, _ = made_by_now(reads, made), os.kill(child, number)
    after = made_by_now(reads, before)
    status = os.waitpid(child, 0)[1]
    os.close(reads)
    return status, set(range(before, after + 2))


def made_by_now(pipe: int, made: int) -> int:
    while select.select([pipe], [], [], 0)[0] and (read := os.read(pipe, 100)):
        made = read[-1]
    return made


def signals(case: Case, count: int, seed: int) -> dict[str, Any]:
    """Runs that get signals at random times, ``count`` of SIGTERM and of SIGUSR1; one that gets a second SIGTERM while
    it saves, and one that gets SIGINT twice."""
    case.settings |= {"train__save_interval": 1000, "train__keep_checkpoints": 9}
    times = case.straight()["times"]
    step_lasts, chance = (times[-1] - times[0]) / (len(times) - 1), random.Random(seed)
    late = list[int]()
    for index in range(2 * count):
        number, code = [(signal.SIGTERM, 143), (signal.SIGUSR1, 0)][index % 2]
        run_dir, step = case.root / f"{number.name}-{index}", chance.randint(1, case.steps - 3)
        status, soon = signalled(case, run_dir, number, step, chance.uniform(0, 2 * step_lasts))
        if not (os.WIFEXITED(status) and os.WEXITSTATUS(status) == code):
            case.problems.append(f"{run_dir.name}: ended with status {status}, and not with code {code}")
        saved = {step_of(path): path for path in checkpoint.checkpoints(run_dir / "checkpoints")}
        asked = min(saved, default=-1)
        if asked not in soon:
            case.problems.append(f"{run_dir.name}: saved {[*saved]}, and not within a step, {soon}")
            continue
        late.append(asked - min(soon))
        if number == signal.SIGUSR1:
            case.compare_saved(run_dir, saved[asked])
        else:
            case.restart(run_dir)
        case.compare(run_dir)
    sent = [("again", [signal.SIGTERM], [signal.SIGTERM], 143), ("twice", [signal.SIGINT, signal.SIGINT], [], 130)]
    for name, first, while_saving, code in sent:
        run_dir, step = case.root / name, chance.randint(1, case.steps - 3)
        sends = Sends(step, [*first], [*while_saving])
        status = forked(lambda run_dir=run_dir, sends=sends: case.go(run_dir, None, sends))
        if not (os.WIFEXITED(status) and os.WEXITSTATUS(status) == code):
            case.problems.append(f"{name}: ended with status {status}, and not with code {code}")
        newest = case.newest(run_dir)
        if (newest and step_of(newest)) != (step if name == "again" else None):
            case.problems.append(f"{name}: the newest checkpoint is {newest}")
        case.restart(run_dir)
        case.compare(run_dir)
    return {"signals": 2 * count + 4, "steps late": late}


def main(mode: str, names: str, root: str, given: str) -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has jobs in the background ignore it
    arguments = json.loads(given)
    settings, steps = arguments.pop("settings", {}), arguments.pop("steps", FULL["train__total_steps"])
    work = {"sweep": sweep, "storm": storm, "generators": generators, "signals": signals, "disk": disk}[mode]
    cases = [Case(name, Path(root) / name, {**settings}, steps) for name in names.split(",")]
    for case in cases:  # whatever is imported late is imported now; an engine may start threads, which a fork loses
        warm = Case(case.name, case.root, {**settings, "rollout__engine": "local"}, 1)
        warm.root.mkdir(parents=True)
        warm.made(case.root / "warm").learn()
        shutil.rmtree(case.root / "warm")
    gc.collect()
    gc.freeze()  # so that children copy less memory
    found = {case.name: {**work(case, **arguments), "problems": case.problems} for case in cases}
    print(json.dumps({"found": found}))


if __name__ == "__main__":
    main(*sys.argv[1:])
