"""Early stopping: at which evaluation a run ends, also if it was resumed, and what is refused."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tables import table
from trainkit import hookimpl
from trainkit.errors import ConfigError, HookError
from trainkit.testing.trainers import tiny_trainer
from trainkit_early_stop import EarlyStop, EarlyStopConfig
from trainkit_kit import check_plugin


@pytest.mark.slow
def test_it_passes() -> None:
    check_plugin("early_stop")  # raises if a check fails


def ends_at(values: Sequence[float], **settings: Any) -> int | None:
    """Return the index of the evaluation after which a run with these values ends, or None."""
    hooks, reasons = EarlyStop(EarlyStopConfig(name="early_stop", **settings)), []
    trainer: Any = type("Trainer", (), {"stop": lambda self, reason: reasons.append(reason)})()
    for index, value in enumerate(values):
        hooks.on_evaluate(trainer, index, {"eval/reward": value})
        if reasons:
            return index
    return None


NAN = math.nan


@table(
    "values, settings, end",
    [
        ([1, 2, 3, 4, 5], {}, None),
        ([1, 2, 2, 2, 2], {}, 4),  # the best value is that of evaluation 1; 2, 3 and 4 are equal to it
        ([1, 0, 0, 2, 0, 0, 0], {}, 6),  # evaluation 3 is an improvement, after two that are none
        ([5, 4, 3, 2], {}, 3),
        ([5, 4, 3, 2], {"mode": "min"}, None),
        ([1, 2, 3], {"mode": "min", "patience": 2}, 2),
        ([0, 0], {"patience": 1}, 1),
        (
            [0.0, 0.5, 1.0, 1.5],
            {"min_delta": 1.0, "patience": 2},
            2,
        ),  # 0.5 and 1.0 are not better than 0 by more than 1
        ([0.0, 0.5, 1.25, 1.5, 2.0], {"min_delta": 1.0, "patience": 2}, 4),  # 1.25 is; then 1.5 and 2 are not
        ([3.0, 2.5, 1.0, 0.5], {"mode": "min", "min_delta": 1.0, "patience": 2}, None),
        ([1, NAN, NAN, NAN], {}, 3),
        ([NAN, NAN, NAN], {}, 2),
        ([NAN, NAN, -5, NAN, -4], {}, None),
        ([math.inf, 1, 2, 3], {}, 3),
    ],
)
def test_a_run_ends_after_patience_evaluations_without_an_improvement(
    values: list[float], settings: dict[str, Any], end: int | None
) -> None:
    assert ends_at(values, **settings) == end


def learnt(run_dir: Path, values: Sequence[float], callbacks: Sequence[object] = (), **changes: Any) -> Any:
    """Return a trainer after its run, whose evaluation at step 2i gives the i-th value."""
    entry = {"name": "early_stop", "patience": 2, **changes.pop("settings", {})}
    usual = {"plugins": [entry], "train__eval_interval": 2, "train__total_steps": 12, "train__save_interval": 2}
    trainer = tiny_trainer("sft", run_dir, callbacks=callbacks, **{**usual, **changes})
    trainer.evaluation = lambda: ({"eval/reward": values[trainer.progress.step // 2]}, [])
    try:
        trainer.learn()
    except Killed:
        return None
    return trainer


class Killed(BaseException):
    """Stands for SIGKILL."""


class Kill:
    """Kills a run after a step."""

    def __init__(self, at: int) -> None:
        self.at = at

    @hookimpl
    def on_step(self, step: int) -> None:
        if step == self.at:
            raise Killed


VALUES = [0.0, 3.0, 2.0, 1.0, 4.0, 4.0, 4.0]


def test_a_run_ends_says_why_and_has_its_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = learnt(tmp_path / "run", VALUES)
    assert trainer.progress.step == 6
    reason = "early_stop: eval/reward has not improved in 2 evaluations; the best value is 3"
    assert trainer.progress.stop_reason == reason
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING] == [
        f"the run ends after step 6: {reason}"
    ]
    assert f"| ended early | {reason} |" in (tmp_path / "run/model/README.md").read_text("utf-8")


@pytest.mark.daily(at=(3,))
@pytest.mark.parametrize("at", [1, 3, 5, 6])
def test_a_killed_and_resumed_run_ends_where_one_does_that_never_stopped(at: int, tmp_path: Path) -> None:
    straight = learnt(tmp_path / "straight", VALUES)
    assert learnt(tmp_path / "run", VALUES, [Kill(at)]) is None
    resumed = learnt(tmp_path / "run", VALUES, train__resume="auto")
    assert resumed.progress.step == straight.progress.step == 6
    for one, other in zip(straight.unwrapped.parameters(), resumed.unwrapped.parameters(), strict=True):
        assert torch.equal(one, other)
    states = [trainer.hooks.made["early_stop"].state_dict() for trainer in (straight, resumed)]
    assert states[0] == states[1] == {"best": 3.0, "waited": 2, "seen": 6}


def test_more_patience_lets_a_run_continue(tmp_path: Path) -> None:
    """The value 4 of step 8 is an improvement; those of steps 10 and 12 are none, and step 12 is the last."""
    learnt(tmp_path / "run", VALUES)
    again = learnt(tmp_path / "run", VALUES, train__resume="auto")
    assert again.progress.step == 6
    longer = learnt(tmp_path / "run", VALUES, train__resume="auto", settings={"patience": 3})
    assert longer.progress.step == 12
    assert longer.progress.stop_reason == ""


def test_evaluating_by_hand_counts_no_evaluation_twice(tmp_path: Path) -> None:
    class Asks:
        @hookimpl
        def on_step(self, trainer: Any) -> None:
            if trainer.progress.step % 2 == 0:
                trainer.evaluate()

    assert learnt(tmp_path / "run", VALUES, [Asks()]).progress.step == 6


def test_a_metric_that_evaluations_do_not_have_is_an_error_with_the_nearest(tmp_path: Path) -> None:
    told = (
        r"watches 'eval/rewrd', which is no metric of this run's evaluations; did you mean 'eval/reward'\?; they have"
    )
    with pytest.raises(HookError, match=told):
        learnt(tmp_path / "run", VALUES, settings={"metric": "eval/rewrd"})
    assert '"step": 1' not in (tmp_path / "run/metrics.jsonl").read_text("utf-8")  # before the first step


def test_a_run_without_data_for_evaluations_is_an_error(tmp_path: Path) -> None:
    trainer = tiny_trainer("ppo", tmp_path, plugins=["early_stop"], train__eval_interval=2)
    trainer.eval_rows = []
    with pytest.raises(HookError, match="this run has none; give eval_prompts or eval_samples"):
        trainer.learn()


@table(
    "settings, told",
    [
        ({"patience": 0}, r"plugins\.0 \(early_stop\)\.patience: should be greater than or equal to 1 \(given 0"),
        ({"mode": "best"}, r"plugins\.0 \(early_stop\)\.mode: should be 'max' or 'min' \(given 'best'"),
        ({"min_delta": -1}, r"plugins\.0 \(early_stop\)\.min_delta: should be greater than or equal to 0"),
        ({"patients": 3}, r"plugins\.0 \(early_stop\)\.patients: unknown field; did you mean 'patience'\?"),
        ({"metric": "reward"}, r"metric: should be a metric of evaluations.*; did you mean 'eval/reward'\?"),
    ],
)
def test_settings_that_are_not_allowed_are_named(settings: dict[str, Any], told: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=told):
        tiny_trainer("ppo", tmp_path, plugins=[{"name": "early_stop", **settings}])
