"""Offline experience: made with its progress told, and not again after a stop."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from runs import assert_same, state
from test_processes import succeed
from trainkit.testing.trainers import tiny_trainer
from trainkit.trainer import kept


def counted(name: str, run_dir: Path, **changes: Any) -> tuple[Any, list[int]]:
    """Return a trainer of a whole run, and the list of the numbers of rows that it makes experience of."""
    trainer, made = tiny_trainer(name, run_dir, train__save_interval=1, **changes), list[int]()
    make = trainer.make_experience

    def counting(rows: Any) -> Any:
        made.append(len(rows))
        return make(rows)

    trainer.make_experience = counting
    return trainer, made


def test_experience_made_before_a_stop_is_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr(kept, "EVERY", 0.0)
    monkeypatch.setattr(kept, "TOLD_EVERY", 0.0)
    usual = {"rollout__batch_size": 4, "model__num_layers_unfrozen": 1}
    plain, made = counted("dpo", tmp_path / "plain", **usual)
    plain.learn()
    assert not (plain.run_dir / kept.DIRECTORY).exists()
    assert sum(made) == 16
    stopped, _ = counted("dpo", tmp_path / "stopped", **usual)
    make, calls = stopped.make_experience, iter(range(9))

    def stopping(rows: Any) -> Any:
        if next(calls) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return make(rows)

    stopped.make_experience = stopping
    with caplog.at_level(logging.WARNING), pytest.raises(SystemExit):
        stopped.learn()
    assert "experience is made of 4 of 16 rows" in caplog.text
    again, made = counted("dpo", tmp_path / "stopped", train__resume="auto", **usual)
    again.learn()
    assert sum(made) == 4
    assert_same(state(plain), state(again))


def test_experience_of_other_settings_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "EVERY", 0.0)
    first, _ = counted("dpo", tmp_path, train__total_steps=2)
    monkeypatch.setattr(kept, "remove", lambda trainer: None)  # as if it had been killed
    first.learn()
    changed = {"method__loss_type": "ipo", "train__total_steps": 3, "train__resume": "auto"}
    other, made = counted("dpo", tmp_path, **changed)
    other.allow_drift = True
    other.learn()
    assert sum(made) == 16


TWO = """
import shutil
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import torch
from test_kept import counted
from trainkit.trainer import kept

torch.set_num_threads(1)
kept.EVERY, kept.remove = 0.0, lambda trainer: None
first, _ = counted("dpo", Path(sys.argv[1]), train__total_steps=1)
first.learn()
rank = first.accelerator.process_index
if rank == 1:
    shutil.rmtree(first.run_dir / kept.DIRECTORY / "process_00001")
again, made = counted("dpo", Path(sys.argv[1]), train__total_steps=2, train__resume="auto")
again.learn()
assert again.progress.step == 2
assert sum(made) == 8, made
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_experience_is_made_again_if_one_process_has_none(tmp_path: Path) -> None:
    succeed(TWO, 2, str(tmp_path), str(Path(__file__).parent))
