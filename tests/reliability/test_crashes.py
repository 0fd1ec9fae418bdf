"""B: a run that is killed, damaged, stopped or short of space goes on from a complete checkpoint, by itself."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import trainkit
from faults import killed
from runs import USUAL, assert_same, full, state
from test_checkpoint import hurt, sealed
from trainkit import cli
from trainkit.errors import CheckpointError, ConfigError, NonFiniteError
from trainkit.runs import checkpoint
from trainkit.runs.lock import NAME
from trainkit.testing import tiny_gpt2
from trainkit.testing.trainers import tiny_trainer

Figure = Callable[[str], None]
LAST = "step_00000004"
BESIDE = {"train__save_async": True}


@pytest.fixture
def names(full: bool) -> list[str]:
    """PPO, RLOO, SFT; all algorithms with ``--full``."""
    return trainkit.available_trainers() if full else [*USUAL]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> dict[str, Path]:
    """A run of 4 steps of each algorithm with all its checkpoints; PPO's and RLOO's hold a collection."""
    root = tmp_path_factory.mktemp("saved")
    every = trainkit.available_trainers() if pytestconfig.getoption("--full") else USUAL
    for name in every:
        full(name, root / name, train__total_steps=4).learn()
    return {name: root / name for name in every}


def resumed(name: str, run_dir: Path, **changes: Any) -> Any:
    """A trainer that has begun to go on with a run."""
    trainer = full(name, run_dir, **{"train__total_steps": 4, "train__resume": "auto", **changes})
    trainer.begin()
    return trainer


# ---------------------------------------------------------------------------------------------------------- kills


def test_b1_killed_at_any_change_of_a_file(full: bool, drawn: int, figure: Figure, tmp_path: Path) -> None:
    """SIGKILL at each call of a save and an export that changes a file: goes on by itself, to the same bits.

    With ``--full`` at every call for three algorithms, saving at once and beside the training, and at 12 of each other.
    """
    plain, beside = {"steps": 2, "after": 2}, {"steps": 3, "after": 2, "settings": BESIDE}
    others = [name for name in trainkit.available_trainers() if name not in USUAL]
    drawn_calls = {"count": 12 if full else 4, "seed": drawn}
    if full:
        sweeps: list[tuple[Any, ...]] = [(USUAL, plain, {}), (USUAL, beside, {}), (others, plain, drawn_calls)]
    else:
        sweeps = [(USUAL, random.Random(drawn).choice([plain, beside]), drawn_calls)]
    kills, calls = 0, 0
    for index, (names, way, some) in enumerate(sweeps):
        (tmp_path / str(index)).mkdir()
        for found in killed("sweep", [*names], tmp_path / str(index), **way, **some).values():
            kills, calls = kills + found["kills"], calls + found["calls"]
            assert found["kills"] == some.get("count", found["calls"])
    figure(f"{kills} kills at {calls} calls of {sum(len(names) for names, *_ in sweeps)} saves, 0 differences")


VARIANTS: dict[str, dict[str, Any]] = {
    "fresh": {},
    "sampled ahead": {"rollout__staleness": 1, "method__ppo_epochs": 1},
    "saving beside": BESIDE,
}


def test_b2_killed_again_and_again(full: bool, drawn: int, figure: Figure, tmp_path: Path) -> None:
    """SIGKILL at random calls and times, started again each time: no intervention, the same bits.

    With ``--full`` 100 times for three algorithms and each variant of PPO, and 20 times for each other algorithm.
    """
    others = [name for name in trainkit.available_trainers() if name not in USUAL]
    if full:
        storms = [([*USUAL], "fresh", 100), (["ppo"], "sampled ahead", 100), (["ppo"], "saving beside", 100)]
        storms.append((others, "fresh", 20))
    else:
        which = random.Random(drawn).choice([*VARIANTS])
        storms = [(["ppo"], which, 7), (["rloo", "sft"], "fresh", 7)]
    kills, runs = 0, 0
    for index, (names, variant, number) in enumerate(storms):
        (tmp_path / str(index)).mkdir()
        root, settings = tmp_path / str(index), VARIANTS[variant]
        for found in killed("storm", names, root, kills=number, seed=drawn, settings=settings).values():
            assert found["kills"] == number
            assert found["after steps"][0] == 0, "the first kill came before the first checkpoint"
            kills, runs = kills + found["kills"], runs + found["runs"]
    figure(f"{kills} kills in {runs} runs, 0 differences ({', '.join(variant for _, variant, _ in storms)})")


def test_b3_a_disk_that_fails(full: bool, drawn: int, figure: Figure, tmp_path: Path) -> None:
    """No space, I/O error or read-only during a save: the error says where and how much; both policies; resumes."""
    name, count = random.Random(drawn).choice(USUAL), 0 if full else 6
    found = killed("disk", [name], tmp_path, steps=4, after=2, count=count, seed=drawn)[name]
    figure(f"{name}: {found['faults']} runs with a fault, 0 lost")
    assert found["faults"] == 2 * count if count else found["faults"] > 200


def test_b10_retention_never_leaves_none(full: bool, drawn: int, figure: Figure, tmp_path: Path) -> None:
    """Killed at removals and renames: there is a complete checkpoint from the first on, and the best export is kept."""
    settings = {"train__save_best": True, "train__eval_interval": 1, "train__keep_checkpoints": 1}
    some = {} if full else {"count": 5, "seed": drawn}
    able = ["ppo", "rloo"]  # those of the usual ones that have rewards, and so a best
    found = killed("sweep", able, tmp_path, steps=3, after=0, removals=True, settings=settings, **some)
    kills = sum(each["kills"] for each in found.values())
    figure(f"{kills} kills at {sum(each['calls'] for each in found.values())} calls, {len(able)} algorithms, 0 lost")
    assert kills >= 10


def test_b11_signals(names: list[str], full: bool, drawn: int, figure: Figure, tmp_path: Path) -> None:
    """SIGTERM, SIGUSR1: saved within a step, exit 143 or none, same bits; a second while saving; SIGINT twice."""
    found = killed("signals", names, tmp_path, count=3 if full else 1, seed=drawn)
    late = [steps for each in found.values() for steps in each["steps late"]]
    sent = sum(each["signals"] for each in found.values())
    figure(f"{sent} signals, saved at most {max(late)} steps after, 0 differences")
    assert max(late) <= 1


# --------------------------------------------------------------------------------------------------------- damage


def test_b4_files_that_are_cut_or_garbage(
    names: list[str], saved: dict[str, Path], figure: Figure, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each file cut at 0, 50 and 99 % or garbage: set aside with a message, the checkpoint before is used."""
    count = 0
    for name in names:
        files = [path.name for path in (saved[name] / "checkpoints" / LAST).iterdir()]
        for file, damage in ((file, how) for file in files for how in ("empty", "cut", "almost whole", "garbage")):
            run_dir = Path(shutil.copytree(saved[name], tmp_path / f"{name}-{file}-{damage}"))
            hurt(run_dir / "checkpoints" / LAST / file, damage)
            caplog.clear()
            assert resumed(name, run_dir).progress.step == 3
            assert f"{run_dir / 'checkpoints' / LAST} is not intact" in caplog.text
            assert len(list((run_dir / "checkpoints").glob(f"{LAST}-*.corrupt"))) == 1
            shutil.rmtree(run_dir)
            count += 1
    figure(f"{count} damages in {len(names)} algorithms' files found")


def test_b5_a_flipped_bit(names: list[str], saved: dict[str, Path], drawn: int, figure: Figure, tmp_path: Path) -> None:
    """One flipped bit, at 20 random places of each file: found."""
    chance, flips, found = random.Random(drawn), 0, 0
    for name in names:
        path = Path(shutil.copytree(saved[name] / "checkpoints" / LAST, tmp_path / name / LAST))
        for file in sorted(path.iterdir()):
            whole = file.read_bytes()
            for bit in chance.sample(range(8 * len(whole)), 20):
                flipped = bytearray(whole)
                flipped[bit // 8] ^= 1 << bit % 8
                file.write_bytes(flipped)
                flips, found = flips + 1, found + (checkpoint.find_fault(path) is not None)
            file.write_bytes(whole)
        assert checkpoint.find_fault(path) is None
    figure(f"{found} of {flips} found")
    assert found == flips


def test_b6_a_missing_file(
    names: list[str], saved: dict[str, Path], figure: Figure, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each file missing: never a new optimizer, generator or schedule, but the checkpoint before, to the same bits."""
    count = 0
    for name in names:
        honest = full(name, tmp_path / name, train__total_steps=4)
        honest.learn()
        for file in sorted(path.name for path in (saved[name] / "checkpoints" / LAST).iterdir()):
            run_dir = Path(shutil.copytree(saved[name], tmp_path / f"{name}-{file}"))
            (run_dir / "checkpoints" / LAST / file).unlink()
            trainer = resumed(name, run_dir)
            assert trainer.progress.step == 3
            assert f"{run_dir / 'checkpoints' / LAST} is not intact" in caplog.text
            trainer.learn()
            assert_same(state(trainer), state(honest))
            count += 1
    figure(f"{count} missing files in {len(names)} algorithms, 0 differences")


Change = Callable[[dict[str, Any], str], Any]
CHANGES: dict[str, Change] = {
    "missing": lambda state, key: state.pop(key),
    "another shape": lambda state, key: state.update({key: state[key].flatten()[:-1].clone()}),
    "extra": lambda state, key: state.update({f"{key}_more": state[key].clone()}),
}


def test_b7_tensors_that_do_not_fit(
    names: list[str], saved: dict[str, Path], full: bool, drawn: int, figure: Figure, tmp_path: Path
) -> None:
    """A tensor that is missing, extra or of another shape: refused or set aside before anything is loaded, by name."""
    count, chance = 0, random.Random(drawn)
    for name in names:
        path = tmp_path / name / "checkpoints" / LAST
        shutil.copytree(saved[name] / "checkpoints" / LAST, path)
        honest = {stem: checkpoint.read_state(path, stem) for stem in ("model", "loop")}
        every = full and name in USUAL
        keys = [*honest["model"]] if every else chance.sample([*honest["model"]], 4)
        slots = [*honest["loop"]["optimizer"]["state"]]
        for what, change in CHANGES.items():
            for key in keys:
                model = dict(honest["model"])
                change(model, key)
                refused(name, path, "model", model, re.escape(key))
                checkpoint.write_state(path, "model", honest["model"])
                count += 1
            for slot in slots if every else chance.sample(slots, 2):
                loop = checkpoint.read_state(path, "loop")
                states = loop["optimizer"]["state"]
                if what == "extra":
                    states[10**6] = states[slot]
                else:
                    change(*((states, slot) if what == "missing" else (states[slot], "exp_avg")))
                refused(name, path, "loop", loop, "the optimizer's (states of parameters differ in|exp_avg of) ")
                checkpoint.write_state(path, "loop", honest["loop"])
                count += 1
        count += stores(path)
    figure(f"{count} of {count} refused")


def refused(name: str, path: Path, stem: str, changed: dict[str, Any], said: str) -> None:
    """Require that a checkpoint with a changed state is refused, by name, and that nothing of it is loaded."""
    checkpoint.write_state(path, stem, changed)
    sealed(path)
    trainer = full(name, path.parents[2] / "other", train__total_steps=4)
    trainer.models.build()  # makes the model
    before = state(trainer)
    with pytest.raises(CheckpointError, match=f"(?s)does not fit this model: .*{said}"):
        trainer.load(path)
    assert_same(state(trainer), before)


def stores(path: Path) -> int:
    """Require that a checkpoint is at fault whose experience has other columns; return how many it was tried with."""
    if not (path / "store-00000.json").exists():
        return 0
    honest = json.loads((path / "store-00000.json").read_text())
    columns = honest["dict"][0][1]["fields"]["dict"]
    cases = [[*columns[:i], *columns[i + 1 :]] for i in range(len(columns))]
    cases.append([*columns, ["surprise", columns[-1][1]]])
    for changed in cases:
        honest["dict"][0][1]["fields"]["dict"] = changed
        (path / "store-00000.json").write_text(json.dumps(honest))
        sealed(path)
        fault = checkpoint.find_fault(path)
        assert fault is not None
        assert "column" in fault
    return len(cases)


# ---------------------------------------------------------------------------------------------------------- drift

TASK = """
from trainkit.testing import character_tokenizer

def task():
    return {'samples': [('a', 'b')] * 4, 'tokenizer': character_tokenizer('ab')}
"""


def test_b8_another_configuration(figure: Figure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another configuration when resuming: each difference is printed; refused, unless it may differ or is allowed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path("task_for_drift.py").write_text(TASK)
    changes = {"model.model_path": tiny_gpt2(4), "train.save_interval": 1, "train.run_dir": "run"}
    config = tiny_trainer("sft", tmp_path / "unused").config.update({**changes, "train.total_steps": 1})
    config.update({"optimizer.lr": 2e-5}).save_yaml("run.yaml")
    command = ["train", "run.yaml", "--task", "task_for_drift.py:task"]
    assert CliRunner().invoke(cli.app, command).exit_code == 0
    resuming = [*command, "train.resume=auto", "train.total_steps=2"]
    others = ["optimizer.lr=0.5", "optimizer.weight_decay=0.25", "train.seed=7", "train.batch_size=4"]
    others += ["train.max_grad_norm=0.5", "train.seq_length=32", "scheduler.warmup_steps=1", "optimizer.name=sgd"]
    said = 0
    for other in others:
        key, _, value = other.partition("=")
        done = CliRunner().invoke(cli.app, [*resuming, other])
        assert done.exit_code == 1
        assert re.search(rf"\n  {re.escape(key)}: .* -> '?{re.escape(value)}'?\n.*--allow-drift", done.stderr), other
        said += 1
    assert json.loads(Path("run/metrics.jsonl").read_text().splitlines()[-1])["step"] == 1, "no step was made"
    allowed = CliRunner().invoke(cli.app, [*resuming, "optimizer.lr=0.5", "--allow-drift"])
    assert allowed.exit_code == 0, allowed.output
    assert "changed: optimizer.lr: 2e-05 -> 0.5" in allowed.output
    assert json.loads(Path("run/metrics.jsonl").read_text().splitlines()[-1])["train/lr"] == 0.5
    may = ["train.total_steps=3", "train.save_interval=2", "train.eval_interval=1", "train.keep_checkpoints=5"]
    longer = CliRunner().invoke(cli.app, [*command, "train.resume=auto", "optimizer.lr=0.5", *may])
    assert longer.exit_code == 0, longer.output
    figure(f"{said} of {len(others)} refused with their difference, {len(may)} accepted, 1 allowed")


# ----------------------------------------------------------------------------------------------------------- lock

HOLDER = """
import os, sys, time
from pathlib import Path
from trainkit.runs import RunLock

lock = RunLock(Path(sys.argv[1]))
child = os.fork()
if child == 0:
    time.sleep(60)
print(os.getpid(), child, flush=True)
time.sleep(60)
"""


def test_b9_a_second_process(figure: Figure, tmp_path: Path) -> None:
    """A second process on a run's directory is refused within 1 s, by pid and host; let in when the first was killed.

    Also where a process that the first one forked is still there.
    """
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    pid, child = map(int, holder.stdout.readline().split())
    try:
        trainer = tiny_trainer("sft", tmp_path / "run", train__total_steps=1)
        started = time.monotonic()
        with pytest.raises(ConfigError, match=rf"use by process {pid} on {re.escape(socket.gethostname())} since 20"):
            trainer.learn()
        lasted = time.monotonic() - started
        assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [NAME]
        holder.kill()
        holder.wait()
        assert json.loads((tmp_path / "run" / NAME).read_text())["pid"] == pid, "what the killed one has left"
        os.kill(child, 0)  # it lives
        trainer.learn()
        assert not (tmp_path / "run" / NAME).exists()
    finally:
        holder.kill()
        os.kill(child, signal.SIGKILL)
        holder.wait()
        holder.stdout.close()
    figure(f"refused in {lasted:.2f} s; let in after kill -9")
    assert lasted < 1


# ----------------------------------------------------------------------------------------------------- not finite


class Breaks:
    """Breaks a weight after a step that was finite itself."""

    @trainkit.hookimpl
    def on_step(self, trainer: Any, step: int) -> None:
        if step == 3:
            next(trainer.unwrapped.parameters()).data.fill_(torch.inf)


def test_b12_what_is_not_finite_is_not_saved(names: list[str], figure: Figure, tmp_path: Path) -> None:
    """A step with a loss, gradient or weights that are not finite is never saved: the newest is of the step before."""
    cases = [(name, what) for name in names for what in ("loss", "gradient", "weights")]
    for name, what in cases:
        trainer = full(name, tmp_path / name / what, callbacks=[Breaks()] if what == "weights" else [])
        if what != "weights":
            trainer.loss = broken(trainer, what)
        with pytest.raises(NonFiniteError, match="step 3"):
            trainer.learn()
        root = tmp_path / name / what / "checkpoints"
        newest = checkpoint.newest_whole(root)
        assert newest is not None
        assert newest.name == "step_00000002"
        assert sorted(path.name for path in root.iterdir()) == ["step_00000001", "step_00000002"]
        assert all(t.isfinite().all() for t in checkpoint.read_state(newest, "model").values())
    figure(f"{len(cases)} of {len(cases)} runs end at the step, and keep the one before")


def broken(trainer: Any, what: str) -> Any:
    """The loss of a trainer, which is not finite from the third step on, or whose gradient is not."""
    honest = trainer.loss

    def loss(batch: Any) -> Any:
        value, found = honest(batch)
        if trainer.progress.step < 2:
            return value, found
        return (value * torch.nan, found) if what == "loss" else (value + (value - value.detach()).sqrt(), found)

    return loss
