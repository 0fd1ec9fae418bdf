"""SFT: what is trained, and that it learns."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import trainkit
from trainkit.testing import character_tokenizer, tiny_gpt2
from trainkit.testing.trainers import tiny_trainer


def test_loss_equals_the_cross_entropy_of_output_tokens(tmp_path: Path) -> None:
    trainer = tiny_trainer("sft", tmp_path)
    batch = trainer.make_experience(trainer.pipeline.take(0, 8))
    loss, found = trainer.loss(batch)
    logits = trainer.unwrapped.model(batch.input_ids, attention_mask=batch.attention_mask).logits
    labels = batch.input_ids.masked_fill(~batch.response_mask, -100)
    expected = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    assert loss.item() == pytest.approx(expected.item(), abs=1e-6)
    assert found["loss/nll"].compute() == pytest.approx(expected.item(), abs=1e-6)


def test_prompts_are_read_and_outputs_with_eos_are_trained(tmp_path: Path) -> None:
    tokenizer = character_tokenizer("abc")
    trainer = tiny_trainer("sft", tmp_path)
    trainer.tokenizer = tokenizer
    trainer.add_samples([("ab", "cc"), "abc"])
    rows = trainer.pipeline.rows
    batch = trainer.make_experience(list(rows))
    eos = tokenizer.eos_token_id
    assert [r.tolist() for r in batch.responses] == [[2, 2, eos], [1, 2, eos]]  # 'a' of "abc" follows nothing: context


def test_temperature_of_sampling_does_not_change_the_likelihood(tmp_path: Path) -> None:
    losses = []
    for temperature in (1.0, 0.3):
        trainer = tiny_trainer("sft", tmp_path / str(temperature), rollout__temperature=temperature)
        losses.append(trainer.loss(trainer.make_experience(trainer.pipeline.take(0, 8)))[0].item())
    assert losses[0] == losses[1]


def test_it_learns_its_samples(tmp_path: Path) -> None:
    tokenizer = character_tokenizer("abcdefgh")
    trainer = trainkit.train(
        tiny_gpt2(len(tokenizer)),
        samples=[("a", "bcd"), ("e", "fgh")],
        tokenizer=tokenizer,
        config={
            "method": "sft",
            "optimizer": {"lr": 1e-2},
            "train": {"epochs": 60, "run_dir": str(tmp_path), "trackers": []},
            "rollout": {"max_new_tokens": 8},
        },
    )
    assert trainer.generate(["a", "e"], temperature=0).outputs == ["bcd", "fgh"]
