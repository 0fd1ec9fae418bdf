"""Reward functions of images: what they are given and may return, at once or later."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tenacity
import torch
from torch import Tensor

from tables import table
from trainkit import RewardFunctionConfig
from trainkit.errors import ConfigError, RewardError
from trainkit.testing.trainers import tiny_trainer
from trainkit_ddpo import ImageRollouts
from trainkit_ddpo.scoring import RewardCaller

POOL = ThreadPoolExecutor(2)


def rollouts(values: list[float], **columns: Any) -> ImageRollouts:
    """Images of one grey each."""
    images = torch.tensor(values).view(-1, 1, 1, 1).expand(-1, 3, 2, 2).clone()
    return ImageRollouts([{"prompt": f"p{i}", **columns} for i in range(len(values))], images)


def brightness(images: Tensor, **_: Any) -> list[float]:
    return images.flatten(1).mean(1).tolist()


async def soon(images: Tensor, **_: Any) -> list[float]:
    await asyncio.sleep(0.01)
    return brightness(images)


def promised(images: Tensor, **_: Any) -> Future[list[float]]:
    return POOL.submit(brightness, images)


def promised_each(images: Tensor, **_: Any) -> list[Future[float]]:
    return [POOL.submit(lambda image: float(image.mean()), image) for image in images]


@table("workers", [0, 2])
@table(
    "reward_fn",
    [
        brightness,
        lambda images, **_: tuple(brightness(images)),
        lambda images, **_: images.flatten(1).mean(1),
        lambda images, **_: np.array(brightness(images)),
        soon,
        promised,
        promised_each,
    ],
)
def test_numbers_and_promises_of_numbers_are_scores_in_order(reward_fn: Callable[..., Any], workers: int) -> None:
    """Batches that were submitted one after the other are settled so, whoever is ready first."""
    caller = RewardCaller(reward_fn, workers)
    settle = [caller.submit(rollouts([0.25, 0.5])), caller.submit(rollouts([1.0]))]
    assert [each().tolist() for each in settle] == [[0.25, 0.5], [1.0]]
    assert settle[0]().dtype == torch.float32


def test_a_reward_function_gets_images_prompts_and_columns_and_cannot_change_them() -> None:
    seen: dict[str, Any] = {}

    def reward(**given: Any) -> list[float]:
        seen.update(given)
        given["images"].zero_()
        given["tags"][0].append("mine")
        return [0.0, 0.0]

    part = rollouts([0.5, 1.0], tags=["x"])
    RewardCaller(reward).submit(part)()
    assert sorted(seen) == ["images", "prompts", "tags"]
    assert seen["prompts"] == ["p0", "p1"]
    assert part.images[:, 0, 0, 0].tolist() == [0.5, 1.0]
    assert part.rows[0]["tags"] == ["x"]


def raises(**_: Any) -> None:
    raise TimeoutError("the judge is away")


async def raises_later(**_: Any) -> None:
    raise TimeoutError("the judge is away")


@table("workers", [0, 1])
@table(
    "reward_fn, said",
    [
        (raises, "raises .* raised TimeoutError: the judge is away"),
        (raises_later, "raises_later .* raised TimeoutError: the judge is away"),
        (lambda images, **_: POOL.submit(raises), "raised TimeoutError: the judge is away"),
        (lambda images, **_: [1.0], "returned 1 scores for 2 samples; return one finite number per image"),
        (lambda images, **_: torch.zeros(2, 1), r"2-D array of shape \(2, 1\).*squeeze"),
        (lambda images, **_: [0.0, float("nan")], "for sample 1; numbers must be finite"),
        (lambda images, **_: [0.0, "good"], "'good'.*for sample 1"),
        (lambda images, **_: 1.0, r"returned 1\.0"),
        (lambda images, **_: (torch.zeros(2), {}), "for sample 0"),
    ],
)
def test_what_a_reward_function_must_not_do_is_an_explained_error(
    reward_fn: Callable[..., Any], said: str, workers: int
) -> None:
    with pytest.raises(RewardError, match=said):
        RewardCaller(reward_fn, workers).submit(rollouts([0.0, 1.0]))()


def test_a_column_with_a_name_that_is_taken_is_refused() -> None:
    with pytest.raises(RewardError, match="a column 'images'"):
        RewardCaller(brightness).submit(rollouts([0.0], images=1))


@pytest.mark.parametrize("workers", [0, 1])
def test_scoring_overlaps_with_making_the_next_images(workers: int, tmp_path: Path) -> None:
    """Every batch but the last is scored by somebody who waits until the next one has begun to be made."""
    trainer = tiny_trainer("ddpo", tmp_path, method__reward_workers=workers, rollout__batch_size=2)
    begun = [threading.Event() for _ in range(4)]
    made, overlapped, honest = 0, [], trainer.draw

    def draw(*given: Any) -> Any:
        nonlocal made
        begun[made].set()
        made += 1
        return honest(*given)

    def slow(images: Tensor, prompts: list[str], **_: Any) -> list[float]:
        batch = len(overlapped)
        overlapped.append(batch == 3 or begun[batch + 1].wait(timeout=20))
        return brightness(images)

    trainer.draw = draw
    one = ThreadPoolExecutor(1)
    trainer.reward_fn = slow if workers else lambda **given: one.submit(slow, **given)
    trainer.collect()
    assert overlapped == [True] * 4
    assert [r.scores.tolist() for r in trainer.collector.collection.rollouts] == [
        pytest.approx(brightness(r.images), abs=1e-6) for r in trainer.collector.collection.rollouts
    ]


def test_promised_rewards_train_as_rewards_at_once(tmp_path: Path) -> None:
    def late(images: Tensor, **_: Any) -> list[float]:
        time.sleep(0.01 * float(images[0, 0, 0, 0]))
        return brightness(images)

    weights = []
    for index, (reward_fn, workers) in enumerate([(brightness, 0), (late, 2), (soon, 0)]):
        trainer = tiny_trainer("ddpo", tmp_path / str(index), method__reward_workers=workers, train__total_steps=2)
        trainer.reward_fn = reward_fn
        trainer.learn()
        weights.append(torch.cat([p.flatten() for p in trainer.unwrapped.parameters()]))
    assert torch.equal(weights[0], weights[1])
    assert torch.equal(weights[0], weights[2])


@table("workers", [0, 1])
def test_rewards_are_computed_in_full_precision_whoever_calls(workers: int, tmp_path: Path) -> None:
    """The trainer's autocast is not the reward function's: a product of float32 stays one, in place as in threads."""
    seen = []

    def product(images: Tensor, **_: Any) -> list[float]:
        seen.append((images.flatten(1) @ torch.ones(images[0].numel(), 1)).dtype)
        return brightness(images)

    trainer = tiny_trainer("ddpo", tmp_path, method__reward_workers=workers, train__mixed_precision="bf16")
    trainer.reward_fn = product
    trainer.collect()
    assert set(seen) == {torch.float32}


def test_an_error_in_a_thread_ends_the_run_before_a_step(tmp_path: Path) -> None:
    trainer = tiny_trainer("ddpo", tmp_path, method__reward_workers=2)
    trainer.reward_fn = raises
    with pytest.raises(RewardError, match="the judge is away"):
        trainer.learn()
    assert trainer.progress.step == 0


# ------------------------------------------------------------------------------------------- limits and repetitions


def stuck(**_: Any) -> Any:
    return threading.Event().wait()


async def stuck_later(**_: Any) -> Any:
    await asyncio.sleep(1000)


@table("workers", [0, 1])
@table("reward_fn", [stuck, stuck_later, lambda images, **_: Future(), lambda images, **_: [Future() for _ in images]])
def test_a_call_or_a_promise_that_takes_too_long_is_an_error(reward_fn: Callable[..., Any], workers: int) -> None:
    caller = RewardCaller(reward_fn, workers, RewardFunctionConfig(timeout=0.05))
    with pytest.raises(RewardError, match=r"^after step 3: .* took longer than reward.timeout, 0.05 s \(called"):
        caller.submit(rollouts([0.0, 1.0]), 3)()


@table("workers", [0, 1])
@table("kind", [brightness, soon, promised, promised_each])
def test_calls_and_promises_that_failed_are_repeated(
    kind: Callable[..., Any], workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(tenacity.nap, "time", SimpleNamespace(sleep=waits.append))
    calls = 0

    def fails_once(images: Tensor) -> list[float]:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise ConnectionError("the judge is away")
        return brightness(images)

    def fails_once_each(image: Tensor) -> float:
        return fails_once(image)[0]

    async def later(images: Tensor, **_: Any) -> list[float]:
        return fails_once(images)

    kinds: dict[Any, Callable[..., Any]] = {
        brightness: lambda images, **_: fails_once(images),
        soon: later,
        promised: lambda images, **_: POOL.submit(fails_once, images),
        promised_each: lambda images, **_: [POOL.submit(fails_once_each, image) for image in images.split(1)],
    }
    for config in (RewardFunctionConfig(retries=1), RewardFunctionConfig(retries=1, timeout=None)):
        calls = 0
        caller = RewardCaller(kinds[kind], workers, config)
        assert caller.submit(rollouts([0.25, 0.5]))().tolist() == [0.25, 0.5]
    assert len(waits) == 2


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_the_reward_function_leaves_a_checkpoint_of_the_last_step(workers: int, tmp_path: Path) -> None:
    settings = {"train__save_interval": 100, "train__total_steps": 4, "method__reward_workers": workers}
    straight = tiny_trainer("ddpo", tmp_path / "straight", **settings)
    straight.reward_fn = brightness
    straight.learn()
    stopped = tiny_trainer("ddpo", tmp_path / "stopped", **settings)

    def fails(images: Tensor, **_: Any) -> list[float]:
        if stopped.progress.collection == 1:
            raise ValueError("not today")
        return brightness(images)

    stopped.reward_fn = fails
    with pytest.raises(RewardError, match=r"after step \d: .*fails .* raised ValueError: not today"):
        stopped.learn()
    (saved,) = (tmp_path / "stopped" / "checkpoints").iterdir()
    assert saved.name == f"step_{stopped.progress.step:08d}"
    again = tiny_trainer("ddpo", tmp_path / "stopped", train__resume="auto", **settings)
    again.reward_fn = brightness
    again.learn()
    for one, other in zip(straight.unwrapped.parameters(), again.unwrapped.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_run_logs_the_time_of_its_calls_and_refuses_other_scores_than_finite_ones(tmp_path: Path) -> None:
    tiny_trainer("ddpo", tmp_path, train__total_steps=2).learn()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["time/reward"] > 0 for line in lines if "reward/mean" in line] == [True] * sum(
        "reward/mean" in line for line in lines
    )
    with pytest.raises(ConfigError, match=r"reward.on_nonfinite is set, but does not apply to images"):
        tiny_trainer("ddpo", tmp_path / "x", reward__on_nonfinite="drop_row")
    tiny_trainer("ddpo", tmp_path / "y", reward__timeout=5.0, reward__retries=2, reward__retry_on=["OSError"])
