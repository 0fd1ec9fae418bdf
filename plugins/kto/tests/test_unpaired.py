"""Labelled samples without pairs: what mismatched samples are made of, and labels that cannot be trained on."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tables import table
from trainkit.errors import DataError
from trainkit_kto.unpaired import check_labels, mismatched


def rows(*samples: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"turns": list(sample), "outputs": [False, True]} for sample in samples]


def turns(*samples: tuple[str, str]) -> list[tuple[str, ...]]:
    return [tuple(row["turns"]) for row in mismatched(rows(*samples))]


def test_each_prompt_gets_the_output_before_it() -> None:
    """As in TRL: the outputs are shifted by one."""
    assert turns(("a", "1"), ("b", "2"), ("c", "3")) == [("a", "3"), ("b", "1"), ("c", "2")]


def test_no_output_keeps_its_prompt_if_prompts_recur() -> None:
    """Pairs that were divided into two samples, next to each other or not: a desirable gets a desirable output."""
    assert turns(("a", "+"), ("a", "-"), ("b", "p"), ("b", "m")) == [("a", "p"), ("a", "m"), ("b", "+"), ("b", "-")]
    assert turns(("a", "1"), ("b", "2"), ("a", "3"), ("c", "4")) == [("a", "2"), ("b", "1"), ("a", "4"), ("c", "3")]


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=12))
def test_every_output_is_used_once_and_keeps_its_prompt_only_where_it_must(prompts: list[str]) -> None:
    found = turns(*[(prompt, prompt + str(index)) for index, prompt in enumerate(prompts)])
    assert [prompt for prompt, _ in found] == prompts
    assert sorted(output for _, output in found) == sorted(p + str(i) for i, p in enumerate(prompts))
    kept = sum(output[0] == prompt for prompt, output in found)
    assert kept == max(0, 2 * max(map(prompts.count, prompts)) - len(prompts))
    if len(prompts) > 1:
        assert all(output != p + str(i) for i, (p, (_, output)) in enumerate(zip(prompts, found, strict=True)))


def test_conversations_and_texts_are_divided_before_their_first_output() -> None:
    talk = {"turns": ["ask", "one", "more", "two"], "outputs": [False, True, False, True]}
    text = {"turns": ["text"], "outputs": [True], "label": True}
    assert mismatched([talk, text]) == [
        {"turns": ["ask", "text"], "outputs": [False, True]},
        {"turns": ["one", "more", "two"], "outputs": [True, False, True]},
    ]


def labels(good: int, bad: int) -> list[dict[str, Any]]:
    return [{"label": True}] * good + [{"label": False}] * bad


@table("label", [True, False])
def test_labels_of_one_kind_are_an_error(label: bool) -> None:
    with pytest.raises(DataError, match=f"all 3 samples are labelled {label}.*Add samples with the other label"):
        check_labels([{"label": label}] * 3, {"good": 1.0, "bad": 1.0}, ratio=(1, 2))


@table(
    "counts, advice",
    [
        ((4, 8), None),
        # good = 9 / 3 to 2 · 9 / 3
        ((3, 9), "3 samples are desirable and 9 undesirable; recommended is method.good between 3 and 6"),
        # bad from 9 / 3 / 2 to 9 / 3
        ((9, 3), "9 samples are desirable and 3 undesirable; recommended is method.bad between 1.5 and 3"),
    ],
)
def test_advice_on_weights_is_logged_if_one_kind_weighs_more_than_twice_the_other(
    counts: tuple[int, int], advice: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "trainkit.data"):
        check_labels(labels(*counts), {"good": 1.0, "bad": 1.0}, ratio=(1, 2))
    said = [record.getMessage() for record in caplog.records]
    assert said == ([] if advice is None else [f"{advice} for these numbers; given 1"])
