"""Checkpoints that are written while the training goes on."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import trainkit
from trainkit.errors import CheckpointError
from trainkit.runs import checkpoint
from trainkit.testing.trainers import tiny_trainer

SAVES: dict[str, Any] = {"train__save_interval": 2, "train__total_steps": 6, "train__keep_checkpoints": 9}


def weights(trainer: Any) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in trainer.unwrapped.parameters()]


class Saves:
    """Records the steps at which checkpoints became complete, and of which."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int, bool]] = []
        self.weights: dict[int, list[torch.Tensor]] = {}

    @trainkit.hookimpl
    def on_save(self, trainer: Any, step: int, path: Path) -> None:
        self.seen.append((trainer.progress.step, step, checkpoint.find_fault(path) is None))

    @trainkit.hookimpl
    def on_step(self, trainer: Any, step: int) -> None:
        self.weights[step] = weights(trainer)


@pytest.mark.daily(name=("ppo",))
@pytest.mark.parametrize("name", ["ppo", "sft"])
def test_the_training_goes_on_while_a_checkpoint_is_written(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first checkpoint is held back until step 3 is made; it holds step 2, from which the run goes on as it did."""
    honest, go_on, saves = checkpoint.write_state, threading.Event(), Saves()

    def held_back(directory: Path, part: str, state: Any) -> None:
        assert threading.current_thread() is threading.main_thread() or go_on.wait(60)
        honest(directory, part, state)

    class Frees:
        @trainkit.hookimpl
        def on_step(self, step: int) -> None:
            if step == 3:
                assert not [*(tmp_path / "run/checkpoints").glob("step_*")]
                go_on.set()

    monkeypatch.setattr(checkpoint, "write_state", held_back)
    trainer = tiny_trainer(name, tmp_path / "run", callbacks=[saves, Frees()], train__save_async=True, **SAVES)
    trainer.learn()
    assert [(step, whole) for _, step, whole in saves.seen] == [(2, True), (4, True), (6, True)]
    assert saves.seen[0][0] > 2, "it became complete while the training went on"
    assert saves.seen[-1][0] == 6, "the last one is complete when the run ends"

    resumed = tiny_trainer(
        name, tmp_path / "again", **SAVES, train__resume=str(tmp_path / "run/checkpoints/step_00000002")
    )
    resumed.begin()
    assert all(map(torch.equal, weights(resumed), saves.weights[2]))
    resumed.learn()
    assert all(map(torch.equal, weights(resumed), weights(trainer)))


def test_a_checkpoint_that_cannot_be_written_ends_the_run_at_a_later_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = checkpoint.write_state

    def full(directory: Path, part: str, state: Any) -> None:
        if ".tmp-4" in str(directory):
            raise OSError(28, "No space left on device")
        honest(directory, part, state)

    monkeypatch.setattr(checkpoint, "write_state", full)
    trainer = tiny_trainer("sft", tmp_path / "run", train__save_async=True, **SAVES)
    with pytest.raises(CheckpointError, match=r"cannot save a checkpoint under .*No space left on device"):
        trainer.learn()
    assert trainer.progress.step in (5, 6)
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["step_00000002"]


def test_a_run_that_fails_finishes_the_checkpoint_that_is_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, go_on = checkpoint.write_state, threading.Event()

    def held_back(directory: Path, part: str, state: Any) -> None:
        assert go_on.wait(60)
        honest(directory, part, state)

    class Fails:
        @trainkit.hookimpl
        def on_step(self, step: int) -> None:
            if step == 3:
                threading.Timer(0.2, go_on.set).start()
                raise RuntimeError("the end")

    monkeypatch.setattr(checkpoint, "write_state", held_back)
    trainer = tiny_trainer("sft", tmp_path / "run", callbacks=[Fails()], train__save_async=True, **SAVES)
    with pytest.raises(trainkit.errors.HookError, match="the end"):  # type: ignore[attr-defined]
        trainer.learn()
    saved = sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir())
    assert saved == ["step_00000002", "step_00000003"], "the second one because of the error"


def test_what_the_user_saves_is_complete_at_once(tmp_path: Path) -> None:
    trainer = tiny_trainer("sft", tmp_path / "run", train__save_async=True, **SAVES)
    assert checkpoint.find_fault(trainer.save()) is None
