"""Reward modelling's own mathematics: golden numbers, what is read, and that it learns what is preferred."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForSequenceClassification

import trainkit
from tables import table
from trainkit.errors import ConfigError, DataError
from trainkit.testing import character_tokenizer, tiny_gpt2, tiny_llama, tiny_t5
from trainkit.testing.trainers import LETTERS, tiny_trainer
from trainkit_reward import RewardModel, preference_loss

SCORES = st.lists(st.floats(-20, 20), min_size=1, max_size=8)
PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}


def test_the_loss_with_margins_is_the_golden_number() -> None:
    """Golden 10.9: every difference is its margin, so every term is log 2; [B, 1] − [B] would give .842927."""
    chosen, margins = torch.tensor([1.0, 2, 3]), torch.tensor([1.0, 2, 3])
    assert preference_loss(chosen, torch.zeros(3), margins).mean().item() == pytest.approx(0.693147, abs=1e-6)
    wrong = preference_loss(chosen.unsqueeze(1), torch.zeros(3, 1), margins)
    assert wrong.mean().item() == pytest.approx(0.842927, abs=1e-6)


@given(SCORES, st.floats(-3, 3), st.floats(0, 2))
def test_the_loss_is_bradley_terrys_with_centring(scores: list[float], margin: float, center: float) -> None:
    chosen = torch.tensor(scores, dtype=torch.float64)
    rejected, margins = chosen.flip(0) / 2, torch.full_like(chosen, margin)
    expected = [
        math.log1p(math.exp(-(c - r - margin))) + center * (c + r) ** 2
        for c, r in zip(chosen.tolist(), rejected.tolist(), strict=True)
    ]
    found = preference_loss(chosen, rejected, margins, center_coef=center)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


def test_both_sides_go_through_the_model_at_once(tmp_path: Path) -> None:
    trainer = tiny_trainer("reward", tmp_path)
    trainer.collect()
    rows: list[int] = []
    trainer.unwrapped.model.base_model.register_forward_hook(
        lambda _, inputs, kwargs, __: rows.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    _, found = trainer.loss(trainer.store.experience)
    assert rows == [32]
    assert set(found) == {"rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies"}
    chosen, rejected, margins = (found[f"rewards/{n}"].compute() for n in ("chosen", "rejected", "margins"))
    assert margins == pytest.approx(chosen - rejected)


def read(tmp_path: Path, *samples: dict[str, Any]) -> Any:
    trainer = tiny_trainer("reward", tmp_path)
    trainer.add_samples(list(samples))
    return trainer


def test_margins_come_from_a_column_and_are_0_without_one(tmp_path: Path) -> None:
    trainer = read(tmp_path, {**PAIR, "margin": 2}, {**PAIR, "margin": 0.5})
    assert trainer.make_experience(trainer.pipeline.rows).margins.tolist() == [2, 0.5]
    trainer = read(tmp_path, PAIR, PAIR)
    assert trainer.make_experience(trainer.pipeline.rows).margins.tolist() == [0, 0]


@table(
    "fault, said",
    [
        ({"margin": math.nan}, r"sample 1: margin should be a finite number; given nan"),
        ({"margin": math.inf}, r"sample 1: margin should be a finite number"),
        ({"margin": "large"}, r"sample 1: margin should be a finite number; given 'large'"),
        ({"margin": True}, r"sample 1: margin should be a finite number; given True"),
        ({"margin": None}, r"1 of 2 samples have a margin; give all of them one, or none"),
        ({"chosen": ""}, r"sample 1: chosen is empty"),
        ({"rejected": 3}, r"sample 1: rejected should be text"),
    ],
)
def test_pairs_that_say_nothing_are_refused(fault: dict[str, Any], said: str, tmp_path: Path) -> None:
    good = {**PAIR, "margin": 1.0}
    with pytest.raises(DataError, match=said):
        read(tmp_path, good, {**good, **fault})
    missing = {key: value for key, value in good.items() if key not in fault or key == "margin"}
    if len(missing) < len(good):
        with pytest.raises(DataError, match=r"without (chosen|rejected); expected here: prompt, chosen, rejected"):
            read(tmp_path, good, missing)


# ----------------------------------------------------------------------------------------------------- it learns


def by_letter(count: int, seed: int) -> list[dict[str, Any]]:
    """Pairs of which the one with more a is preferred, by as much as it has more."""
    draws, pairs = random.Random(seed), []
    while len(pairs) < count:
        one, other = ("".join(draws.choices("abcd", k=draws.randint(1, 6))) for _ in range(2))
        more = one.count("a") - other.count("a")
        if more > 0:
            pairs.append({"prompt": draws.choice("efgh"), "chosen": one, "rejected": other, "margin": more / 2})
    return pairs


def trained(tmp_path: Path, **sections: Any) -> Any:
    return trainkit.train(
        tiny_gpt2(10),
        method="reward",
        samples=by_letter(400, 1),
        eval_samples=by_letter(200, 2),
        tokenizer=character_tokenizer(LETTERS),
        config={
            "optimizer": {"lr": 3e-3},
            **sections,
            "train": {"batch_size": 32, "epochs": 6, "run_dir": str(tmp_path / "run"), "trackers": []},
        },
    )


def test_it_learns_what_is_preferred(tmp_path: Path) -> None:
    found = trained(tmp_path).evaluate()
    assert found["eval/rewards/accuracies"] > 0.95
    assert found["eval/rewards/margins"] > 1


@pytest.mark.slow
def test_a_run_is_a_reward_function_afterwards(tmp_path: Path) -> None:
    trained(tmp_path)
    model = RewardModel.from_pretrained(tmp_path / "run" / "model")
    assert model(["ebbb", "eabb", "eaab", "eaaa"]) == sorted(model(["ebbb", "eabb", "eaab", "eaaa"]))
    tuned = trainkit.train(
        tiny_gpt2(10),
        reward_fn=model,
        prompts=list("efgh"),
        method="rloo",
        tokenizer=character_tokenizer(LETTERS),
        metric_fn=lambda outputs, **_: {"a": [output.count("a") for output in outputs]},
        config={
            "method": {"name": "rloo", "kl_coef": 0.0},
            "optimizer": {"lr": 3e-3},
            "rollout": {"max_new_tokens": 4, "num_rollouts": 64},
            "train": {"batch_size": 64, "total_steps": 40, "run_dir": str(tmp_path / "tuned"), "trackers": []},
        },
    )
    assert tuned.evaluate()["eval/a"] > 2


def test_the_reward_function_says_of_a_pair_what_training_does(tmp_path: Path) -> None:
    """Texts are tokenised in the same way, EOS included; the export says it too, and so does an adapter's."""
    for name, changes in {
        "whole": {},
        "adapter": {"model__peft_config": {"r": 2, "target_modules": "all-linear"}},
    }.items():
        trainer = tiny_trainer("reward", tmp_path / name, model=tiny_llama(10), optimizer__lr=0.01, **changes)
        trainer.learn()
        rows = trainer.pipeline.rows
        with torch.no_grad():
            chosen = trainer.unwrapped(trainer.encode_preferences(rows).chosen).tolist()
        texts = [row["prompt"] + row["chosen"] for row in rows]
        assert trainer.reward_model(texts) == pytest.approx(chosen, abs=1e-5)
        assert RewardModel.from_pretrained(tmp_path / name / "model")(texts) == pytest.approx(chosen, abs=1e-4)


@pytest.mark.daily(changes=({},))
@pytest.mark.parametrize("changes", [{}, {"model__peft_config": {"r": 2}}, {"model__num_layers_unfrozen": 1}])
def test_a_classifier_is_trained_and_exported_as_one(changes: dict[str, Any], tmp_path: Path) -> None:
    AutoModelForSequenceClassification.from_config(AutoConfig.for_model(**tiny_gpt2(10), num_labels=1)).save_pretrained(
        tmp_path / "classifier"
    )
    trainer = tiny_trainer("reward", tmp_path / "run", model__model_path=str(tmp_path / "classifier"), **changes)
    trainer.models.build()
    before = {name: tensor.clone() for name, tensor in trainer.unwrapped.state_dict().items()}
    trainer.learn()
    moved = {name for name, tensor in trainer.unwrapped.state_dict().items() if not torch.equal(tensor, before[name])}
    assert any("score" in name for name in moved)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run" / "model", num_labels=1)
    row = torch.tensor([[1, 2, 3]])
    torch.testing.assert_close(loaded(row).logits, trainer.unwrapped.model(row).logits, rtol=0, atol=1e-6)
    texts = ["ab", "hgf"]
    exported = RewardModel.from_pretrained(tmp_path / "run" / "model")
    assert exported(texts) == pytest.approx(trainer.reward_model(texts), abs=1e-5)


@pytest.mark.daily(method=("ppo",))
@pytest.mark.parametrize("method", ["ppo", "sft", "reward"])
def test_a_run_that_leaves_the_head_for_scores_out_says_so(
    method: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    export = str(tiny_trainer("reward", tmp_path / "first").save_pretrained(tmp_path / "export"))
    trainer = tiny_trainer(method, tmp_path / "run", model__model_path=export)
    trainer.models.build()
    assert trainer.unwrapped is trainer.unwrapped
    said = [record.message for record in caplog.records if "its score head is not loaded" in record.message]
    assert len(said) == (method != "reward")
    assert all(f"{export} is a reward model, of which {method} takes the language model alone" in text for text in said)


def test_an_encoder_decoder_is_refused_at_the_door(tmp_path: Path) -> None:
    said = (
        r"of type 't5' is an encoder-decoder, and 'reward' trains none; give a model that reads prompt and response as"
    )
    with pytest.raises(ConfigError, match=said):
        tiny_trainer("reward", tmp_path, model=tiny_t5(10))


def test_nothing_is_generated(tmp_path: Path) -> None:
    """Neither by a language model that has a head, which could, nor by a classifier, which could not."""
    with pytest.raises(ConfigError, match=r"'reward' trains a model that scores text .* so eval_prompts has no use"):
        trainkit.train(
            tiny_gpt2(10), method="reward", samples=[PAIR], eval_prompts=["a"], tokenizer=character_tokenizer(LETTERS),
            config={"train": {"run_dir": str(tmp_path / "run")}},
        )  # fmt: skip
    trainer = tiny_trainer("reward", tmp_path)
    for generate in (trainer.generate, trainer.generate_eval):
        with pytest.raises(ConfigError, match=r"generates none, so generate\(\) has no use; evaluate on eval_samples"):
            generate(["a"])


@pytest.mark.slow
def test_centring_keeps_scores_around_zero(tmp_path: Path) -> None:
    free = trained(tmp_path / "free").evaluate()
    centred = trained(tmp_path / "centred", method={"name": "reward", "center_coef": 0.1}).evaluate()

    def off(found: dict[str, float]) -> float:
        return abs(found["eval/rewards/chosen"] + found["eval/rewards/rejected"])

    assert off(centred) < 0.3 < off(free)
    assert centred["eval/rewards/accuracies"] > 0.95
