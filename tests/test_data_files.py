"""Data files, directories and hub ids that the command line reads."""

from __future__ import annotations

import gzip
import json
import string
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

from tables import table
from trainkit.cli import app
from trainkit.cli.files import read_data
from trainkit.data import PLAIN_TEMPLATE
from trainkit.errors import DataError
from trainkit.testing import character_tokenizer, tiny_gpt2

ASK = {"role": "user", "content": "2+2?"}
ANSWER, WORSE = ({"role": "assistant", "content": content} for content in "45")
ROWS: dict[str, list[dict[str, Any]]] = {
    "language modelling": [{"text": "2+2? 4"}, {"messages": [ASK, ANSWER]}],
    "prompt-completion": [{"prompt": "2+2?", "completion": " 4"}, {"prompt": [ASK], "completion": [ANSWER]}],
    "unpaired preference": [
        {"prompt": "2+2?", "completion": " 4", "label": True},
        {"prompt": [ASK], "completion": [WORSE], "label": False},
    ],
    "preference": [
        {"prompt": "2+2?", "chosen": " 4", "rejected": " 5"},
        {"prompt": [ASK], "chosen": [ANSWER], "rejected": [WORSE]},
    ],
    "implicit preference": [
        {"chosen": "2+2? 4", "rejected": "2+2? 5"},
        {"chosen": [ASK, ANSWER], "rejected": [ASK, WORSE]},
    ],
    "prompt-only": [{"prompt": "2+2?"}, {"prompt": [ASK]}],
}
"""Rows of each format, as text and as messages."""
FORMATS = [
    *((form, row) for form, rows in ROWS.items() for row in rows),
    ("prompt-completion", {"instruction": "Add.", "input": "2+2", "output": "4"}),  # Alpaca
    ("language modelling", {"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]}),
]
FLAT = [(form, row) for form, row in FORMATS if not any(isinstance(value, list) for value in row.values())]


def save(rows: list[Any], path: Path) -> None:
    from datasets import Dataset

    Dataset.from_list(rows).save_to_disk(str(path))


@table("form, row", FORMATS)
@table("suffix", ["jsonl", "json", "parquet", "saved"])
def test_rows_of_every_format_are_read_as_they_were_written(
    form: str, row: dict[str, Any], suffix: str, tmp_path: Path
) -> None:
    rows, path = [row, row], tmp_path / f"data.{suffix}"
    if suffix == "jsonl":
        path.write_text("".join(f"{json.dumps(each)}\n" for each in rows), encoding="utf-8")
    elif suffix == "json":
        path.write_text(json.dumps(rows), encoding="utf-8")
    elif suffix == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        save(rows, path)
    assert read_data(str(path)) == rows


@table("form, row", FLAT)
def test_rows_of_text_are_read_from_csv(form: str, row: dict[str, Any], tmp_path: Path) -> None:
    lines = [",".join(row), ",".join(json.dumps(value).replace("\\n", "\n") for value in row.values())]
    (tmp_path / "a.csv").write_text("\n".join(lines), encoding="utf-8")
    assert read_data(str(tmp_path / "a.csv")) == [row]


def test_text_in_csv_stays_text_whatever_it_looks_like(tmp_path: Path) -> None:
    text = 'prompt,answer,level,hard\n007,1e3,1,true\n,"a\nb",2,false\n'
    (tmp_path / "a.csv").write_text(text, encoding="utf-8")
    assert read_data(str(tmp_path / "a.csv")) == [
        {"prompt": "007", "answer": "1e3", "level": 1, "hard": True},
        {"prompt": "", "answer": "a\nb", "level": 2, "hard": False},
    ]


@table("separator", [",", ";", "\t"])
def test_columns_are_separated_by_what_the_first_line_has(separator: str, tmp_path: Path) -> None:
    text = f'prompt{separator}answer\n"a, b; c"{separator}d\n'
    (tmp_path / "a.csv").write_text(text, encoding="utf-8")
    assert read_data(str(tmp_path / "a.csv")) == [{"prompt": "a, b; c", "answer": "d"}]


def test_text_files_keep_every_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("\ufeffone\r\n\r\ntwo\u2028lines\n".encode())
    assert read_data(str(tmp_path / "a.txt")) == ["one", "", "two\u2028lines"]
    (tmp_path / "b.txt").write_bytes(b"\n")
    assert read_data(str(tmp_path / "b.txt")) == [""]
    (tmp_path / "b.txt").write_bytes(b"")
    assert read_data(str(tmp_path / "b.txt")) == []
    (tmp_path / "b.jsonl").write_text('\n"one"\n  \n"two"\n\n', encoding="utf-8")
    assert read_data(str(tmp_path / "b.jsonl")) == ["one", "two"]
    (tmp_path / "a.JSONL").write_text('"one"\n{"prompt": "p"}', encoding="utf-8")
    assert read_data(str(tmp_path / "a.JSONL")) == ["one", {"prompt": "p"}]


def test_a_directory_is_one_file_in_parts_or_a_saved_dataset(tmp_path: Path) -> None:
    parts = tmp_path / "parts"
    parts.mkdir()
    for at in range(2):
        (parts / f"train-0000{at}-of-00002.jsonl").write_text(f'{{"prompt": "{at}"}}\n', encoding="utf-8")
    (parts / "README.md").write_text("about", encoding="utf-8")
    assert read_data(str(parts)) == [{"prompt": "0"}, {"prompt": "1"}]
    from datasets import Dataset, DatasetDict

    split = DatasetDict({"train": Dataset.from_list([{"prompt": "a"}]), "test": Dataset.from_list([{"prompt": "b"}])})
    split.save_to_disk(str(tmp_path / "both"))
    assert read_data(str(tmp_path / "both")) == [{"prompt": "a"}]
    DatasetDict({"test": split["test"]}).save_to_disk(str(tmp_path / "other"))
    with pytest.raises(DataError, match=r"has no split 'train'; it has test"):
        read_data(str(tmp_path / "other"))


@table(
    "name, content",
    [
        ("rows.jsonl", '"a"\n\n"b"\n'),
        ("rows.json", '["a", "b"]'),
        ("rows.txt", "a\nb\n"),
        ("rows.csv", "prompt\na\nb\n"),
        ("split/train-00000-of-00001.jsonl", '"a"\n"b"\n'),
    ],
)
def test_compressed_text_is_read_as_what_it_holds(name: str, content: str, tmp_path: Path) -> None:
    path = tmp_path / f"{name}.GZ"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(gzip.compress(content.encode()))
    rows = [row["prompt"] if isinstance(row, dict) else row for row in read_data(str(path))]
    assert rows == ["a", "b"]
    assert len(read_data(str(path.parent if "/" in name else path))) == 2


@table(
    "name, content, message",
    [
        ("a.jsonl", b'{"a": 1}\n{"a": \n', r"a\.jsonl, line 2: not JSON .*every line should be an object or a string"),
        ("a.jsonl", b"[" * 100_000, "line 1: not JSON"),
        ("a.json", b'{"a": 1}', "should hold a list of rows; it holds .*A row per line is .jsonl"),
        ("a.json", b"[1,", "not JSON .*the file should be a list of objects or strings"),
        ("a.jsonl", b'{"a": 1},\n', r"line 1: not JSON \(Extra data: column 9, before ','\)"),
        ("a.jsonl", b"[\n", r"line 1: not JSON .*which is the end.* \(a list of rows over several lines is .json\)"),
        ("a.json", b'{"a": 1}\n{"a": 2}\n', r"line 2: not JSON .*a row per line is .jsonl"),
        ("a.json", b"", "line 1: not JSON .it is empty"),
        ("a.txt", b"one\ntwo\ncaf\xe9\n", "a.txt, line 3: not UTF-8 .after 'caf'.; save it as UTF-8"),
        ("a.csv", b"prompt\ncaf\xe9\n", "a.csv, line 2: not UTF-8"),
        ("a.csv", "prompt\nx\n".encode("utf-16"), "a.csv: it is UTF-16; save it as UTF-8"),
        ("a.jsonl", gzip.compress(b"{}", mtime=0), "a.jsonl: it is compressed; decompress it"),
        ("a.jsonl.gz", gzip.compress(b"{", mtime=0), r"a\.jsonl\.gz, line 1: not JSON"),
        ("a.jsonl.gz", gzip.compress(b"{}" * 99, mtime=0)[:20], r"cannot read .*a\.jsonl\.gz: Compressed file ended"),
        ("a.jsonl.gz", b"{}", r"cannot read .*a\.jsonl\.gz: Not a gzipped file"),
        ("a.txt.gz", gzip.compress(b"caf\xe9", mtime=0), "a.txt.gz, line 1: not UTF-8"),
        ("a.parquet.gz", gzip.compress(b"", mtime=0), "given .*a.parquet.gz'; decompress it"),
        ("a.jsonl.zst", b"", "given .*a.jsonl.zst'; decompress it"),
        ("a.csv", b"prompt,prompt\na,b\n", "a.csv has several columns 'prompt'; give each a name of its own"),
        ("a.csv", b"", "cannot read .*a.csv"),
        ("a.csv", b"a,b\n1,2\n1\n", "cannot read .*a.csv: .*Row #3: Expected 2 columns, got 1"),
        ("a.parquet", b"no table", "cannot read .*a.parquet"),
        ("a.xlsx", b"", "data files are .jsonl, .json, .csv, .parquet, .txt, a directory, or a hub id; given"),
        ("a/train.jsonl", None, "cannot read .*train.jsonl: No such file or directory"),
        ("gone.csv", None, "cannot read .*gone.csv: No such file or directory"),
        ("empty/", None, "has no data: no saved dataset"),
        ("deep/data/a.jsonl", b"", "'.*deep' has no data: .*; name a directory below: .*data"),
        ("two/a.jsonl two/b.csv", b"", "has several data files; name one: .*a.jsonl, .*b.csv"),
    ],
)
def test_what_cannot_be_read_is_an_error_in_a_sentence(
    name: str, content: bytes | None, message: str, tmp_path: Path
) -> None:
    for each in name.split():
        path = tmp_path / each
        (path if name.endswith("/") else path.parent).mkdir(parents=True, exist_ok=True)
        if content is not None:
            path.write_bytes(content)
    whole = name.startswith(("two/", "deep/")) or name.endswith("/")
    given = tmp_path / name.partition("/")[0] if whole else tmp_path / name
    with pytest.raises(DataError, match=message):
        read_data(str(given))


def test_a_file_that_is_not_there_is_not_looked_for_in_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data" / "train").mkdir(parents=True)
    with pytest.raises(DataError, match=r"there is no 'data/trian'; did you mean 'data/train'\?"):
        read_data("data/trian")
    (tmp_path / "prompts.jsonl").touch()
    with pytest.raises(DataError, match=r"No such file or directory; did you mean 'prompts.jsonl'\?"):
        read_data("promts.jsonl")
    with pytest.raises(DataError, match=r"'owner/name@main:test' cannot be loaded as a dataset: .*Give a file"):
        read_data("owner/name@main:test")


# ----------------------------------------------------------------------------------------------- from file to training


def stored(rows: list[Any], source: str, folder: Path) -> str:
    """Write rows as a file with this suffix, a saved dataset, or a dataset of the hub; return what names it."""
    path = folder / f"data.{source}"
    if source == "csv":
        cells = [[*rows[0]], *(map(str, row.values()) for row in rows)]
        path.write_text("".join(",".join(line) + "\n" for line in cells), encoding="utf-8")
    elif source == "txt":
        path.write_text("".join(f"{row.get('text') or row['prompt']}\n" for row in rows), encoding="utf-8")
    elif source == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif source == "saved":
        save(rows, path)
    elif source == "hub":  # what `datasets` loads by a name, here without a network: a repository with two splits
        path = folder / "owner" / "name" / "data"
        path.mkdir(parents=True)
        for split, some in (("train", rows[:1]), ("test", rows)):
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(some), path / f"{split}-00000-of-00001.parquet")
        return "owner/name:test"
    else:
        each = [json.dumps(row) for row in rows]
        path.write_text("\n".join(each) if source == "jsonl" else f"[{', '.join(each)}]", encoding="utf-8")
    return path.name


SOURCES = ("jsonl", "json", "csv", "parquet", "txt", "saved", "hub")
METHODS = {"preference": "dpo", "implicit preference": "dpo", "unpaired preference": "kto", "prompt-only": "ppo"}
STORED: list[tuple[str, str, Any]] = [
    (source, form, row)
    for source in SOURCES
    for form, row in (FLAT if source in ("csv", "txt") else FORMATS)
    if source != "txt" or {*row} in ({"text"}, {"prompt"})
]
"""Every format in every source that can hold it: conversations are no text, and lines of text have no columns."""
STORED += [
    (source, form, row)
    for source in ("jsonl", "json")
    for form, row in (
        ("text", "2+2? 4"),
        ("turns", ["2+2?", " 4"]),
        ("turns", ["2+2?", " 4", " 3+3?", " 6"]),
        ("messages", [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]),
    )
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory with a model and a tokenizer of the printable characters."""
    path, tokenizer = tmp_path_factory.mktemp("model"), character_tokenizer(string.printable)
    tokenizer.chat_template = PLAIN_TEMPLATE
    tokenizer.save_pretrained(path)
    config = AutoConfig.for_model(**tiny_gpt2(len(tokenizer), n_positions=128))
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return str(path)


SAMPLE = [
    of[2 * at % len(of)]
    for at, source in enumerate(SOURCES)
    for of in [[stored for stored in STORED if stored[0] == source]]
]
"""Each source once, with several formats."""


@table("source, form, row", SAMPLE)
def test_formats_are_checked_and_trained_on_from_every_source(
    source: str, form: str, row: Any, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trains(source, form, row, model, tmp_path, monkeypatch)


@pytest.mark.slow
@table("source, form, row", [stored for stored in STORED if stored not in SAMPLE])
def test_every_format_is_checked_and_trained_on_from_every_source(
    source: str, form: str, row: Any, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trains(source, form, row, model, tmp_path, monkeypatch)


def trains(source: str, form: str, row: Any, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [row, {**row, "label": not row["label"]} if "label" in row else row]
    data, method = stored(rows, source, tmp_path), METHODS.get(form, "sft")
    checked = CliRunner().invoke(app, ["data", "check", data, "--model", model, "--method", method])
    assert checked.exit_code == 0, checked.output
    assert f"{data}: 2 rows: 2 " in checked.output
    (tmp_path / "reward.py").write_text("def reward(outputs, **_):\n    return [len(each) for each in outputs]\n")
    changes = ["train.total_steps=1", "train.batch_size=2", "train.trackers=[]", f"model.model_path={model}"]
    options = ["--samples", data, "--eval-samples", data]
    if form == "prompt-only":
        options = ["--prompts", data, "--eval-prompts", data, "--reward-fn", "reward.py:reward"]
        changes += ["rollout.max_new_tokens=2", "rollout.num_rollouts=2", "rollout.batch_size=2", "method.ppo_epochs=1"]
    (tmp_path / "run.yaml").write_text(f"method: {method}\ntrain: {{run_dir: out}}\n", encoding="utf-8")
    result = CliRunner().invoke(app, ["train", "run.yaml", *changes, *options])
    assert result.exit_code == 0, result.output
    name = "eval/reward" if form == "prompt-only" else "eval/loss/total"
    assert f'"{name}"' in (tmp_path / "out" / "metrics.jsonl").read_text(encoding="utf-8")


def test_rewards_are_a_column_of_a_file(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rated.csv").write_text("prompt,output,reward\na,b,0.5\na,c,-1\n", encoding="utf-8")
    (tmp_path / "run.yaml").write_text("method: ilql\ntrain: {total_steps: 1, run_dir: out, trackers: []}\n", "utf-8")
    command = ["train", "run.yaml", f"model.model_path={model}", "--samples", "rated.csv"]
    result = CliRunner().invoke(app, [*command, "--eval-samples", "rated.csv"])
    assert result.exit_code == 0, result.output
