"""`trainkit doctor`: what trainkit runs on, and what the health monitor says of a run; completion in shells."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tables import table
from trainkit.cli import app
from trainkit.errors import RewardError
from trainkit.security import MASK
from trainkit.testing.trainers import tiny_trainer
from trainkit_tools import doctor


def asked(*arguments: str) -> Any:
    result = CliRunner().invoke(app, ["doctor", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_it_says_what_trainkit_runs_on_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINKIT_TEST_TOKEN", "canary")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TRAINKIT_SWEEP_STORAGE", "postgresql://me:canary@host/name?password=canary")
    for name in ("WANDB_API_KEY", "HF_TOKEN", "OPENAI_API_KEY", "TRAINKIT_VLLM_URL", "TRAINKIT_SETTINGS"):
        monkeypatch.setenv(name, "https://host/?key=canary")
    monkeypatch.setenv("MASTER_ADDR", "me:canary@host")
    facts = json.loads(asked("--json"))
    assert facts["versions"]["torch"] == version("torch")
    assert facts["devices"]["accelerators"] == torch.accelerator.device_count()
    assert facts["environment"]["TRAINKIT_TEST_TOKEN"] == "(set)"
    assert facts["environment"]["OMP_NUM_THREADS"] == "1"
    assert set(facts["checks"].values()) == {""}
    assert facts["environment"]["TRAINKIT_SWEEP_STORAGE"] == f"postgresql://{MASK}@host/name?{MASK}"
    assert facts["environment"]["TRAINKIT_VLLM_URL"] == "(set)"
    assert facts["environment"]["MASTER_ADDR"] == f"{MASK}@host"
    assert "canary" not in json.dumps(facts)
    assert "float32, bfloat16" in facts["devices"]["products in"]
    assert "gloo" in facts["distributed launch"]["backends"]
    assert "ppo" in facts["plugins"][f"trainkit-ppo {version('trainkit-ppo')}"]
    assert "available" in facts["machine"]["memory"]
    text = asked()
    assert "the working directory can be written to" in text
    assert f"  torch: {version('torch')}" in text


def test_a_check_that_fails_is_named_and_ends_with_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "LITTLE", 10**18)
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "there is room for checkpoints: " in result.stdout


def test_it_says_what_the_monitor_finds_in_a_run_also_if_it_was_off(tmp_path: Path) -> None:
    trainer = tiny_trainer("ppo", tmp_path / "run", train__health="off", train__total_steps=8)
    trainer.reward_fn = lambda outputs, **_: [0.0] * len(outputs)
    trainer.learn()
    assert not (tmp_path / "run" / "health.jsonl").exists()
    found = json.loads(asked(str(tmp_path / "run"), "--json"))
    assert "gradient" in [each["check"] for each in found]
    assert "the gradient was zero in 5 steps" in asked(str(tmp_path / "run"))


def test_numbers_that_are_not_finite_and_runs_without_metrics_are_told(tmp_path: Path) -> None:
    trainer = tiny_trainer("sft", tmp_path / "run", train__total_steps=2)
    trainer.learn()
    assert "nothing found in" in asked(str(tmp_path / "run"))
    metrics = tmp_path / "run" / "metrics.jsonl"
    whole = metrics.read_text(encoding="utf-8")
    metrics.write_text(f'{whole}{{"step": 3, "loss', encoding="utf-8")
    assert "nothing found in" in asked(str(tmp_path / "run")), "a line that is cut off is left out"
    metrics.write_text(whole, encoding="utf-8")
    with metrics.open("a", encoding="utf-8") as file:
        file.write('{"step": 3, "loss/total": NaN, "train/grad_norm": Infinity}\n')
    found = json.loads(asked(str(tmp_path / "run"), "--json"))
    assert {(each["step"], each["message"].partition(";")[0]) for each in found} == {
        (3, "loss/total is nan"),
        (3, "train/grad_norm is inf"),
    }
    assert "finite" in CliRunner().invoke(app, ["runs", str(tmp_path)]).stdout
    metrics.write_text("", encoding="utf-8")
    result = CliRunner().invoke(app, ["doctor", str(tmp_path / "run")])
    assert result.exit_code == 1
    assert "no metrics have been recorded in" in result.stderr


def test_what_is_no_run_is_said_to_be_none(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "config.yaml").write_text("base_model: x\n", encoding="utf-8")
    (foreign / "metrics.jsonl").write_text('{"loss": 1}\n', encoding="utf-8")
    for place, told in (
        (tmp_path, "has no config.yaml; give the directory of a run"),
        (tmp_path / "gone", "there is no directory"),
        (foreign / "config.yaml", "there is no directory"),
        (foreign, "is no run of trainkit: its config.yaml names no method"),
    ):
        result = CliRunner().invoke(app, ["doctor", str(place)])
        assert result.exit_code == 1
        assert told in result.stderr


def test_a_run_that_failed_before_its_first_step_is_listed_and_said_to_have_no_metrics(tmp_path: Path) -> None:
    trainer = tiny_trainer("ppo", tmp_path / "run", train__total_steps=2)
    trainer.reward_fn = lambda outputs, **_: [float("nan")] * len(outputs)
    with pytest.raises(RewardError):
        trainer.learn()
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    assert "stopped" in CliRunner().invoke(app, ["runs", str(tmp_path)]).stdout
    (tmp_path / "run" / "starts.jsonl").unlink()
    for command in ("doctor", "report"):
        assert "no metrics have been recorded in" in CliRunner().invoke(app, [command, str(tmp_path / "run")]).stderr


def asked_by(shell: str, words: str) -> dict[str, str]:
    """The variables by which a shell asks for completions."""
    kind = {
        "bash": {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)},
        "zsh": {"_TYPER_COMPLETE_ARGS": words},
        "fish": {"_TYPER_COMPLETE_ARGS": words, "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
    }
    return {"_TRAINKIT_COMPLETE": f"complete_{shell}", **kind[shell]}


@table(
    "words, expected",
    [("trainkit config show pp", "ppo"), ("trainkit doc", "doctor"), ("trainkit plugins check online", "online_dpo")],
)
@table("shell", ["bash", "zsh", "fish"])
def test_shells_complete_commands_and_algorithms(words: str, expected: str, shell: str) -> None:
    result = CliRunner().invoke(app, [], prog_name="trainkit", env=asked_by(shell, words))
    pattern = r"\(\(\"(\w+)" if shell == "zsh" else r"^(\w+)"
    assert re.findall(pattern, result.stdout, re.MULTILINE) == [expected], result.output


@pytest.mark.slow
def test_the_installed_program_completes() -> None:
    environment = {**os.environ, **asked_by("bash", "trainkit doc")}
    program = Path(sys.executable).with_name("trainkit")
    assert subprocess.run([program], env=environment, capture_output=True, text=True, check=True).stdout == "doctor\n"


@table("shell", ["bash", "zsh", "fish"])
def test_the_script_of_a_shell_is_printed(shell: str) -> None:
    result = CliRunner().invoke(app, [], prog_name="trainkit", env={"_TRAINKIT_COMPLETE": f"source_{shell}"})
    assert f"_TRAINKIT_COMPLETE=complete_{shell}" in result.stdout
