"""Staleness: collections sampled ahead with older weights, the same bits by every engine, resuming, corrections."""

from __future__ import annotations

import logging
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import trainkit
from researchers.copying import Copying
from researchers.dapo import DapoTrainer
from tables import table
from test_laws import assert_same_weights, weights
from test_processes import succeed
from trainkit.errors import ConfigError, RewardError
from trainkit.functional import effective_sample_size, importance_ratios, masked_ratios, truncated_ratios
from trainkit.testing.trainers import Letters, count_first_letters, tiny_trainer

assert all((Copying, DapoTrainer)), "registered by their imports"

AHEAD = ("best_of_k", "distill", "grpo", "online_dpo", "ppo", "rft", "rloo", "xpo")
CORRECTED = ["grpo", "ppo", "rloo"]


class Noted:
    """Notes with which weights the collections were sampled, and what was sampled."""

    def __init__(self) -> None:
        self.versions: list[list[int]] = []
        self.texts: list[list[str]] = []
        self.steps: list[int] = []

    @trainkit.hookimpl
    def on_experience(self, trainer: Any, rollouts: Any) -> None:
        self.versions.append(
            sorted({int(version) for part in rollouts if part.versions is not None for version in part.versions})
        )
        self.texts.append([text for part in rollouts for text in part.outputs])
        self.steps.append(trainer.progress.step)


def ran(name: str, place: Path, *, callbacks: Any = (), **changes: Any) -> Any:
    settings = {"rollout__staleness": 1, "train__total_steps": 8, **changes}
    trainer = tiny_trainer(name, place, callbacks=callbacks, **settings)
    trainer.learn()
    return trainer


# ------------------------------------------------------------------------------------------------ which weights sample


@pytest.mark.daily(staleness=(2,), engine=("local",))
@pytest.mark.parametrize("engine", ["local", "_test_copy"])
@pytest.mark.parametrize("staleness", [0, 1, 2, 3])
def test_collection_c_is_sampled_with_the_weights_after_collection_c_minus_1_minus_s(
    staleness: int, engine: str, tmp_path: Path
) -> None:
    noted = Noted()
    ran(
        "rloo", tmp_path, callbacks=[noted], rollout__staleness=staleness, rollout__engine=engine, train__total_steps=10
    )
    starts = [0, 2, 4, 6, 8]  # steps before each collection
    assert noted.steps == starts
    assert noted.versions == [[starts[max(0, c - staleness)]] for c in range(5)]


@pytest.mark.daily(name=("rloo",), staleness=(1,))
@pytest.mark.parametrize("name", AHEAD)
@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_an_engine_with_a_copy_of_the_weights_ends_with_the_same_bits(
    name: str, staleness: int, tmp_path: Path
) -> None:
    local, apart = Noted(), Noted()
    one = ran(name, tmp_path / "local", callbacks=[local], rollout__staleness=staleness)
    other = ran(name, tmp_path / "copy", callbacks=[apart], rollout__staleness=staleness, rollout__engine="_test_copy")
    assert_same_weights(weights(one), weights(other))
    assert (local.versions, local.texts) == (apart.versions, apart.texts)
    beside = any(thread.startswith("trainkit-sampling") for thread in other.sampling.engine.threads)
    assert beside == bool(staleness)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo", "ppo", "_test_dapo"])
def test_an_engine_gets_all_requests_of_a_collection_at_a_time(name: str, tmp_path: Path) -> None:
    """Groups of four are cut by calls of six rows, and the numbers of the responses still are those of the rows."""
    settings = {"rollout__batch_size": 6, "train__total_steps": 4}
    one = ran(name, tmp_path / "local", **settings)
    other = ran(name, tmp_path / "pair", rollout__engine="_test_pair", **settings)
    assert_same_weights(weights(one), weights(other))
    assert max(other.sampling.engine.under_way) > 1


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["local", "_test_copy"])
def test_episodes_belong_to_the_version_of_their_collection(engine: str, tmp_path: Path) -> None:
    noted = Noted()
    ran(
        "ppo", tmp_path, callbacks=[noted], rollout__engine=engine, method__ppo_epochs=1,
        arguments={"reward_fn": None, "environment": Letters},
    )  # fmt: skip
    assert noted.versions == [[0], [0], [2], [4]]


@pytest.mark.daily(engine=("local",))
@pytest.mark.parametrize("engine", ["local", "_test_copy"])
def test_refills_belong_to_the_version_of_their_collection(engine: str, tmp_path: Path) -> None:
    noted = Noted()

    def picky(outputs: list[str], **_: Any) -> list[float]:
        return [float(output.count("a") > 1) for output in outputs]

    kept = ran(
        "_test_dapo", tmp_path, callbacks=[noted], rollout__engine=engine, train__total_steps=6,
        arguments={"reward_fn": picky},
    )  # fmt: skip
    assert noted.versions == [[0], [0], [2]]
    assert kept.progress.cursor > 4 * len(noted.versions), "refills use further prompts of the stream"


def test_metrics_tell_the_staleness_and_how_far_the_sampler_is_from_the_policy(tmp_path: Path) -> None:
    logged: list[dict[str, float]] = []

    class Log:
        @trainkit.hookimpl
        def log_metrics(self, metrics: dict[str, float]) -> None:
            logged.append(metrics)

        @trainkit.hookimpl
        def on_step(self, trainer: Any, step: int) -> None:
            assert int(trainer.generate(["ab"]).versions) == step, "what is generated beside is of the newest weights"

    ran("ppo", tmp_path, callbacks=[Log()], optimizer__lr=0.01, method__ppo_epochs=1)
    steps = [found for found in logged if "rollout/staleness" in found]
    assert [found["rollout/staleness"] for found in steps] == [0, 1, 1, 1]
    assert steps[0]["policy/sampler_kl"] == pytest.approx(0, abs=1e-6)
    assert steps[-1]["policy/sampler_kl"] > 1e-4
    assert steps[0]["rollout/kept_mass"] == pytest.approx(1, abs=1e-5)
    assert 0.2 < steps[-1]["rollout/effective_sample_size"] < 0.99999
    assert all("time/sample" in found for found in steps)


def test_collections_that_no_step_is_made_on_are_not_sampled(tmp_path: Path) -> None:
    scored: list[int] = []

    def reward(outputs: list[str], **_: Any) -> list[float]:
        scored.append(len(outputs))
        return count_first_letters(outputs)

    ran("rloo", tmp_path / "steps", rollout__staleness=3, train__total_steps=6, arguments={"reward_fn": reward})
    assert sum(scored) == 3 * 16
    scored.clear()
    ran(
        "rloo", tmp_path / "epochs", rollout__staleness=3, train__total_steps=None, train__epochs=1,
        arguments={"reward_fn": reward},
    )  # fmt: skip
    assert sum(scored) == 8 * 4


# ---------------------------------------------------------------------------------------------------------- resuming


class StopAt:
    """Receives SIGTERM after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    @trainkit.hookimpl
    def on_step(self, trainer: Any, step: int) -> None:
        trainer.run.stop.asked = signal.SIGTERM if step == self.step else trainer.run.stop.asked


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["local", "_test_copy"])
@pytest.mark.parametrize(("staleness", "stop"), [(1, 1), (1, 2), (1, 5), (2, 3), (2, 4)])
def test_a_run_that_is_stopped_resumes_with_the_same_bits(
    staleness: int, stop: int, engine: str, tmp_path: Path
) -> None:
    settings = {"rollout__staleness": staleness, "rollout__engine": engine, "train__save_interval": 100}
    settings |= {"method__ppo_epochs": 1, "method__target": 0.1, "train__total_steps": 6}
    whole = ran("ppo", tmp_path / "whole", **settings)
    with pytest.raises(SystemExit):
        ran("ppo", tmp_path / "cut", callbacks=[StopAt(stop)], **settings)
    resumed = ran("ppo", tmp_path / "cut", train__resume="auto", **settings)
    assert resumed.progress.step == 6
    assert_same_weights(weights(whole), weights(resumed))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["_test_dapo", "ppo"])
def test_episodes_and_groups_that_were_sampled_ahead_are_stored(name: str, tmp_path: Path) -> None:
    arguments = {"reward_fn": None, "environment": Letters} if name == "ppo" else {}
    settings = {"train__save_interval": 3, "train__total_steps": 5, "arguments": arguments}
    settings |= {"method__ppo_epochs": 1} if name == "ppo" else {}
    whole = ran(name, tmp_path / "whole", **settings)
    with pytest.raises(SystemExit):
        ran(name, tmp_path / "cut", callbacks=[StopAt(3)], **settings)
    resumed = ran(name, tmp_path / "cut", train__resume="auto", **settings)
    assert_same_weights(weights(whole), weights(resumed))


@pytest.mark.slow
def test_a_run_stopped_while_it_samples_ahead_resumes_with_the_same_bits(tmp_path: Path) -> None:
    calls = 0

    def reward(outputs: list[str], **_: Any) -> list[float]:
        nonlocal calls
        calls += 1
        if calls == stop_at:
            trainer.run.stop.asked = signal.SIGTERM
        return count_first_letters(outputs)

    settings: dict[str, Any] = {
        "rollout__staleness": 1, "train__total_steps": 8, "train__save_interval": 100,
        "arguments": {"reward_fn": reward},
    }  # fmt: skip
    stop_at = 0
    trainer = tiny_trainer("rloo", tmp_path / "whole", **settings)
    trainer.learn()
    expected = weights(trainer)
    for stop_at in (1, 3, 5):  # in the first collection, in the one ahead of it, and in a later one
        calls, place = 0, tmp_path / str(stop_at)
        trainer = tiny_trainer("rloo", place, **settings)
        with pytest.raises(SystemExit):
            trainer.learn()
        calls = 100
        trainer = tiny_trainer("rloo", place, train__resume="auto", **settings)
        trainer.learn()
        assert_same_weights(expected, weights(trainer))


@pytest.mark.slow
def test_a_longer_run_says_which_collections_have_newer_weights_than_they_would_have(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"train__save_interval": 100, "rollout__staleness": 2}
    ran("rloo", tmp_path, train__total_steps=4, **settings)
    noted = Noted()
    with caplog.at_level(logging.WARNING):
        ran("rloo", tmp_path, callbacks=[noted], train__total_steps=8, train__resume="auto", **settings)
    assert "collections 2 to 3 are sampled with the weights of step 4, because the run was to end" in caplog.text
    assert noted.versions == [[4], [4]]


def test_a_column_that_no_checkpoint_can_hold_is_named_when_one_is_written(tmp_path: Path) -> None:
    prompts = [{"prompt": "ab", "picture": object()}] * 8
    with pytest.raises(trainkit.errors.CheckpointError, match=r"the column 'picture' of a prompt is .*staleness > 0"):
        ran("rloo", tmp_path, train__save_interval=2, arguments={"prompts": prompts})


# ----------------------------------------------------------------------------------------------- beside the training


@pytest.mark.slow
def test_evaluating_and_generating_use_the_newest_weights_and_change_nothing(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"rollout__engine": "_test_copy", "rollout__staleness": 2, "train__total_steps": 3}
    quiet = ran("rloo", tmp_path / "quiet", **settings)

    class Looks:
        @trainkit.hookimpl
        def on_step(self, trainer: Any, step: int) -> None:
            assert int(trainer.generate(["ab"]).versions) == step

    seen = ran("rloo", tmp_path / "seen", callbacks=[Looks()], train__eval_interval=2, **settings)
    assert_same_weights(weights(quiet), weights(seen))


def test_the_policy_is_trained_while_the_next_collection_is_sampled(tmp_path: Path) -> None:
    """Neither waits for the other: every score is given after a step of the training beside it."""
    steps, waited = threading.Semaphore(0), []

    class Trains:
        @trainkit.hookimpl
        def on_step(self) -> None:
            steps.release()

    calls = 0

    def reward(outputs: list[str], **_: Any) -> list[float]:
        nonlocal calls
        calls += 1
        if 4 < calls <= 8:  # of the collections 2 and 3, sampled while 1 and 2 are trained on
            waited.append(steps.acquire(timeout=20))
        return count_first_letters(outputs)

    ran("rloo", tmp_path, callbacks=[Trains()], rollout__engine="_test_copy", arguments={"reward_fn": reward})
    assert waited == [True] * 4


def test_a_fault_of_the_reward_function_ends_the_run_and_samples_no_further(tmp_path: Path) -> None:
    calls = 0

    def reward(outputs: list[str], **_: Any) -> list[float]:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise KeyError("no such thing")
        return count_first_letters(outputs)

    with pytest.raises(RewardError, match="no such thing"):
        ran("rloo", tmp_path, rollout__engine="_test_copy", rollout__staleness=3, arguments={"reward_fn": reward})
    time.sleep(0.2)
    assert calls == 5


# -------------------------------------------------------------------------------------------------------- corrections


def test_corrections_equal_their_closed_forms() -> None:
    mask = torch.tensor([[True, True, False], [True, True, True]])
    new = torch.tensor([[0.0, 0.5, 9.0], [0.0, -1.0, 0.5]], dtype=torch.float64)
    old = torch.tensor([[0.0, 0.0, float("nan")], [0.0, 0.0, 0.0]], dtype=torch.float64)
    token = importance_ratios(new, old, mask)
    assert token.flatten().tolist() == pytest.approx([1, 1.6487212707, 1, 1, 0.3678794412, 1.6487212707])
    whole = importance_ratios(new, old, mask, level="sequence")
    assert whole.flatten().tolist() == pytest.approx([1.6487212707, 1.6487212707, 1, *[0.6065306597] * 3])
    ratios = torch.tensor([0.1, 0.5, 0.7, 1.5, 2.0, 8.0])
    assert truncated_ratios(ratios, 2.0).tolist() == pytest.approx([0.1, 0.5, 0.7, 1.5, 2, 2])
    assert masked_ratios(ratios, 2.0).tolist() == pytest.approx([0, 0.5, 0.7, 1.5, 2, 0])
    weighed, chosen = torch.tensor([1.0, 3.0, 100.0]), torch.tensor([True, True, False])
    assert float(effective_sample_size(weighed, chosen)) == pytest.approx(16 / 10)
    assert float(effective_sample_size(torch.ones(7), torch.ones(7, dtype=torch.bool))) == 7


def gradient_with(name: str, place: Path, shift: float, **changes: Any) -> Tensor:
    """The gradient of the first step if the sampler gave every token of the first 4 responses e^−shift of its odds."""
    trainer = tiny_trainer(name, place, rollout__num_rollouts=8, rollout__batch_size=8, **changes)
    rows = trainer.pipeline.take(0, trainer.collection_rows)
    rows = [row for row in rows for _ in range(trainer.samples_per_prompt)]
    rollouts, scores = trainer.sample_and_score(rows)
    moved = rollouts.logprobs.clone()
    moved[:4] -= shift * rollouts.sequences.response_mask[:4]
    rollouts = trainkit.Rollouts(**{**vars(rollouts), "logprobs": moved, "hidden": None})
    with torch.no_grad():
        trainer.store.push(trainer.collector.experience(rollouts, scores))
        trainer.collector.prepare()
    trainer.policy.train(False)
    loss, _ = trainer.loss(trainer.prepare_step(trainer.store.experience))
    loss.backward()
    return torch.cat([p.grad.flatten() for p in trainer.unwrapped.parameters() if p.grad is not None])


PLAIN = {
    "grpo": {},
    "ppo": {"method__vf_coef": 0.0, "method__init_kl_coef": 0.0},
    "rloo": {"method__kl_coef": 0.0, "method__ratio_level": "token"},
}


@pytest.mark.daily(name=("ppo",))
@pytest.mark.parametrize("name", CORRECTED)
def test_importance_weights_scale_the_gradients_of_their_tokens(name: str, tmp_path: Path) -> None:
    """The gradient is that of the first 4 responses, times their weight, plus that of the others."""

    def gradient(shift: float, **changes: Any) -> Tensor:
        given = {f"rollout__{key}": value for key, value in changes.items()}
        place = tmp_path / f"{shift}-{len(changes)}-{changes.get('correction')}"
        return gradient_with(name, place, shift, **PLAIN[name], **given)

    usual = gradient(0.0, correction="decoupled")
    without = gradient(2.0, correction="masked")  # e² is beyond the cap
    first = usual - without
    assert float(first.norm()) > 1e-4
    half = gradient(-0.6931471806, correction="decoupled", correction_cap=4.0)
    torch.testing.assert_close(half, without + first / 2, rtol=1e-4, atol=1e-7)
    capped = gradient(2.0, correction="decoupled", correction_cap=1.5)
    torch.testing.assert_close(capped, without + 1.5 * first, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(gradient(2.0, correction="none"), usual)


@pytest.mark.daily(name=("ppo",))
@pytest.mark.parametrize("name", CORRECTED)
def test_the_ratio_to_the_sampler_is_that_of_its_log_probabilities(name: str, tmp_path: Path) -> None:
    """Within the clip range the gradient of a token is multiplied by the ratio, as of the loss without a clip."""
    usual = gradient_with(name, tmp_path / "0", 0.0, **PLAIN[name], rollout__correction="sampler")
    without = gradient_with(name, tmp_path / "1", 2.0, **PLAIN[name], rollout__correction="masked")
    moved = gradient_with(name, tmp_path / "2", 0.1, **PLAIN[name], rollout__correction="sampler")
    torch.testing.assert_close(moved, without + 1.105170918 * (usual - without), rtol=1e-3, atol=1e-6)


def test_responses_with_one_ratio_have_one_weight(tmp_path: Path) -> None:
    trainer = tiny_trainer("rloo", tmp_path / "a", rollout__correction="decoupled")
    assert trainer.correction_level == "sequence"
    usual = gradient_with("rloo", tmp_path / "b", 0.0, method__kl_coef=0.0, rollout__correction="decoupled")
    moved = gradient_with("rloo", tmp_path / "c", 0.01, method__kl_coef=0.0, rollout__correction="decoupled")
    assert not torch.allclose(usual, moved, rtol=1e-4)


def test_what_auto_stands_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def correction(name: str, **changes: Any) -> str:
        changes = {f"rollout__{key}": value for key, value in changes.items()}
        found: str = tiny_trainer(name, tmp_path, **changes).correction.kind
        return found

    assert [correction(name) for name in ("ppo", "online_dpo", "sft")] == ["none"] * 3
    assert correction("ppo", engine="_test_copy") == "none"
    assert [correction(name, staleness=1) for name in CORRECTED] == ["decoupled"] * 3
    with caplog.at_level(logging.WARNING):
        assert [correction(name, staleness=1) for name in ("online_dpo", "best_of_k", "rft")] == ["none"] * 3
    told = [record.message for record in caplog.records if "corrects for no difference" in record.message]
    assert len(told) == 3
    assert correction("ppo", staleness=1, correction="none") == "none"


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("sft", {"staleness": 1}, r"rollout\.staleness cannot be set with 'sft', which learns from samples"),
    ("_test_remax", {"staleness": 1}, "makes its experience while it samples"),
    ("ddpo", {"staleness": 1}, r"rollout\.staleness is set, but does not apply to images"),
    ("ddpo", {"engine": "_test_copy"}, r"rollout\.engine is set, but does not apply to images"),
    ("rft", {"correction": "decoupled"}, "is 'decoupled', and 'rft' supports none"),
    ("ppo", {"correction_cap": 3.0}, r"correction_cap cannot be set with the correction 'none'"),
    ("ppo", {"staleness": -1}, r"rollout\.staleness"),
]


@table("name, changes, message", REFUSED)
def test_what_cannot_be_is_refused(name: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    from researchers.remax import ReMaxTrainer

    assert ReMaxTrainer
    with pytest.raises(ConfigError, match=message):
        tiny_trainer(name, tmp_path, **{f"rollout__{key}": value for key, value in changes.items()})


# ------------------------------------------------------------------------------------------------------- two processes

TWO = """
import sys
import threading
from pathlib import Path
import torch
sys.path[:0] = [sys.argv[2], str(Path(sys.argv[2]).parent)]
from researchers.copying import Copying
from researchers.dapo import DapoTrainer
from trainkit.testing.trainers import tiny_trainer

torch.set_num_threads(1)
out, found, threads = Path(sys.argv[1]), {}, set()

def reward(outputs, **_):
    return [float(output.count("a") > 0) + 0.1 * len(set(output)) for output in outputs]

kept = DapoTrainer.keep

def keep(self, rollouts, scores):
    rank, world = self.accelerator.process_index, self.accelerator.num_processes
    here = torch.tensor([1.0, rank])
    assert self.reduce(here).tolist() == [world, world * (world - 1) / 2]
    assert (self.min(here).tolist(), self.max(here).tolist()) == ([1, 0], [1, world - 1])
    assert self.gather([rank]) == list(range(world))
    threads.add(threading.current_thread().name)
    return kept(self, rollouts, scores)

DapoTrainer.keep = keep

for name in ("_test_dapo", "ppo"):
    for engine in ("local", "_test_copy"):
        trainer = tiny_trainer(
            name, out / name / engine, rollout__staleness=1, rollout__engine=engine, train__total_steps=8,
            train__save_interval=3, arguments={"reward_fn": reward},
        )
        trainer.learn()
        world = trainer.accelerator.num_processes
        found[f"{name} {engine}"] = torch.cat([p.detach().flatten() for p in trainer.unwrapped.parameters()])
        found[f"{name} {engine} steps"] = trainer.progress.step
assert any("sampling" in name for name in threads), threads
if trainer.accelerator.is_main_process:
    torch.save(found, out / "found.pt")
if world > 1:
    torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_two_processes_sample_ahead_what_one_does(tmp_path: Path) -> None:
    """Also with refills, for which the sampling threads of the two processes communicate, and `keep` here."""
    for processes in (1, 2):
        (tmp_path / str(processes)).mkdir()
        succeed(TWO, processes, str(tmp_path / str(processes)), str(Path(__file__).parent))
    one, two = (torch.load(tmp_path / str(processes) / "found.pt") for processes in (1, 2))
    for name in ("_test_dapo", "ppo"):
        assert torch.equal(two[f"{name} local"], two[f"{name} _test_copy"])
        torch.testing.assert_close(one[f"{name} local"], two[f"{name} local"], rtol=0, atol=1e-5)
