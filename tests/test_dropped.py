"""Nothing of the data is dropped silently: columns that nothing reads, truncated tokens, odd numbers of rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import trainkit
from tables import table
from trainkit.data.columns import KNOWN, near
from trainkit.errors import CheckpointError, DataError
from trainkit.rollouts import Turn
from trainkit.testing import character_tokenizer, tiny_gpt2
from trainkit.testing.trainers import LETTERS, count_first_letters, tiny_trainer

SAMPLE = {"prompt": "a", "completion": "b"}
PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}


def told(caplog: pytest.LogCaptureFixture, said: str = "") -> list[str]:
    return [line for line in caplog.messages if said in line]


def config(tmp_path: Path, **sections: Any) -> dict[str, Any]:
    return {
        **sections,
        "rollout": {"max_new_tokens": 3, "num_rollouts": 8, **sections.get("rollout", {})},
        "train": {
            "run_dir": str(tmp_path), "trackers": [], "batch_size": 4, "total_steps": 1, **sections.get("train", {})
        },
    }  # fmt: skip


def train(tmp_path: Path, *arguments: Any, settings: dict[str, Any] | None = None, **given: Any) -> Any:
    made = given.pop("tokenizer", None) or character_tokenizer(LETTERS)
    settings = config(tmp_path, **(settings or {}))
    return trainkit.train(tiny_gpt2(len(made)), *arguments, config=settings, tokenizer=made, **given)


# --------------------------------------------------------------------------------------------- what is refused

REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    ("sft", {"question": "a", "completion": "b"}, "question", "rename it to 'prompt'"),
    ("sft", {"instruction": "a", "completion": "b"}, "instruction", "rename it to 'prompt'"),
    ("sft", {"promt": "a", "completion": "b"}, "promt", "did you mean 'prompt'"),
    ("sft", {"prompts": "a", "completion": "b"}, "prompts", "did you mean 'prompt'"),
    ("sft", {"pormpt": "a", "completion": "b"}, "pormpt", "did you mean 'prompt'"),
    ("sft", {"prompt": "a", "output": "b", "imput": "c"}, "imput", "did you mean 'input'"),
    ("sft", {"Prompt": "a", "completion": "b"}, "Prompt", "did you mean 'prompt'"),
    ("sft", {**SAMPLE, "images": ["x"]}, "images", "training is on text alone"),
    ("dpo", {**PAIR, "image": "x"}, "image", "training is on text alone"),
    ("sft", {**SAMPLE, "output": "c"}, "output", "it belongs to another format"),
    ("sft", {"text": "a", "completion": "b"}, "text", "it belongs to another format"),
    ("sft", {"prompt": "a", "text": "b"}, "prompt", "it belongs to another format"),
    ("dpo", {"question": "x", "chosen": "ab", "rejected": "ac"}, "question", "'prompt'"),
    ("dpo", {**PAIR, "reference_chosen_logps": -1.0}, "reference_chosen_logps", "computed here"),
    ("dpo", {**PAIR, "ref_rejected_logps": -1.0}, "ref_rejected_logps", "computed here"),
    ("reward", {**PAIR, "system": "x"}, "system", "write it into the prompt"),
    ("sft", {**SAMPLE, "tools": [{"name": "f"}]}, "tools", "and the row is text"),
    ("kto", {**SAMPLE, "label": True, "images": ["x"]}, "images", "text alone"),
]


@table("method, row, column, said", REFUSED)
def test_a_column_that_changes_what_is_learnt_is_refused_until_it_is_ignored(
    method: str, row: dict[str, Any], column: str, said: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=f"sample 1 has the column '{column}', which is not read .*{said}") as caught:
        tiny_trainer(method, tmp_path).add_samples([{k: v for k, v in row.items() if k != column}, row])
    assert f"data.ignore_columns: ['{column}']" in str(caught.value)
    assert "formatting_func" in str(caught.value)
    trainer = tiny_trainer(method, tmp_path, data__ignore_columns=[column])
    trainer.add_samples([row, {**row, "label": False}] if method == "kto" else [row])
    assert column not in trainer.pipeline.rows[0]


def test_an_empty_cell_is_no_column() -> None:
    """A table has the columns of its widest row."""
    empty = {"system": "", "history": [], "images": None, "question": float("nan")}
    assert trainkit.data.sample_rows([{**SAMPLE, **empty}])[0]["turns"] == ["a", "b"]
    assert trainkit.data.prompt_rows([{"prompt": "a", "images": [], "completions": None, "labels": None}])


ORDINARY = ("id", "source", "label", "labels", "answer", "score", "test", "prompt_id", "context", "category", "meta")


@table("column", ORDINARY)
def test_a_column_of_an_ordinary_dataset_is_named_and_stops_nobody(
    column: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = tiny_trainer("sft", tmp_path)
    trainer.add_samples([{"text": "ab", column: "x"}, {"text": "ab"}])
    assert told(caplog) == [f"sft does not read the column '{column}' of the samples"]
    trainer.add_eval_samples([{"text": "ab", column: "x", "more": 1}])
    assert told(caplog)[1:] == ["sft does not read the column 'more' of the samples"]


@given(st.sampled_from(list(KNOWN)), st.integers(0, 20), st.sampled_from("xyz"))
def test_names_at_one_edit_are_near_and_others_are_not(column: str, at: int, letter: str) -> None:
    at %= len(column)
    edits = [column, column[:at] + column[at + 1 :], column[:at] + letter + column[at:], column.upper()]
    assert all(column in near(edit, (column,)) for edit in edits)
    assert bool(near(column[:at] + letter + column[at + 1 :], (column,))) == (len(column) > 4)  # 'test' is no 'text'
    assert not near(column + letter * 2, (column,))


# ------------------------------------------------------------------------------------- who reads which columns


def test_columns_are_named_in_one_line_by_the_method_that_does_not_read_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{**PAIR, "margin": 0.5, "id": 1, "source": "x"}]
    tiny_trainer("dpo", tmp_path)
    caplog.clear()
    tiny_trainer("dpo", tmp_path, arguments={"samples": rows, "prompts": ["a"]})
    tiny_trainer("reward", tmp_path, arguments={"samples": rows})
    assert told(caplog) == [
        "dpo does not read the columns 'margin', 'id', 'source' of the samples",
        "reward does not read the columns 'id', 'source' of the samples",
    ]


def test_labels_are_read_by_those_that_learn_from_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{**SAMPLE, "label": label} for label in (True, False)]
    tiny_trainer("kto", tmp_path, arguments={"samples": rows, "rewards": None, "prompts": ["a"]})
    tiny_trainer("ilql", tmp_path, arguments={"samples": rows, "rewards": None, "prompts": ["a"]})
    assert told(caplog) == []


class Rows:
    """A stream of three windows of rows with a column that nothing reads."""

    def __iter__(self) -> Iterator[Any]:
        return ({**SAMPLE, "id": n} for n in range(600))


def test_a_column_of_a_stream_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = tiny_trainer("sft", tmp_path)
    trainer.add_samples(Rows())
    trainer.pipeline.take(0, 600)
    assert told(caplog, "does not read") == ["sft does not read the column 'id' of the samples"]


def test_columns_of_prompts_reach_reward_functions_and_are_not_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[Any] = []

    def reward(outputs: list[str], **columns: Any) -> list[float]:
        seen.append(columns)
        return [float(index) for index, _ in enumerate(outputs)]

    prompts = [{"prompt": "a", "instruction": "x", "completion": "y", "chosen": "z"}]
    train(tmp_path, reward, prompts=prompts)
    assert {"instruction", "completion", "chosen"} < set(seen[0])
    assert told(caplog, "does not read") == []


def test_columns_of_prompts_that_nobody_gets_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = tiny_trainer("sft", tmp_path)
    trainer.add_eval_pipeline([{"prompt": "a", "answer": "b", "seed": 1}])
    assert told(caplog) == ["sft does not read the column 'answer' of the prompts"]
    trainer = tiny_trainer("sft", tmp_path, arguments={"metric_fn": lambda outputs, **_: {"n": len(outputs)}})
    trainer.add_eval_pipeline([{"prompt": "a", "answer": "b", "seed": 1}])
    assert len(told(caplog)) == 1


NO_PROMPTS: dict[str, tuple[dict[str, Any], str]] = {
    "images": ({"prompt": "a", "images": ["x"]}, "the column 'images', which the model does not see"),
    "a video": ({"prompt": "a", "video": "x"}, "the column 'video', which the model does not see"),
    "stepwise supervision": (
        {"prompt": "a", "completions": ["b", "c"], "labels": [True, False]},
        "the column 'completions', which has 'labels'; stepwise supervision is not supported",
    ),
}


@table("row, said", NO_PROMPTS.values())
def test_prompts_that_are_something_else_are_refused_until_the_column_is_ignored(
    row: dict[str, Any], said: str, tmp_path: Path
) -> None:
    trainer = tiny_trainer("ppo", tmp_path)
    for add in (trainer.add_prompt_pipeline, trainer.add_eval_pipeline):
        with pytest.raises(DataError, match=f"prompt 1 has {said}") as caught:
            add(["a", row])
    (column,) = [name for name in row if f"data.ignore_columns: ['{name}']" in str(caught.value)]

    def reward(outputs: list[str], **columns: Any) -> list[float]:
        assert column not in columns
        return count_first_letters(outputs)

    trainer = tiny_trainer("ppo", tmp_path, data__ignore_columns=[column], arguments={"reward_fn": reward})
    trainer.add_prompt_pipeline([row])
    trainer.collect()
    assert len(trainer.store) == 16


def test_stepwise_samples_are_not_taken_for_prompts() -> None:
    row = NO_PROMPTS["stepwise supervision"][0]
    assert trainkit.data.recognise(row) is None
    with pytest.raises(DataError, match="Stepwise supervision is not supported; make samples of its steps"):
        trainkit.data.sample_rows([row])


class Reads:
    """An environment that gives the prompt, from a column of its own."""

    def __init__(self, row: dict[str, Any]) -> None:
        self.row = row

    def reset(self) -> str:
        return str(self.row["question"])

    def step(self, output: str) -> Turn:
        return Turn("", float(len(output)), done=True)


def test_an_environment_reads_any_column_but_a_misspelt_prompt(tmp_path: Path) -> None:
    assert train(tmp_path, environment=Reads, prompts=[{"question": "a"}]).progress.step == 1
    with pytest.raises(DataError, match="prompt 0 has the column 'promt', which is no prompt; did you mean 'prompt'"):
        train(tmp_path, environment=Reads, prompts=[{"promt": "a"}])


def test_an_ignored_label_makes_samples_of_labelled_ones(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The format decides the method, and it is that of the rows without the ignored columns."""
    rows = [{**SAMPLE, "label": n % 2} for n in range(4)]
    with pytest.raises(DataError, match=r"list it in data.ignore_columns: \['label'\]"):
        tiny_trainer("sft", tmp_path).add_samples(rows)
    settings = {"data": {"ignore_columns": ["label", "nowhere"]}}
    trainer = train(tmp_path, samples=rows, eval_samples=rows, settings=settings)
    assert trainer.config.method.name == "sft"
    assert trainer.pipeline.rows[0] == {"turns": ["a", "b"], "outputs": [False, True]}
    assert told(caplog, "does not read") == []
    assert rows[1]["label"] == 1, "the caller's rows are not changed"


def test_a_formatting_function_returns_one_sample_and_no_list_of_texts() -> None:
    """A function for batches returns one, which would pass for turns if it has two texts."""
    for made in (["a", "b"], ["a", "b", "c"], ["a"], []):
        with pytest.raises(
            DataError, match=r"formatting_func returned a list for sample 0.*with one row and returns one"
        ):
            trainkit.data.formatted(["x"], lambda _, made=made: made)
    talk = [{"role": "user", "content": "a"}]
    assert trainkit.data.formatted(["x"], lambda _: talk) == [talk]
    assert trainkit.data.sample_rows([["a", "b"]])[0]["outputs"] == [False, True], "samples themselves may be lists"


# ------------------------------------------------------------------------------------------------- truncation


def tokenizer(side: str) -> Any:
    made = character_tokenizer(LETTERS)
    made.truncation_side = side
    return made


@table("side, kept, lost", [("right", "abcdef", "end"), ("left", "efghh<eos>", "beginning")])
def test_a_sample_loses_the_side_that_the_tokenizer_truncates_and_it_is_told(
    side: str, kept: str, lost: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given = {"tokenizer": tokenizer(side), "prompts": ["a"]}
    trainer = tiny_trainer("sft", tmp_path, train__seq_length=6, rollout__max_new_tokens=1, arguments=given)
    caplog.clear()
    trainer.add_samples([("abc", "defghh"), ("a", "b")])
    (line,) = told(caplog)
    assert line.startswith("1 of 2 samples were truncated to 6 tokens: ")
    assert line.endswith(f"they lose their {lost} (the tokenizer's truncation_side is '{side}')")
    sequences = trainer.encode_samples(trainer.pipeline.rows)
    assert trainer.tokenizer.decode(sequences.input_ids[0]) == kept
    trained = trainer.tokenizer.decode(sequences.responses[0])
    assert trained == ("def" if side == "right" else "fghh<eos>"), "nothing precedes the first token"


class Endless:
    """A stream of rows."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows)


@table("side, first", [("right", "end"), ("left", "beginning")])
def test_pairs_that_truncation_makes_equal_are_skipped_counted_and_named(
    side: str, first: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given = {"tokenizer": tokenizer(side), "samples": [PAIR], "prompts": ["a"]}
    trainer = tiny_trainer("dpo", tmp_path, train__seq_length=4, rollout__max_new_tokens=1, arguments=given)
    alike = {"right": ("bbbbc", "bbbbd"), "left": ("cbbbbb", "dbbbbb")}[side]
    other = {"right": ("cbbbb", "dbbbb"), "left": ("bbbbbc", "bbbbbd")}[side]
    equal, differ = ({"prompt": "a", "chosen": pair[0], "rejected": pair[1]} for pair in (alike, other))
    same = {"prompt": "a", "chosen": "b", "rejected": "b"}
    as_tokens = {"prompt": "a", "chosen": "b", "rejected": "b<eos>"}
    tied = [equal, same, as_tokens]
    for given in (tied, Endless(tied)):
        with pytest.raises(DataError, match=r"all 3 pairs have the same chosen and|no sample of the stream"):
            trainer.add_samples(given)
    trainer.add_samples([PAIR, equal, same, as_tokens, differ])
    assert "3 of 5 pairs are skipped, because chosen and rejected are the same within 4 tokens: samples 1, 2, 3" in (
        caplog.text
    )
    assert f"outputs that are still too long their {first} (the tokenizer's truncation_side is '{side}')" in caplog.text
    assert "1 of 2 samples were truncated to 4 tokens: prompts lose their beginning, and outputs" in caplog.text
    pairs = trainer.encode_preferences(trainer.pipeline.rows[1:])
    assert trainer.tokenizer.decode(pairs.chosen.input_ids[0]) == {"right": "acbb", "left": "bbc<eos>"}[side]
    assert pairs.chosen.response_mask[0].tolist() == [False, True, True, True]


def test_the_side_of_truncation_is_set_in_the_configuration_and_belongs_to_the_run(tmp_path: Path) -> None:
    character_tokenizer(LETTERS).save_pretrained(tmp_path / "tokenizer")

    def run(side: str) -> Any:
        path = {"tokenizer_path": str(tmp_path / "tokenizer"), "kwargs": {"truncation_side": side}}
        settings = config(
            tmp_path / "run",
            tokenizer=path,
            train={"seq_length": 4, "resume": "auto", "total_steps": 2 + (side == "right")},
        )
        return trainkit.train(tiny_gpt2(10), samples=[("abc", "defgh")], config=settings)

    assert run("left").encode_samples([{"turns": ["abc", "defgh"], "outputs": [False, True]}]).input_ids[0, 0] == 5
    with pytest.raises(CheckpointError, match=r"tokenizer\.kwargs\.truncation_side"):
        run("right")


# ------------------------------------------------------------------------------------------- how many rows a step has

SHORT_STEPS: list[tuple[str, dict[str, Any], int, str]] = [
    (
        "sft", {"train__batch_size": 6}, 4,
        "step 3 is made with 4 rows: train.batch_size, 6, does not divide the 16 rows of the "
        "dataset",
    ),
    (
        "sft", {"train__batch_size": 32}, 2,
        "step 1 is made with 16 rows: train.batch_size, 32, does not divide the 16 rows of the dataset",
    ),
    (
        "ppo", {"rollout__num_rollouts": 12}, 6,
        "step 2 is made with 4 rows: train.batch_size, 8, does not divide the 12 rows of a collection "
        "(rollout.num_rollouts)",
    ),
]  # fmt: skip


@table("method, changes, steps, said", SHORT_STEPS)
def test_a_step_of_fewer_rows_is_told_once(
    method: str, changes: dict[str, Any], steps: int, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = tiny_trainer(method, tmp_path, **changes, train__total_steps=steps)
    trainer.learn()
    assert told(caplog, "is made with") == [said]


def test_steps_of_whole_batches_are_not_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for method in ("sft", "ppo"):
        tiny_trainer(method, tmp_path / method, train__total_steps=4).learn()
    tiny_trainer(
        "sft", tmp_path / "stopped", train__batch_size=6, train__total_steps=2
    ).learn()  # before it comes to it
    assert told(caplog, "is made with") == []


def test_prompts_of_a_further_epoch_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = {"rollout": {"num_rollouts": 6}, "train": {"epochs": 1, "batch_size": 6, "total_steps": None}}
    train(tmp_path, count_first_letters, prompts=[*LETTERS], settings=settings)
    assert told(caplog, "epoch") == [
        "4 of the 6 prompts of the last collection are of a further epoch: collections of rollout.num_rollouts do not "
        "divide the 8 prompts of train.epochs"
    ]


@table("method", ["sft", "ppo"])
def test_no_steps_train_nothing_and_it_is_told(method: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tiny_trainer(method, tmp_path, train__total_steps=0).learn()
    assert told(caplog, "nothing is trained") == [
        "train.total_steps is 0: nothing is trained, and the model is exported as it is"
    ]
    caplog.clear()
    tiny_trainer(method, tmp_path / "one", train__total_steps=1).learn()
    assert told(caplog, "nothing is trained") == []
