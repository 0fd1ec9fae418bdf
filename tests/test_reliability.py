"""A run is never lost and never quietly another one: killed, stopped, damaged, started twice, changed on the way.

The letters and numbers are those of the checks that the tests are about: A resuming, B crashes.
"""

from __future__ import annotations

import gc
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
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import trainkit
from trainkit.errors import CheckpointError, ConfigError, NonFiniteError, RewardError
from trainkit.runs import RunLock, checkpoint
from trainkit.runs.lock import NAME
from trainkit.testing import character_tokenizer, tiny_gpt2
from trainkit.testing.trainers import Letters, count_first_letters, tiny_trainer

WATCHED = ("dpo", "ilql", "online_dpo", "ppo", "rloo", "sft")
TRAINERS = [name for name in trainkit.available_trainers() if name in WATCHED]
all_trainers = pytest.mark.parametrize("name", TRAINERS)
HERE = Path(__file__).parent

FULL: dict[str, Any] = {
    "model": tiny_gpt2(10, resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1),
    "model__disable_dropout": False,
    "train__batch_size": 6,  # which does not divide 16 rows: passes end in a smaller batch
    "train__microbatch_size": 4,
    "train__total_steps": 12,
    "train__save_interval": 1,
    "train__keep_checkpoints": 99,
}
"""Dropout, micro-batches and partial epochs; PPO goes twice over each collection, so 12 steps are two of them."""


def full(name: str, run_dir: Path, **changes: Any) -> Any:
    passes = {"method__ppo_epochs": 2} if name == "ppo" else {}
    return tiny_trainer(name, run_dir, **{**FULL, **passes, **changes})


def state(trainer: Any) -> dict[str, Tensor]:
    """Weights and optimizer, every tensor by its path."""
    packer = checkpoint.Packer()
    packer.pack({"model": trainer.unwrapped.state_dict(), "optimizer": trainer.optimizer.state_dict()})
    return {name: tensor.clone() for name, tensor in packer.tensors.items()}


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=300, check=False)


def steps_logged(run_dir: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


# ------------------------------------------------------------------------------------------------- A: resuming

TWICE = """
import sys
from pathlib import Path

import torch

torch.set_num_threads(1)
sys.path.insert(0, sys.argv[1])
from killed import digest
from test_reliability import TRAINERS, full

root, again = Path(sys.argv[2]), sys.argv[3] == "again"
for name in TRAINERS:
    straight = full(name, root / name / f"straight-{again}")
    straight.learn()
    steps = {"train__resume": "auto"} if again else {"train__total_steps": 6}
    stopped = full(name, root / name / "stopped", **steps)
    stopped.learn()
    print("digest", name, digest(straight), digest(stopped) if again else "")
"""


@pytest.mark.slow
def test_another_process_makes_the_same_run_and_continues_one_to_the_same_end(tmp_path: Path) -> None:
    """A1, A2: the second process runs anew, and goes on with what the first stopped at the end of a collection."""
    said = []
    for which in ("first", "again"):
        done = python("-c", TWICE, str(HERE), str(tmp_path), which)
        assert done.returncode == 0, done.stderr[-3000:]
        said.append([line.split()[1:] for line in done.stdout.splitlines() if line.startswith("digest")])
    for (name, first), (_, second, resumed) in zip(*said, strict=True):
        assert first == second, name
        assert first == resumed, name


@pytest.mark.daily(name=("ppo",))
@all_trainers
def test_resumed_at_every_step_a_run_ends_with_the_same_bits(name: str, tmp_path: Path) -> None:
    """A3: in the middle of a pass, between passes, between collections, at the end."""
    straight = full(name, tmp_path / "straight")
    straight.learn()
    end = state(straight)
    for step in range(1, 13):
        path = tmp_path / "straight" / "checkpoints" / f"step_{step:08d}"
        resumed = full(name, tmp_path / str(step), train__resume=str(path), train__save_interval=0)
        resumed.learn()
        assert resumed.progress.step == 12
        assert resumed.progress.samples == straight.progress.samples
        assert_same(state(resumed), end)


def snapshot(run_dir: Path) -> dict[str, tuple[int, bytes]]:
    return {str(p): (p.stat().st_mtime_ns, p.read_bytes()) for p in run_dir.rglob("*") if p.is_file()}


@pytest.mark.daily(name=("ppo",))
@all_trainers
def test_resuming_a_finished_run_changes_no_file(name: str, tmp_path: Path) -> None:
    """A4: no step, no evaluation, no export, no event file."""
    changes = {"train__trackers": ["tensorboard"], "train__eval_interval": 2, "train__total_steps": 3}
    first = full(name, tmp_path / "run", **changes)
    first.learn()
    before = snapshot(tmp_path / "run")
    again = full(name, tmp_path / "run", **changes, train__resume="auto")
    again.learn()
    assert snapshot(tmp_path / "run") == before
    assert again.progress.step == 3
    assert_same(state(again), state(first))


def test_a_finished_run_can_be_made_longer_and_its_export_is_the_new_one(tmp_path: Path) -> None:
    for steps in (2, 4):
        trainer = full("ppo", tmp_path / "run", train__total_steps=steps, train__resume="auto")
        trainer.learn()
    straight = full("ppo", tmp_path / "straight", train__total_steps=4)
    straight.learn()
    for file in ("model.safetensors", "trainkit.json"):
        assert (tmp_path / "run" / "model" / file).read_bytes() == (tmp_path / "straight/model" / file).read_bytes()
    assert json.loads((tmp_path / "run" / "model" / "trainkit.json").read_text()) == {"method": "ppo", "step": 4}


def test_a_run_that_died_between_its_last_step_and_its_export_exports_when_resumed(tmp_path: Path) -> None:
    full("sft", tmp_path, train__total_steps=2).learn()
    export = (tmp_path / "model" / "model.safetensors").read_bytes()
    shutil.rmtree(tmp_path / "model")
    full("sft", tmp_path, train__total_steps=2, train__resume="auto").learn()
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == export


@pytest.mark.daily(name=("ppo",))
@all_trainers
def test_the_weights_after_six_steps_do_not_depend_on_how_a_batch_is_split(name: str, tmp_path: Path) -> None:
    """A6: to 1e-5, sampled responses and all."""
    ends = []
    for size in (None, 1, 2, 4, 8):
        trainer = tiny_trainer(name, tmp_path / str(size), train__microbatch_size=size)
        trainer.learn()
        ends.append({key: tensor.clone() for key, tensor in trainer.unwrapped.state_dict().items()})
    for end in ends[1:]:
        for key, tensor in end.items():
            torch.testing.assert_close(tensor, ends[0][key], rtol=0, atol=1e-5)


# ---------------------------------------------------------------------------------------------- B: real kills


def killed(*arguments: str) -> dict[str, Any]:
    done = python(str(HERE / "killed.py"), *arguments)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert found["problems"] == []
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "steps", "first", "stride", "kills", "settings"),
    [
        ("ppo", 2, 2, 1, 55, {}),
        ("sft", 2, 0, 6, 12, {}),
        ("rloo", 2, 0, 8, 11, {}),
        ("ppo", 3, 0, 5, 30, {"train__save_async": True}),
    ],
    ids=["ppo, all of the last save and the export", "sft, all of a run", "rloo, all of a run", "ppo, saving beside"],
)
def test_killed_at_a_change_of_a_file_a_run_goes_on_by_itself_to_the_same_bits(
    name: str, steps: int, first: int, stride: int, kills: int, settings: dict[str, Any], tmp_path: Path
) -> None:
    """B1: by SIGKILL; weights, optimizer, export, metrics and samples are those of a run that was left alone."""
    found = killed("sweep", name, str(tmp_path), str(steps), str(first), str(stride), json.dumps(settings))
    assert found["kills"] >= kills


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [{}, {"rollout__staleness": 1, "method__ppo_epochs": 1}, {"train__save_async": True}],
    ids=["fresh", "sampled ahead", "saving beside"],
)
def test_a_run_killed_thirty_times_ends_with_the_same_bits(settings: dict[str, Any], tmp_path: Path) -> None:
    """B2: by SIGKILL, at random changes of files and at random times, before the first checkpoint too.

    With staleness 1 checkpoints hold the collection that was sampled ahead.
    """
    found = killed("storm", "ppo", str(tmp_path), "12", "36", json.dumps(settings))
    assert found["kills"] >= 30
    assert found["after steps"][0] == 0, "the first kill came before the first checkpoint"


# -------------------------------------------------------------------------------------------------- B: damage


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run of 4 steps of each algorithm with all its checkpoints; PPO's and RLOO's hold a collection."""
    root = tmp_path_factory.mktemp("saved")
    for name in TRAINERS:
        full(name, root / name, train__total_steps=4).learn()
    return {name: root / name for name in TRAINERS}


@pytest.fixture
def a_run(saved: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved["ppo"], tmp_path / "run"))


@pytest.mark.daily(name=("ppo",))
@all_trainers
def test_a_flipped_bit_in_any_file_of_a_checkpoint_is_found(name: str, saved: dict[str, Path], tmp_path: Path) -> None:
    """B5: at 20 random places of each file of a real checkpoint."""
    path = Path(shutil.copytree(saved[name] / "checkpoints" / "step_00000004", tmp_path / "step_00000004"))
    chance = random.Random(3)
    for file in sorted(path.iterdir()):
        whole = file.read_bytes()
        for bit in chance.sample(range(8 * len(whole)), 20):
            flipped = bytearray(whole)
            flipped[bit // 8] ^= 1 << bit % 8
            file.write_bytes(flipped)
            assert checkpoint.find_fault(path) is not None, f"bit {bit} of {file.name}"
        file.write_bytes(whole)
    assert checkpoint.find_fault(path) is None


@pytest.mark.daily(name=("ppo",))
@all_trainers
def test_without_any_one_file_a_checkpoint_is_set_aside_and_the_one_before_continues_the_run(
    name: str, saved: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """B6: no optimizer, schedule, collection or counter starts afresh."""
    for file in sorted((saved[name] / "checkpoints" / "step_00000004").iterdir()):
        run_dir = Path(shutil.copytree(saved[name], tmp_path / file.name))
        (run_dir / "checkpoints" / "step_00000004" / file.name).unlink()
        resumed = full(name, run_dir, train__total_steps=4, train__resume="auto")
        resumed.generate("a") if resumed.online else resumed.save()  # whatever begins the run
        assert resumed.progress.step == 3
        assert f"{run_dir / 'checkpoints' / 'step_00000004'} is not intact" in caplog.text
        assert any(path.suffix == ".corrupt" for path in (run_dir / "checkpoints").iterdir())


def test_where_no_checkpoint_is_whole_the_run_does_not_quietly_start_anew(a_run: Path) -> None:
    for path in (a_run / "checkpoints").iterdir():
        (path / "loop.safetensors").unlink()
    before = (a_run / "metrics.jsonl").read_text()
    for _ in range(2):  # the second time they have been set aside already
        with pytest.raises(
            CheckpointError, match=r"no checkpoint under .* is intact \(step_00000001-.*so the run cannot"
        ):
            full("ppo", a_run, train__total_steps=4, train__resume="auto").learn()
    assert (a_run / "metrics.jsonl").read_text() == before


@pytest.mark.parametrize("what", ["loss", "gradient"])
@all_trainers
def test_a_step_that_is_not_finite_is_never_saved(name: str, what: str, tmp_path: Path) -> None:
    """B12: with a checkpoint at each step, the newest is of the step before, and whole."""
    trainer = full(name, tmp_path)
    honest = trainer.loss

    def broken(batch: Any) -> Any:
        loss, found = honest(batch)
        if trainer.progress.step < 2:
            return loss, found
        return (loss * torch.nan, found) if what == "loss" else (loss + (loss - loss.detach()).sqrt(), found)

    trainer.loss = broken
    with pytest.raises(NonFiniteError, match="step 3"):
        trainer.learn()
    newest = checkpoint.newest_whole(tmp_path / "checkpoints")
    assert newest is not None
    assert newest.name == "step_00000002"
    assert all(t.isfinite().all() for t in checkpoint.read_state(newest, "model").values())


def test_weights_that_a_step_has_broken_are_not_saved(tmp_path: Path) -> None:
    """B12: loss and gradient were finite, the step was too long."""

    class Breaks:
        @trainkit.hookimpl
        def on_step(self, trainer: Any, step: int) -> None:
            if step == 3:
                next(trainer.unwrapped.parameters()).data.fill_(torch.inf)

    trainer = full("ppo", tmp_path)
    trainer.hooks.register(Breaks())
    with pytest.raises(NonFiniteError, match=r"after step 3 the weights are not finite in model\..*nothing was saved"):
        trainer.learn()
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step_00000001", "step_00000002"]


@pytest.mark.parametrize("save_interval", [0, 10])
def test_weights_that_are_not_finite_are_not_exported(save_interval: int, tmp_path: Path) -> None:
    """With and without checkpoints: the last step was too long, and no loss follows that would say so."""

    class Breaks:
        @trainkit.hookimpl
        def on_step(self, trainer: Any, step: int) -> None:
            if step == trainer.total_steps:
                next(trainer.unwrapped.parameters()).data[0].fill_(torch.nan)

    trainer = full("sft", tmp_path, train__save_interval=save_interval, train__eval_interval=0)
    trainer.hooks.register(Breaks())
    with pytest.raises(NonFiniteError, match=r"the weights are not finite in model\..*nothing was saved or exported"):
        trainer.learn()
    assert not (tmp_path / "model").exists()
    assert not list(tmp_path.glob(".tmp-*"))


# --------------------------------------------------------------------------------------------------- B8: drift


def drifted(run_dir: Path, **changes: Any) -> Any:
    trainer = full("ppo", run_dir, **{"train__total_steps": 4, "train__resume": "auto", **changes})
    trainer.allow_drift = True
    return trainer


def rates_of(trainer: Any) -> list[float]:
    used: list[float] = []
    trainer.optimizer.optimizer.register_step_pre_hook(lambda opt, *_: used.append(opt.param_groups[0]["lr"]))
    trainer.learn()
    return used


def test_allowed_drift_is_told_and_takes_effect(a_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes = {"optimizer__lr": 0.5, "optimizer__weight_decay": 0.1, "optimizer__kwargs": {"eps": 1e-3}}
    trainer = drifted(a_run, **changes, train__total_steps=6)
    rates = rates_of(trainer)
    assert rates == [0.5, 0.5], "the steps after the resumed one, at the new rate"
    group = trainer.optimizer.param_groups[0]
    assert (group["weight_decay"], group["eps"]) == (0.1, 1e-3)
    said = capsys.readouterr().out
    assert f"resumed from {a_run / 'checkpoints' / 'step_00000004'} at step 4\n" in said
    assert "  changed: optimizer.lr: 0.001 -> 0.5\n" in said
    assert "total_steps" not in said, "that may change anyway"
    assert trainkit.TRLConfig.load_yaml(a_run / "config.yaml").optimizer.lr == 0.5


def test_a_fixed_price_of_divergence_follows_the_configuration_and_a_steered_one_the_checkpoint(a_run: Path) -> None:
    fixed = drifted(a_run, method__init_kl_coef=0.5)
    fixed.generate("a")
    assert fixed.kl.coef == 0.5
    del fixed
    steered = drifted(a_run, method__init_kl_coef=0.5, method__target=6.0)
    steered.generate("a")
    assert steered.kl.coef != 0.5


def test_the_optimizer_keeps_its_memory_when_its_rate_changes(a_run: Path) -> None:
    trainer = drifted(a_run, optimizer__lr=0.5)
    trainer.generate("a")
    saved = checkpoint.read_state(a_run / "checkpoints" / "step_00000004", "loop")["optimizer"]["state"]
    for index, found in enumerate(trainer.optimizer.state.values()):
        assert found["step"] == 4
        assert torch.equal(found["exp_avg"], saved[index]["exp_avg"])


def test_a_new_schedule_goes_on_at_the_step_where_the_run_stands(a_run: Path) -> None:
    """Linear over 8 steps: after 4 of them half of the rate is left."""
    trainer = drifted(a_run, scheduler__name="linear", optimizer__lr=1.0, train__total_steps=8)
    assert rates_of(trainer) == [0.5, 0.375, 0.25, 0.125]


def test_a_longer_run_follows_the_longer_schedule_from_the_first_step_on(tmp_path: Path) -> None:
    changes = {"scheduler__name": "linear", "optimizer__lr": 1.0}
    full("sft", tmp_path, train__total_steps=2, **changes).learn()
    longer = full("sft", tmp_path, train__total_steps=4, train__resume="auto", **changes)
    longer.generate("a")
    assert longer.optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"optimizer__name": "sgd"}, r"another method or optimizer: optimizer\.name: 'adamw' -> 'sgd'"),
        (
            {"model": {**tiny_gpt2(10), "n_embd": 64}},
            r"does not fit this model: .* in the checkpoint, and \(.*64.*\) in the model",
        ),
        ({"model": {**tiny_gpt2(10), "n_layer": 1}}, r"model: model\.transformer\.h\.1\..* is only in the checkpoint"),
    ],
)
def test_what_cannot_be_continued_is_refused_also_where_drift_is_allowed(
    changes: dict[str, Any], said: str, a_run: Path
) -> None:
    before = snapshot(a_run)
    with pytest.raises(CheckpointError, match=f"(?s){said}"):
        drifted(a_run, **changes).learn()
    assert snapshot(a_run) == before


ODD = {"samples": [("ab", "c"), ("cd", "e")] * 8, "rewards": [0.0, 1.0] * 8}
OTHER_DATA: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "a prompt": ("ppo", {"prompts": ["a", "b", "c", "d"] * 4}, {"prompts": ["a", "b", "c", "e"] * 4}, "'prompt'"),
    "their order": ("ppo", {"prompts": ["a", "b", "c", "d"]}, {"prompts": ["b", "a", "c", "d"]}, "'prompt'"),
    "a column": (
        "ppo",
        {"prompts": [{"prompt": "a", "answer": 1}, {"prompt": "b", "answer": 2}]},
        {"prompts": [{"prompt": "a", "answer": 1}, {"prompt": "b", "answer": 3}]},
        "'answer'",
    ),
    "a sample": ("ilql", ODD, {**ODD, "samples": [("ab", "c"), ("cd", "f")] * 8}, "'[a-z]+'"),
    "a reward": ("ilql", ODD, {**ODD, "rewards": [0.0, 0.5] * 8}, "'reward'"),
    "the tokenizer": ("ppo", {}, {"tokenizer": character_tokenizer("hgfedcba")}, "the tokenizer"),
}


@pytest.mark.parametrize("case", [*OTHER_DATA])
def test_a_run_does_not_go_on_with_other_data_unless_that_is_allowed(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name, before, now, said = OTHER_DATA[case]
    changes: dict[str, Any] = {"train__save_interval": 1, "train__total_steps": 1, "train__eval_interval": 0}
    tiny_trainer(name, tmp_path, arguments=before, **changes).learn()
    changes |= {"train__total_steps": 2, "train__resume": "auto"}
    tiny_trainer(name, tmp_path, arguments=before, **changes).begin()
    with pytest.raises(CheckpointError, match=f"a run with other data.*\n  data: (the column )?{said}.* changed\n"):
        tiny_trainer(name, tmp_path, arguments=now, **changes).learn()
    allowed = tiny_trainer(name, tmp_path, arguments={**now, "allow_drift": True}, **changes)
    allowed.learn()
    assert allowed.progress.step == 2
    assert any("changed: data: " in line for line in allowed.resumed)


def test_another_environment_is_refused(tmp_path: Path) -> None:
    class Others(Letters):
        """The same game."""

    changes: dict[str, Any] = {"train__save_interval": 1, "train__total_steps": 1, "rollout__max_new_tokens": 4}
    given: dict[str, Any] = {"reward_fn": None, "environment": Letters}
    tiny_trainer("ppo", tmp_path, arguments=given, **changes).learn()
    with pytest.raises(CheckpointError, match="data: the environment changed"):
        tiny_trainer(
            "ppo", tmp_path, arguments={**given, "environment": Others}, **changes, train__resume="auto"
        ).begin()


def test_another_method_is_refused_also_where_drift_is_allowed(a_run: Path) -> None:
    trainer = full("rloo", a_run, train__total_steps=4, train__resume="auto")
    trainer.allow_drift = True
    with pytest.raises(CheckpointError, match=r"another method or optimizer: method\.name: 'ppo' -> 'rloo'"):
        trainer.learn()


def test_another_batch_size_goes_on_with_the_rows_that_are_left(a_run: Path) -> None:
    """After step 4 one batch of 6 of the second pass over 16 rows is made: two of 3."""
    trainer = drifted(a_run, train__batch_size=3)
    trainer.generate("a")
    assert (trainer.progress.epoch, trainer.progress.position) == (1, 2)


def test_the_command_line_and_train_allow_drift(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from trainkit import cli

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path("task_for_drift.py").write_text(
        "from trainkit.testing import character_tokenizer\n"
        "def task(): return {'samples': [('a', 'b')] * 4, 'tokenizer': character_tokenizer('ab')}"
    )
    tiny_trainer("sft", tmp_path / "unused").config.update(
        {"model.model_path": tiny_gpt2(4), "train.save_interval": 1, "train.run_dir": "run", "train.total_steps": 1}
    ).save_yaml("run.yaml")
    command = ["train", "run.yaml", "--task", "task_for_drift.py:task"]
    assert CliRunner().invoke(cli.app, command).exit_code == 0
    command += ["train.resume=auto", "optimizer.lr=0.25", "train.total_steps=2"]
    refused = CliRunner().invoke(cli.app, command)
    assert refused.exit_code == 1
    assert re.search(r"\n  optimizer\.lr: 0\.001 -> 0\.25\n.*--allow-drift", refused.stderr)
    allowed = CliRunner().invoke(cli.app, [*command, "--allow-drift"])
    assert allowed.exit_code == 0, allowed.output
    assert json.loads(Path("run/metrics.jsonl").read_text().splitlines()[-1])["train/lr"] == 0.25


# ------------------------------------------------------------------------------------------------- B9: the lock

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


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[tuple[int, int]]:
    """Process ids of one that holds ``tmp_path / "run"``, and of one that it forked."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid, child = map(int, process.stdout.readline().split())
    yield pid, child
    process.kill()
    os.kill(child, signal.SIGKILL)
    process.wait()
    process.stdout.close()


def test_a_second_process_is_refused_at_once_and_let_in_when_the_first_was_killed(
    holder: tuple[int, int], tmp_path: Path
) -> None:
    """B9: also where a process that the first one forked is still there."""
    trainer = tiny_trainer("sft", tmp_path / "run", train__total_steps=1)
    started = time.monotonic()
    said = rf"run is in use by process {holder[0]} on {re.escape(socket.gethostname())} since 20"
    with pytest.raises(ConfigError, match=said):
        trainer.learn()
    assert time.monotonic() - started < 1
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [NAME]
    os.kill(holder[0], signal.SIGKILL)
    time.sleep(0.2)
    assert json.loads((tmp_path / "run" / NAME).read_text())["pid"] == holder[0], "what the killed one has left"
    os.kill(holder[1], 0)  # it lives
    trainer.learn()
    assert not (tmp_path / "run" / NAME).exists()


def test_two_trainers_of_one_process_do_not_share_a_directory(tmp_path: Path) -> None:
    first, second = (tiny_trainer("ppo", tmp_path, train__resume="auto") for _ in range(2))
    first.save()
    with pytest.raises(ConfigError, match=r"this process, another trainer"):
        second.save()
    reference = weakref.ref(first)
    del first
    second.save()  # nobody uses the first one any more
    assert reference() is None


def test_the_lock_is_let_go_when_a_run_ends_also_by_an_error(tmp_path: Path) -> None:
    def fails(**_: Any) -> list[float]:
        raise TimeoutError

    for reward, error in ((fails, RewardError), (count_first_letters, None)):
        trainer = tiny_trainer("ppo", tmp_path, train__resume="auto", train__total_steps=1)
        trainer.reward_fn = reward
        if error is not None:
            with pytest.raises(error):
                trainer.learn()
        else:
            trainer.learn()
        assert not (tmp_path / NAME).exists()
        RunLock(tmp_path).release()


def test_a_refused_run_leaves_no_directory(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no intact checkpoint"):
        tiny_trainer("sft", tmp_path / "a" / "b", train__resume=str(tmp_path / "nothing")).learn()
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_locks_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("trainkit.runs.lock.fcntl", None)
    tiny_trainer("sft", tmp_path, train__total_steps=1).learn()
    assert "cannot be locked (this system has no fcntl)" in caplog.text


# ------------------------------------------------------------------------------------------------ B11: SIGTERM


class Terminates:
    """Sends its own process SIGTERM at a step, as a scheduler would."""

    def __init__(self, at: int) -> None:
        self.at = at

    @trainkit.hookimpl
    def on_step(self, step: int) -> None:
        if step == self.at:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.daily(name=("ppo",))
@all_trainers
def test_sigterm_saves_at_the_step_and_the_run_resumes_to_the_same_bits(name: str, tmp_path: Path) -> None:
    """B11, with checkpoints that are far apart."""
    straight = full(name, tmp_path / "straight", train__save_interval=0)
    straight.learn()
    before = signal.getsignal(signal.SIGTERM)
    stopped = full(name, tmp_path / "run", train__save_interval=1000, callbacks=[Terminates(4)])
    with pytest.raises(SystemExit) as caught:
        stopped.learn()
    assert caught.value.code == 143
    assert signal.getsignal(signal.SIGTERM) == before
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_00000004"]
    resumed = full(name, tmp_path / "run", train__save_interval=1000, train__resume="auto")
    resumed.learn()
    assert_same(state(resumed), state(straight))
    assert steps_logged(tmp_path / "run") == [*range(1, 13)]


@pytest.mark.daily(name=("ppo",))
@pytest.mark.parametrize("at_call", [1, 3])
@pytest.mark.parametrize("name", ["ppo", "rloo"])
def test_sigterm_while_sampling_saves_what_was_before_the_collection(name: str, at_call: int, tmp_path: Path) -> None:
    """B11: a collection is sampled and scored in two parts; the second is not waited for."""
    straight = full(name, tmp_path / "straight")
    straight.learn()
    calls: list[int] = []

    def judge(**given: Any) -> list[float]:
        calls.append(len(calls))
        if len(calls) == at_call:
            os.kill(os.getpid(), signal.SIGTERM)
        return count_first_letters(**given)

    stopped = full(name, tmp_path / "run", train__save_interval=1000)
    stopped.reward_fn = judge
    with pytest.raises(SystemExit):
        stopped.learn()
    assert len(calls) == at_call
    step = 0 if at_call == 1 else 6 if name == "ppo" else 3
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == [f"step_{step:08d}"]
    resumed = full(name, tmp_path / "run", train__save_interval=1000, train__resume="auto")
    resumed.learn()
    assert_same(state(resumed), state(straight))


class Sends:
    """Sends its own process signals at a step."""

    def __init__(self, at: int, *signals: signal.Signals) -> None:
        self.at, self.signals = at, signals

    @trainkit.hookimpl
    def on_step(self, step: int) -> None:
        if step == self.at:
            for number in self.signals:
                os.kill(os.getpid(), number)


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        ([signal.SIGTERM, signal.SIGTERM], 143),
        ([signal.SIGHUP, signal.SIGTERM], 129),
        ([signal.SIGINT], 130),
        ([signal.SIGTERM, signal.SIGHUP], 143),
    ],
)
def test_signals_save_and_end_with_their_code(
    sent: list[signal.Signals], code: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The first decides; a second one is ignored unless it is SIGINT."""
    before = {number: signal.getsignal(number) for number in sent}
    stopped = full("sft", tmp_path, train__save_interval=1000, callbacks=[Sends(4, *sent)])
    with caplog.at_level("WARNING", logger="trainkit"), pytest.raises(SystemExit) as caught:
        stopped.learn()
    assert caught.value.code == code
    assert f"stopped by {sent[0].name} after step 4; saved" in caplog.text
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_00000004"]
    assert {number: signal.getsignal(number) for number in sent} == before


def test_a_signal_that_was_ignored_before_stays_ignored(tmp_path: Path) -> None:
    """As SIGHUP after `nohup`, where nobody is to end the run by closing a terminal."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        trainer = full("sft", tmp_path, train__save_interval=1000, callbacks=[Sends(4, signal.SIGHUP)])
        trainer.learn()
        assert trainer.progress.step == 12
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("sent", [[signal.SIGINT, signal.SIGINT], [signal.SIGTERM, signal.SIGINT]])
def test_a_second_interrupt_ends_at_once(sent: list[signal.Signals], tmp_path: Path) -> None:
    stopped = full("sft", tmp_path, train__save_interval=1000, callbacks=[Sends(4, *sent)])
    with pytest.raises(KeyboardInterrupt):
        stopped.learn()
    assert not (tmp_path / "checkpoints").exists()


def test_an_interrupt_while_saving_leaves_the_checkpoint_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight = full("sft", tmp_path / "straight")
    straight.learn()
    written = checkpoint.write_state

    def interrupted(directory: Path, name: str, state: Any) -> None:
        written(directory, name, state)
        if name == "loop" and ".tmp-6" in directory.name:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    stopped = full("sft", tmp_path / "run", train__save_interval=3)
    monkeypatch.setattr(checkpoint, "write_state", interrupted)
    with pytest.raises(KeyboardInterrupt):
        stopped.learn()
    monkeypatch.undo()
    found = checkpoint.newest_whole(tmp_path / "run" / "checkpoints")
    assert found is not None
    assert found.name == "step_00000003"
    resumed = full("sft", tmp_path / "run", train__save_interval=3, train__resume="auto")
    resumed.learn()
    assert_same(state(resumed), state(straight))


@pytest.mark.parametrize("where", ["step", "sampling", "evaluating"])
@pytest.mark.parametrize("name", ["ppo", "rloo"])
def test_sigusr1_saves_and_the_run_goes_on(name: str, where: str, tmp_path: Path) -> None:
    """Also before a collection that is being made, which is made again if the run resumes from there."""
    straight = full(name, tmp_path / "straight", train__save_interval=0)
    straight.learn()
    calls: list[int] = []
    noted: Any

    def judge(**given: Any) -> list[float]:
        calls.append(len(calls))
        if where == "sampling" and len(calls) == 2:
            os.kill(os.getpid(), signal.SIGUSR1)
        return count_first_letters(**given)

    def measure(outputs: list[str], **_: Any) -> dict[str, list[float]]:
        if where == "evaluating" and noted.progress.step == 3:
            os.kill(os.getpid(), signal.SIGUSR1)
        return {"letters": [float(len(output)) for output in outputs]}

    changes: dict[str, Any] = {"train__save_interval": 1000, "train__keep_checkpoints": 9, "train__eval_interval": 3}
    changes["arguments"] = {"metric_fn": measure}
    noted = full(name, tmp_path / "run", **changes, callbacks=[Sends(4, signal.SIGUSR1)] if where == "step" else [])
    noted.reward_fn = judge
    noted.learn()
    assert_same(state(noted), state(straight))
    first, last = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert first == {"step": "step_00000004", "sampling": "step_00000000", "evaluating": "step_00000003"}[where]
    assert last == "step_00000012"
    resumed = full(name, tmp_path / "again", **changes)
    resumed.load(tmp_path / "run" / "checkpoints" / first)
    resumed.learn()
    assert_same(state(resumed), state(straight))


def test_a_checkpoint_that_sigusr1_asks_for_and_that_cannot_be_written_need_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[int] = []

    def judge(**given: Any) -> list[float]:
        calls.append(len(calls))
        if len(calls) == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        return count_first_letters(**given)

    def full_disk(*_: Any, **__: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full_disk)
    trainer = full("ppo", tmp_path, train__save_interval=1000, train__on_save_error="continue", train__eval_interval=0)
    trainer.reward_fn = judge
    with caplog.at_level("ERROR", logger="trainkit"):
        trainer.learn()
    assert trainer.progress.step == 12
    told = [message for message in caplog.messages if "The run goes on (train.on_save_error)" in message]
    assert [message[:7] for message in told] == ["step 0:", "step 12"], "in the first collection, and at the end"


TASK = """
from trainkit.testing import character_tokenizer


def task():
    return {"samples": [("ab", "cd"), ("ef", "gh")] * 8, "tokenizer": character_tokenizer("abcdefgh")}
"""


@pytest.mark.slow
def test_a_job_of_slurm_that_is_ended_is_queued_again_until_the_run_is_finished(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    for name, does in (("srun", 'exec "$@"'), ("scontrol", 'echo "$@" >> queued')):
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{does}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "task.py").write_text(TASK)
    train = {"total_steps": 400, "batch_size": 4, "save_interval": 1000, "trackers": []}
    config = {"method": "sft", "model": {"model_path": tiny_gpt2(11)}, "train": train}
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    paths = os.pathsep.join([str(tmp_path / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
    given = {"CONFIG": "config.yaml", "TASK": "task.py:task", "RUN": "run", "SLURM_JOB_ID": "7", "PATH": paths}
    given |= {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    script = Path(__file__).parents[1] / "docs" / "requeue.sh"

    def started() -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", str(script)], cwd=tmp_path, env={**os.environ, **given}, text=True, stderr=subprocess.PIPE
        )

    with started() as job:
        while not (tmp_path / "run" / "metrics.jsonl").exists():
            assert job.poll() is None
            time.sleep(0.02)
        job.send_signal(signal.SIGTERM)
        _, errors = job.communicate(timeout=120)
    assert job.returncode != 0, errors
    assert (tmp_path / "queued").read_text() == "requeue 7\n"
    assert checkpoint.newest_whole(tmp_path / "run" / "checkpoints") is not None
    with started() as job:
        _, errors = job.communicate(timeout=120)
    assert job.returncode == 0, errors
    assert (tmp_path / "queued").read_text() == "requeue 7\n"
    assert steps_logged(tmp_path / "run") == [*range(1, 401)]


class Ends:
    """Ends the run while the model runs, at the n-th forward pass of a kind."""

    def __init__(self, trainer: Any, at: int) -> None:
        self.passes, self.at = 0, at
        trainer.unwrapped.model.base_model.register_forward_pre_hook(self.count)

    def count(self, *_: Any) -> None:
        self.passes += 1
        if self.passes == self.at:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("at", [2, 9, 40])
def test_a_run_ends_within_one_forward_pass_and_resumes_to_the_same_bits(at: int, tmp_path: Path) -> None:
    """While it evaluates before the first step, in a turn of an episode, and while responses are sampled."""
    given: dict[str, Any] = {"arguments": {"reward_fn": None, "environment": Letters}, "rollout__max_new_tokens": 4}
    straight = full("ppo", tmp_path / "straight", **given)
    straight.learn()
    stopped = full("ppo", tmp_path / "run", **given, train__save_interval=1000)
    ends = Ends(stopped, at)
    with pytest.raises(SystemExit) as caught:
        stopped.learn()
    assert caught.value.code == 143
    assert ends.passes <= at + 1
    resumed = full("ppo", tmp_path / "run", **given, train__save_interval=1000, train__resume="auto")
    resumed.learn()
    assert_same(state(resumed), state(straight))
    assert resumed.progress.samples == straight.progress.samples
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    expected = [json.loads(line) for line in (tmp_path / "straight" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [line["step"] for line in expected]


def test_without_checkpoints_sigterm_does_what_it_did_before(tmp_path: Path) -> None:
    """It ends the process at once: there is nothing to wait for."""

    class Looks:
        @trainkit.hookimpl
        def on_step(self) -> None:
            seen.append(signal.getsignal(signal.SIGTERM))

    seen: list[Any] = []
    full("sft", tmp_path, train__save_interval=0, train__total_steps=1, callbacks=[Looks()]).learn()
    assert seen == [signal.getsignal(signal.SIGTERM)]


# --------------------------------------------------------------------------------------- one directory, one run


def test_a_checkpoint_of_another_run_does_not_go_on_in_a_directory_that_holds_one(a_run: Path, tmp_path: Path) -> None:
    full("ppo", tmp_path / "other", train__total_steps=1).learn()
    before = snapshot(tmp_path / "other")
    with pytest.raises(
        ConfigError, match=r"other already holds a run, and train\.resume names a checkpoint of another"
    ):
        full("ppo", tmp_path / "other", train__resume=str(a_run)).learn()
    assert snapshot(tmp_path / "other") == before


def test_going_back_within_a_run_drops_what_was_logged_after(a_run: Path) -> None:
    path = a_run / "checkpoints" / "step_00000002"
    full("ppo", a_run, train__resume=str(path), train__total_steps=3).learn()
    assert steps_logged(a_run) == [1, 2, 3]


def test_a_run_that_starts_over_logs_the_first_evaluation_once(tmp_path: Path) -> None:
    """It was killed before its first checkpoint."""
    for _ in range(2):
        trainer = full("ppo", tmp_path, train__total_steps=1, train__resume="auto", train__eval_interval=1)
        trainer.learn()
        shutil.rmtree(tmp_path / "checkpoints")
    assert steps_logged(tmp_path) == [0, 1, 1], "evaluation, step, evaluation"
    kinds = [json.loads(line)["step"] for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert kinds == sorted(kinds)
    assert kinds.count(1) == 8


def test_trackers_of_a_loop_that_the_user_drives_are_closed_with_it(tmp_path: Path, monkeypatch: Any) -> None:
    from torch.utils.tensorboard import SummaryWriter

    closed: list[bool] = []
    honest = SummaryWriter.close
    monkeypatch.setattr(SummaryWriter, "close", lambda self: (closed.append(True), honest(self)))
    trainer = tiny_trainer("ppo", tmp_path, train__trackers=["tensorboard"])
    rollouts = trainer.generate(["a", "b"])
    trainer.step(rollouts.queries, rollouts.responses, [0.0, 1.0])
    assert not closed
    del trainer, rollouts
    gc.collect()
    assert closed


# ---------------------------------------------------------------------------------------------------- launching


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"ACCELERATE_USE_FSDP": "true"}, "configured to use FSDP, which would divide the model"),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "configured to use DeepSpeed"),
        ({"MASTER_ADDR": "127.0.0.1", "ACCELERATE_USE_CPU": "True"}, "starts one process, however many"),
        ({"WORLD_SIZE": "2"}, "2 processes were launched"),
    ],
)
def test_a_launch_that_would_not_train_as_it_says_is_refused(
    variables: dict[str, str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=said):
        tiny_trainer("sft", tmp_path)
