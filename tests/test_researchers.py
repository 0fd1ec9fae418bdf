"""Algorithms of today, written by the documents alone: none needs a workaround, and each passes the kit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from researchers import (
    dapo,
    distillation,
    dr_grpo,
    guess,
    kept_games,
    kto,
    remax,
)
from tables import table
from trainkit.data import Row
from trainkit.errors import ConfigError, DataError, PluginError, RegistryError
from trainkit.testing import Declaration
from trainkit.testing.trainers import SAMPLES, tiny_trainer
from trainkit_kit import check_plugin

ALGORITHMS: dict[str, Any] = {
    "_test_dr_grpo": dr_grpo.DrGRPOTrainer,
    "_test_remax": remax.ReMaxTrainer,
    "_test_kto": kto.KTOTrainer,
    "_test_dapo": dapo.DapoTrainer,
    "_test_distillation": distillation.DistillationTrainer,
    "_test_turns": guess.TurnsTrainer,
    "_test_kept_games": kept_games.KeptGamesTrainer,
}


@pytest.mark.weekly
@pytest.mark.parametrize("name", ALGORITHMS)
def test_it_passes_the_whole_kit(name: str) -> None:
    check_plugin(name)


@pytest.mark.slow
def test_the_game_is_learnt(tmp_path: Path) -> None:
    """Of eight letters, three guesses by halves find seven; each guess at random finds one in eight."""
    arguments = {"environment": guess.Guess, "prompts": list("abcdefgh")}
    trainer = tiny_trainer(
        "_test_turns", tmp_path, arguments=arguments, optimizer__lr=2e-2, rollout__max_new_tokens=1,
        rollout__max_turns=3, rollout__num_rollouts=128, rollout__batch_size=128, train__batch_size=128,
        train__total_steps=300,
    )  # fmt: skip
    won = [float(trainer.play(list("abcdefgh") * 64).terminated.float().mean())]
    trainer.learn()
    won.append(float(trainer.play(list("abcdefgh") * 64).terminated.float().mean()))
    assert won[1] > won[0] + 0.2, won


def test_a_required_setting_without_a_value_for_tests_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distillation, "KIT", Declaration())
    said = (
        "DistillationConfig has no default for teacher, so tests need values; write into the module of "
        "DistillationTrainer, or into a module kit beside it, KIT = trainkit.testing.Declaration(arguments={'config': "
        "{'method': {'teacher': ...}}}). A second language model has 10 tokens: tiny_gpt2(10)"
    )
    with pytest.raises(ConfigError, match=re.escape(said)):
        tiny_trainer("_test_distillation", tmp_path)


def test_labels_are_true_or_false(tmp_path: Path) -> None:
    trainer = tiny_trainer("_test_kto", tmp_path)
    rows = [{"prompt": "a", "completion": "b", "label": True}, {"prompt": "a", "completion": "c", "label": False}]
    trainer.add_samples(rows)
    assert [row["label"] for row in trainer.pipeline.rows] == [True, False]
    assert "reward" not in trainer.pipeline.rows[0]
    trainer.add_samples(SAMPLES[:2], [1, 0])
    assert [row["label"] for row in trainer.pipeline.rows] == [True, False]
    with pytest.raises(DataError, match=r"sample 1: label should be true or false, or 1 or 0; given 0.5"):
        trainer.add_samples(SAMPLES[:2], [1, 0.5])
    with pytest.raises(DataError, match="sample 0 has no reward; give rewards, one per sample, or a column 'label'"):
        trainer.add_samples(SAMPLES[:2])


WRONG = {
    "misspelt": (("promts",), r"its inputs name 'promts'; did you mean 'prompts'\?; known: environment, labels, pairs"),
    "a combination": (("samples", "environment"), r"are \('samples', 'environment'\), which is no combination"),
    "rewards alone": (("rewards",), "which is no combination that can be trained on; give one of: prompts, prompts"),
}


@table("inputs, said", WRONG.values())
def test_a_wrong_declaration_of_inputs_is_refused_at_registration(inputs: Any, said: str) -> None:
    from trainkit import register_trainer

    with pytest.raises(RegistryError, match=said):
        register_trainer("_test_remax")(type("Wrong", (remax.ReMaxTrainer,), {"inputs": inputs}))


def needing(name: str, inputs: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ALGORITHMS[name], "inputs", inputs)


def test_train_follows_the_declaration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import trainkit

    tiny = tiny_trainer("_test_dr_grpo", tmp_path)
    given: dict[str, Any] = {"tokenizer": tiny.tokenizer, "config": tiny.config}
    prompts: list[Row | str] = ["ab", "c"]
    with pytest.raises(
        ConfigError, match=r"'_test_dr_grpo' learns from reward_fn and prompts; given prompts. Add reward"
    ):
        trainkit.train(prompts=prompts, **given)
    needing("_test_dr_grpo", ("prompts",), monkeypatch)
    trained = trainkit.train(prompts=prompts, **given)
    assert trained.progress.step == 6
    rollouts = trained.collector.collection.rollouts[0]
    assert torch.equal(trained.score(rollouts).cpu(), torch.zeros(len(rollouts)))
    with pytest.raises(ConfigError, match=r"learns from prompts; given reward_fn and prompts. Remove reward_fn"):
        trainkit.train(prompts=prompts, reward_fn=lambda outputs, **_: [0.0] * len(outputs), **given)
    needing("_test_dr_grpo", ("environment", "prompts"), monkeypatch)
    with pytest.raises(
        ConfigError, match=r"learns from environment and prompts; given reward_fn and prompts. Add envir"
    ):
        trainkit.train(prompts=prompts, reward_fn=lambda outputs, **_: [0.0] * len(outputs), **given)


def test_a_loop_of_ones_own_is_told_what_is_missing_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needing("_test_dr_grpo", ("environment", "prompts"), monkeypatch)
    trainer = tiny_trainer("_test_dr_grpo", tmp_path, arguments={"reward_fn": None, "environment": None})
    with pytest.raises(DataError, match=r"learns from environment and prompts; give environment$"):
        trainer.learn()


def by_settings(monkeypatch: pytest.MonkeyPatch, *found: str) -> None:
    """Let the inputs of an algorithm with a reward function depend on a setting."""
    cls = ALGORITHMS["_test_dr_grpo"]
    monkeypatch.setattr(
        cls, "inputs_for", classmethod(lambda cls, method: found if method.name == "_test_dr_grpo" else cls.inputs)
    )


def test_inputs_may_follow_from_the_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import trainkit

    by_settings(monkeypatch, "prompts")
    tiny = tiny_trainer("_test_dr_grpo", tmp_path)
    assert (tiny.inputs, type(tiny).inputs) == (("prompts",), ("reward_fn", "prompts"))
    assert (tiny.reward_fn, tiny.rewarded, tiny._missing_inputs) == (None, False, [])
    given: dict[str, Any] = {"prompts": ["ab"], "tokenizer": tiny.tokenizer, "config": tiny.config}
    with pytest.raises(ConfigError, match=r"learns from prompts; given reward_fn and prompts. Remove reward_fn"):
        trainkit.train(reward_fn=lambda outputs, **_: [0.0] * len(outputs), **given)


@table(
    "found, said",
    [
        (("promts",), r"'_test_dr_grpo': inputs_for: its inputs name 'promts'; did you mean 'prompts'\?"),
        (
            ("samples",),
            r"inputs_for returned \('samples',\), and inputs is \('reward_fn', 'prompts'\); an algorithm is",
        ),
    ],
)
def test_wrong_inputs_of_settings_are_refused(
    found: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_settings(monkeypatch, *found)
    with pytest.raises(PluginError, match=said):
        tiny_trainer("_test_dr_grpo", tmp_path)
