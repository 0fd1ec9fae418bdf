"""What reward functions return besides scores is logged, and is in the samples of evaluations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tables import table
from test_rewards import rollouts
from trainkit.errors import RewardError
from trainkit.rollouts import score
from trainkit.testing.trainers import tiny_trainer


def by_sample(outputs: list[str], **_: Any) -> list[dict[str, Any]]:
    return [{"score": float(o.count("a")), "letters": o.count("a"), "why": f"{o.count('a')} a"} for o in outputs]


def columns(outputs: list[str], **_: Any) -> dict[str, Any]:
    found = by_sample(outputs)
    return {
        "score": torch.tensor([each["score"] for each in found]),
        "letters": np.array([each["letters"] for each in found]),
        "why": [each["why"] for each in found],
    }


def plain_scores(outputs: list[str], **_: Any) -> list[float]:
    return [float(output.count("a")) for output in outputs]


def run(place: Path, reward_fn: Any, **changes: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]], Any]:
    settings = {"train__total_steps": 2, "train__eval_interval": 2, **changes}
    trainer = tiny_trainer("rloo", place, arguments={"reward_fn": reward_fn}, **settings)
    trainer.learn()
    read = [(place / name).read_text(encoding="utf-8").splitlines() for name in ("metrics.jsonl", "samples.jsonl")]
    metrics, samples = ([json.loads(line) for line in lines] for lines in read)
    return metrics, samples, trainer


def test_numbers_are_logged_and_all_of_it_is_in_the_samples(tmp_path: Path) -> None:
    _, _, usual = run(tmp_path / "plain", plain_scores)
    for reward_fn in (by_sample, columns):
        metrics, samples, trainer = run(tmp_path / reward_fn.__name__, reward_fn)
        collected = next(line for line in metrics if "reward/mean" in line)
        assert collected["reward_fn/letters"] == pytest.approx(collected["reward/mean"])
        assert "reward_fn/why" not in collected
        evaluated = next(line for line in metrics if "eval/reward" in line)
        assert evaluated["eval/letters"] == pytest.approx(evaluated["eval/reward"])
        samples = [row for row in samples if row["kind"] == "evaluation"]
        assert samples
        assert all(row["why"] == f"{row['letters']} a" and row["letters"] == row["reward"] for row in samples)
        for name, tensor in usual.unwrapped.state_dict().items():
            assert torch.equal(tensor, trainer.unwrapped.state_dict()[name]), name


def mixed(outputs: list[str], **_: Any) -> list[dict[str, Any]]:
    """Of four samples: two numbers, nothing, and a number that is not finite; and numbers among words."""
    values = [1.0, None, float("nan"), 3.0]
    return [{"score": 0.0, "known": values[i % 4], "odd": [1, "one"][i % 2]} for i in range(len(outputs))]


def test_what_is_missing_or_not_finite_counts_in_no_mean(tmp_path: Path) -> None:
    metrics, _, _ = run(tmp_path, mixed)
    collected, evaluated = (next(line for line in metrics if name in line) for name in ("reward/mean", "eval/reward"))
    assert (collected["reward_fn/known"], evaluated["eval/known"]) == (2.0, 2.0)
    assert not {"reward_fn/odd", "eval/odd"} & {*collected, *evaluated}


def test_a_metric_may_not_take_the_name_of_what_the_reward_function_returned(tmp_path: Path) -> None:
    trainer = tiny_trainer("rloo", tmp_path, arguments={"reward_fn": by_sample})
    trainer.metric_fn = lambda **_: {"letters": 1.0}
    with pytest.raises(RewardError, match="'letters', a name that evaluations use themselves"):
        trainer.evaluate()


@table(
    "found, said",
    [
        (lambda outputs: [{"score": 1.0}] * 2 + [{}], "give the same names for all"),
        (lambda outputs: [{"value": 1.0} for _ in outputs], "without 'score', the name of the scores"),
        (lambda outputs: {"value": [1.0] * len(outputs)}, "without 'score', the name of the scores"),
        (lambda outputs: {"score": [1.0] * len(outputs), "extra": [1]}, "as 'extra'; give a list of 3, one per sample"),
        (lambda outputs: {"score": [1.0] * len(outputs), "extra": 3.0}, "as 'extra'; give a list of 3, one per sample"),
        (
            lambda outputs: {"score": [1.0] * len(outputs), "output": outputs},
            "a name that trainkit uses itself",
        ),
        (
            lambda outputs: [{"score": 1.0}] * 2 + [{"score": 1.0, "x": 1}],
            "give the same names for all",
        ),
        (lambda outputs: {"score": [1.0], "x": [1.0] * len(outputs)}, "returned 1 scores for 3 samples"),
    ],
)
def test_what_is_not_one_value_per_sample_is_refused(found: Any, said: str) -> None:
    with pytest.raises(RewardError, match=said):
        score(lambda outputs, **_: found(outputs), rollouts(), None, extras={})
