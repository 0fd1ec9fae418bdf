"""`trainkit doctor`: what trainkit runs on, and what the health monitor says of a run; completion in shells."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from trainkit.cli import app, doctor
from trainkit.security import MASK
from trainkit.testing.trainers import tiny_trainer


def asked(*arguments: str) -> Any:
    result = CliRunner().invoke(app, ["doctor", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_it_says_what_trainkit_runs_on_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINKIT_TEST_TOKEN", "canary")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TRAINKIT_TEST_URL", "postgresql://me:canary@host/name")
    facts = json.loads(asked("--json"))
    assert facts["versions"]["torch"] == torch.__version__
    assert facts["devices"]["accelerators"] == torch.accelerator.device_count()
    assert facts["environment"]["TRAINKIT_TEST_TOKEN"] == "(set)"
    assert facts["environment"]["OMP_NUM_THREADS"] == "1"
    assert set(facts["checks"].values()) == {""}
    assert facts["environment"]["TRAINKIT_TEST_URL"] == f"postgresql://{MASK}@host/name"
    assert "canary" not in json.dumps(facts)
    assert "float32, bfloat16" in facts["devices"]["products in"]
    assert "gloo" in facts["distributed launch"]["backends"]
    assert "ppo" in facts["plugins"][f"trainkit-ppo {version('trainkit-ppo')}"]
    assert "available" in facts["machine"]["memory"]
    text = asked()
    assert "the working directory can be written to" in text
    assert f"  torch: {torch.__version__}" in text


def test_a_check_that_fails_is_named_and_ends_with_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "LITTLE", 10**18)
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "there is room for checkpoints: " in result.stdout


@pytest.mark.parametrize("health", ["warn", "off"])
def test_it_says_what_the_monitor_finds_in_a_run_also_if_it_was_off(health: str, tmp_path: Path) -> None:
    trainer = tiny_trainer("ppo", tmp_path / "run", train__health=health, train__total_steps=8)
    trainer.reward_fn = lambda outputs, **_: [0.0] * len(outputs)
    trainer.learn()
    assert (tmp_path / "run" / "health.jsonl").exists() == (health == "warn")
    found = json.loads(asked(str(tmp_path / "run"), "--json"))
    assert "gradient" in [each["check"] for each in found]
    assert "the gradient was zero in 5 steps" in asked(str(tmp_path / "run"))


def test_a_healthy_run_and_one_cut_off_have_no_finding(tmp_path: Path) -> None:
    trainer = tiny_trainer("sft", tmp_path / "run", train__health="off", train__total_steps=2)
    trainer.learn()
    with (tmp_path / "run" / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 3, "loss')
    assert "nothing found in" in asked(str(tmp_path / "run"))


def test_numbers_that_are_not_finite_and_runs_without_metrics_are_told(tmp_path: Path) -> None:
    trainer = tiny_trainer("sft", tmp_path / "run", train__total_steps=2)
    trainer.learn()
    assert "nothing found in" in asked(str(tmp_path / "run"))
    metrics = tmp_path / "run" / "metrics.jsonl"
    with metrics.open("a", encoding="utf-8") as file:
        file.write('{"step": 3, "loss/total": NaN, "train/grad_norm": Infinity}\n')
    found = json.loads(asked(str(tmp_path / "run"), "--json"))
    assert {(each["step"], each["message"]) for each in found} == {
        (3, "loss/total is nan"),
        (3, "train/grad_norm is inf"),
    }
    metrics.write_text("", encoding="utf-8")
    result = CliRunner().invoke(app, ["doctor", str(tmp_path / "run")])
    assert result.exit_code == 1
    assert "no metrics have been recorded in" in result.stderr


def test_what_is_no_run_is_said_to_be_none(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["doctor", str(tmp_path)])
    assert result.exit_code == 1
    assert "has no config.yaml; give the directory of a run" in result.stderr


@pytest.mark.parametrize(
    ("words", "expected"),
    [("trainkit config show pp", "ppo"), ("trainkit doc", "doctor"), ("trainkit plugins check online", "online_dpo")],
)
def test_shells_complete_commands_and_algorithms(words: str, expected: str) -> None:
    variables = {
        "_TRAINKIT_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split()) - 1),
    }
    done = subprocess.run(
        [Path(sys.executable).with_name("trainkit")],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == [expected], done.stderr
