"""`trainkit data check`: what training would make of a dataset."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import pytest
from test_data_files import FORMATS
from transformers import AutoConfig, PreTrainedTokenizerBase
from typer.testing import CliRunner

from trainkit.cli import app
from trainkit.config import TRLConfig
from trainkit.data import PLAIN_TEMPLATE
from trainkit.data.ahead import TokenizerAhead
from trainkit.data.inspection import Inspection, Reading, inspect, kind_of, usual_kind
from trainkit.data.pipeline import encode_joint, encode_sample
from trainkit.errors import DataError
from trainkit.plugins import get_trainer
from trainkit.testing import character_tokenizer, tiny_gpt2

ANSWER = {"prompt": "2+2?", "completion": " 4"}
LONG: dict[str, list[dict[str, Any]]] = {
    "language modelling": [{"text": "a sentence of more than sixteen tokens"}],
    "prompt-completion": [{"prompt": "a question?", "completion": " an answer of several words"}],
    "preference": [
        {"prompt": "a question?", "chosen": " good, and much too long", "rejected": " bad and much too short"}
    ],
    "implicit preference": [
        {"chosen": "a question? good, and much too long", "rejected": "a question? bad, also long"}
    ],
}
"""Rows of more than 16 tokens."""
PAIR = {"prompt": "2+2?", "chosen": " 4", "rejected": " 5"}


def talking_tokenizer(**special: str) -> PreTrainedTokenizerBase:
    """A tokenizer of the printable characters with the plain chat template."""
    tokenizer = character_tokenizer(string.printable, **special)
    tokenizer.chat_template = PLAIN_TEMPLATE
    return tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory with a tokenizer and a config of 64 positions."""
    path, tokenizer = tmp_path_factory.mktemp("model"), talking_tokenizer()
    tokenizer.save_pretrained(path)
    AutoConfig.for_model(**tiny_gpt2(len(tokenizer))).save_pretrained(path)
    return str(path)


def written(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return str(path)


def checked(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["data", "check", *arguments])
    assert result.exit_code == code, result.output
    return result.stdout if code < 2 else result.stderr


def facts(*arguments: str, code: int = 0) -> dict[str, Any]:
    return dict(json.loads(checked(*arguments, "--json", code=code)))


@pytest.mark.parametrize(("form", "row"), FORMATS)
@pytest.mark.parametrize("named", [True, False], ids=["model", "characters"])
def test_every_format_of_the_documents_is_accepted(
    form: str, row: dict[str, Any], named: bool, model: str, tmp_path: Path
) -> None:
    rows = [row, {**row, "label": not row["label"]}] if "label" in row else [row]
    text = checked(written(tmp_path / "a.jsonl", rows), *(["--model", model] if named else []))
    assert f"{len(rows)} {form}" in text
    assert "training accepts all rows" in text
    assert ("left out: tokens" in text) == (not named)
    assert "refused" not in text


def trainer_of(method: str, tokenizer: PreTrainedTokenizerBase, path: Path, **changes: Any) -> Any:
    """A trainer that has not loaded its model."""
    sections = {"method": method, "model": {"model_path": tiny_gpt2(len(tokenizer))}, "train": {"trackers": []}}
    config: TRLConfig[Any] = TRLConfig.from_dict(sections).update({"train.run_dir": str(path / "run"), **changes})
    return get_trainer(method)(config, tokenizer=tokenizer)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("limit", [None, 16])
@pytest.mark.parametrize("form", ["language modelling", "prompt-completion", "preference", "implicit preference"])
def test_what_is_shown_as_trained_on_is_what_the_trainer_trains_on(
    form: str, limit: int | None, side: str, tmp_path: Path
) -> None:
    rows = [row for kind, row in FORMATS if kind == form] if limit is None else LONG[form]
    tokenizer, pairs = talking_tokenizer(), "preference" in form
    tokenizer.truncation_side = side
    trainer = trainer_of("dpo" if pairs else "sft", tokenizer, tmp_path, **{"train.seq_length": limit})
    made = trainer.read_samples(rows)
    both = trainer.encode_preferences(made) if pairs else None
    batches = {"chosen": both.chosen, "rejected": both.rejected} if both else {"sample": trainer.encode_samples(made)}
    for index in range(len(rows)):
        found = inspect(rows, Reading(usual_kind(rows), tokenizer=tokenizer, limit=trainer.limit), shown=index)
        assert found.example.keys() == batches.keys()
        assert (found.tokens_lost > 0) == (limit is not None)
        for name, batch in batches.items():
            shown = found.example[name]
            assert "".join(text for text, _ in shown) == tokenizer.decode(
                batch.input_ids[index][batch.attention_mask[index]]
            )
            trained = tokenizer.decode(batch.input_ids[index][batch.response_mask[index]])
            assert "".join(text for text, on in shown if on) == trained != ""


FAULTY: dict[str, tuple[str, list[Any]]] = {
    "mixed formats": ("sft", [ANSWER, PAIR, {"prompt": "3?"}, "text", ("a", "b"), {"question": "4?", "answer": "5"}]),
    "labels": ("kto", [{**ANSWER, "label": label} for label in (True, float("nan"), 2, None, "yes", 0)]),
    "one label": ("kto", [{**ANSWER, "label": True}]),
    "prompts": ("dpo", [{"prompt": "2+2?"}]),
    "equal pairs": ("dpo", [PAIR, {**PAIR, "rejected": " 4"}]),
    "truncated pairs": ("dpo", [PAIR, {**PAIR, "chosen": f"{'a' * 99}b", "rejected": f"{'a' * 99}c"}]),
    "no room": ("sft", [ANSWER, {**ANSWER, "prompt": "a" * 99}]),
    "columns": ("sft", [{"promt": "2+2?", "completion": " 4"}, {**ANSWER, "system": "x"}, {**ANSWER, "id": 4}]),
    "empty": (
        "sft",
        [{**ANSWER, "completion": ""}, {**ANSWER, "prompt": None}, {"messages": []}, {"text": 5}, 5, None],
    ),
    "messages": (
        "sft",
        [{"messages": [{"role": "user", "content": "?"}]}, {"conversations": [{"from": "x", "value": ""}]}],
    ),
    "characters": ("sft", [ANSWER, {**ANSWER, "completion": "\u2603"}, {**ANSWER, "completion": "\ud800"}]),
    "no rows": ("sft", []),
}


@pytest.mark.parametrize("name", FAULTY)
def test_rows_are_refused_that_the_trainer_refuses_and_no_others(name: str, tmp_path: Path) -> None:
    method, rows = FAULTY[name]
    tokenizer = talking_tokenizer()
    trainer = trainer_of(method, tokenizer, tmp_path, **{"train.seq_length": 64})
    kind = kind_of(trainer.inputs)
    found = inspect(rows, Reading(kind, tokenizer=tokenizer, limit=64))
    with pytest.raises(DataError):
        trainer.add_samples(rows)
    refused = {row for fault in found.faults for row in fault.rows}
    assert found.faults
    assert len(refused) == found.refused
    for index, row in enumerate(rows):
        try:
            trainer.read_samples([row], first=index)
        except DataError as error:
            assert index in refused
            if name != "truncated pairs":  # of these the trainer tells the number
                assert str(error) in {fault.message for fault in found.faults} or index not in firsts(found)
        else:
            assert index not in refused


def firsts(found: Inspection) -> set[int]:
    return {fault.rows[0] for fault in found.faults if fault.rows}
