"""Collators and rows of one length of TRL: which tokens are labels, and what becomes of the data."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, TrainingArguments

from tables import table
from trainkit.testing import character_tokenizer
from trainkit_trl import ConstantLengthDataset, DataCollatorForCompletionOnlyLM, SFTTrainer
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
