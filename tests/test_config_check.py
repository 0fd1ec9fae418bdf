"""`trainkit config check` refuses what the trainer would refuse when it is made, and nothing else."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tables import table
from trainkit.cli import app
from trainkit.config import ModelConfig
from trainkit.errors import ConfigError
from trainkit.models import load_model
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
    "best": ({"train.save_best": True, "train.eval_interval": 0}, "there are none; set it to"),
    "no evaluations": ({"plugins": ["early_stop"], "train.eval_interval": 0}, "early_stop compares evaluations, and"),
    "no metric": (
        {"plugins": [{"name": "early_stop", "metric": "reward"}]},
        "should be a metric of evaluations, such as 'eval/reward' or 'eval/loss/total'; did you mean 'eval/reward'?",
    ),
    "no metric of the best": (
        {"train.save_best": {"metric": "train/loss", "mode": "min"}},
        "should be a metric of evaluations",
    ),
    "nothing swept": (
        {"plugins": [{"name": "early_stop", "metric": "eval/reward@temperature=0"}], "train.eval_interval": 2},
        "no evaluation is at temperature=0 (rollout.eval_kwargs: it is no list of values)",
    ),
    "other values swept": (
        {
            "rollout.eval_kwargs": {"temperature": [0, 0.7]},
            "train.eval_interval": 2,
            "train.save_best": {"metric": "eval/pass@1@temperature=0.5", "mode": "max"},
        },
        "no evaluation is at temperature=0.5 (rollout.eval_kwargs: they are at temperature=0, temperature=0.7)",
    ),
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
    with pytest.raises(ConfigError, match=re.escape(said[:30])):
        tiny_trainer("grpo", tmp_path, method__group_size=8, **changes)


def test_several_reasons_are_told_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    found = checked(tiny_gpt2(11), {"rollout.temperature": 0, "rollout.num_rollouts": 60, "train.seq_length": 1000})
    told = found.output + str(found.exception)
    assert all(part in told for part in ("rollout.temperature is 0", "give a multiple of 8", "seq_length is 1000"))
    assert "scheduler.warmup_steps is 9" not in caplog.text
    assert checked(tiny_gpt2(11), {"scheduler.warmup_steps": 9}).exit_code == 0
    assert "scheduler.warmup_steps is 9, and the run ends after 4 steps" in caplog.text
    assert checked("some/model-of-the-hub", {}).exit_code == 0, "nothing is loaded from the hub"


MIXTRAL = {"model_type": "mixtral", "vocab_size": 11, "hidden_size": 32, "intermediate_size": 48,
           "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
           "num_local_experts": 4, "bos_token_id": None, "eos_token_id": None}  # fmt: skip


@table(
    "fields, settings, said",
    [
        ({"router_aux_loss_coef": 10.0}, {}, "model.model_path.router_aux_loss_coef is 10.0"),
        ({}, {"model.kwargs": {"router_aux_loss_coef": 0.1}}, "model.kwargs.router_aux_loss_coef is 0.1"),
        ({"output_router_logits": True}, {}, ""),
        ({}, {}, ""),
        ({"router_aux_loss_coef": 0.0}, {}, ""),
        ({"router_aux_loss_coef": 0}, {}, "expected float, got int"),
    ],
)
def test_a_loss_of_experts_that_is_not_added_is_told_and_one_without_effect_refused(
    fields: dict[str, Any],
    settings: dict[str, Any],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    found = checked({**MIXTRAL, **fields}, settings)
    assert found.exit_code == (2 if said else 0)
    changes = {key.replace(".", "__"): value for key, value in settings.items()}
    if said:
        assert said in found.output + str(found.exception)
        with pytest.raises(ConfigError, match=said):
            tiny_trainer("sft", tmp_path, model={**MIXTRAL, **fields}, **changes)
        return
    tiny_trainer("sft", tmp_path, model={**MIXTRAL, **fields})
    told = (
        "the loss that balances the experts of a mixture (router_aux_loss_coef) is not added to that of sft; model.kw"
    )
    assert (told in caplog.text) == (fields == {})


KINDS = {
    "qwen2_audio": "reads more than text and cannot be trained; give a language model, such as its text model (qwen2) "
    "alone",
    "clip": "reads more than text",
    "whisper": "is no language model and cannot be trained; give a language model",
    "vit": "is no language model",
}


@table("kind", KINDS)
def test_models_of_other_kinds_are_refused_in_a_sentence(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": kind}), encoding="utf-8")
    for model in ({"model_type": kind}, str(tmp_path / "model")):
        told = " ".join(checked(model, {}).output.split())
        assert KINDS[kind] in told
        assert len(told) < 400
        with pytest.raises(ConfigError, match=f"of the kind '{kind}'"):
            load_model(ModelConfig(model_path=model))


def test_it_is_told_if_the_text_of_a_model_that_reads_more_is_trained_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = {"vocab_size": 11, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "pad_token_id": 0,
            "num_attention_heads": 4, "num_key_value_heads": 2, "cross_attention_layers": [],
            "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
    trainer = tiny_trainer("sft", tmp_path, model={"model_type": "mllama", "text_config": text})
    trainer.models.build()
    assert "of the mllama, which reads more than text, the language model alone is loaded and trained" in caplog.text
