"""Algorithms of today, written by the documents alone: none needs a workaround, and each passes the kit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from researchers import dr_grpo, kto, remax
from test_dynamic import Dapo
from trainkit.data import Row
from trainkit.errors import ConfigError, DataError, RegistryError
from trainkit.testing.conformance import check_plugin, checks_for, subjects_of
from trainkit.testing.trainers import SAMPLES, tiny_trainer

ALGORITHMS = {
    "test_dr_grpo": dr_grpo.DrGRPOTrainer,
    "test_remax": remax.ReMaxTrainer,
    "test_kto": kto.KTOTrainer,
    "test_dapo": Dapo,
}
EXPECTED: dict[str, dict[str, str]] = {
    "test_remax": {
        "given_responses": "responses given to step() have no greedy response to compare with",
        "first_update": "REINFORCE has no importance ratio",
    },
    "test_dapo": {"docstrings": "it is a test", "fields_have_effects": "its only setting is the size of its groups"},
}
QUICK = {"credit_of_scores", "turn_rewards", "episodes_are_whole", "keep_chooses", "micro_batches", "learns"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ALGORITHMS)
def test_it_passes_the_whole_kit(name: str) -> None:
    check_plugin(name, expected_failures=EXPECTED.get(name))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_it_passes_the_checks_of_what_is_new(name: str) -> None:
    applying = {each.name for subject in subjects_of(name) for each in checks_for(subject)}
    check_plugin(name, only=sorted(QUICK & applying))


def test_labels_are_true_or_false(tmp_path: Path) -> None:
    trainer = tiny_trainer("test_kto", tmp_path)
    rows = [{"prompt": "a", "completion": "b", "label": True}, {"prompt": "a", "completion": "c", "label": False}]
    trainer.add_samples(rows)
    assert [row["label"] for row in trainer.pipeline.rows] == [True, False]
    assert "reward" not in trainer.pipeline.rows[0]
    trainer.add_samples(SAMPLES[:2], [1, 0])
    assert [row["label"] for row in trainer.pipeline.rows] == [True, False]
    with pytest.raises(DataError, match=r"sample 1 has the label 0.5; labels are true or false, or 1 and 0"):
        trainer.add_samples(SAMPLES[:2], [1, 0.5])
    with pytest.raises(DataError, match="sample 0 has no reward; give rewards, one per sample, or a column 'label'"):
        trainer.add_samples(SAMPLES[:2])


WRONG = {
    "misspelt": (("promts",), r"its inputs name 'promts'; did you mean 'prompts'\?; known: environment, labels, pairs"),
    "a combination": (("samples", "prompts"), r"its inputs are \('samples', 'prompts'\), which is no combination"),
    "rewards alone": (("rewards",), "which is no combination that can be trained on; give one of: prompts, prompts"),
}


@pytest.mark.parametrize(("inputs", "said"), WRONG.values(), ids=WRONG)
def test_a_wrong_declaration_of_inputs_is_refused_at_registration(inputs: Any, said: str) -> None:
    from trainkit import register_trainer

    with pytest.raises(RegistryError, match=said):
        register_trainer("test_remax")(type("Wrong", (remax.ReMaxTrainer,), {"inputs": inputs}))


def needing(name: str, inputs: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ALGORITHMS[name], "inputs", inputs)


def test_train_follows_the_declaration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import trainkit

    tiny = tiny_trainer("test_dr_grpo", tmp_path)
    given: dict[str, Any] = {"tokenizer": tiny.tokenizer, "config": tiny.config}
    prompts: list[Row | str] = ["ab", "c"]
    with pytest.raises(
        ConfigError, match="'test_dr_grpo' learns from reward_fn and prompts; given prompts. Add reward"
    ):
        trainkit.train(prompts=prompts, **given)
    needing("test_dr_grpo", ("prompts",), monkeypatch)
    trained = trainkit.train(prompts=prompts, **given)
    assert trained.progress.step == 6
    assert torch.equal(trained.score(trained._rollouts[0]).cpu(), torch.zeros(len(trained._rollouts[0])))
    with pytest.raises(ConfigError, match="learns from prompts; given reward_fn and prompts. Remove reward_fn"):
        trainkit.train(prompts=prompts, reward_fn=lambda outputs, **_: [0.0] * len(outputs), **given)
    needing("test_dr_grpo", ("environment", "prompts"), monkeypatch)
    with pytest.raises(
        ConfigError, match="learns from environment and prompts; given reward_fn and prompts. Add envir"
    ):
        trainkit.train(prompts=prompts, reward_fn=lambda outputs, **_: [0.0] * len(outputs), **given)
