"""Calls of the reward function: the same bits in a thread, limited in time, repeated after errors that are named."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from contextvars import ContextVar
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tenacity
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from researchers.copying import Copying
from tables import table
from test_laws import assert_same_weights, weights
from test_rewards import judge_that_returns, rollouts
from trainkit.config import RewardFunctionConfig
from trainkit.errors import ConfigError, RewardError
from trainkit.models import RewardModel
from trainkit.rollouts import Turn, metrics, score
from trainkit.rollouts.rewards import is_named
from trainkit.testing import tiny_gpt2
from trainkit.testing.trainers import Letters, count_first_letters, tiny_trainer

assert Copying, "registered by its import"

LIMITED = RewardFunctionConfig()
"""The default: calls are made in a thread."""


def trained(place: Path, reward_fn: Any, name: str = "ppo", **changes: Any) -> Any:
    settings = {"train__total_steps": 4, **changes}
    trainer = tiny_trainer(name, place, arguments={"reward_fn": reward_fn}, **settings)
    trainer.learn()
    return trainer


# ---------------------------------------------------------------------------------------------------- in a thread


def drawing(outputs: list[str], **_: Any) -> list[float]:
    """A reward that draws from all global generators."""
    noise = random.random() + np.random.rand() + float(torch.rand(()))
    return [len(output) + noise for output in outputs]


def judge(tokenizer: Any) -> RewardModel:
    torch.manual_seed(3)
    scores = AutoConfig.for_model(**tiny_gpt2(10), num_labels=1)
    return RewardModel.from_pretrained(AutoModelForSequenceClassification.from_config(scores), tokenizer)


@pytest.mark.daily(kind=("generators",))
@pytest.mark.parametrize(("kind", "staleness"), [("generators", 1), ("a model", 0)])
def test_a_run_ends_with_the_same_bits_whether_calls_are_limited_or_not(
    kind: str, staleness: int, tmp_path: Path
) -> None:
    ends = []
    for timeout in (None, 600.0):
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        trainer = tiny_trainer(
            "rloo",
            tmp_path / str(timeout),
            train__total_steps=4,
            arguments={"reward_fn": drawing},
            reward__timeout=timeout,
            rollout__staleness=staleness,
            train__mixed_precision="bf16",
        )
        trainer.reward_fn = drawing if kind == "generators" else judge(trainer.tokenizer)
        trainer.learn()
        ends.append(weights(trainer))
    assert_same_weights(*ends)


def test_what_belongs_to_a_thread_is_that_of_the_thread_that_calls() -> None:
    name: ContextVar[str] = ContextVar("name", default="none")
    name.set("of the caller")

    def state() -> tuple[Any, ...]:
        return name.get(), torch.is_grad_enabled(), torch.get_default_device(), torch.get_num_threads()

    def judge(**_: Any) -> list[float]:
        seen.append((state(), torch.is_autocast_enabled("cpu"), threading.current_thread()))
        return [0.0] * 3

    async def later(**given: Any) -> list[float]:
        await asyncio.sleep(0)
        return judge(**given)

    for function in (judge, later):
        seen: list[Any] = []
        with torch.no_grad(), torch.device("meta"), torch.autocast("cpu", torch.bfloat16):
            score(function, rollouts(), None, LIMITED)
            here = state()
        ((there, autocast, thread),) = seen
        assert there == here
        assert not autocast
        assert thread is not threading.current_thread()


def test_coroutines_are_scored_as_functions_and_keep_their_event_loop() -> None:
    loops = []

    async def judge(outputs: list[str], **_: Any) -> list[float]:
        loops.append(asyncio.get_running_loop())
        return await asyncio.to_thread(lambda: [float(len(output)) for output in outputs])

    for config in (LIMITED, LIMITED, RewardFunctionConfig(timeout=None)):
        assert score(judge, rollouts(), None, config).tolist() == [3.0, 1.0, 4.0]
    assert loops[0] is loops[1] is loops[2]


def test_a_function_may_ask_for_the_event_loop_of_its_thread() -> None:
    async def answer() -> list[float]:
        return [1.0, 2.0, 3.0]

    def judge(**_: Any) -> list[float]:
        return asyncio.get_event_loop().run_until_complete(answer())

    assert score(judge, rollouts(), None, LIMITED).tolist() == [1.0, 2.0, 3.0]


def test_a_function_that_needs_the_main_thread_is_told_how_it_gets_it() -> None:
    import signal

    def judge(**_: Any) -> list[float]:
        signal.signal(signal.SIGALRM, signal.getsignal(signal.SIGALRM))
        return [0.0] * 3

    with pytest.raises(RewardError, match=r"signal only works in main thread.* set it to null"):
        score(judge, rollouts(), None, LIMITED)
    assert score(judge, rollouts(), None).tolist() == [0.0] * 3


def test_calls_at_the_same_time_do_not_wait_for_each_other() -> None:
    """The evaluation in the main thread, and a collection that is sampled beside the training."""
    both = threading.Barrier(2, timeout=20)

    def judge(**_: Any) -> list[float]:
        both.wait()
        return [0.0] * 3

    other = threading.Thread(target=score, args=(judge, rollouts(), None, LIMITED))
    other.start()
    assert score(judge, rollouts(), None, LIMITED).tolist() == [0.0] * 3
    other.join()


# ---------------------------------------------------------------------------------------------------- time limits


def test_a_call_that_takes_too_long_is_an_error_that_names_function_prompts_step_and_setting(tmp_path: Path) -> None:
    """C3."""
    go_on = threading.Event()
    calls = []

    def hangs(outputs: list[str], **_: Any) -> list[float]:
        calls.append(len(outputs))
        if len(calls) == 3:
            go_on.wait(20)
        return [1.0] * len(outputs)

    said = (
        r"^after step 2: .*hangs \(.*\) took longer than reward.timeout, 0.5 s \(called with 8 samples of the prompts "
        r"\d+, \d+, .*…\); it is not waited for, and not called again"
    )
    with pytest.raises(RewardError, match=said):
        trained(
            tmp_path, hangs, reward__timeout=0.5, reward__retries=3, rollout__batch_size=8, rollout__num_rollouts=16,
            train__batch_size=8, method__ppo_epochs=1,
        )  # fmt: skip
    go_on.set()
    assert calls == [8] * 3


def test_a_coroutine_that_takes_too_long_is_cancelled() -> None:
    cancelled = threading.Event()

    async def hangs(**_: Any) -> list[float]:
        try:
            await asyncio.sleep(20)
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return [0.0] * 3

    with pytest.raises(RewardError, match=r"hangs .* took longer than reward.timeout, 0.2 s"):
        score(hangs, rollouts(), None, RewardFunctionConfig(timeout=0.2))
    assert cancelled.wait(20)
    assert score(judge_that_returns([1, 2, 3]), rollouts(), None, LIMITED).tolist() == [1, 2, 3]


def test_prompts_are_not_numbered_in_errors_if_some_were_dropped(tmp_path: Path) -> None:
    changes = {"rollout__overlong_prompts": "drop", "train__seq_length": 8, "rollout__max_new_tokens": 4}
    trainer = tiny_trainer("ppo", tmp_path, arguments={"reward_fn": judge_that_returns(None)}, **changes)
    trainer.add_prompt_pipeline(["abcdefgh", "a", "b"])
    trainer.reward_fn = lambda outputs, **_: [0.0] * (len(outputs) - 1) + ["x"]
    with pytest.raises(RewardError, match=r"returned 'x' \(str\) for sample \d+;"):
        trainer.learn()


# ---------------------------------------------------------------------------------------------------- repetitions


class AwayError(ConnectionError):
    """One that no module knows but this."""


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The waits between calls, which take no time."""
    found: list[float] = []
    monkeypatch.setattr(tenacity.nap, "time", SimpleNamespace(sleep=found.append))
    return found


def flaky(honest: Any, every: int = 3) -> Any:
    """``honest``, of which one call of ``every`` fails after it has drawn, and has spoiled what it was given."""
    calls = 0

    def reward(**given: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls % every == 0:
            given["outputs"].clear()
            drawing(["x"])
            raise AwayError("the judge is away")
        return honest(**given)

    return reward


def test_a_run_with_failures_that_pass_equals_one_without(waits: list[float], tmp_path: Path) -> None:
    """C2."""
    ends = []
    for reward_fn in (drawing, flaky(drawing)):
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        trainer = trained(tmp_path / str(len(ends)), reward_fn, reward__retries=1, rollout__batch_size=2)
        ends.append(weights(trainer))
    assert_same_weights(*ends)
    assert len(waits) >= 2


def test_the_waits_grow_to_a_minute_and_have_jitter(waits: list[float]) -> None:
    def away(**_: Any) -> Any:
        calls.append(1)
        raise AwayError("the judge is away")

    calls: list[int] = []
    with pytest.raises(RewardError, match=r"away .* raised AwayError: the judge is away") as caught:
        score(away, rollouts(), None, RewardFunctionConfig(retries=8))
    assert isinstance(caught.value.__cause__, AwayError)
    assert len(calls) == 9
    assert all(2**n <= wait <= min(2**n + 1, 60) for n, wait in enumerate(waits[:6]))
    assert waits[6:] == [60.0, 60.0]
    assert any(wait != int(wait) for wait in waits[:6])


def test_a_coroutine_is_repeated_as_a_function(waits: list[float]) -> None:
    calls = 0

    async def judge(outputs: list[str], **_: Any) -> list[float]:
        nonlocal calls
        calls += 1
        if calls == 1:
            outputs.clear()
            raise TimeoutError("the judge is away")
        return [float(len(output)) for output in outputs]

    assert score(judge, rollouts(), None, RewardFunctionConfig(retries=1)).tolist() == [3.0, 1.0, 4.0]
    assert len(waits) == 1


def test_other_errors_and_wrong_answers_are_not_repeated(waits: list[float]) -> None:
    def wrong(**_: Any) -> Any:
        raise KeyError("no such thing")

    def stopped(**_: Any) -> Any:
        raise KeyboardInterrupt

    config = RewardFunctionConfig(retries=3)
    for judge, error in (
        (wrong, RewardError), (judge_that_returns(None), RewardError), (stopped, KeyboardInterrupt)
    ):  # fmt: skip
        with pytest.raises(error):
            score(judge, rollouts(), None, config)
    assert not waits


def test_exceptions_are_named_by_their_class_or_a_base_with_or_without_module() -> None:
    for names in (
        ["AwayError"],
        ["ConnectionError"],
        ["builtins.OSError"],
        [f"{__name__}.AwayError"],
        ["x", "Exception"],
    ):
        assert is_named(AwayError(), names)
    for names in ([], ["Away"], ["TimeoutError"], ["requests.exceptions.ConnectionError"], ["NoneType"]):
        assert not is_named(AwayError(), names)
        assert not is_named(None, names)


# ------------------------------------------------------------------------------------------------------- settings


@table(
    "changes, said",
    [
        ({"reward__retry_on": ["KeyError"]}, "retry_on has an effect only if retries is at least 1"),
        ({"reward__retries": 1, "reward__retry_on": []}, "retries has an effect only if retry_on names an exception"),
        ({"reward__retries": 1, "reward__retry_on": ["Key Error"]}, r"reward\.retry_on"),
        ({"reward__timeout": 0.0}, r"reward\.timeout"),
        ({"reward__on_nonfinite": "mask"}, r"reward\.on_nonfinite"),
    ],
)
def test_settings_without_an_effect_are_refused(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        tiny_trainer("ppo", tmp_path, **changes)


def test_settings_of_reward_functions_need_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"reward.timeout is set, and 'sft' learns from samples, without a reward"):
        tiny_trainer("sft", tmp_path, reward__timeout=5.0)
    given = {"reward__timeout": None, "reward__on_nonfinite": "clip"}
    with pytest.raises(
        ConfigError, match=r"reward.timeout and reward.on_nonfinite are set, and there is no reward function; give one"
    ):
        tiny_trainer("ppo", tmp_path, arguments={"environment": Letters, "reward_fn": None}, **given)


def test_the_time_of_all_calls_for_a_collection_is_logged(tmp_path: Path) -> None:
    def slow(outputs: list[str], **given: Any) -> list[float]:
        time.sleep(0.02)
        return count_first_letters(outputs, **given)

    class Slow(Letters):
        def step(self, output: str) -> Turn:
            time.sleep(0.01)
            return super().step(output)

    trained(tmp_path / "function", slow, train__total_steps=1)  # 16 responses in two calls
    tiny_trainer(
        "ppo", tmp_path / "episodes", arguments={"environment": Slow, "reward_fn": None}, train__total_steps=1
    ).learn()
    for place, name, least in (("function", "reward", 0.04), ("episodes", "environment", 0.02)):
        lines = [json.loads(line) for line in (tmp_path / place / "metrics.jsonl").read_text().splitlines()]
        collected = [line for line in lines if "reward/mean" in line]
        assert collected
        assert all(least < line[f"time/{name}"] < line["time/collect"] for line in collected)


# --------------------------------------------------------------------------------------------- torch's default dtype


@table("config", [LIMITED, RewardFunctionConfig(timeout=None)])
@table("wait", [False, True])
def test_a_function_that_changes_the_default_dtype_is_refused_and_it_is_set_back(
    config: RewardFunctionConfig, wait: bool
) -> None:
    def judge(**_: Any) -> list[float]:
        torch.set_default_dtype(torch.float64)
        return [0.0] * 3

    async def later(**given: Any) -> list[float]:
        await asyncio.sleep(0)
        return judge(**given)

    with pytest.raises(RewardError, match=r"has set torch's default dtype from torch.float32 to torch.float64"):
        score(later if wait else judge, rollouts(), None, config)
    assert torch.get_default_dtype() == torch.float32
    with pytest.raises(RewardError, match="default dtype"):
        metrics(judge, rollouts())
    assert torch.get_default_dtype() == torch.float32


def bare(outputs: Any) -> Any:
    return [1.0] * len(outputs)


def no_columns(samples: Any, prompts: Any, outputs: Any, tokenizer: Any) -> Any:
    return [1.0] * len(outputs)


@table(
    "name, function, said",
    [
        ("reward_fn", bare, r"not take samples, prompts, tokenizer, answer.*write def bare\(outputs, \*\*kwargs\)"),
        (
            "reward_fn",
            no_columns,
            r"does not take answer, .*write def no_columns\(samples, prompts, outputs, tokenizer",
        ),
        ("reward_fn", lambda o, /, **_: [1.0] * len(o), ""),
        ("metric_fn", bare, r"metric function .* does not take samples, prompts, answer"),
    ],
)
def test_a_function_that_does_not_take_its_keywords_is_refused_before_the_model_is_loaded(
    name: str, function: Any, said: str, tmp_path: Path
) -> None:
    prompts = [{"prompt": "a", "answer": "b"}] * 16
    if not said:
        tiny_trainer("ppo", tmp_path, arguments={name: function, "prompts": prompts})
        return
    with pytest.raises(ConfigError, match=said):
        tiny_trainer("ppo", tmp_path, arguments={name: function, "prompts": prompts})
