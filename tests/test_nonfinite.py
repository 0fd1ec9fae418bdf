"""Scores that are not finite: responses are dropped and counted, or infinite scores are clipped; never trained on."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from researchers.copying import Copying
from researchers.dapo import DapoTrainer
from researchers.remax import ReMaxTrainer
from tables import table
from test_dynamic import picky
from test_laws import assert_same_weights, weights
from test_processes import succeed
from trainkit.errors import ConfigError, RewardError
from trainkit.functional import per_response
from trainkit.testing.trainers import count_first_letters, tiny_trainer

assert all((Copying, DapoTrainer, ReMaxTrainer)), "registered by their imports"

BAD = [math.nan, math.inf, -math.inf, 1e39, 10**400]
"""None of them is a number of float32."""


def spoilt(outputs: list[str], prompts: list[str], **_: Any) -> list[float]:
    """No score for responses that begin with h, and for all to one prompt."""
    return [
        BAD[len(output) % len(BAD)] if output[:1] == "h" or prompt == "a" else float(len(output) % 3)
        for prompt, output in zip(prompts, outputs, strict=True)
    ]


def trainer_at(place: Path, reward_fn: Any = spoilt, name: str = "rloo", **changes: Any) -> Any:
    settings = {"reward__on_nonfinite": "drop_row", "train__total_steps": 6, **changes}
    return tiny_trainer(name, place, arguments={"reward_fn": reward_fn}, **settings)


def is_bad(output: str, prompt: str) -> bool:
    return output[:1] == "h" or prompt == "a"


def logged(place: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]


# ---------------------------------------------------------------------------------------------------------- dropping


@pytest.mark.daily(name=("rloo",))
@pytest.mark.parametrize("name", ["ppo", "rloo", "online_dpo"])
def test_what_is_trained_on_has_finite_scores_and_groups_are_whole(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = trainer_at(tmp_path, name=name, rollout__num_rollouts=32, rollout__batch_size=8)
    k, seen, sampled = trainer.samples_per_prompt, [], []
    honest, honest_sample = trainer.experience, trainer.sample_and_score

    def experience(rollouts: Any, scores: Any) -> Any:
        assert scores.isfinite().all()
        assert len({row["__place__"].position for row in rollouts.rows}) * k == len(rollouts)
        seen.extend(zip(rollouts.outputs, rollouts.prompts, strict=True))
        return honest(rollouts, scores)

    def sample_and_score(rows: Any) -> Any:
        found = honest_sample(rows)
        sampled.extend(zip(found[0].outputs, found[0].prompts, strict=True))
        return found

    trainer.experience, trainer.sample_and_score = experience, sample_and_score
    with caplog.at_level(logging.WARNING):
        trainer.collect()
    groups = [sampled[start : start + k] for start in range(0, len(sampled), k)]
    kept = [group for group in groups if not any(is_bad(*each) for each in group)]
    assert 0 < len(kept) < len(groups)
    assert seen == [each for group in kept for each in group]
    dropped = len(sampled) - len(seen)
    assert trainer.recorder.pending["reward/dropped"].compute() == dropped
    assert trainer.progress.prompts == len(kept)
    assert sum(f"{dropped} of 32 responses are dropped" in record.getMessage() for record in caplog.records) == 1
    trainer.learn()
    assert trainer.progress.step == 6
    lines = [line for line in logged(tmp_path) if "reward/dropped" in line]
    assert lines
    assert all(math.isfinite(value) for line in lines for value in line.values())


@pytest.mark.daily(name=("rloo",))
@pytest.mark.parametrize(("name", "policy"), [("ppo", "drop_row"), ("rloo", "clip"), ("rft", "drop_row")])
def test_with_finite_scores_the_run_is_the_same(name: str, policy: str, tmp_path: Path) -> None:
    ends = []
    for on_nonfinite in ("error", policy):
        settings = {"reward__on_nonfinite": on_nonfinite, "rollout__batch_size": 8, "train__total_steps": 2}
        trainer = trainer_at(tmp_path / on_nonfinite, count_first_letters, name, **settings)
        trainer.learn()
        ends.append(weights(trainer))
    assert_same_weights(*ends)


def test_pools_get_no_score_that_is_not_finite(tmp_path: Path) -> None:
    trainer = trainer_at(tmp_path, name="rft", train__total_steps=4)
    trainer.learn()
    scores = [score for pool in trainer.pools.values() for score in pool.values()]
    assert scores
    assert all(map(math.isfinite, scores))


def test_a_run_that_only_reuses_pools_without_scores_ends_too(tmp_path: Path) -> None:
    trainer = trainer_at(tmp_path, lambda outputs, **_: [math.nan] * len(outputs), "rft", train__total_steps=50)
    with pytest.raises(RewardError, match="3 collections in a row"):
        trainer.learn()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "stop"), [("ppo", 1), ("rloo", 2)])
def test_a_run_that_drops_resumes_exactly(name: str, stop: int, tmp_path: Path) -> None:
    changes = {"name": name, "train__save_interval": 6, "train__batch_size": 4, "train__total_steps": 4}
    straight = trainer_at(tmp_path / "a", **changes)
    straight.learn()
    trainer_at(tmp_path / "b", **{**changes, "train__total_steps": stop}).learn()
    resumed = trainer_at(tmp_path / "b", **changes, train__resume="auto")
    resumed.learn()
    assert straight.progress.cursor == resumed.progress.cursor
    assert_same_weights(weights(straight), weights(resumed))


@pytest.mark.slow
def test_an_engine_that_samples_ahead_drops_the_same(tmp_path: Path) -> None:
    ends = []
    for engine in ("local", "_test_copy"):
        trainer = trainer_at(tmp_path / engine, rollout__staleness=2, rollout__engine=engine, train__total_steps=8)
        trainer.learn()
        ends.append(weights(trainer))
    assert_same_weights(*ends)


def test_an_algorithm_that_keeps_sees_finite_scores_and_the_collection_is_filled(tmp_path: Path) -> None:
    def reward(outputs: list[str], **given: Any) -> list[float]:
        return [math.nan if output[:1] == "h" else score for output, score in zip(outputs, picky(outputs), strict=True)]

    trainer = trainer_at(tmp_path, reward, "_test_dapo", rollout__max_refills=50)
    honest = trainer.keep

    def keep(rollouts: Any, scores: Any) -> Any:
        assert scores.isfinite().all()
        assert len(rollouts) % 4 == 0
        return honest(rollouts, scores)

    trainer.keep = keep
    trainer.collect()
    assert len(trainer.store) == 16
    assert trainer.recorder.pending["reward/dropped"].compute() > 0


def test_rewards_per_token_are_dropped_with_their_response(tmp_path: Path) -> None:
    def dense(outputs: list[str], **_: Any) -> list[list[float]]:
        return [[math.inf if letter == "h" else 1.0 for letter in output] for output in outputs]

    trainer = trainer_at(tmp_path, dense, "ppo")
    trainer.collect()
    texts = [text for part in trainer.collector.collection.rollouts for text in part.outputs]
    assert 0 < len(texts) < 16
    assert not any("h" in text for text in texts)


TWO = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import torch
from test_nonfinite import trainer_at

torch.set_num_threads(1)
settings = {"rollout__num_rollouts": 32, "optimizer__kwargs": {"eps": 1e-4}, "train__batch_size": 4}
ends, world = [], int(sys.argv[3])
for name in ("ppo", "rloo", "online_dpo"):
    trainer = trainer_at(Path(sys.argv[1]) / name, name=name, **settings)
    trainer.add_prompt_pipeline(["a", "bc", "def", "b", "cd"])
    trainer.collect()
    rows = sum(trainer.gather([len(trainer.store)]))
    dropped = trainer.recorder.pending["reward/dropped"]
    dropped = [sum(trainer.gather([float(part)])) for part in dropped.tensors()]
    trainer.store.clear()
    trainer.learn()
    ends.append([trainer.unwrapped.state_dict(), rows, dropped])
if trainer.accelerator.is_main_process:
    torch.save(ends, Path(sys.argv[1]) / "end.pt")
if world > 1:
    torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_two_processes_drop_what_one_drops_and_stay_in_step(tmp_path: Path) -> None:
    """The number of usable groups may be odd; then two processes train on one fewer, each on equally many."""
    ends = []
    for processes in (1, 2):
        place = tmp_path / str(processes)
        place.mkdir()
        succeed(TWO, processes, str(place), str(Path(__file__).parent), str(processes))
        ends.append(torch.load(place / "end.pt", weights_only=False))
    for (_, rows, dropped), (_, rows_of_two, dropped_of_two) in zip(*ends, strict=True):
        assert dropped == [dropped[0], 1.0]
        assert dropped_of_two == dropped
        assert dropped[0] > 0
        assert rows_of_two <= rows


# ---------------------------------------------------------------------------------------------------------- clipping


def test_infinite_scores_become_the_largest_and_smallest_of_the_collection(tmp_path: Path) -> None:
    given = iter([[5.0, math.inf, -2.0, 1.0], [1e39, 0.0, -math.inf, 4.0], [-(10**400), 7.0, 0.0, 1.0], [3.0] * 4])
    trainer = trainer_at(tmp_path, lambda **_: next(given), "ppo", reward__on_nonfinite="clip", rollout__batch_size=4)
    seen: list[float] = []
    honest = trainer.experience

    def experience(rollouts: Any, scores: Any) -> Any:
        seen.extend(scores.tolist())
        return honest(rollouts, scores)

    trainer.experience = experience
    trainer.collect()
    assert seen == [5, 7, -2, 1, 7, 0, -2, 4, -2, 7, 0, 1, 3, 3, 3, 3]
    assert trainer.recorder.pending["reward/clipped"].compute() == 4
    assert trainer.recorder.pending["reward/mean"].compute() == pytest.approx(sum([5, -2, 1, 0, 4, 7, 0, 1, 12]) / 12)


def test_infinite_rewards_per_token_are_clipped_and_padding_stays_zero(tmp_path: Path) -> None:
    def dense(outputs: list[str], **_: Any) -> list[list[float]]:
        return [[math.inf if letter == "h" else 2.0 + (letter == "a") for letter in output] for output in outputs]

    trainer = trainer_at(tmp_path, dense, "ppo", reward__on_nonfinite="clip")
    honest = trainer.experience

    def experience(rollouts: Any, scores: Any) -> Any:
        letters = torch.tensor([float(sum(3 if c in "ah" else 2 for c in output)) for output in rollouts.outputs])
        assert torch.equal(per_response(scores), letters)
        return honest(rollouts, scores)

    trainer.experience = experience
    trainer.learn()


def test_an_algorithm_that_keeps_gets_clipped_scores(tmp_path: Path) -> None:
    def reward(outputs: list[str], **_: Any) -> list[float]:
        return [math.inf if score else 0.0 if index else 1.0 for index, score in enumerate(picky(outputs))]

    trainer = trainer_at(tmp_path, reward, "_test_dapo", reward__on_nonfinite="clip")
    honest = trainer.keep

    def keep(rollouts: Any, scores: Any) -> Any:
        assert {*scores.tolist()} <= {0.0, 1.0}
        return honest(rollouts, scores)

    trainer.keep = keep
    trainer.collect()
    assert len(trainer.store) == 16


@table(
    "value, said",
    [
        (math.nan, r"after step 0: .* returned nan \(float\) for sample 0 \(of prompt \d\); numbers must be finite"),
        (math.inf, "no score of the collection after step 0 is finite"),
    ],
)
def test_clipping_needs_numbers(value: float, said: str, tmp_path: Path) -> None:
    trainer = trainer_at(tmp_path, lambda outputs, **_: [value] * len(outputs), "ppo", reward__on_nonfinite="clip")
    with pytest.raises(RewardError, match=said):
        trainer.learn()


# ------------------------------------------------------------------------------------------------------ no use at all


def some_collections(bad: set[int], calls: list[int]) -> Any:
    """Scores that are NaN in some collections, each of one call."""

    def reward(outputs: list[str], **given: Any) -> list[float]:
        calls.append(len(calls))
        return [math.nan] * len(outputs) if calls[-1] in bad else count_first_letters(outputs)

    return reward


@pytest.mark.daily(staleness=(0,))
@pytest.mark.parametrize("staleness", [0, 1])
def test_three_collections_in_a_row_without_a_usable_score_end_the_run(staleness: int, tmp_path: Path) -> None:
    """C6: two in a row do not, and one that is usable begins anew."""
    calls: list[int] = []
    trainer = trainer_at(
        tmp_path,
        some_collections({1, 2, 4, 5, 7, 8, 9}, calls),
        train__total_steps=20,
        rollout__batch_size=16,
        rollout__staleness=staleness,
    )
    said = r"after step \d+: .*reward \(.*\): 3 collections in a row have no response with a usable score; of the last"
    with pytest.raises(RewardError, match=said):
        trainer.learn()
    assert trainer.progress.collection == 9
    assert trainer.progress.step == 3 * 2


def test_a_run_whose_last_collections_are_of_no_use_ends_as_any_other(tmp_path: Path) -> None:
    """Eight prompts, four in a collection: the second of two is dropped."""
    calls: list[int] = []
    trainer = trainer_at(
        tmp_path,
        some_collections({1}, calls),
        train__total_steps=None,
        train__epochs=1,
        train__save_interval=100,
        rollout__batch_size=16,
    )
    trainer.learn()
    assert trainer.progress.collection == 2
    assert (tmp_path / "model" / "model.safetensors").exists()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [f"step_{trainer.progress.step:08d}"]


# --------------------------------------------------------------------------------------------------------- evaluations


def test_evaluations_leave_out_or_clip_what_training_would(tmp_path: Path) -> None:
    scores = {"a": math.nan, "bc": 1.0, "def": 3.0, "b": math.inf}

    def reward(prompts: list[str], outputs: list[str], **_: Any) -> list[float]:
        return [scores[prompt] for prompt in prompts]

    trainer = trainer_at(tmp_path / "drop", reward)
    trainer.add_eval_pipeline(list(scores))
    assert trainer.evaluate()["eval/reward"] == 2.0
    means, records = trainer.evaluation()
    assert [record["reward"] for record in records] == [None, 1.0, 3.0, None]
    assert math.isfinite(means["eval/length"])
    trainer.add_eval_pipeline(["a"])
    assert "eval/reward" not in trainer.evaluate()
    trainer = trainer_at(tmp_path / "clip", reward, reward__on_nonfinite="clip")
    trainer.add_eval_pipeline(["bc", "def", "b"])
    assert trainer.evaluate()["eval/reward"] == pytest.approx(7 / 3)
    trainer.add_eval_pipeline(["b"])
    with pytest.raises(RewardError, match="no score of the evaluation after step 0 is finite"):
        trainer.evaluate()


def test_an_experience_of_ones_own_making_is_not_checked_and_so_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"reward.on_nonfinite is 'clip', and '_test_remax' makes its experience while"
    ):
        tiny_trainer("_test_remax", tmp_path, reward__on_nonfinite="clip")
