"""Rewards to advantages: golden numbers, what is remembered, and what two processes make of it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tables import table
from trainkit_ddpo import PerPromptStatTracker, standardise

PROMPTS = ["a", "a", "a", "b", "b"]
REWARDS = [1.0, 2.0, 4.0, 0.0, 1.0]


def test_golden_numbers_of_the_tracker() -> None:
    """Golden 10.7."""
    assert PerPromptStatTracker(16, 2).update(PROMPTS, REWARDS).tolist() == pytest.approx(
        [-1.069044, -0.267261, 1.336305, -0.999998, 0.999998], abs=1e-6
    )
    found = PerPromptStatTracker(16, 3).update(PROMPTS, REWARDS)
    assert found[3:].tolist() == pytest.approx([-1.179535, -0.442326], abs=1e-6)


@table("kind", [int, np.int64, np.float32])
def test_integer_rewards_give_the_advantages_of_floats(kind: type) -> None:
    """[−1, 0, 1, 0, 0] is what truncation makes of them."""
    given = [kind(r) for r in REWARDS]
    assert PerPromptStatTracker(16, 2).update(PROMPTS, given).tolist() == (
        PerPromptStatTracker(16, 2).update(PROMPTS, REWARDS).tolist()
    )


def test_only_the_newest_rewards_of_a_prompt_count_the_present_ones_among_them() -> None:
    tracker = PerPromptStatTracker(2, 1)
    tracker.update(["a"], [100.0])
    # the buffer holds [1, 3]: mean 2, deviation 1
    assert tracker.update(["a", "a"], [1.0, 3.0]).tolist() == pytest.approx([-1, 1], abs=1e-5)
    assert tracker.get_stats() == {"a": {"mean": 2.0, "std": 1.0, "count": 2}}


def test_prompts_are_told_apart_by_their_text_and_equal_rewards_give_no_advantage() -> None:
    tracker = PerPromptStatTracker(4, 1)
    assert tracker.update(["a ", "a", "A"], [5.0, 6.0, 7.0]).tolist() == [0.0, 0.0, 0.0]
    assert sorted(tracker.rewards) == ["A", "a", "a "]


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=20), st.integers(1, 5), st.integers(1, 5))
def test_a_tracker_that_was_saved_goes_on_as_if_it_had_not_been(values: list[float], size: int, least: int) -> None:
    names = [f"p{i % 3}" for i in range(len(values))]
    straight, other = PerPromptStatTracker(size, least), PerPromptStatTracker(size, least)
    straight.update(names, values)
    other.load_state_dict(straight.state_dict())
    assert straight.update(names, values[::-1]).tolist() == other.update(names, values[::-1]).tolist()


CALLS = st.lists(
    st.lists(st.tuples(st.sampled_from("abc"), st.floats(-100, 100)), min_size=1, max_size=8), min_size=1, max_size=4
)


@given(CALLS, st.integers(1, 5), st.integers(1, 6))
def test_advantages_are_those_of_a_plain_loop(calls: list[list[tuple[str, float]]], size: int, least: int) -> None:
    """In float64: all rewards ever given, of which the newest of a prompt count."""
    tracker, history = PerPromptStatTracker(size, least), []
    for call in calls:
        history += call
        expected = []
        for prompt, reward in call:
            own = [r for other, r in history if other == prompt][-size:]
            usable = own if len(own) >= least else [r for _, r in call]
            mean = math.fsum(usable) / len(usable)
            deviation = math.sqrt(math.fsum((r - mean) ** 2 for r in usable) / len(usable))
            expected.append((reward - mean) / (deviation + 1e-6))
        found = tracker.update([prompt for prompt, _ in call], [reward for _, reward in call])
        assert found.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_without_a_tracker_all_prompts_share_their_moments() -> None:
    """Mean 2, biased deviation √(2/3)."""
    assert standardise([1, 2, 3]).tolist() == pytest.approx([-1.224745, 0, 1.224745], abs=1e-6)
    assert standardise([5.0]).tolist() == [0.0]
