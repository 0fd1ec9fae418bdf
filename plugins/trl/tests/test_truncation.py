"""Pairs and labelled samples are truncated as in TRL 0.8.6; what is expected is written by hand from its rule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    GPT2Config,
    T5Config,
    TrainingArguments,
)

from tables import table
from trainkit.errors import ConfigError, DataError
from trainkit.testing import character_tokenizer, tiny_t5
from trainkit_trl import CPOConfig, CPOTrainer, DPOTrainer, KTOConfig, KTOTrainer, ORPOConfig, ORPOTrainer

PAIRS = [{"prompt": "abcde", "chosen": "fgh", "rejected": "f"}]
LABELLED = [{"prompt": "abcde", "completion": "fgh", "label": True}, {"prompt": "a", "completion": "f", "label": False}]
CONFIGS: dict[Any, Any] = {ORPOTrainer: ORPOConfig, CPOTrainer: CPOConfig, KTOTrainer: KTOConfig}


def trainer_of(kind: Any, tmp_path: Path, bos: bool = False, t5: bool = False, **settings: Any) -> Any:
    tokenizer = character_tokenizer("abcdefgh", **({"bos_token": "<bos>"} if bos else {}))
    vocabulary = len(tokenizer)
    if t5:
        fields = {name: value for name, value in tiny_t5(vocabulary).items() if name != "model_type"}
        model: Any = AutoModelForSeq2SeqLM.from_config(T5Config(**fields))
    else:
        config = GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=vocabulary, n_positions=32)
        model = AutoModelForCausalLM.from_config(config)
    usual: dict[str, Any] = {"output_dir": str(tmp_path), "max_steps": 1, "report_to": "none"}
    if kind is DPOTrainer:
        given = {"args": TrainingArguments(**usual), **settings}
    else:
        given = {"args": CONFIGS[kind](**usual, **settings)}
    rows = LABELLED if kind is KTOTrainer else PAIRS
    return kind(model, train_dataset=rows, tokenizer=tokenizer, **given)


def read(trainer: Any, sequences: Any) -> list[str]:
    """Return rows as ``prompt|output`` with B for BOS and E for EOS."""
    marks = {trainer.tokenizer.eos_token_id: "E", trainer.tokenizer.bos_token_id: "B"}
    found = []
    for ids, real, chosen in zip(sequences.input_ids, sequences.attention_mask, sequences.response_mask, strict=True):
        parts = [ids[real & ~chosen].tolist(), ids[chosen].tolist()]
        found.append("|".join("".join(marks.get(each, trainer.tokenizer.decode(each)) for each in x) for x in parts))
    return found


@table(
    "bos, max_length, mode, expected",
    [
        # 5 + 4 tokens, the longer output with EOS, fit into 9
        (False, 9, "keep_end", ["abcde|fghE", "abcde|fE"]),
        # not into 8: the prompt keeps 3 of its tokens, though 4 would do
        (False, 8, "keep_end", ["cde|fghE", "cde|fE"]),
        (False, 8, "keep_start", ["abc|fghE", "abc|fE"]),
        # 3 + 4 do not fit into 6: outputs keep 6 - 3
        (False, 6, "keep_end", ["cde|fgh", "cde|fE"]),
        (False, 6, "keep_start", ["abc|fgh", "abc|fE"]),
        # BOS is one of the 3
        (True, 10, "keep_end", ["Babcde|fghE", "Babcde|fE"]),
        (True, 9, "keep_end", ["cde|fghE", "cde|fE"]),
        (True, 9, "keep_start", ["Bab|fghE", "Bab|fE"]),
    ],
)  # fmt: skip
def test_pairs_are_cut_as_in_trl(bos: bool, max_length: int, mode: str, expected: list[str], tmp_path: Path) -> None:
    for kind in (DPOTrainer, ORPOTrainer, CPOTrainer):
        trainer = trainer_of(
            kind, tmp_path, bos, max_length=max_length, max_prompt_length=3, truncation_mode=mode
        )  # fmt: skip
        pairs = trainer.trainer.encode_preferences(trainer.trainer.pipeline.rows)
        assert [*read(trainer, pairs.chosen), *read(trainer, pairs.rejected)] == expected


@table(
    "max_length, mode, expected",
    [
        # BOS and EOS are not counted among 3, and are always there: 5 + 3 tokens fit into 10 - 2
        (10, "keep_end", ["Babcde|fghE", "Ba|fE"]),
        (9, "keep_end", ["Bcde|fghE", "Ba|fE"]),
        (9, "keep_start", ["Babc|fghE", "Ba|fE"]),
        # 3 + 3 do not fit into 7 - 2: the output keeps 7 - 2 - 3
        (7, "keep_start", ["Babc|fgE", "Ba|fE"]),
    ],
)
def test_labelled_samples_are_cut_as_in_trl(max_length: int, mode: str, expected: list[str], tmp_path: Path) -> None:
    trainer = trainer_of(
        KTOTrainer, tmp_path, bos=True, max_length=max_length, max_prompt_length=3, truncation_mode=mode
    )
    trainer.trainer.models.build()
    batch = trainer.trainer.make_experience(trainer.trainer.pipeline.rows)
    assert read(trainer, batch.own) == expected
    trainer.train()


def test_the_sides_of_an_encoder_decoder_keep_their_beginning(tmp_path: Path) -> None:
    trainer = trainer_of(DPOTrainer, tmp_path, t5=True, max_length=16, max_prompt_length=3, max_target_length=3)
    pairs = trainer.trainer.encode_preferences(trainer.trainer.pipeline.rows)
    assert read(trainer, pairs.chosen) == ["abc|fgE"]  # EOS stays
    assert read(trainer, pairs.rejected) == ["abc|fE"]


def test_what_is_lost_is_told_and_what_cannot_be_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer_of(DPOTrainer, tmp_path, max_length=8, max_prompt_length=3, truncation_mode="keep_start")
    assert "prompts lose their end, to max_prompt_length (3), then outputs their end" in caplog.text
    with pytest.raises(DataError, match=r"max_prompt_length 128 of these to the prompt.*set max_prompt_length"):
        trainer_of(ORPOTrainer, tmp_path, max_length=8)
    with pytest.raises(ConfigError, match="truncation_mode should be 'keep_end' or 'keep_start'; given 'middle'"):
        trainer_of(KTOTrainer, tmp_path, truncation_mode="middle")
    with pytest.raises(ConfigError, match="max_prompt_length should be 1 at least; given 0"):
        trainer_of(DPOTrainer, tmp_path, max_prompt_length=0)
