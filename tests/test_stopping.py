"""`trainer.stop`: the run ends after the step at hand as a finished run does, and says why when it is resumed."""

from __future__ import annotations

import functools
import json
import logging
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tables import table
from trainkit import hookimpl
from trainkit.cli import app
from trainkit.errors import ConfigError, RewardError
from trainkit.metrics import Mean
from trainkit.runs import newest_whole, read_state
from trainkit.runs.parallel import Parallel
from trainkit.runs.stopping import Interrupted, Stop
from trainkit.testing.trainers import tiny_trainer

SAVING = {"train__save_interval": 10, "train__eval_interval": 10}
"""Checkpoints and evaluations that are due at the end of a run only."""


class Stops:
    """A callback that stops the run in ``hook`` at a step, and notes the evaluated and the saved steps."""

    def __init__(self, hook: str = "on_step", at: int = 3, reason: str = "enough") -> None:
        self.hook, self.at, self.reason = hook, at, reason
        self.evaluated: list[int] = []
        self.saved: list[int] = []

    def _stop(self, hook: str, trainer: Any) -> None:
        if hook == self.hook and trainer.progress.step >= self.at:
            trainer.stop(self.reason)

    @hookimpl
    def on_step(self, trainer: Any) -> None:
        self._stop("on_step", trainer)

    @hookimpl
    def on_evaluate(self, trainer: Any, step: int) -> None:
        self.evaluated.append(step)
        self._stop("on_evaluate", trainer)

    @hookimpl
    def on_experience(self, trainer: Any) -> None:
        self._stop("on_experience", trainer)

    @hookimpl
    def on_save(self, trainer: Any, step: int) -> None:
        self.saved.append(step)
        self._stop("on_save", trainer)


def weights(trainer: Any) -> list[torch.Tensor]:
    return list(trainer.unwrapped.state_dict().values())


def same(one: Any, other: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(weights(one), weights(other), strict=True))


@table("name", ["sft", "ppo"])
def test_a_stopped_run_ends_with_evaluation_checkpoint_export_and_its_reason(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    stops = Stops()
    trainer = tiny_trainer(name, tmp_path / "run", callbacks=[stops], **SAVING)
    trainer.learn()
    assert trainer.progress.step == 3
    assert (stops.evaluated, stops.saved) == ([0, 3], [3])
    newest = newest_whole(tmp_path / "run" / "checkpoints")
    assert newest is not None
    assert read_state(newest, "loop")["progress"]["stop_reason"] == "enough"
    assert json.loads((tmp_path / "run" / "model" / "trainkit.json").read_text())["step"] == 3
    assert "| ended early | enough |" in (tmp_path / "run" / "model" / "README.md").read_text("utf-8")
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING] == [
        "the run ends after step 3: enough"
    ]
    assert capsys.readouterr().out.splitlines()[-1].startswith("step 3/6  stopped after ")


def test_an_evaluation_that_stops_the_run_is_its_last_one(tmp_path: Path) -> None:
    stops = Stops("on_evaluate", at=2)
    trainer = tiny_trainer("sft", tmp_path / "run", callbacks=[stops], train__eval_interval=2)
    trainer.learn()
    assert trainer.progress.step == 2
    assert stops.evaluated == [0, 2]


@table("name, hook, at, last", [("sft", "on_evaluate", 0, 1), ("ppo", "on_experience", 0, 1), ("sft", "on_save", 2, 3)])
def test_a_call_between_steps_ends_the_run_after_the_next_step(
    name: str, hook: str, at: int, last: int, tmp_path: Path
) -> None:
    stops = Stops(hook, at)
    trainer = tiny_trainer(name, tmp_path / "run", callbacks=[stops], train__eval_interval=10, train__save_interval=2)
    trainer.learn()
    assert trainer.progress.step == last
    assert stops.evaluated == [0, last]


def test_the_algorithm_may_stop_its_run_and_the_first_reason_counts(tmp_path: Path) -> None:
    trainer = tiny_trainer("sft", tmp_path / "run", callbacks=[Stops(at=2, reason="later")])
    honest = trainer.loss

    def loss(batch: Any) -> Any:
        if trainer.progress.step == 1:  # of the second step
            trainer.stop("the loss says so")
        return honest(batch)

    trainer.loss = loss
    trainer.learn()
    assert trainer.progress.step == 2
    assert trainer.progress.stop_reason == "the loss says so"


def test_stopping_in_the_last_step_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = tiny_trainer("sft", tmp_path / "run", callbacks=[Stops(at=2)], **SAVING, train__total_steps=2)
    trainer.learn()
    assert trainer.progress.stop_reason == ""
    assert caplog.records == []
    longer = tiny_trainer("sft", tmp_path / "run", **SAVING, train__resume="auto", train__total_steps=3)
    longer.learn()
    assert longer.progress.step == 3


@table("reason", ["", " ", None, 3])
def test_a_reason_is_a_text(reason: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.stop\(reason\) logs why the run ends; given .* Give a text"):
        tiny_trainer("sft", tmp_path).stop(reason)


def files(run_dir: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in run_dir.rglob("*") if path.is_file()}


def test_resuming_a_stopped_run_says_why_it_ended_and_changes_no_file(tmp_path: Path) -> None:
    tiny_trainer("sft", tmp_path / "run", callbacks=[Stops()], **SAVING).learn()
    before = files(tmp_path / "run")
    trainer = tiny_trainer("sft", tmp_path / "run", **SAVING, train__resume="auto")
    trainer.learn()
    assert trainer.progress.step == 3
    assert files(tmp_path / "run") == before
    assert trainer.run.resumption.messages[1:] == [
        "the run was ended after step 3: enough. It continues only if train.total_steps, train.epochs, train.health or "
        "plugins is changed"
    ]


@pytest.mark.daily(name=("ppo",))
@pytest.mark.parametrize(("name", "change"), [("ppo", {"plugins": ["rloo"]}), ("sft", {"train__total_steps": 7})])
def test_a_stopped_run_continues_if_its_length_is_changed_as_if_it_had_not_been_stopped(
    name: str, change: dict[str, Any], tmp_path: Path
) -> None:
    """At step 3 of 6: in the middle of a collection, with evaluations in both runs."""
    straight = tiny_trainer(name, tmp_path / "straight", **{"train__total_steps": 6, **change})
    straight.learn()
    tiny_trainer(name, tmp_path / "run", callbacks=[Stops()], **SAVING).learn()
    trainer = tiny_trainer(name, tmp_path / "run", **SAVING, **change, train__resume="auto")
    trainer.learn()
    assert trainer.progress.step == straight.progress.step
    assert trainer.progress.stop_reason == ""
    assert same(trainer, straight)
    key = next(iter(change)).replace("__", ".")
    assert (
        trainer.run.resumption.messages[-1]
        == f"the run was ended after step 3: enough. It continues, because of a change of {key}"
    )


@pytest.mark.slow
def test_a_stopped_run_that_was_killed_before_its_export_is_exported_when_it_is_resumed(tmp_path: Path) -> None:
    tiny_trainer("sft", tmp_path / "run", callbacks=[Stops()], **SAVING).learn()
    (tmp_path / "run" / "model" / "trainkit.json").unlink()
    trainer = tiny_trainer("sft", tmp_path / "run", **SAVING, train__resume="auto")
    trainer.learn()
    assert trainer.progress.step == 3
    assert json.loads((tmp_path / "run" / "model" / "trainkit.json").read_text())["step"] == 3


def test_one_process_asks_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = tiny_trainer("sft", tmp_path / "run", callbacks=[Stops()])
    for name in ("min", "max"):
        monkeypatch.setattr(trainer, name, None)
    trainer.learn()
    assert trainer.progress.step == 3


COMMAND = """
from trainkit import hookimpl
from trainkit.testing import character_tokenizer

class Stops:
    @hookimpl
    def on_step(self, trainer):
        trainer.stop("told to")

def task():
    return {"samples": [("a", "b")] * 8, "tokenizer": character_tokenizer("abcdefgh"), "callbacks": [Stops()]}
"""
CONFIG = """
method: sft
model: {model_path: {model_type: gpt2, vocab_size: 10, n_layer: 2, n_head: 2, n_embd: 32}}
train: {batch_size: 4, total_steps: 2, run_dir: run, trackers: []}
"""


def test_the_command_line_ends_with_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("task.py").write_text(COMMAND)
    Path("config.yaml").write_text(CONFIG)
    done = CliRunner().invoke(app, ["train", "config.yaml", "--task", "task.py:task"])
    assert done.exit_code == 0, done.output
    assert "step 1/2  stopped after " in done.output
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()


# ------------------------------------------------------------------------------------------------- records


class Records:
    """Makes a trainer record a metric in a method that training and evaluations call."""

    def __init__(self, trainer: Any, method: str) -> None:
        *path, name = method.split(".")
        holder = functools.reduce(getattr, path, trainer)
        self.honest, self.trainer, self.calls = getattr(holder, name), trainer, 0
        setattr(holder, name, self)

    def __call__(self, *arguments: Any) -> Any:
        self.calls += 1
        self.trainer.record({"own/calls": Mean.of(torch.tensor(float(self.calls)))})
        return self.honest(*arguments)


def logged(run_dir: Path) -> list[float]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line["own/calls"] for line in lines if "own/calls" in line]


@table("method", ["prepare_step", "loss"])
def test_what_evaluations_record_is_not_logged_with_training(method: str, tmp_path: Path) -> None:
    """Two steps with evaluations of held-out samples before, between and after: calls 1, 3 and 5 are evaluations'."""
    trainer = tiny_trainer("sft", tmp_path / "run", train__eval_interval=1, train__total_steps=2)
    trainer.eval_rows, trainer.eval_samples = [], list(trainer.pipeline.rows)[:2]
    records = Records(trainer, method)
    trainer.learn()
    assert logged(tmp_path / "run") == [2, 4]
    assert records.calls == 5


def test_evaluating_by_hand_keeps_what_training_has_recorded_and_adds_nothing(tmp_path: Path) -> None:
    trainer = tiny_trainer("sft", tmp_path)
    trainer.add_eval_samples([("a", "b"), ("c", "d")])
    Records(trainer, "loss")
    trainer.collect()
    before = dict(trainer.recorder.pending)
    found = trainer.evaluate()
    assert "eval/loss/total" in found
    assert "eval/own/calls" not in found
    assert trainer.recorder.pending == before


def test_generating_by_hand_records_nothing(tmp_path: Path) -> None:
    trainer = tiny_trainer("ppo", tmp_path)
    trainer.sampling.__dict__["sampler"] = trainer.core_sampler()
    Records(trainer, "sampling.sampler")
    trainer.generate(["a", "bc"])
    trainer.evaluate()
    assert trainer.recorder.pending == {}
    trainer.collect()
    assert "own/calls" in trainer.recorder.pending


def test_records_are_kept_when_an_evaluation_fails(tmp_path: Path) -> None:
    trainer = tiny_trainer("sft", tmp_path)
    trainer.add_eval_samples([("a", "b")])
    trainer.collect()
    before = dict(trainer.recorder.pending)
    Records(trainer, "prepare_step").honest = lambda batch: 1 / 0
    with pytest.raises(ZeroDivisionError):
        trainer.evaluate()
    assert trainer.recorder.pending == before


@table("own, others", [*product(["interrupted", "failed", "nothing"], repeat=2)])
def test_processes_leave_in_the_same_way(own: str, others: str) -> None:
    """An error of one comes before the request to end that another has received: both would wait for each other."""
    made = {"interrupted": Interrupted(), "failed": RewardError("away"), "nothing": None}

    def here() -> None:
        if made[own] is not None:
            raise made[own]

    parallel: Any = Parallel(SimpleNamespace(num_processes=2), Stop())  # type: ignore[arg-type]
    parallel.gather = lambda items: [*items, made[others]]
    kind = next((type(made[name]) for name in ("failed", "interrupted") if name in (own, others)), None)
    if kind is None:
        parallel.sync_errors(here)
        return
    with pytest.raises(kind):
        parallel.sync_errors(here)
