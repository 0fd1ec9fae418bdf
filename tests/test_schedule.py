"""The learning rate: what is logged of it, and what becomes of a loop that goes on after the schedule has ended."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from tables import table
from trainkit.testing.trainers import tiny_trainer


def test_the_rate_that_is_logged_is_the_one_of_the_step(tmp_path: Path) -> None:
    # linear, two warm-up steps of five: the rates of steps 1 to 5 are 0, 1/2, 1, 2/3, 1/3 of the whole.
    settings = {"scheduler__name": "linear", "scheduler__warmup_steps": 2, "optimizer__lr": 0.6}
    trainer = tiny_trainer("sft", tmp_path / "run", **settings, train__total_steps=5)
    used: list[float] = []
    trainer.models.build()
    step = trainer.optimizer.step

    def noted() -> None:
        used.append(trainer.optimizer.param_groups[0]["lr"])
        step()

    trainer.optimizer.step = noted
    trainer.learn()
    lines = map(json.loads, (tmp_path / "run/metrics.jsonl").read_text(encoding="utf-8").splitlines())
    logged = [line["train/lr"] for line in lines if "train/lr" in line]
    assert logged == used == pytest.approx([0, 0.3, 0.6, 0.4, 0.2])


def test_a_loop_of_ones_own_past_the_last_step_says_once_that_the_schedule_has_ended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = tiny_trainer("ppo", tmp_path, scheduler__name="linear", train__total_steps=1, method__ppo_epochs=1)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            sampled = trainer.generate(["a", "b"] * 4)
            trainer.step(sampled.queries, sampled.responses, torch.arange(8.0))
    told = [record.getMessage() for record in caplog.records if "past the last step" in record.getMessage()]
    assert len(told) == 1
    assert "the learning rate is 0" in told[0]
    assert "train.total_steps" in told[0]


def test_learning_to_the_last_step_warns_of_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        tiny_trainer("ppo", tmp_path / "run", scheduler__name="linear", train__total_steps=3).learn()
    assert "past the last step" not in caplog.text


@table(
    "changes, jump",
    [
        ({"train__total_steps": 12}, "after step 4 the learning rate jumps to 0.75, from 0 in the run so far"),
        ({"train__total_steps": 12, "scheduler__name": "constant"}, ""),
    ],
)
def test_a_rate_that_jumps_where_a_longer_run_resumes_is_told(
    changes: dict[str, Any], jump: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """(1 + cos(π·4/12)) / 2 = 0.75, where the shorter schedule had come to 0."""
    settings = {"scheduler__name": changes.get("scheduler__name", "cosine"), "optimizer__lr": 1.0}
    tiny_trainer("sft", tmp_path / "run", **settings, train__total_steps=4, train__save_interval=4).learn()
    settings |= {"train__resume": "auto", "train__save_interval": 4, **changes}
    with caplog.at_level(logging.WARNING):
        tiny_trainer("sft", tmp_path / "run", **settings).learn()
    told = [record.getMessage() for record in caplog.records if "learning rate jumps" in record.getMessage()]
    assert len(told) == bool(jump)
    assert all(jump in each for each in told)
