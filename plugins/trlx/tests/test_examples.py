"""Longer scripts written for trlX run to their end and learn; `rewritten` changes the first word of their imports."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from trainkit.testing import character_tokenizer, tiny_gpt2, tiny_t5
from trainkit_migrate.scripts import rewritten

SCRIPTS = Path(__file__).with_name("scripts")
LETTERS = "abcdefghHA\n"


@pytest.fixture
def models(tmp_path: Path) -> dict[str, str]:
    """Return the directories of a GPT-2 and a T5 of random weights, with their tokenizer.

    The embeddings of the GPT-2, which some scripts freeze, are those of a trained model in size.
    """
    tokenizer = character_tokenizer(LETTERS)
    torch.manual_seed(0)
    for name, fields in {
        "gpt2": tiny_gpt2(len(tokenizer), initializer_range=0.2),
        "t5": tiny_t5(len(tokenizer)),
    }.items():
        config = AutoConfig.for_model(**fields)
        kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
        kind.from_config(config).save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    return {name: str(tmp_path / name) for name in ("gpt2", "t5")}


def run(name: str, hparams: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run a script with its settings as the first argument of the command; return its names."""
    found = rewritten((SCRIPTS / name).read_text(encoding="utf-8"))
    assert not found.refused
    monkeypatch.setattr(sys, "argv", [name, json.dumps(hparams)])
    monkeypatch.setenv("SCRIPTS", str(SCRIPTS))
    monkeypatch.setattr(sys, "path", [*sys.path])  # scripts add to it
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(found.text, name, "exec"), names)
    return names


def small(path: str, tmp_path: Path) -> dict[str, Any]:
    """Return the settings that such a script takes from its command."""
    return {
        "model.model_path": path,
        "tokenizer.tokenizer_path": path,
        "train.checkpoint_dir": str(tmp_path / "ckpts"),
        "train.seed": 1,
    }


def rewards(names: dict[str, Any], metric: str = "eval/reward") -> list[float]:
    """Return the mean reward of each evaluation."""
    return [*names["trainer"].history[metric].values()]


@pytest.mark.slow
def test_ppo_trains_a_t5(models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = rewards(run("ppo_sentiments_t5.py", small(models["t5"], tmp_path), monkeypatch))
    assert found[-1] > found[0] + 2


@pytest.mark.slow
def test_ppo_on_dialogues(models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rewards are relative to those of the answers in the dataset, which reach the reward function as a column."""
    hparams = {**small(models["gpt2"], tmp_path), "train.total_steps": 90, "train.epochs": 400}
    names = run("ppo_hh.py", hparams, monkeypatch)
    found = rewards(names)
    assert found[-1] > found[0] + 3
    assert rewards(names, "eval/metrics/longer")[-1] > 0


@pytest.mark.slow
def test_ilql_on_dialogues_of_several_turns(
    models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = rewards(run("ilql_hh.py", small(models["gpt2"], tmp_path), monkeypatch), "eval/metrics/reward")
    assert found[-1] > 0.8 > 0.5 > found[0]


@pytest.mark.slow
def test_summaries_are_learnt_from_comparisons(
    models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fine-tuning, a reward model, and PPO with rewards relative to the person's summary, of which 0 is the best."""
    names = run("trlx_gptj_text_summarization.py", {"model_path": models["gpt2"], "out": str(tmp_path)}, monkeypatch)
    found = rewards(names)
    assert names["accuracy"] > 0.95
    assert found[-1] > 0.5 * found[0]
    assert found[0] < 0


@pytest.mark.slow
def test_dense_rewards_are_learnt(models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hparams = {
        **small(models["gpt2"], tmp_path),
        "train.total_steps": 60,
        "train.epochs": 100,
        "train.batch_size": 16,
        "train.seq_length": 16,
        "train.eval_interval": 30,
        "train.tracker": None,
        "optimizer.kwargs": {"lr": 3e-3},
        "scheduler.kwargs": {"eta_min": 3e-3, "T_max": 1e12},
        "model.num_layers_unfrozen": -1,
        "method": {"num_rollouts": 64, "chunk_size": 32, "gen_kwargs": {"max_new_tokens": 6, "min_new_tokens": 6}},
    }
    found = rewards(run("ppo_dense_sentiments.py", hparams, monkeypatch))
    assert found[-1] > 1 > 0.5 > found[0]


@pytest.mark.slow
def test_random_walks_become_short(models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ILQL begins with random weights, of a configuration that a file holds; RFT with a model that has seen walks."""
    hparams = small(models["gpt2"], tmp_path)
    with pytest.warns(FutureWarning, match="dataset="):
        names = run("ilql_randomwalks.py", hparams, monkeypatch)
    found = rewards(names, "eval/metrics/optimality")
    assert found[-1] > 0.7 > 0.3 > found[0]
    assert rewards(names, "eval/metrics/lengths")[-1] < 5
    names = run("rft_randomwalks.py", {**hparams, "train.checkpoint_dir": str(tmp_path / "rft")}, monkeypatch)
    found = rewards(names)
    assert found[-1] > found[0] + 0.1
    assert found == pytest.approx(rewards(names, "eval/metrics/optimality"))
    assert (tmp_path / "rft" / "best" / "config.json").is_file()


@pytest.mark.slow
def test_ilql_on_an_encoder_decoder(models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = run("ilql_sentiments_t5.py", small(models["t5"], tmp_path), monkeypatch)
    found = rewards(names, "eval/metrics/sentiments")
    assert found[-1] > 0.9 > found[0]


@pytest.mark.slow
def test_translations_are_looked_up_by_the_decoded_prompt(
    models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Metrics are of the corpus, one number each."""
    names = run("ppo_translation_t5.py", small(models["t5"], tmp_path), monkeypatch)
    found = rewards(names, "eval/metrics/bleu")
    assert found == pytest.approx(rewards(names))
    assert found[-1] > found[0] + 0.4
    assert rewards(names, "eval/metrics/longest")[-1] <= 2


@pytest.mark.slow
def test_rewards_may_be_whole_numbers(models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = rewards(run("architext.py", small(models["gpt2"], tmp_path), monkeypatch))
    assert found[-1] > max(found[0] / 2, -0.3)
    assert (tmp_path / "ckpts" / "best" / "config.json").is_file()


@pytest.mark.slow
def test_instructions_are_learnt_and_the_model_saved(
    models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hparams = {
        "model_name": models["gpt2"],
        "saved": str(tmp_path / "saved"),
        "train.checkpoint_dir": str(tmp_path / "ckpts"),
        "train.tracker": None,
    }
    names = run("sft_alpaca.py", hparams, monkeypatch)
    assert rewards(names, "eval/metrics/repeated")[-1] == 1
    assert names["answer"] == "HbdAd"


@pytest.mark.slow
def test_descriptions_with_ratings(models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of "ca" and "ga", which follow "b" in the data, the one that is rated better is sampled."""
    trainer = run("simulacra.py", small(models["gpt2"], tmp_path), monkeypatch)["trainer"]
    asked = trainer.tokenizer(["b"] * 32, return_tensors="pt")
    found = trainer.tokenizer.batch_decode(trainer.generate_eval(**asked, beta=8), skip_special_tokens=True)
    assert sum(text.startswith("bc") for text in found) > 24


@pytest.mark.slow
def test_whole_dialogues_are_learnt_and_the_best_model_kept(
    models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = rewards(run("sft_hh.py", small(models["gpt2"], tmp_path), monkeypatch), "eval/metrics/reward")
    assert found[-1] > 1.8 > 1 > found[0]
    assert (tmp_path / "ckpts" / "best" / "config.json").is_file()


def test_an_adapter_is_trained(models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of layers that are not frozen has no effect then, as in trlX."""
    hparams = {
        **small(models["gpt2"], tmp_path),
        "train": {"total_steps": 16, "batch_size": 16, "seq_length": 16, "eval_interval": 16, "tracker": None},
        "optimizer.kwargs": {"lr": 2e-2},
        "scheduler.kwargs": {"eta_min": 2e-2},
        "method": {"num_rollouts": 32, "chunk_size": 32, "init_kl_coef": 0.0},
    }
    names = run("ppo_sentiments_peft.py", hparams, monkeypatch)
    found = rewards(names)
    assert found[-1] > found[0] + 1.5
    for name in ("model", "checkpoint_16/hf_model", "best_checkpoint/hf_model"):  # the last two where trlX has them
        assert (tmp_path / "ckpts" / name / "adapter_config.json").is_file()
