"""`trainkit data check`: what training would make of a dataset."""

from __future__ import annotations

import gzip
import itertools
import json
import re
import string
from pathlib import Path
from typing import Any

import pytest
import typer
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, PreTrainedTokenizerBase
from typer.testing import CliRunner

from tables import table
from test_data_files import FORMATS
from trainkit.cli import app
from trainkit.config import TRLConfig
from trainkit.data import PLAIN_TEMPLATE
from trainkit.data.pipeline import encode_joint, encode_sample
from trainkit.errors import DataError
from trainkit.plugins import get_trainer
from trainkit.testing import character_tokenizer, tiny_gpt2
from trainkit_tools.ahead import TokenizerAhead
from trainkit_tools.data import row_lines
from trainkit_tools.inspection import Reading, inspect, kind_of, usual_kind

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
    """A directory with a tokenizer and a config of 128 positions."""
    path, tokenizer = tmp_path_factory.mktemp("model"), talking_tokenizer()
    tokenizer.save_pretrained(path)
    AutoConfig.for_model(**tiny_gpt2(len(tokenizer), n_positions=128)).save_pretrained(path)
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


@table("form, row, named", [(form, row, bool(at % 2)) for at, (form, row) in enumerate(FORMATS)])
def test_every_format_of_the_documents_is_accepted(
    form: str, row: dict[str, Any], named: bool, model: str, tmp_path: Path
) -> None:
    rows = [row, {**row, "label": not row["label"]}] if "label" in row else [row]
    text = checked(written(tmp_path / "a.jsonl", rows), *(["--model", model] if named else []))
    assert f"{len(rows)} {form}" in text
    assert "training accepts all rows" in text
    assert ("omitted: tokens" in text) == (not named)
    assert "refused" not in text


def trainer_of(method: str, tokenizer: PreTrainedTokenizerBase, path: Path, **changes: Any) -> Any:
    """A trainer that has not loaded its model."""
    sections = {"method": method, "model": {"model_path": tiny_gpt2(len(tokenizer))}, "train": {"trackers": []}}
    config: TRLConfig[Any] = TRLConfig.from_dict(sections).update({"train.run_dir": str(path / "run"), **changes})
    return get_trainer(method)(config, tokenizer=tokenizer)


@table("side", ["right", "left"])
@table("limit", [None, 16])
@table("form", ["language modelling", "prompt-completion", "preference", "implicit preference"])
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


@table("name", FAULTY)
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
    alone = {index: error for index, row in enumerate(rows) if (error := refusal(trainer, row, index))}
    assert refused == {*alone}
    for fault in found.faults:
        if fault.rows:
            assert fault.message == alone[fault.rows[0]]


TIED = [{**PAIR, "rejected": " 4"}, {**PAIR, "chosen": f"{'a' * 99}b", "rejected": f"{'a' * 99}c"}]


def test_equal_pairs_are_found_as_the_trainer_skips_them(tmp_path: Path) -> None:
    tokenizer = talking_tokenizer()
    trainer = trainer_of("dpo", tokenizer, tmp_path, **{"train.seq_length": 64})
    reading = Reading("pairs", tokenizer=tokenizer, limit=64)
    found = inspect([TIED[0], PAIR, TIED[1]], reading)
    assert (found.findings["equal"].rows, found.refused, found.faults) == ([0, 2], 0, [])
    assert len(trainer.read_samples([TIED[0], PAIR, TIED[1]])) == 1
    (fault,) = inspect(TIED, reading).faults
    assert fault.message.startswith("all 2 pairs have the same")


def refusal(trainer: Any, row: Any, index: int) -> str:
    """What the trainer says of one row; nothing if it accepts it."""
    try:
        trainer.read_samples([row], first=index)
    except DataError as error:
        return str(error)
    return ""


# ------------------------------------------------------------------------------------------------------------ findings


def test_columns_are_named_with_what_becomes_of_them(tmp_path: Path) -> None:
    rows = [{**ANSWER, "id": 1, "source": "", "note": "n"}, {**ANSWER, "id": 2, "system": "be brief"}]
    columns = facts(written(tmp_path / "a.jsonl", rows), "data.ignore_columns=[note]", code=1)["columns"]
    assert columns == {
        "prompt": {"prompt": 2},
        "completion": {"output": 2},
        "id": {"not read": 2},
        "note": {"removed by data.ignore_columns": 1},
        "system": {"refused": 1},
    }
    prompts = written(tmp_path / "b.jsonl", [{"prompt": "2+2?", "answer": "4", "seed": 3}])
    given = "given to reward functions, metric functions and environments"
    assert facts(prompts)["columns"] == {"prompt": {"prompt": 1}, "answer": {given: 1}, "seed": {"seed": 1}}
    margins = written(tmp_path / "c.jsonl", [{**PAIR, "margin": 1.0, "label": None}])
    found = facts(margins, "--method", "reward")
    assert found["columns"]["margin"] == {"read by the method": 1}
    rated = written(tmp_path / "e.jsonl", [{**ANSWER, "reward": 0.5}, {**ANSWER, "reward": -1}])
    assert facts(rated, "--method", "ilql")["columns"]["reward"] == {"reward": 2}
    assert facts(rated, "--method", "ilql")["rewards"] == [-1, -0.25, 0.5]
    assert "\nrewards: -1 to 0.5, mean -0.25\n" in checked(rated, "--method", "ilql")
    assert facts(rated)["columns"]["reward"] == {"not read": 2}
    alpaca = {"instruction": "Add.", "input": "2+2", "output": "4", "text": "Add. 2+2 4"}
    columns = facts(written(tmp_path / "d.jsonl", [alpaca]))["columns"]
    assert [*columns] == [*alpaca]
    assert columns["text"] == {"not read; it repeats prompt and output": 1}


def test_columns_that_refuse_a_prompt_are_told_as_refused(tmp_path: Path) -> None:
    rows = [
        {"prompt": "2+2?", "images": None},
        {"prompt": "", "answer": "4"},
        {"prompt": "2+2?", "images": ["a.png"]},
        {"prompt": "2+2?", "outputs": "4", "answer": "4"},
        {"prompt": "2+2?", "completions": ["4"], "labels": [True]},
        {"promt": "2+2?"},
    ]
    for method in ("ppo", "distill"):
        found = facts(written(tmp_path / "a.jsonl", rows), "--method", method, code=1)
        uses = {name: [*uses] for name, uses in found["columns"].items()}
        refused = {name: ["refused"] for name in ("images", "outputs", "completions", "labels", "promt")}
        assert {name: uses[name] for name in refused} == refused
        assert uses["answer"] != ["refused"]
        assert [fault["rows"] for fault in found["faults"]] == [[1], [2], [3], [4], [5]]


def test_an_algorithm_checks_its_own_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{**PAIR, "margin": 1.0}, PAIR]
    path = written(tmp_path / "a.jsonl", rows)
    found = facts(path, "--method", "reward", code=1)
    assert [fault["message"] for fault in found["faults"]] == [
        "1 of 2 samples have a margin; give all of them one, or none"
    ]
    trainer = trainer_of("reward", talking_tokenizer(), tmp_path)
    with pytest.raises(DataError, match="1 of 2 samples have a margin"):
        trainer.add_samples(rows)
    found = facts(written(tmp_path / "b.jsonl", [*rows, ANSWER]), "--method", "reward", code=1)
    assert "what the method checks itself of its samples, until all rows are accepted" in found["omitted"]
    own = lambda self, samples, rewards=None, *, first=0: []  # noqa: E731
    own.__module__ = "trainkit_stranger"
    stranger = type("Stranger", (get_trainer("reward"),), {"read_samples": own, "__module__": "trainkit_stranger"})
    monkeypatch.setattr("trainkit.plugins.get_trainer", lambda _: stranger)
    assert "what 'reward' checks itself of its samples" in facts(path, "--method", "reward", code=1)["omitted"]


def test_rows_of_environments_need_no_prompt(model: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("from trainkit.testing.trainers import Letters\n", encoding="utf-8")
    path = written(tmp_path / "a.jsonl", [{"level": 1}, {"prompt": "2+2?", "level": 2}, {"level": 1}])
    said = "rows 0, 2: prompt 0 has the columns level; .* Rows without a prompt need an environment, which gives it"
    assert re.search(said, checked(path, "--method", "ppo", code=1))
    for named in ([], ["--model", model], ["--method", "ppo"]):
        text = checked(path, "--environment", f"{tmp_path}/own.py:Letters", *named)
        assert "2 rows without a prompt, which the environment gives (rows 0, 2)" in text
        assert "read as prompts (method 'ppo' learns from reward_fn and prompts)" in text
    assert "not from an environment" in checked(
        path, "--environment", f"{tmp_path}/own.py:Letters", "--method", "sft", code=2
    )


def test_without_a_tokenizer_lengths_are_characters_and_words(tmp_path: Path) -> None:
    rows = [
        {"prompt": "one two three", "chosen": " four", "rejected": " five six"},
        {"prompt": "one", "chosen": " 4 5", "rejected": " 6"},
    ]
    path = written(tmp_path / "a.jsonl", rows)
    found = facts(path)
    assert {name: (each["least"], each["most"]) for name, each in found["words"].items()} == {
        "prompt": (1, 3), "chosen": (1, 2), "rejected": (1, 2), "whole": (3, 5),
    }  # fmt: skip
    assert (found["lengths"]["prompt"]["most"], found["lengths"]["whole"]["most"]) == (13, 22)
    lines = checked(path).splitlines()
    words = lines[lines.index("lengths in words:") + 2]
    assert words.split() == ["prompt", "1", "2", "2", "2.9", "3", "█", "█"]  # one of 1, none of 2, one of 3
    text = {"text": "one two"}
    assert [*facts(written(tmp_path / "b.jsonl", [text]))["words"]] == ["output", "whole"]


def test_repetition_is_told_by_kind(tmp_path: Path) -> None:
    rows = [ANSWER, {**ANSWER, "id": 7}, {**ANSWER, "completion": " 5"}, {**ANSWER, "prompt": "?", "completion": " \n"}]
    found = facts(written(tmp_path / "a.jsonl", rows))["findings"]
    told = {name: each["rows"] for name, each in found.items()}
    assert told == {"duplicate": [1], "repeated prompt": [2], "empty": [3]}
    pairs = [PAIR, {**PAIR, "chosen": " 5", "rejected": " 4"}]
    assert facts(written(tmp_path / "b.jsonl", pairs))["findings"]["contradictory"]["rows"] == [1]
    labels = [{**ANSWER, "label": label} for label in (True, False, True)]
    found = facts(written(tmp_path / "c.jsonl", labels))
    assert {name: each["rows"] for name, each in found["findings"].items()} == {"contradictory": [1], "duplicate": [2]}
    assert found["labels"] == {"true": 2, "false": 1}


def test_truncation_is_counted_in_rows_and_tokens_and_says_which_end(model: str, tmp_path: Path) -> None:
    path = written(
        tmp_path / "a.jsonl", [ANSWER, {**ANSWER, "completion": "a" * 95}, {**ANSWER, "completion": "a" * 9}]
    )
    found = facts(path, "--model", model, "train.seq_length=12")
    assert found["findings"]["truncated"] == {"count": 2, "rows": [1, 2], "message": ""}
    assert found["tokens_lost"] == (4 + 95 + 1 - 12) + (4 + 9 + 1 - 12)
    assert found["lengths"]["whole"]["most"] == 100
    assert sum(found["lengths"]["whole"]["counts"]) == 3
    text = checked(path, "--model", model, "train.seq_length=12")
    assert "2 rows truncated, which removes 90 tokens: they lose their end" in text
    text = checked(path, "--model", model, "train.seq_length=12", "tokenizer.kwargs={truncation_side: left}")
    assert "they lose their beginning" in text


def test_overlong_prompts_are_refused_truncated_or_dropped_as_the_settings_say(model: str, tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", [{"prompt": "2+2?"}, {"prompt": f"{'a' * 50}end"}])
    given = (path, "--model", model, "train.seq_length=48", "rollout.max_new_tokens=40")
    found = facts(*given, code=1)
    assert (found["limit"], found["refused"], found["findings"]["no room"]["rows"]) == (8, 1, [1])
    found = facts(*given, "--row", "1", "rollout.overlong_prompts=truncate")
    assert (found["findings"]["truncated"]["rows"], found["tokens_lost"]) == ([1], 45)
    assert found["example"] == {"prompt": [["aaaaaend", False]]}
    right = facts(*given, "--row", "1", "rollout.overlong_prompts=truncate_right")
    assert right["example"] == {"prompt": [["aaaaaaaa", False]]}
    assert "1 row too long and dropped" in checked(*given, "rollout.overlong_prompts=drop")
    only = written(tmp_path / "b.jsonl", [{"prompt": "a" * 50}])
    assert "all 1 prompts are longer than 8" in checked(only, *given[1:], "rollout.overlong_prompts=drop", code=1)
    assert "leaves no room for a prompt within 48 tokens" in checked(*given, "rollout.max_new_tokens=48", code=2)


@table("given", [[ANSWER, PAIR], [PAIR, ANSWER], [{"prompt": "2?"}, PAIR]])
def test_without_a_method_the_first_row_decides(given: list[Any], tmp_path: Path) -> None:
    found = facts(written(tmp_path / "a.jsonl", given), code=0 if given[0] == {"prompt": "2?"} else 1)
    assert found["kind"] == {"completion": "samples", "chosen": "pairs", "prompt": "prompts"}[[*given[0]][:2][-1]]
    assert sum(found["formats"].values()) == 2


# ------------------------------------------------------------------------------------------------------ the command


def test_faults_of_all_rows_are_told_with_their_lines(tmp_path: Path) -> None:
    rows = [ANSWER, *[{"prompt": "2+2?"}] * 30, {**ANSWER, "completion": ""}]
    text = checked(written(tmp_path / "a.jsonl", rows), "--method", "sft", code=1)
    assert "training refuses 31 of 32 rows; expected are text | messages" in text
    assert "rows 1, 2, 3, 4, 5, 6, 7, 8, 9, 10 and 20 more: sample 1 has the columns prompt" in text
    assert "row 31, line 32: sample 31: completion is empty; give some text, or remove it" in text
    alike = [{**ANSWER, "completion": number} for number in range(150)]
    assert [each["count"] for each in facts(written(tmp_path / "a.jsonl", alike), code=1)["faults"]] == [150]
    different = [{**ANSWER, f"reference_{number}_logps": -1.0} for number in range(150)]
    found = facts(written(tmp_path / "b.jsonl", [ANSWER, *different]), code=1)
    assert (found["refused"], len(found["faults"])) == (150, 101)
    text = checked(str(tmp_path / "b.jsonl"), code=1)
    (tmp_path / "c.jsonl").write_text(f'\n{json.dumps(ANSWER)}\n\n{{"text": ""}}\n', encoding="utf-8")
    assert "row 1, line 4: sample 1: text is empty" in checked(str(tmp_path / "c.jsonl"), code=1)
    text = checked(str(tmp_path / "b.jsonl"), code=1)
    assert "and 91 more kinds of faults, of 140 rows; --json prints them" in text


def test_a_method_that_learns_from_other_data_says_what_it_learns_from(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", [{"prompt": "2+2?"}])
    text = checked(path, "--method", "dpo", code=1)
    assert "read as pairs (method 'dpo' learns from samples and pairs)" in text
    assert "expected are prompt, chosen, rejected (preference)" in text
    assert "Prompts without outputs are for prompts=" in text


@table(
    "content, message",
    [
        (b'{"prompt": "a", "completion": "b"}\n{"prompt": \nx\n', r"line 2: not JSON[\s\S]*2 lines are not JSON: 2, 3"),
        (b'"a"\n"\xe9"\n', "line 2: not UTF-8"),
        (None, "No such file or directory"),
    ],
)
def test_files_that_cannot_be_read_are_errors_in_a_sentence(
    content: bytes | None, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.jsonl"
    if content is not None:
        path.write_bytes(content)
    result = CliRunner().invoke(app, ["data", "check", str(path)])
    assert result.exit_code == 1
    assert re.search(message, result.output), result.output


def test_no_rows_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("[]", encoding="utf-8")
    assert "0 rows" in (text := checked(str(tmp_path / "a.json"), code=1))
    assert "samples is empty; give at least one sample" in text
    assert "prompts is empty" in checked(str(tmp_path / "a.json"), "--method", "ppo", code=1)
    for name in ("b.jsonl", "b.txt"):
        (tmp_path / name).touch()
        assert "samples is empty" in checked(str(tmp_path / name), code=1)


def test_strict_checks_end_with_code_1_for_what_training_accepts(tmp_path: Path) -> None:
    good = written(tmp_path / "a.jsonl", [ANSWER, {**ANSWER, "completion": " 5"}])
    checked(good, "--strict")
    twice = written(tmp_path / "b.jsonl", [ANSWER, ANSWER])
    checked(twice)
    assert "✓ training accepts all rows" in checked(twice)
    assert checked(twice, "--strict", code=1).endswith("✗ with --strict, what is marked by ! is a fault\n")
    assert "--strict" not in checked(good, "--strict")
    found = facts(twice, "--strict", code=1)
    assert (found["passed"], found["faults"]) == (False, [])
    assert found["warnings"] == ["1 row the same as a row before (row 1)"]
    checked(written(tmp_path / "c.jsonl", [{**ANSWER, "id": 1}]), "--strict", code=1)


def test_settings_come_from_a_configuration_or_the_command_line_and_not_from_both(model: str, tmp_path: Path) -> None:
    path, config = written(tmp_path / "a.jsonl", [PAIR]), tmp_path / "run.yaml"
    config.write_text(f"method: dpo\nmodel: {{model_path: {model}}}\ntrain: {{seq_length: 32}}\n", encoding="utf-8")
    assert facts(path, "--config", str(config))["limit"] == 32
    assert facts(path, "--config", str(config), "train.seq_length=16", "--method", "DPO")["limit"] == 16
    assert facts(path, "method=dpo")["read_as"] == "pairs (method 'dpo' learns from samples and pairs)"
    assert "--method is 'sft' and the method of" in checked(path, "--config", str(config), "--method", "sft", code=2)
    assert "give one of the two" in checked(path, "--model", model, "model.model_path=other", code=2)
    assert "the model attends to at most 128 tokens" in checked(path, "--model", model, "train.seq_length=256", code=2)
    assert "no plugin 'nope' is installed" in checked(path, "--method", "nope", code=2)
    assert "there is 1 row" in checked(path, "--row", "1", code=2)
    assert "section.field=value" in checked(path, "train", code=2)


def test_text_of_data_cannot_control_the_terminal(tmp_path: Path) -> None:
    bad = "\x1b[31m\x07"
    path = written(
        tmp_path / "a.jsonl", [{"prompt": f"a{bad}", "completion": f"b{bad}", f"c{bad}": 1}, {f"promt{bad}": bad}]
    )
    text = checked(path, code=1)
    assert "\x1b" not in text
    assert "\x07" not in text


def test_what_is_trained_on_is_coloured_on_a_terminal_and_bracketed_elsewhere(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path / "a.jsonl", [ANSWER])
    assert "\n2+2?[[ 4<eos>]]\n" in checked(path, "--model", model)
    monkeypatch.setattr("trainkit_tools.data._coloured", lambda: True)
    text = checked(path, "--model", model)
    assert typer.style("2+2?", dim=True) + typer.style(" 4<eos>", fg="green", bold=True) in text


def test_other_trainers_than_those_of_text_are_omitted(tmp_path: Path) -> None:
    found = facts(written(tmp_path / "a.jsonl", [{"prompt": "a cat"}]), "--method", "ddpo")
    assert any("'ddpo' has its own way to read text" in each for each in found["omitted"])
    assert found["unit"] == "characters"


# -------------------------------------------------------------------------------------------------------- tokenizers


@table("offsets", [False, True])
@table("begins", [False, True])
def test_encoding_ahead_changes_no_token(begins: bool, offsets: bool) -> None:
    tokenizer = talking_tokenizer(bos_token="<bos>")
    if begins:
        first = ("<bos>", tokenizer.bos_token_id)
        post = TemplateProcessing(single="<bos> $A", pair="<bos> $A $B", special_tokens=[first])
        tokenizer.backend_tokenizer.post_processor = post
    texts = ["2+2?", " 4", "2+2? 4", "<bos>x", "a" * 200]
    ahead = TokenizerAhead(tokenizer, offsets=offsets)
    ahead.use(ahead.encoded(texts))
    assert len(ahead._known) == len(texts)
    for text in [*texts, "not given before"]:
        for add, ends in itertools.product((False, True), repeat=2):
            asked = {"add_special_tokens": add, "return_offsets_mapping": ends}
            expected = tokenizer(text, **asked)
            assert ends == ("offset_mapping" in ahead(text, **asked))
            assert ahead(text, **asked) == {name: expected[name] for name in ahead(text, **asked)}
    row = {"turns": ["2+2?", " 4"], "outputs": [False, True]}
    assert encode_sample(ahead, row, None) == encode_sample(tokenizer, row, None)  # type: ignore[arg-type]
    assert encode_joint(ahead, "2+2?", " 4") == encode_joint(tokenizer, "2+2?", " 4")  # type: ignore[arg-type]
    assert ahead.encoded(["\u2603", "a"]) == {}  # it is told of the row that has it


def test_encoder_decoders_have_a_limit_for_each_side(tmp_path: Path) -> None:
    rows = [ANSWER, {"prompt": "a" * 20, "completion": "b" * 20}, {"text": "no prompt"}]
    tokenizer = talking_tokenizer()
    found = inspect(rows, Reading("samples", tokenizer=tokenizer, limit=12, is_encoder_decoder=True), shown=1)
    assert found.example == {"sample": [("a" * 12, False), ("b" * 11, True)]}
    assert [fault.rows for fault in found.faults] == [[2]]
    assert "prompts lose their beginning, and outputs their end" in found.lost
    pairs = [
        {"prompt": "a" * 20, "chosen": "b", "rejected": "c"},
        {"prompt": "a", "chosen": "b" * 12, "rejected": "b" * 13},
    ]
    found = inspect(pairs, Reading("pairs", tokenizer=tokenizer, limit=12, is_encoder_decoder=True))
    assert (found.findings["equal"].rows, found.refused, found.tokens_lost) == ([1], 0, 16)


def test_progress_counts_every_row() -> None:
    counts: list[int] = []
    inspect([ANSWER] * 2500, Reading(tokenizer=talking_tokenizer()), progress=counts.append)
    assert counts == [1000, 1000, 500]


def test_a_method_that_is_not_installed_is_not_needed_for_what_the_format_says(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINKIT_DISABLE_PLUGINS", "trainkit-dpo,trainkit-kto")
    path = written(tmp_path / "a.jsonl", [PAIR])
    found = facts(path, "--model", model)
    assert (found["kind"], found["lengths"]["whole"]["most"], found["passed"]) == ("pairs", 7, True)
    assert "what 'dpo' checks itself of its samples: it cannot be used here" in found["omitted"]
    result = CliRunner().invoke(app, ["data", "check", path, "--method", "dpo"])
    assert result.exit_code == 1
    assert "disabled by TRAINKIT_DISABLE_PLUGINS" in result.stderr


def test_a_row_that_is_refused_is_not_shown_and_a_long_one_is_shortened(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", [{"text": "a" * 5000}, {"text": ""}])
    assert "row 1 is refused, so it is not shown" in checked(path, "--row", "1", code=1)
    assert " ... (3000 more characters) ... " in checked(path, code=1)


def test_tokens_that_pairs_lose_are_those_of_both_sides() -> None:
    tokenizer = talking_tokenizer()
    tokenizer.truncation_side = "left"
    pairs = [PAIR, {**PAIR, "chosen": "a" * 30, "rejected": "b"}, {**PAIR, "prompt": "a" * 30}]
    found = inspect(pairs, Reading("pairs", tokenizer=tokenizer, limit=12))
    assert {name: each.rows for name, each in found.findings.items()} == {
        "truncated": [1, 2],
        "repeated prompt": [1],
    }
    assert found.tokens_lost == (4 + 31 - 12) + 3 + 2 * (30 + 3 - 12)


@table(
    "name, lines", [("rows.jsonl", [1, 3]), ("rows.jsonl.gz", [1, 3]), ("rows.txt", [1, 2, 3, 4]), ("rows.json", [])]
)
def test_rows_have_the_numbers_of_their_lines(name: str, lines: list[int], tmp_path: Path) -> None:
    content = b'"a"\n\n"b"\n  \n'
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    assert row_lines(tmp_path / name) == lines
