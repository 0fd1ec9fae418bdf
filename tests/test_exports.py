"""Exports end where training ended: transformers' ``generate`` stops at the EOS that was trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config

import trainkit
from tables import table
from trainkit.errors import NonFiniteError
from trainkit.models.loading import merge_export
from trainkit.testing.trainers import tiny_trainer

OLD = 3
"""The EOS that the model was made with; the tokenizer's is another."""


FIELDS = {"model_type": "gpt2", "vocab_size": 10, "n_embd": 16, "n_layer": 1, "n_head": 2, "eos_token_id": OLD}


def named(directory: Path) -> tuple[Any, Any]:
    config, generation = (
        json.loads((directory / name).read_text(encoding="utf-8"))["eos_token_id"]
        for name in ("config.json", "generation_config.json")
    )
    return config, generation


def test_an_export_names_the_eos_of_the_tokenizer_and_generate_stops_there(tmp_path: Path) -> None:
    trainer = tiny_trainer("sft", tmp_path / "run", model=FIELDS)
    eos = trainer.tokenizer.eos_token_id
    directory = trainer.save_pretrained(tmp_path / "export")
    assert named(directory) == (eos, [OLD, eos])  # training ended at the model's own EOS too
    loaded = AutoModelForCausalLM.from_pretrained(directory)
    with torch.no_grad():  # prefers EOS to everything
        loaded.lm_head.weight.zero_()
        loaded.lm_head.bias = torch.nn.Parameter(torch.nn.functional.one_hot(torch.tensor(eos), 10).float())
    assert loaded.generate(torch.tensor([[1, 2]]), max_new_tokens=5, do_sample=False).tolist() == [[1, 2, eos]]
    assert AutoTokenizer.from_pretrained(directory).eos_token_id == eos


def test_an_export_of_an_export_is_the_same(tmp_path: Path) -> None:
    first = tiny_trainer("sft", tmp_path / "run", model=FIELDS).save_pretrained(tmp_path / "first")
    again = tiny_trainer("sft", tmp_path / "again", model__model_path=str(first))
    assert named(again.save_pretrained(tmp_path / "second")) == named(first)


@table("merged", [False, True])
def test_what_is_saved_of_an_adapters_base_names_it_too(merged: bool, tmp_path: Path) -> None:
    lora = {"peft_type": "LORA", "r": 2, "target_modules": "all-linear"}
    trainer = tiny_trainer("sft", tmp_path / "run", model=FIELDS, model__peft_config=lora)
    directory = trainer.save_pretrained(tmp_path / "adapter")
    if merged:
        merge_export(directory, tmp_path / "whole")
    (base,) = [tmp_path / "whole"] if merged else [path.parent for path in directory.glob("*/config.json")]
    assert named(base) == (trainer.tokenizer.eos_token_id, [OLD, trainer.tokenizer.eos_token_id])


def test_an_adapter_whose_base_is_elsewhere_says_that_the_base_names_another_eos(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(GPT2Config(**FIELDS)).save_pretrained(tmp_path / "base")
    lora = {"peft_type": "LORA", "r": 2, "target_modules": "all-linear"}
    path = str(tmp_path / "base")
    trainer = tiny_trainer("sft", tmp_path / "run", model__model_path=path, model__peft_config=lora)
    trainer.save_pretrained(tmp_path / "adapter")
    assert "does not name the tokenizer's EOS" in caplog.text
    merge_export(tmp_path / "adapter", tmp_path / "whole")
    assert named(tmp_path / "whole") == (trainer.tokenizer.eos_token_id, [OLD, trainer.tokenizer.eos_token_id])


@table("save_interval", [0, 10])
def test_weights_that_are_not_finite_are_not_exported(save_interval: int, tmp_path: Path) -> None:
    """With and without checkpoints: the last step was too long, and no loss follows that would say so."""

    class Breaks:
        @trainkit.hookimpl
        def on_step(self, trainer: Any, step: int) -> None:
            if step == trainer.total_steps:
                next(trainer.unwrapped.parameters()).data[0].fill_(torch.nan)

    trainer = tiny_trainer("sft", tmp_path, train__save_interval=save_interval, train__eval_interval=0)
    trainer.hooks.register(Breaks())
    with pytest.raises(NonFiniteError, match=r"the weights are not finite in model\..*nothing was saved or exported"):
        trainer.learn()
    assert not (tmp_path / "model").exists()
    assert not list(tmp_path.glob(".tmp-*"))
