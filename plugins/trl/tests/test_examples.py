"""Longer scripts written for TRL run to their end and learn; `rewritten` changes the first word of their imports."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from trainkit.testing import character_tokenizer, tiny_gpt2, tiny_llama, tiny_t5
from trainkit_migrate.scripts import rewritten

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # of peft
SCRIPTS = Path(__file__).with_name("scripts")


@pytest.fixture
def models(tmp_path: Path) -> dict[str, str]:
    """Return the directories of a GPT-2, a Llama and a T5 of random weights, with their tokenizer."""
    tokenizer = character_tokenizer("abcdefgh#")
    torch.manual_seed(0)
    size = len(tokenizer)
    wide = {"initializer_range": 0.3}  # so that adapters of the attention have an effect
    kinds = {"gpt2": tiny_gpt2(size), "llama": tiny_llama(size, **wide), "t5": tiny_t5(size)}
    for name, fields in kinds.items():
        config = AutoConfig.for_model(**fields)
        kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
        kind.from_config(config).save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    return {name: str(tmp_path / name) for name in kinds}


def run(name: str, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run a script with the arguments of its command; return its names."""
    found = rewritten((SCRIPTS / name).read_text(encoding="utf-8"))
    assert not found.refused
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    module = type(sys)("script")
    monkeypatch.setitem(sys.modules, "script", module)  # dataclasses look up the module of their class
    exec(compile(found.text, name, "exec"), vars(module))
    return vars(module)


@pytest.mark.slow
@pytest.mark.parametrize("packing", [True, False])
def test_fine_tuning(packing: bool, models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = str(tmp_path / "out")
    run("sft.py", ["--model_name", models["gpt2"], "--output_dir", out, f"--packing={packing}"], tmp_path, monkeypatch)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    for letter in "ach":
        ids = tokenizer(f"{letter}#", return_tensors="pt")["input_ids"]
        made = model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=tokenizer.pad_token_id)
        assert tokenizer.decode(made[0]) == f"{letter}#{letter * 3}"


@pytest.mark.slow
def test_ppo_trains_a_t5(models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history = run("t5_sentiment.py", [models["t5"]], tmp_path, monkeypatch)["history"]
    assert sum(history[-4:]) / 4 > history[0] + 1.5


def share_of_a(model: str, tokenizer: str) -> float:
    """Return which share of sampled answers is the letter a."""
    torch.manual_seed(0)
    loaded, words = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(tokenizer)
    ids = words(["b#", "d#", "g#"] * 8, return_tensors="pt")["input_ids"]
    made = loaded.generate(ids, max_new_tokens=4, min_new_tokens=4, do_sample=True, top_k=0)
    return float((made[:, 2:] == words.encode("a")[0]).float().mean())


@pytest.mark.slow
def test_three_steps_from_a_llama_to_ppo(
    models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manner of stack_llama: an adapter learns answers, another one their rewards, a third one is trained by PPO.

    Answers have half of their letters an a, the reward model prefers more of them, and PPO writes more of them.
    """
    run("stack_sft.py", ["--model_path", models["llama"], "--output_dir", "tuned"], tmp_path, monkeypatch)
    merged = str(tmp_path / "tuned" / "merged")
    before = share_of_a(merged, models["llama"])
    assert before > share_of_a(models["llama"], models["llama"]) + 0.1
    metrics = run("stack_rm.py", ["--model_name", merged, "--output_dir", "reward"], tmp_path, monkeypatch)["metrics"]
    assert metrics["eval_accuracy"] > 0.9
    arguments = [
        "--model_name",
        merged,
        "--tokenizer_name",
        merged,
        "--reward_model_name",
        str(tmp_path / "reward/merged"),
    ]
    found = run("stack_rl.py", arguments, tmp_path, monkeypatch)
    assert sum(found["history"][-3:]) / 3 > sum(found["history"][:2]) / 2 + 0.5
    assert found["answers"][-1] > found["answers"][0] + 0.15


@pytest.mark.slow
def test_policy_and_reward_adapters_on_one_base(
    models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("stack_rm.py", ["--model_name", models["llama"], "--output_dir", "reward"], tmp_path, monkeypatch)
    arguments = ["--model_name", models["llama"], "--rm_adapter", str(tmp_path / "reward")]
    found = run("multi_adapter.py", arguments, tmp_path, monkeypatch)
    assert sum(found["history"][-3:]) / 3 > sum(found["history"][:2]) / 2 + 0.5


@pytest.fixture
def classifier(models: dict[str, str], tmp_path: Path) -> str:
    """Return the directory of a classifier that gives texts the share of the letter a, times four."""
    tokenizer = AutoTokenizer.from_pretrained(models["gpt2"])
    torch.manual_seed(0)
    fields = tiny_gpt2(len(tokenizer), num_labels=1, pad_token_id=tokenizer.pad_token_id)
    model = AutoModelForSequenceClassification.from_config(AutoConfig.for_model(**fields))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    letters = torch.tensor(tokenizer.encode("abcdefgh"))
    for _ in range(150):
        ids = letters[(torch.rand(32, 7) * 12).long().clamp(max=11) % 8 * (torch.rand(32, 7) > 0.3)]
        loss = ((model(ids).logits[:, 0] - 4 * (ids == letters[0]).float().mean(1)) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss < 0.3
    model.save_pretrained(tmp_path / "classifier")
    tokenizer.save_pretrained(tmp_path / "classifier")
    return str(tmp_path / "classifier")


@pytest.mark.slow
def test_detoxifying(models: dict[str, str], classifier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["--model_name", models["llama"], "--toxicity_model", classifier]
    history = run("toxicity.py", arguments, tmp_path, monkeypatch)["history"]
    assert sum(history[-3:]) / 3 > sum(history[:2]) / 2 + 0.5
    assert (tmp_path / "detoxified" / "config.json").exists()


@pytest.mark.slow
def test_sentiment_with_an_adapter(
    models: dict[str, str], classifier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = [
        "--model_name", models["llama"], "--reward_model", f"sentiment-analysis:{classifier}", "--use_peft", "True",
        "--learning_rate", "1e-2", "--batch_size", "32", "--mini_batch_size", "16", "--init_kl_coef", "0.0",
    ]  # fmt: skip
    history = run("sentiment_peft.py", arguments, tmp_path, monkeypatch)["history"]
    (last, reference), first = history[-1], history[0][0]
    assert last > first + 0.5
    assert last > reference + 0.5, "the reference is the model without its adapter"


@pytest.mark.daily(peft=(False,))
@pytest.mark.parametrize("peft", [False, True])
def test_preferences_with_a_file_of_arguments(
    peft: bool, models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arguments of the command come before those of the file; ``env`` sets the environment."""
    (tmp_path / "dpo.yaml").write_text(
        "beta: 0.1\nlearning_rate: 1e-4\nper_device_train_batch_size: 8\nmax_steps: 20\nreport_to: none\n"
        f"save_strategy: 'no'\nuse_peft: {peft}\nenv:\n  EXAMPLE_OF_TRL: '1'\n",
        encoding="utf-8",
    )
    monkeypatch.setenv("EXAMPLE_OF_TRL", "0")
    arguments = ["--config", "dpo.yaml", "--model_name_or_path", models["gpt2"], "--output_dir", "out",
                 "--learning_rate", "1e-2", "--max_length", "16", "--lora_dropout", "0.0"]  # fmt: skip
    found = run("dpo.py", arguments, tmp_path, monkeypatch)
    assert found["training_args"].learning_rate == 1e-2
    assert found["training_args"].max_steps == 20
    assert found["trainer"].evaluate()["eval_rewards/accuracies"] == 1.0
    assert (tmp_path / "out" / ("adapter_config.json" if peft else "config.json")).exists()
