"""One directory has one run: the lock on it."""

from __future__ import annotations

import errno
import os
import weakref
from pathlib import Path
from typing import Any

import pytest

from runs import only_new_garbage
from trainkit.errors import CheckpointError, ConfigError, RewardError
from trainkit.runs import RunLock
from trainkit.runs.lock import NAME
from trainkit.testing.trainers import count_first_letters, tiny_trainer


def test_two_trainers_of_one_process_do_not_share_a_directory(tmp_path: Path) -> None:
    first, second = (tiny_trainer("ppo", tmp_path, train__resume="auto") for _ in range(2))
    first.save()
    with only_new_garbage(), pytest.raises(ConfigError, match=r"this process, another trainer"):
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
    def refuses(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", refuses)
    tiny_trainer("sft", tmp_path, train__total_steps=1).learn()
    assert f"cannot be locked ([Errno {errno.ENOLCK}]" in caplog.text
    assert not (tmp_path / NAME).exists()


def test_a_directory_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / NAME).mkdir()
    with pytest.raises(ConfigError, match=r"cannot be used: .*; give another train.run_dir"):
        RunLock(tmp_path)
