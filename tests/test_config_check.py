"""`trainkit config check` refuses what the trainer would refuse when it is made, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tables import table
from trainkit.cli import app
from trainkit.errors import ConfigError
from trainkit.testing import tiny_gpt2
from trainkit.testing.trainers import tiny_trainer

GROUPS = {"method.name": "grpo", "rollout.num_rollouts": 64, "train.total_steps": 4, "train.batch_size": 32}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "groups": ({"rollout.num_rollouts": 60}, "give a multiple of 8"),
    "greedy": ({"rollout.temperature": 0}, "rollout.temperature is 0"),
    "one token": ({"rollout.top_k": 1}, "rollout.top_k is 1"),
    "rank": ({"model.peft_config": {"r": 0}}, "r is 0, the rank of the adapter; give 1 or more"),
    "dropout": ({"model.peft_config": {"lora_dropout": 0.1}}, "disable_dropout switches all dropout off"),
    "modules": ({"model.peft_config": {"target_modules": ["foo"]}}, "foo"),
    "length": ({"train.seq_length": 1000}, "train.seq_length is 1000; the model attends to at most"),
    "room": ({"rollout.max_new_tokens": 64}, "leaves no room for a prompt"),
    "layers": ({"model.num_layers_unfrozen": 5}, "model.num_layers_unfrozen is 5, and the model has 2 layers"),
    "warm-up": ({"scheduler.warmup_steps": 9}, "scheduler.warmup_steps is 9, and the run ends after 4 steps"),
    "best": ({"train.save_best": True, "train.eval_interval": 0}, "there are none; set it to"),
}


def checked(model: Any, settings: dict[str, Any]) -> Any:
    path = Path("run.yaml")
    path.write_text(json.dumps({"model": {"model_path": model}, "method": {"name": "grpo"}}), encoding="utf-8")
    overrides = [f"{key}={json.dumps(value)}" for key, value in {**GROUPS, **settings}.items()]
    return CliRunner().invoke(app, ["config", "check", str(path), *overrides])


@table("name", REFUSED)
def test_what_training_refuses_is_no_valid_configuration(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings, said = REFUSED[name]
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(tiny_gpt2(11)), encoding="utf-8")
    for model in (tiny_gpt2(11), str(tmp_path / "model")):
        found = checked(model, settings)
        assert found.exit_code == 2
        assert said in " ".join((found.output + str(found.exception)).split())
    changes = {key.replace(".", "__"): value for key, value in {**GROUPS, **settings}.items() if key != "method.name"}
    with pytest.raises(ConfigError, match=said[:30]):
        tiny_trainer("grpo", tmp_path, method__group_size=8, **changes)


def test_several_reasons_are_told_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = checked(tiny_gpt2(11), {"rollout.temperature": 0, "rollout.num_rollouts": 60, "train.seq_length": 1000})
    told = found.output + str(found.exception)
    assert all(part in told for part in ("rollout.temperature is 0", "give a multiple of 8", "seq_length is 1000"))
    assert checked(tiny_gpt2(11), {}).exit_code == 0
    assert checked("some/model-of-the-hub", {}).exit_code == 0, "nothing is loaded from the hub"
