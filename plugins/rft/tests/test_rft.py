"""RFT's own mathematics: what is kept, when is sampled, what pools hold, and that it learns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import trainkit
from tables import table
from trainkit.data import Sequences
from trainkit.testing.trainers import tiny_trainer
from trainkit_rft import RFTRows, select, share

SCORES = st.lists(st.lists(st.integers(-3, 3).map(float), min_size=1, max_size=6), min_size=1, max_size=5)


def test_what_is_kept_equals_the_golden_table() -> None:
    """Golden 10.7: the .7-quantiles are 1, 1 and 0. Half of the first pool reaches its own, the others are all equal:
    the ones reach the median of all twelve, which is ½, and the zeros do not."""
    pools = [[0.0, 0, 1, 1], [1.0, 1, 1, 1], [0.0, 0, 0, 0]]
    assert [torch.tensor(pool).quantile(0.7).item() for pool in pools] == [1, 1, 0]
    assert select(pools, [0.7] * 3) == [[False, False, True, True], [True] * 4, [False] * 4]


def test_the_least_of_a_pool_is_not_kept_however_low_the_threshold() -> None:
    """At p = 0 the threshold is the minimum itself."""
    assert select([[1.0, 2, 3]], [0.0]) == [[False, True, True]]
    assert select([[1.0, 2, 3]], [1.0]) == [[False, False, True]]


def test_a_threshold_that_equals_scores_keeps_them() -> None:
    """The quantile 0.6 of the first is 0; torch 2.14 returns 1.2e-7 in float32. 0.55 of the second is 11; its rank in
    float64 is above 11."""
    assert select([[0.0, 0, 0, 1, 1, -1]], [0.6]) == [[True] * 5 + [False]]
    assert sum(select([[float(i) for i in range(21)]], [0.55])[0]) == 10


@given(SCORES, st.floats(0, 1))
def test_something_is_always_kept_and_the_best_first(scores: list[list[float]], percentile: float) -> None:
    kept = select(scores, [percentile] * len(scores))
    assert any(any(row) for row in kept)
    for row, keep in zip(scores, kept, strict=True):
        if min(row) < max(row):
            assert keep[row.index(max(row))]
            assert not keep[row.index(min(row))]


@given(SCORES, st.integers(0, 20))
def test_what_is_kept_reaches_the_quantile_that_numpy_gives(scores: list[list[float]], twentieth: int) -> None:
    p, median = twentieth / 20, np.median(np.concatenate([np.array(row) for row in scores]))
    for row, kept in zip(map(np.array, scores), select(scores, [p] * len(scores)), strict=True):
        above = (row >= np.quantile(row, p)) & (row > row.min())
        assert kept == (above if row.min() < row.max() else row >= median).tolist()


def rows(*found: tuple[list[int], list[int], float]) -> RFTRows:
    """Fresh responses."""
    sequences = Sequences.from_lists([query for query, _, _ in found], [response for _, response, _ in found])
    return RFTRows(sequences, torch.tensor([score for *_, score in found]), torch.zeros(len(found), dtype=torch.long))


def visited(trainer: Any) -> RFTRows:
    """Another visit to the prompt [1], without anything new."""
    return RFTRows(Sequences.from_lists([[1]], [[]]), torch.zeros(1), torch.zeros(1, dtype=torch.long))


def test_thresholds_rise_to_the_last_percentile_with_every_visit_and_then_begin_anew(tmp_path: Path) -> None:
    """linspace(0, 1, 3) of the scores 0 … 4 is 0, 2, 4; trlX's schedule would end at 2/3 of the way."""
    trainer = tiny_trainer("rft", tmp_path, method__start_percentile=0.0, method__end_percentile=1.0,
                           method__n_improve_steps=3)  # fmt: skip
    pool = [([1], [2, i], float(i)) for i in range(5)]
    shares = [trainer.prepare_experience(rows(*pool))]
    shares += [trainer.prepare_experience(visited(trainer)) for _ in range(3)]
    kept = [int(share.response_mask.any(1).sum()) for share in shares]
    assert kept == [4, 3, 1, 4]
    assert trainer.visits == {"[1]": 4}


def test_only_every_nth_visit_samples(tmp_path: Path) -> None:
    """Eight prompts, four to a collection: two collections that sample, two that do not, and so on."""
    trainer = tiny_trainer("rft", tmp_path, method__n_improve_steps=2, train__total_steps=100, train__epochs=4)
    fresh: list[bool] = []

    class Watch:
        @trainkit.hookimpl
        def on_experience(self, rollouts: Any) -> None:
            fresh.append(sum(map(len, rollouts)) == 16)

    trainer.hooks.register(Watch())
    trainer.learn()
    assert fresh == [True, True, False, False] * 2
    assert set(trainer.visits.values()) == {4}


def test_a_response_that_comes_again_is_held_once_with_its_latest_score_and_the_oldest_leave(tmp_path: Path) -> None:
    trainer = tiny_trainer("rft", tmp_path, method__pool_size=2)
    trainer.prepare_experience(rows(([1], [2], 0.0), ([1], [3], 1.0), ([1], [2], 2.0)))
    assert trainer.pools == {"[1]": {"[3]": 1.0, "[2]": 2.0}}
    trainer.prepare_experience(rows(([1], [4, 5], 3.0)))
    assert trainer.pools == {"[1]": {"[2]": 2.0, "[4, 5]": 3.0}}


def test_what_is_trained_are_responses_of_the_pool_and_not_their_prompts(tmp_path: Path) -> None:
    """A response that was cut at the length limit has no EOS, and none is added."""
    trainer = tiny_trainer("rft", tmp_path)
    kept = trainer.prepare_experience(rows(([1, 2], [3, 4, 8], 1.0), ([1, 2], [5], 0.0), ([6], [7], 2.0)))
    assert [(q.tolist(), r.tolist()) for q, r in zip(kept.queries, kept.responses, strict=True) if len(r)] == [
        ([1, 2], [3, 4, 8]),
        ([6], [7]),
    ]
    trainer.models.build()
    loss, found = trainer.loss(kept)
    logprobs = trainer.unwrapped(kept).logprobs[kept.response_mask]
    assert logprobs.numel() == 4
    torch.testing.assert_close(loss, -logprobs.mean())
    assert found["loss/nll"].compute() == pytest.approx(loss.item())


def test_scores_given_to_step_are_counted_once(tmp_path: Path) -> None:
    """Of 1, 2, 3, 4 the unbiased deviation is √(5/3); of each twice it would be √(10/7)."""
    trainer = tiny_trainer("rft", tmp_path)
    rollouts = trainer.generate(["a"] * 4)
    found = trainer.step(rollouts.queries, rollouts.responses, [1.0, 2.0, 3.0, 4.0])
    assert (found["reward/mean"], found["reward/std"]) == (2.5, pytest.approx((5 / 3) ** 0.5))


@table("count", [1, 3, 4, 5, 8])
def test_processes_share_what_is_kept_and_train_nothing_twice(count: int) -> None:
    kept = [("[1]", f"[{i}]") for i in range(count)]
    shares = [share(kept, rank, 4, 8) for rank in range(4)]
    assert {len(part) for part in shares} == {2}  # 8 / 4 in each, so that all make the same steps
    assert sorted(pair for part in shares for pair in part if pair[1] != "[]") == sorted(kept)


def test_rows_that_fill_up_weigh_nothing(tmp_path: Path) -> None:
    trainer = tiny_trainer("rft", tmp_path)
    batch = Sequences.from_lists([[1], [2], [1]], [[3, 4], [5], []]).to(trainer.accelerator.device)
    trainer.models.build()
    loss, _ = trainer.loss(batch)
    alone, _ = trainer.loss(Sequences.from_lists([[1], [2]], [[3, 4], [5]]).to(trainer.accelerator.device))
    assert loss.item() == pytest.approx(alone.item(), abs=1e-6)
    nothing, _ = trainer.loss(Sequences.from_lists([[1]], [[]]).to(trainer.accelerator.device))
    assert nothing.item() == 0.0


def test_micro_batches_have_the_rows_of_a_prompt_together(tmp_path: Path) -> None:
    """Shuffled rows of three prompts: each prompt runs once, and the gradient is that of separate rows."""
    torch.manual_seed(0)
    prompts = [[0, 1, 2, 3, 4], [5, 6, 7, 0, 1], [2, 4, 6, 0, 5]]
    order = torch.randperm(12).tolist()
    shuffled = Sequences.from_lists([prompts[i % 3] for i in order], [[i % 8, (i + 3) % 8] for i in order])
    gradients, tokens = [], [0, 0]
    for shares in (None, False):
        trainer = tiny_trainer(
            "rft", tmp_path / str(shares), train__batch_size=12, train__microbatch_size=4, train__share_prompts=shares
        )
        trainer.models.build()
        policy = trainer.unwrapped.double()
        policy.shares_prompts = trainer.progress.shares_prompts = shares is None
        assert policy.can_share_prompts is (shares is None)

        def count(_: Any, __: Any, kwargs: Any, shared: bool = shares is None) -> None:
            tokens[shared] += kwargs["input_ids"].numel()

        policy.model.base_model.register_forward_pre_hook(count, with_kwargs=True)
        micros = trainer.updater.micro_batches(trainer.prepare_step(shuffled))
        assert [len({tuple(query.tolist()) for query in micro.queries}) for micro in micros] == [1, 1, 1]
        for micro in micros:
            (trainer.loss(micro)[0] * len(micro) / 12).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None]))
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-12, atol=1e-12)
    assert tokens == [12 * 7, 3 * 5 + 12 * 1]  # the last token of a prompt gives the first response token
