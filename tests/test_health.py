"""The health monitor: what each check finds and what it does not, and what a run does about it."""

from __future__ import annotations

import json
import logging
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tables import table
from trainkit import TRLConfig
from trainkit.runs.health import Health
from trainkit.runs.symptoms import MANY
from trainkit.testing import tiny_gpt2
from trainkit.testing.trainers import tiny_trainer

RISING = {"reward/mean": [0.0, 0.0, 0.0, *[1.0] * MANY], "reward/std": [0.5]}
FLAT = {"reward/mean": [0.0] * 13, "reward/std": [0.5]}


def watched(columns: dict[str, list[float]], health: Health | None = None) -> list[str]:
    """Return the checks that find something when the metrics have these values, collection by collection."""
    health, found = health or Health(), []
    longest = max(map(len, columns.values()))
    for index in range(longest):
        metrics = {name: values[min(index, len(values) - 1)] for name, values in columns.items()}
        evaluated = {name: value for name, value in metrics.items() if name.startswith("eval/")}
        trained = {name: value for name, value in metrics.items() if name not in evaluated}
        found += [verdict.check for verdict in health.trained({"time/collect": 1.0, **trained})]
        found += [verdict.check for verdict in health.evaluated(evaluated)]
    return found


LONG = {"rollout/length": [20.0]}
LATER = {"train/lr": [1.0] * 100}
CASES: list[tuple[str, dict[str, list[float]], dict[str, list[float]]]] = [
    # check, what it finds, what it does not
    ("off_policy", {"policy/ratio": [1.002]}, {"policy/ratio": [1.0009], "policy/approx_kl": [9e-5]}),
    ("off_policy", {"policy/approx_kl": [2e-4]}, {}),
    ("divergence", {**FLAT, **LONG, "policy/kl": [0.0, 20.1]}, {**FLAT, **LONG, "policy/kl": [0.0, 19.9]}),
    ("divergence", {**RISING, **LONG, "policy/kl": [0.0, 61.0]}, {**RISING, **LONG, "policy/kl": [0.0, 59.0]}),
    ("entropy", {**FLAT, "policy/entropy": [1, 1, 1, 0.09]}, {**FLAT, "policy/entropy": [1, 1, 1, 0.11]}),
    ("entropy", {**FLAT, "policy/entropy": [1, 1, 1, 0.01]}, {**RISING, "policy/entropy": [1, 1, 1, 0.5, 0.5, 0.01]}),
    ("signal", {"reward/mean": [1], "reward/std": [0.4, 0, 0, 0]}, {"reward/mean": [1], "reward/std": [0, 0, 0.1] * 3}),
    ("signal", {**FLAT, "reward/equal_in_group": [1.0]}, {**RISING, "reward/equal_in_group": [0, 0, 0, 0, 0, 1, 1, 1]}),
    ("truncation", {**LONG, "rollout/terminated": [0.01] * 3}, {**LONG, "rollout/terminated": [0, 0.03, 0.03]}),
    ("truncation", {**LONG, "rollout/terminated": [0] * 3}, {"rollout/length": [1], "rollout/terminated": [0] * 9}),
    ("repetition", {**LONG, "rollout/repetition": [0.3, 0.95, 0.95]}, {**LONG, "rollout/repetition": [0.89] * 9}),
    ("repetition", {**LONG, "rollout/repetition": [1] * 3}, {"rollout/length": [8], "rollout/repetition": [1] * 9}),
    ("gradient", {**FLAT, "train/grad_norm": [0.0] * 5}, {**FLAT, "train/grad_norm": [0, 0, 0, 0, 1e-3] * 3}),
    ("gradient", {"train/grad_norm": [0.0] * 5}, {**RISING, "train/grad_norm": [1, 1, 1, 1, *[0] * 9]}),
    ("value_function", {**LATER, "values/explained_variance": [-0.2]}, {**LATER, "values/explained_variance": [-0.09]}),
    ("value_function", {**LATER, "values/explained_variance": [0.0]}, {"values/explained_variance": [-0.2] * 99}),
    ("sampler", {"policy/sampler_kl": [-0.3] * 10}, {"policy/sampler_kl": [0.1, 0.3] * 9}),
    ("sampler", {"rollout/effective_sample_size": [0.4] * 10}, {"rollout/effective_sample_size": [0.6] * 10}),
    ("held_out", {**RISING, "eval/x": [0, 0.5, 0.8, *[0.2] * 9]}, {**RISING, "eval/x": [0, 0.5, 0.8, *[0.5] * 9]}),
    ("held_out", {**RISING, "eval/reward": [1, *[0.5] * 9]}, {**RISING, "eval/length": [1, 9, *[0.5] * 9]}),
    ("overfitting", {"eval/loss/total": [2, 1, 1.2, 1.2, 1.2]}, {"eval/loss/total": [2, 1, 1.2, 1.2, 1.05]}),
]  # fmt: skip


@table("check, wrong, right", CASES)
def test_a_check_finds_what_is_beyond_its_limit_and_nothing_else(
    check: str, wrong: dict[str, list[float]], right: dict[str, list[float]]
) -> None:
    assert check in watched(wrong)
    assert watched({"reward/mean": [1.0], **right}) == []


NAMES = sorted({name for _, *columns in CASES for column in columns for name in column})


@given(st.dictionaries(st.sampled_from(NAMES), st.floats(), min_size=1), st.integers(0, 2**32))
@settings(max_examples=150, deadline=None)
def test_no_check_fails_whatever_metrics_an_algorithm_records(values: dict[str, float], seed: int) -> None:
    draw = random.Random(seed)
    watched({name: [draw.choice([value, -value, 0.0, 1.0]) for _ in range(2 * MANY)] for name, value in values.items()})


def test_the_updates_on_three_collections_in_a_row_must_be_large() -> None:
    """The mean over the steps of each counts; narrow clip ranges clip small changes, which are none."""

    def found(collections: list[list[tuple[float, float]]]) -> list[str]:
        health, checks = Health(), []
        for steps in collections:
            for index, (kl, clipped) in enumerate(steps):
                first = {"time/collect": 1.0} if index == 0 else {}
                checks += health.trained({"policy/approx_kl": kl, "policy/clipfrac": clipped, **first})
        return [verdict.check for verdict in checks]

    large, clipping, narrow, small = [(0.0, 0.0), (0.5, 0.1)], [(0, 0), (0.05, 0.9), (0.05, 0.9)], [(0, 0.9)], [(0, 0)]
    assert found([large, large, large, small]) == ["update_size"]
    assert found([clipping, clipping, clipping, small]) == ["update_size"]
    assert found([large, large, small, clipping, clipping, small, narrow, narrow, narrow, small]) == []


def test_large_updates_that_halve_the_entropy_are_found_at_once() -> None:
    """Seen in a run of PPO: a clip fraction of 0.72 and a KL of 0.62 after 16 steps, and the entropy fell from 2.8."""
    for entropy, found in ((0.5, ["update_size"]), (2.0, [])):
        health = Health()
        checks = health.trained({"time/collect": 1.0, "policy/entropy": 2.8, "policy/approx_kl": 0.0})
        for _ in range(15):
            checks += health.trained({"policy/approx_kl": 0.62, "policy/clipfrac": 0.72})
        checks += health.trained({"time/collect": 1.0, "policy/entropy": entropy, "policy/approx_kl": 0.0})
        assert [verdict.check for verdict in checks] == found


def test_the_first_ratio_may_differ_under_half_precision_and_where_the_sampler_is_another() -> None:
    metrics = {"policy/ratio": [1.02], "policy/approx_kl": [5e-3]}
    assert watched(metrics) == ["off_policy"]
    assert watched(metrics, Health(half_precision=True)) == []
    assert watched(metrics, Health(starts_on_policy=False)) == []


def test_a_check_speaks_once_also_after_its_state_was_restored() -> None:
    one, other = Health(), Health()
    assert watched({**FLAT, "train/grad_norm": [0.0] * 9}, one) == ["gradient"]
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert watched({**FLAT, "train/grad_norm": [0.0] * 9}, other) == []
    assert other.state_dict().keys() == {"series", "steps", "told"}


def equal(outputs: list[str], **_: Any) -> list[float]:
    return [1.0] * len(outputs)


ONE_REWARD: dict[str, Any] = {
    "arguments": {"reward_fn": equal},
    "train__total_steps": 10,
    "train__save_interval": 4,
}
THREE = {**ONE_REWARD, "train__total_steps": 6}
"""Three collections."""


def lines(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / "health.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.daily(name=("grpo",))
@pytest.mark.parametrize("name", ["ppo", "grpo"])
def test_three_collections_of_equal_rewards_are_told_once(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="trainkit"):
        tiny_trainer(name, tmp_path, **THREE, **{"ppo": {"method__ppo_epochs": 1}}.get(name, {})).learn()
    found = [line for line in lines(tmp_path) if line["check"] == "signal"]
    assert [line["step"] for line in found] == [5], "a collection makes two steps"
    assert "in 3 collections in a row" in found[0]["message"]
    assert sum(found[0]["message"] in record.getMessage() for record in caplog.records) == 1


def test_a_run_that_health_ends_says_why_and_is_saved(tmp_path: Path) -> None:
    trainer = tiny_trainer("grpo", tmp_path, **ONE_REWARD, train__health="stop")
    trainer.learn()
    step = lines(tmp_path)[0]["step"]
    assert trainer.progress.step == step < 10
    assert trainer.progress.stop_reason.startswith("health: ")
    assert (tmp_path / "checkpoints" / f"step_{step:08}").is_dir()
    assert (tmp_path / "model").is_dir()
    on = tiny_trainer("grpo", tmp_path, **ONE_REWARD, train__health="warn", train__resume="auto")
    on.learn()
    assert on.progress.step == 10, "with another setting it continues"
    assert lines(tmp_path)[0]["step"] == step


def test_health_can_be_off(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert TRLConfig(method="sft", train={"health": False}).train.health == "off", "an unquoted off in YAML"
    with caplog.at_level(logging.WARNING, logger="trainkit"):
        tiny_trainer("grpo", tmp_path, **THREE, train__health="off").learn()
    assert lines(tmp_path) == []
    assert "health" not in caplog.text


def test_a_resumed_run_has_the_same_verdicts(tmp_path: Path) -> None:
    straight = tiny_trainer("grpo", tmp_path / "straight", **ONE_REWARD)
    straight.learn()
    for steps in (7, 10):
        settings = {**ONE_REWARD, "train__total_steps": steps, "train__resume": "auto"}
        resumed = tiny_trainer("grpo", tmp_path / "resumed", **settings)
        resumed.learn()
    assert resumed.health.state_dict() == straight.health.state_dict()
    assert lines(tmp_path / "resumed") == lines(tmp_path / "straight") != []


def test_dropout_in_the_updates_is_found(tmp_path: Path) -> None:
    dropout = tiny_gpt2(10, resid_pdrop=0.2, embd_pdrop=0.2)
    tiny_trainer("ppo", tmp_path / "off", model=dropout).learn()
    tiny_trainer("ppo", tmp_path / "on", model=dropout, model__disable_dropout=False).learn()
    assert "off_policy" not in [line["check"] for line in lines(tmp_path / "off")]
    assert [line["step"] for line in lines(tmp_path / "on") if line["check"] == "off_policy"] == [1]


def test_what_is_remembered_of_a_long_run_stays_small() -> None:
    health = Health()
    for _ in range(1000):
        health.trained({"policy/approx_kl": 0.1, "loss/total": torch.rand(()).item()})
        health.trained({"time/collect": 0.0, "reward/mean": 0.0})
    assert all(len(series["last"]) <= MANY for series in health.state_dict()["series"].values())
    assert all(len(values) <= 1 for values in health.steps.values())
