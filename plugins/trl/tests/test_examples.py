"""Longer scripts written for TRL run to their end and learn; `rewritten` changes the first word of their imports."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

from trainkit.migrating.scripts import rewritten
from trainkit.testing import character_tokenizer, tiny_gpt2, tiny_t5

SCRIPTS = Path(__file__).with_name("scripts")


@pytest.fixture
def models(tmp_path: Path) -> dict[str, str]:
    """Return the directories of a GPT-2 and a T5 of random weights, with their tokenizer."""
    tokenizer = character_tokenizer("abcdefgh#")
    torch.manual_seed(0)
    for name, fields in {"gpt2": tiny_gpt2(len(tokenizer)), "t5": tiny_t5(len(tokenizer))}.items():
        config = AutoConfig.for_model(**fields)
        kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
        kind.from_config(config).save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    return {name: str(tmp_path / name) for name in ("gpt2", "t5")}


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


@pytest.mark.parametrize("packing", [True, False])
def test_fine_tuning(packing: bool, models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = str(tmp_path / "out")
    run("sft.py", ["--model_name", models["gpt2"], "--output_dir", out, f"--packing={packing}"], tmp_path, monkeypatch)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    for letter in "ach":
        ids = tokenizer(f"{letter}#", return_tensors="pt")["input_ids"]
        made = model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=tokenizer.pad_token_id)
        assert tokenizer.decode(made[0]) == f"{letter}#{letter * 3}"


def test_ppo_trains_a_t5(models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history = run("t5_sentiment.py", [models["t5"]], tmp_path, monkeypatch)["history"]
    assert sum(history[-4:]) / 4 > history[0] + 1.5
