"""Runs that are ended, or asked to save, by signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import trainkit
from runs import assert_same, full, state, steps_logged
from tables import table
from trainkit.runs import checkpoint
from trainkit.testing import tiny_gpt2
from trainkit.testing.trainers import Letters, count_first_letters


@pytest.fixture(autouse=True)
def interrupts() -> Iterator[None]:
    """Let Ctrl+C interrupt, which a shell has its jobs in the background ignore."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


SELDOM: dict[str, Any] = {"train__save_interval": 1000, "train__total_steps": 8}
"""Checkpoints that are not due before the end."""


@pytest.mark.daily(name=("ppo",), at_call=(3,))
@pytest.mark.parametrize("at_call", [1, 3])
@pytest.mark.parametrize("name", ["ppo", "rloo"])
def test_sigterm_while_sampling_saves_what_was_before_the_collection(name: str, at_call: int, tmp_path: Path) -> None:
    """B11: a collection is sampled and scored in two parts; the second is not waited for."""
    straight = full(name, tmp_path / "straight", **SELDOM)
    straight.learn()
    calls: list[int] = []

    def judge(**given: Any) -> list[float]:
        calls.append(len(calls))
        if len(calls) == at_call:
            os.kill(os.getpid(), signal.SIGTERM)
        return count_first_letters(**given)

    stopped = full(name, tmp_path / "run", **SELDOM)
    stopped.reward_fn = judge
    with pytest.raises(SystemExit):
        stopped.learn()
    assert len(calls) == at_call
    step = 0 if at_call == 1 else 6 if name == "ppo" else 3
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == [f"step_{step:08d}"]
    resumed = full(name, tmp_path / "run", **SELDOM, train__resume="auto")
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


@table(
    "sent, code",
    [
        ([signal.SIGTERM, signal.SIGTERM], 143),
        ([signal.SIGHUP, signal.SIGTERM], 129),
        ([signal.SIGINT], 130),
    ],
)
def test_signals_save_and_end_with_their_code(
    sent: list[signal.Signals],
    code: int,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    request: pytest.FixtureRequest,
) -> None:
    """The first decides; a second one is ignored unless it is SIGINT."""
    request.addfinalizer(partial(signal.signal, signal.SIGHUP, signal.signal(signal.SIGHUP, signal.SIG_DFL)))  # nohup
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
        trainer = full("sft", tmp_path, **SELDOM, callbacks=[Sends(4, signal.SIGHUP)])
        trainer.learn()
        assert trainer.progress.step == 8
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@table("sent", [[signal.SIGINT, signal.SIGINT], [signal.SIGTERM, signal.SIGINT]])
def test_a_second_interrupt_ends_at_once(sent: list[signal.Signals], tmp_path: Path) -> None:
    stopped = full("sft", tmp_path, train__save_interval=1000, callbacks=[Sends(4, *sent)])
    with pytest.raises(KeyboardInterrupt):
        stopped.learn()
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="a process that uses a GPU cannot be forked")
def test_a_run_that_is_killed_while_it_saves_goes_on_and_ends_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By SIGKILL in a process that is forked; the battery kills at every call that changes a file."""
    changes: dict[str, Any] = {"train__total_steps": 6, "train__save_interval": 2, "train__resume": "auto"}
    straight = full("sft", tmp_path / "straight", **changes)
    straight.learn()
    written = checkpoint.write_state

    def kills(directory: Path, name: str, state: Any) -> None:
        written(directory, name, state)
        if name == "loop" and ".tmp-4" in directory.name:
            os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if child == 0:
        try:
            signal.alarm(100)  # whatever happens, it ends
            monkeypatch.setattr(checkpoint, "write_state", kills)
            full("sft", tmp_path / "run", **changes).learn()
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    left = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert [name[:6] for name in left] == [".tmp-4", "step_0"]
    assert steps_logged(tmp_path / "run") == steps_logged(tmp_path / "straight")[:4]
    resumed = full("sft", tmp_path / "run", **changes)
    resumed.learn()
    assert resumed.run.resumption.messages[0].endswith("step_00000002 at step 2")
    assert_same(state(resumed), state(straight))
    assert steps_logged(tmp_path / "run") == steps_logged(tmp_path / "straight")


@pytest.mark.slow
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


@pytest.mark.daily(name=("ppo",), where=("sampling",))
@pytest.mark.parametrize("where", ["step", "sampling", "evaluating"])
@pytest.mark.parametrize("name", ["ppo", "rloo"])
def test_sigusr1_saves_and_the_run_goes_on(name: str, where: str, tmp_path: Path) -> None:
    """Also before a collection that is being made, which is made again if the run resumes from there."""
    straight = full(name, tmp_path / "straight", train__save_interval=0, train__total_steps=5)
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
    changes |= {"train__total_steps": 5, "arguments": {"metric_fn": measure}}
    noted = full(name, tmp_path / "run", **changes, callbacks=[Sends(4, signal.SIGUSR1)] if where == "step" else [])
    noted.reward_fn = judge
    noted.learn()
    assert_same(state(noted), state(straight))
    first, last = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert first == {"step": "step_00000004", "sampling": "step_00000000", "evaluating": "step_00000003"}[where]
    assert last == "step_00000005"
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
    trainer = full("ppo", tmp_path, train__save_interval=1000, train__on_save_error="continue", train__total_steps=2)
    trainer.reward_fn = judge
    with caplog.at_level("ERROR", logger="trainkit"):
        trainer.learn()
    assert trainer.progress.step == 2
    told = [message for message in caplog.messages if "The run goes on (train.on_save_error)" in message]
    assert [message[:7] for message in told] == ["step 0:", "step 2:"], "in the first collection, and at the end"


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
        trainer.models.build()
        trainer.unwrapped.model.base_model.register_forward_pre_hook(self.count)

    def count(self, *_: Any) -> None:
        self.passes += 1
        if self.passes == self.at:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.daily(at=(9,))
@pytest.mark.parametrize("at", [2, 9, 20])
def test_a_run_ends_within_one_forward_pass_and_resumes_to_the_same_bits(at: int, tmp_path: Path) -> None:
    """While it evaluates before the first step, and in turns of episodes."""
    given: dict[str, Any] = {"arguments": {"reward_fn": None, "environment": Letters}, "rollout__max_new_tokens": 4}
    given["train__total_steps"] = 3
    straight = full("ppo", tmp_path / "straight", **given, train__save_interval=0)
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
