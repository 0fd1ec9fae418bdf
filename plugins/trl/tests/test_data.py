"""Collators and rows of one length of TRL: which tokens are labels, and what becomes of the data."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    GPT2Config,
    TrainingArguments,
)

from tables import table
from trainkit.errors import DataError
from trainkit.testing import character_tokenizer
from trainkit_trl import ConstantLengthDataset, DataCollatorForCompletionOnlyLM, RewardConfig, RewardTrainer, SFTTrainer
from trainkit_trl.trainer.utils import RewardDataCollatorWithPadding, compute_accuracy, pad_to_length

tokenizer = character_tokenizer("abcdefgh#:")


def labels(text: str, *templates: Any) -> str:
    """Return the text with a dot for each token that is not trained on."""
    collator = DataCollatorForCompletionOnlyLM(*templates, tokenizer=tokenizer)
    found = collator([tokenizer.encode(text)])["labels"][0].tolist()
    return "".join("." if label == -100 else tokenizer.decode(label) for label in found)


def test_labels_are_what_follows_the_last_template() -> None:
    assert labels("ab#:cd", "#:") == "....cd"
    assert labels("ab#:cd", tokenizer.encode("#:")) == "....cd"
    assert labels("a#:b#:cd", "#:") == "......cd"


def test_labels_are_all_outputs_of_several_turns() -> None:
    """Instructions begin with "a:", outputs after "#:"; what follows the last instruction is no output."""
    assert labels("a:b#:cda:e#:f", "#:", "a:") == ".....cd....." + "f"
    assert labels("b#:ca:d", "#:", "a:") == "...c..."


def test_a_text_without_template_is_told_of() -> None:
    with pytest.warns(UserWarning, match="nothing follows the response_template '#:'"):
        assert labels("abcd", "#:") == "...."


def rows(**changes: Any) -> ConstantLengthDataset:
    data = [{"text": text} for text in ("abc", "de", "f")]
    given = {"dataset_text_field": "text", "seq_length": 3, "shuffle": False, **changes}
    return ConstantLengthDataset(tokenizer, data, **given)


def test_texts_are_joined_by_eos_and_cut() -> None:
    """abc$ de$ f$ is nine tokens, three rows; with pieces of any size (the remainder is carried over)."""
    eos = tokenizer.eos_token_id
    a, b, c, d, e, f = tokenizer.encode("abcdef")
    expected = [[a, b, c], [eos, d, e], [eos, f, eos]]
    for size in (1, 1024):
        found = list(rows(num_of_sequences=size, chars_per_token=0.1 if size == 1 else 3.6))
        assert [row["input_ids"].tolist() for row in found] == expected
        assert [row["labels"].tolist() for row in found] == expected
    assert len(list(islice(rows(infinite=True), 7))) == 7
    joined = list(rows(append_concat_token=False))
    assert [row["input_ids"].tolist() for row in joined] == [[a, b, c], [d, e, f]]
    with pytest.raises(ValueError, match="give dataset_text_field"):
        ConstantLengthDataset(tokenizer, [])
    with pytest.raises(ValueError, match="a row has no 'text', which is dataset_text_field; it has words"):
        list(ConstantLengthDataset(tokenizer, [{"words": "a"}], dataset_text_field="text"))
    with pytest.raises(ValueError, match="a template is empty, or no text; give the text"):
        DataCollatorForCompletionOnlyLM(3, tokenizer=tokenizer)


@table("infinite", [False, True])
def test_rows_of_one_length_are_trained_on(infinite: bool, tmp_path: Path) -> None:
    config = GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=len(tokenizer), n_positions=16)
    args = TrainingArguments(output_dir=str(tmp_path), max_steps=3, report_to="none", per_device_train_batch_size=2)
    trainer = SFTTrainer(
        AutoModelForCausalLM.from_config(config), args, train_dataset=rows(infinite=infinite), tokenizer=tokenizer,
        max_seq_length=8,
    )  # fmt: skip
    assert trainer.train().global_step == 3
    assert trainer.trainer.progress.tokens == 3 * 2 * 2 - 2 * (not infinite)  # 2 of 3 tokens; the second step has 1 row


def test_pairs_are_padded_for_loops_of_ones_own() -> None:
    row = {"input_ids_chosen": [1, 2], "attention_mask_chosen": [1, 1], "input_ids_rejected": [3],
           "attention_mask_rejected": [1], "margin": 0.5}  # fmt: skip
    other = {**row, "input_ids_chosen": [4], "attention_mask_chosen": [1]}
    found = RewardDataCollatorWithPadding(tokenizer)([row, other])
    pad = tokenizer.pad_token_id
    assert {*map(tuple, found["input_ids_chosen"].tolist())} <= {(1, 2), (4, pad), (pad, 4)}
    assert found["attention_mask_chosen"].sum() == 3
    assert found["margin"].tolist() == [0.5, 0.5]
    with pytest.raises(ValueError, match="_chosen and _rejected"):
        RewardDataCollatorWithPadding(tokenizer)([{"input_ids_chosen": [1]}])


def test_helpers() -> None:
    assert pad_to_length(torch.tensor([[1, 2]]), 3, 9).tolist() == [[1, 2, 9]]
    assert pad_to_length(torch.tensor([[1, 2]]), 1, 9).tolist() == [[1, 2]]
    assert compute_accuracy(([[2.0, 1.0], [0.0, 1.0], [1.0, 1.0], [3.0, 0.0]], None)) == {"accuracy": 0.625}


# ------------------------------------------------------------------------------------------------ of a script's own


class After(DataCollatorForCompletionOnlyLM):
    """Trains on one token more: that before the output."""

    def torch_call(self, examples: list[Any]) -> dict[str, Any]:
        batch = super().torch_call(examples)
        for ids, row in zip(batch["input_ids"], batch["labels"], strict=True):
            first = int((row != -100).nonzero()[0])
            row[first - 1] = ids[first - 1]
        return batch


class Reversed(ConstantLengthDataset):
    """Yields the tokens of a row from the last to the first."""

    def __iter__(self) -> Any:
        for row in super().__iter__():
            yield {name: ids.flip(0) for name, ids in row.items()}


def first_two(rows: list[Any]) -> dict[str, Any]:
    """Return a batch in which only the first two tokens are labels."""
    batch = tokenizer.pad(rows, return_tensors="pt")
    masked = batch["input_ids"].clone()
    masked[:, 2:] = -100
    return {**batch, "labels": masked}


def supervised(tmp_path: Path, data: Any, **given: Any) -> Any:
    """Return a trainer of SFT with a small model."""
    config = GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=len(tokenizer))
    args = TrainingArguments(str(tmp_path / "out"), max_steps=1, report_to="none", save_strategy="no")
    model = AutoModelForCausalLM.from_config(config)
    return SFTTrainer(model, args, train_dataset=data, tokenizer=tokenizer, max_seq_length=8, **given)


def trained_on(trainer: Any) -> str:
    """Return the first sample with a dot for each token that is not trained on."""
    row = trainer.trainer.pipeline.rows[0]
    return "".join(
        tokenizer.decode(token) if chosen else "." for token, chosen in zip(*encoded(trainer, row), strict=True)
    )


def encoded(trainer: Any, row: Any) -> Any:
    sequences = trainer.trainer.make_experience([row])
    return sequences.input_ids[0].tolist(), sequences.response_mask[0].tolist()


@table(
    "collator, expected",
    [
        (After("#:", tokenizer=tokenizer), "...:cd"),
        (first_two, ".b...."),
        (DataCollatorForCompletionOnlyLM("#:", tokenizer=tokenizer), "....cd$"),
    ],
)
def test_a_collator_of_ones_own_says_what_is_trained_on(collator: Any, expected: str, tmp_path: Path) -> None:
    """``ab#:cd``; EOS, which trainkit adds itself, is no part of what TRL gives a collator."""
    trainer = supervised(tmp_path, [{"text": "ab#:cd"}] * 4, dataset_text_field="text", data_collator=collator)
    assert trained_on(trainer).replace(tokenizer.eos_token, "$") == expected
    trainer.train()


def test_rows_of_a_dataset_of_ones_own_are_those_it_yields(tmp_path: Path) -> None:
    data = [{"text": "abc"}, {"text": "def"}]
    given = {"dataset_text_field": "text", "seq_length": 3, "shuffle": False, "append_concat_token": False}
    assert trained_on(supervised(tmp_path, Reversed(tokenizer, data, **given))) == ".ba"


@table(
    "collator, error, said",
    [
        (lambda rows: rows, DataError, "data_collator should return a dictionary with input_ids, labels; it returned"),
        (lambda rows: {"input_ids": [[1]]}, DataError, "it returned one with input_ids"),
        (lambda rows: {"input_ids": [1, 2], "labels": [1, 2]}, DataError, r"one row for one; input_ids has the shape"),
        (DataCollatorForSeq2Seq(tokenizer), DataError, "it returned one with input_ids, attention_mask"),
        (lambda rows: rows[0]["text"], DataError, "data_collator raised KeyError for .*'text'"),
        (3, ValueError, "data_collator should be a function; given 3"),
        (DataCollatorForLanguageModeling(tokenizer, mlm=False), None, ""),
    ],
)
def test_what_a_collator_returns_is_checked(collator: Any, error: Any, said: str, tmp_path: Path) -> None:
    given = {"dataset_text_field": "text", "data_collator": collator}
    if error is None:
        assert supervised(tmp_path, [{"text": "ab"}] * 2, **given).data_collator is collator
        return
    with pytest.raises(error, match=said):
        supervised(tmp_path, [{"text": "ab"}] * 2, **given)


class Swapped(RewardDataCollatorWithPadding):
    """Swaps the sides of a pair."""

    def __call__(self, features: list[dict[str, Any]]) -> dict[str, Any]:
        found, names = super().__call__(features), {"chosen": "rejected", "rejected": "chosen"}
        return {key.replace(side, names[side]): found[key] for key in found for side in names if side in key}


def test_a_collator_of_pairs_of_ones_own_makes_the_pairs(tmp_path: Path) -> None:
    config = GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=len(tokenizer), num_labels=1, pad_token_id=0)
    pair = {
        "input_ids_chosen": [1],
        "attention_mask_chosen": [1],
        "input_ids_rejected": [2],
        "attention_mask_rejected": [1],
    }
    trainer = RewardTrainer(
        AutoModelForSequenceClassification.from_config(config), RewardConfig(str(tmp_path), report_to="none"),
        Swapped(tokenizer), [pair] * 2, tokenizer=tokenizer,
    )  # fmt: skip
    assert [row["input_ids_chosen"] for row in trainer.trainer.pipeline.rows] == [[2], [2]]
