"""Samples without a length: read as they are needed, in order, and gone on with where a run was."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import trainkit
from tables import table
from trainkit.data import Stream
from trainkit.data.pipeline import WINDOW
from trainkit.errors import ConfigError, DataError
from trainkit.testing import character_tokenizer, tiny_gpt2
from trainkit.testing.trainers import tiny_trainer


class Endless:
    """Samples without end, and how many were asked for."""

    def __init__(self, end: int | None = None) -> None:
        self.end, self.read = end, 0

    def __iter__(self) -> Iterator[Any]:
        for index in count():
            if index == self.end:
                return
            self.read += 1
            yield {"prompt": "abcdefgh"[index % 8], "completion": "ab" * (index % 3 + 1)}


def numbered(end: int, *, one_to_one: bool) -> Stream:
    """A stream over 0, 1, ..., each of them once or, where rows are arranged, twice."""

    def read(window: list[Any], first: int) -> list[Any]:
        assert window == list(range(first, first + len(window)))
        return [{"n": n} for n in window for _ in range(1 if one_to_one else 2)]

    class Numbers:
        def __iter__(self) -> Iterator[int]:
            return iter(range(end))

    return Stream(Numbers(), read, one_to_one=one_to_one)


@given(st.integers(1, 7), st.booleans(), st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), max_size=4))
def test_a_position_has_one_row_whatever_was_taken_before(
    end: int, one_to_one: bool, takes: list[tuple[int, int]]
) -> None:
    stream, each = numbered(end, one_to_one=one_to_one), 1 if one_to_one else 2
    for start, amount in takes:
        expected = [(p // each) % end for p in range(start, start + amount)]
        assert [row["n"] for row in stream.take(start, amount)] == expected
        shards = [numbered(end, one_to_one=one_to_one).take(start, amount, rank=r, world=2) for r in (0, 1)]
        assert [shards[i % 2][i // 2]["n"] for i in range(amount)] == expected


def test_no_more_is_read_than_is_needed_and_one_window(tmp_path: Path) -> None:
    trainer = tiny_trainer("sft", tmp_path, train__total_steps=10, train__batch_size=32, rollout__num_rollouts=32)
    endless = Endless()
    trainer.add_samples(endless)
    assert endless.read == WINDOW, "the first are checked at construction"
    trainer.learn()
    assert trainer.progress.step == 10
    assert trainer.progress.samples == 320
    assert endless.read == 2 * WINDOW


@pytest.mark.daily(at=(2,), packing=(True,))
@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_run_on_a_stream_resumes_as_if_it_had_never_stopped(at: int, packing: bool, tmp_path: Path) -> None:
    def run(where: str, steps: int, **changes: Any) -> Any:
        trainer = tiny_trainer(
            "sft", tmp_path / where, train__total_steps=steps, train__save_interval=1, train__seq_length=16,
            **({"method__packing": True} if packing else {}), **changes,
        )  # fmt: skip
        trainer.add_samples(Endless(21))
        trainer.learn()
        return trainer.unwrapped.state_dict()

    straight = run("straight", 5)
    run("stopped", at)
    resumed = run("stopped", 5, train__resume="auto")
    assert [name for name in straight if not torch.equal(straight[name], resumed[name])] == []


def test_a_streaming_dataset_of_pairs_or_samples_trains_with_the_usual_call(tmp_path: Path) -> None:
    from datasets import Dataset, IterableDataset

    def rows() -> Iterator[Any]:
        yield from ({"question": letter, "answer": "b"} for letter in "abcd")

    tokenizer = character_tokenizer("abcd")
    trainer = trainkit.train(
        tiny_gpt2(len(tokenizer)),
        samples=IterableDataset.from_generator(rows),
        formatting_func=lambda row: {"prompt": row["question"], "completion": row["answer"]},
        eval_samples=Dataset.from_list(list(rows())),
        tokenizer=tokenizer,
        config={
            "optimizer": {"lr": 1e-2},
            "rollout": {"num_rollouts": 8, "max_new_tokens": 2},
            "train": {"total_steps": 30, "batch_size": 4, "run_dir": str(tmp_path), "trackers": []},
        },
    )
    assert trainer.generate(list("abcd"), temperature=0).outputs == ["b"] * 4
    assert trainer.evaluate()["eval/loss/nll"] < 0.2


def test_a_streams_bad_row_is_named_when_it_is_read(tmp_path: Path) -> None:
    class Spoilt(Endless):
        def __iter__(self) -> Iterator[Any]:
            for index, row in enumerate(super().__iter__()):
                yield {"other": "x"} if index == WINDOW + 3 else row

    trainer = tiny_trainer("sft", tmp_path, train__total_steps=10, train__batch_size=64, rollout__num_rollouts=64)
    trainer.add_samples(Spoilt())
    with pytest.raises(DataError, match=rf"sample {WINDOW + 3} has the columns other"):
        trainer.learn()


@table("total_steps", [None, 5])
def test_a_stream_has_no_epochs(total_steps: int | None, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"set train.total_steps, omit train.epochs.*list\(samples\)"):
        tiny_trainer("sft", tmp_path, train__total_steps=total_steps, train__epochs=1).add_samples(Endless())


def test_an_empty_stream_is_refused_at_the_door(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="samples is an empty stream"):
        tiny_trainer("sft", tmp_path).add_samples(Endless(0))


@pytest.mark.slow
def test_pairs_may_be_a_stream_too(tmp_path: Path) -> None:
    class Pairs:
        def __iter__(self) -> Iterator[Any]:
            return ({"prompt": "ab"[i % 2], "chosen": "c", "rejected": "d"} for i in count())

    tokenizer = character_tokenizer("abcd")
    trainer = trainkit.train(
        tiny_gpt2(len(tokenizer)),
        samples=Pairs(),
        tokenizer=tokenizer,
        config={
            "optimizer": {"lr": 1e-2},
            "rollout": {"num_rollouts": 8},
            "train": {"total_steps": 12, "batch_size": 4, "run_dir": str(tmp_path), "trackers": []},
        },
    )
    assert trainer.config.method.name == "dpo"
    assert trainer.progress.samples == 48
