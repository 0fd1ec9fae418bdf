"""Reward functions and environments in workers: the bits of runs without workers, errors, deaths."""

from __future__ import annotations

import functools
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import trainkit_ray
from trainkit.errors import ConfigError, EngineError, EpisodeError, RewardError
from trainkit.rollouts import Turn
from trainkit.testing.trainers import LETTERS, Letters, count_first_letters, tiny_trainer
from trainkit_ray import remote_environment, remote_reward


def test_workers_without_ray_are_refused_with_the_way_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainkit_ray.cluster, "find_spec", lambda _: None)
    for make in (lambda: remote_reward(count_first_letters), lambda: remote_environment(Letters)):
        with pytest.raises(ConfigError, match=r"needs Ray, which is not installed: pip install 'trainkit-ray\[ray\]'"):
            make()


def test_what_cannot_be_called_in_a_worker_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainkit_ray.cluster, "find_spec", lambda _: object())
    with pytest.raises(ConfigError, match="given 3"):
        remote_reward(3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="the class Turn has no method __call__"):
        remote_reward(Turn)
    with pytest.raises(ConfigError, match="the environment Turn has no method step"):
        remote_environment(Turn)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="workers should be 1 or more; given 0"):
        remote_reward(count_first_letters, workers=0)
    with pytest.raises(ConfigError, match=r"address should be host:port of the head node.*; given 'head'"):
        remote_environment(Letters, address="head")


# ------------------------------------------------------------------------------------------------------- with Ray


@pytest.fixture(scope="module", autouse=True)
def cluster(request: pytest.FixtureRequest) -> Iterator[None]:
    """A cluster that stays between the tests."""
    if not any(item.get_closest_marker("engines") for item in request.session.items):
        yield
        return
    from trainkit_ray import cluster

    cluster.enter(None)
    yield
    cluster.leave([])


def ended(place: Path, name: str = "rloo", **arguments: Any) -> Any:
    """A trainer after two collections."""
    usual = {"optimizer__lr": 0.01, "rollout__num_rollouts": 8, "rollout__batch_size": 4, "train__total_steps": 6}
    trainer = tiny_trainer(name, place, arguments=arguments, **usual)
    trainer.learn()
    return trainer


def require_equal(one: Any, other: Any) -> None:
    left, right = one.unwrapped.state_dict(), other.unwrapped.state_dict()
    assert [key for key in left if not left[key].equal(right[key])] == []


class Words:
    """A reward function with state of its own, which is made in the worker."""

    def __init__(self) -> None:
        self.place = os.getpid()

    def __call__(self, outputs: list[str], tokenizer: Any, **columns: Any) -> list[float]:
        assert self.place == os.getpid()
        return [float(len(tokenizer(output)["input_ids"])) for output in outputs]


def dense(outputs: list[str], **_: Any) -> list[torch.Tensor]:
    return [torch.tensor([float(letter in "abcd") for letter in output][:2] or [0.0]) for output in outputs]


@pytest.mark.engines
@pytest.mark.parametrize("reward", [Words, dense], ids=["class", "function"])
def test_a_run_with_rewards_of_workers_ends_with_the_bits_of_one_without(reward: Any, tmp_path: Path) -> None:
    here = reward() if reward is Words else reward
    name = "ppo" if reward is dense else "rloo"
    one = ended(tmp_path / "here", name, reward_fn=here)
    other = ended(tmp_path / "there", name, reward_fn=remote_reward(reward, workers=2))
    require_equal(one, other)


def dies_once(outputs: list[str], *, place: Path, **_: Any) -> list[float]:
    """Kill the worker in the fourth call."""
    calls = len([*place.iterdir()])
    (place / f"{calls}-{os.getpid()}").touch()
    if calls == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return count_first_letters(outputs)


@pytest.mark.engines
def test_a_worker_that_is_killed_is_replaced_and_scores_again(tmp_path: Path) -> None:
    (place := tmp_path / "calls").mkdir()
    one = ended(tmp_path / "here")
    other = ended(tmp_path / "there", reward_fn=remote_reward(functools.partial(dies_once, place=place), workers=1))
    require_equal(one, other)
    assert len({path.name.partition("-")[2] for path in place.iterdir()}) == 2


def dies(outputs: list[str], **_: Any) -> list[float]:
    os.kill(os.getpid(), signal.SIGKILL)
    return []


@pytest.mark.engines
def test_a_reward_function_that_always_dies_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(
        RewardError, match=r"dies .*a worker of dies .*cannot be replaced \(max_restarts is 0\)"
    ) as told:
        ended(tmp_path, reward_fn=remote_reward(dies, max_restarts=0))
    assert isinstance(told.value.__cause__, EngineError)


def wrong(outputs: list[str], **_: Any) -> list[float]:
    return [1.0, *count_first_letters(outputs)]


def fails(outputs: list[str], **_: Any) -> list[float]:
    raise LookupError("no such word")


@pytest.mark.engines
def test_errors_of_reward_functions_are_those_of_one_without_workers(tmp_path: Path) -> None:
    with pytest.raises(RewardError, match=r"fails \(.*\) raised LookupError: no such word") as caught:
        ended(tmp_path / "fails", reward_fn=remote_reward(fails))
    assert isinstance(caught.value.__cause__, LookupError)
    with pytest.raises(RewardError, match=r"wrong \(.*\) returned 3 scores for 4 samples"):
        ended(tmp_path / "wrong", reward_fn=remote_reward(wrong, workers=2))


class Slow:
    """A game of two turns in coroutines, which begins with a prompt of its own."""

    def __init__(self, row: Mapping[str, Any]) -> None:
        self.draws = random.Random(row["episode_seed"])
        self.outputs: list[str] = []

    async def reset(self) -> str:
        return self.draws.choice(LETTERS)

    async def step(self, output: str) -> Turn:
        self.outputs.append(output)
        return Turn(self.draws.choice(LETTERS), count_first_letters(self.outputs)[0], done=len(self.outputs) == 2)


@pytest.mark.engines
def test_a_run_with_environments_in_workers_ends_with_the_bits_of_one_without(tmp_path: Path) -> None:
    import ray

    there = remote_environment(Slow, workers=2)
    one = ended(tmp_path / "here", environment=Slow, reward_fn=None)
    other = ended(tmp_path / "there", environment=there, reward_fn=None)
    require_equal(one, other)
    held = [actor.__ray_call__.remote(lambda host: len(host.episodes)) for actor in there.pool.actors]  # type: ignore[attr-defined]
    assert ray.get(held) == [0, 0], "episodes that have ended are forgotten"


class Mortal(Letters):
    """Kills its worker in the second turn of one episode."""

    flag: Path

    def step(self, output: str) -> Turn:
        turn = super().step(output)
        if self.turn == 2 and not any(self.flag.iterdir()):
            (self.flag / str(os.getpid())).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return turn


@pytest.mark.engines
def test_episodes_of_a_worker_that_is_killed_are_played_again(tmp_path: Path) -> None:
    (flag := tmp_path / "deaths").mkdir()
    mortal = type("Mortal", (Mortal,), {"flag": flag})
    one = ended(tmp_path / "here", environment=Letters, reward_fn=None)
    remote = remote_environment(mortal)
    other = ended(tmp_path / "there", environment=remote, reward_fn=None)
    require_equal(one, other)
    assert len([*flag.iterdir()]) == 1


@pytest.mark.engines
def test_episodes_of_workers_are_branched_as_those_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trainkit.plugins import get_trainer

    monkeypatch.setattr(get_trainer("rloo"), "forks", True)
    found = []
    for place, environment in (("here", Letters), ("there", remote_environment(Letters, workers=2))):
        trainer = tiny_trainer(
            "rloo", tmp_path / place, arguments={"environment": environment, "reward_fn": None}, rollout__num_rollouts=8
        )
        trainer.models.build()
        episodes = trainer.sample(trainer.pipeline.take(0, 4))
        found.append([part.turns for part in (episodes, *(trainer.branch(episodes, [0, 1, 1, 0]) for _ in range(2)))])
    assert found[0] == found[1]
    assert found[0][1] != found[0][2]


class Broken(Letters):
    def step(self, output: str) -> Turn:
        raise LookupError("no such page")


@pytest.mark.engines
def test_errors_of_environments_are_those_of_one_without_workers(tmp_path: Path) -> None:
    with pytest.raises(EpisodeError, match=r"Broken, prompt .*, turn 1: step\(output\) raised LookupError: no such"):
        ended(tmp_path, environment=remote_environment(Broken), reward_fn=None)


TASK = """
import helper
from trainkit_ray import remote_reward

def score(outputs, **_):
    return helper.score(outputs)

reward_fn = remote_reward(score)
prompts = ["a", "bc", "def", "gh"]
"""
HELPER = """
def score(outputs):
    return [float(len(output)) for output in outputs]
"""


@pytest.mark.engines
def test_functions_of_a_task_file_run_in_workers(tmp_path: Path) -> None:
    (tmp_path / "letters.py").write_text(TASK)
    (tmp_path / "helper.py").write_text(HELPER)
    (tmp_path / "sub").mkdir()
    script = f"""
import sys
from trainkit.plugins.files import load_file
from pathlib import Path
from trainkit.testing.trainers import tiny_trainer
task = load_file(Path({str(tmp_path / "letters.py")!r}))
tiny_trainer("rloo", Path("run"), arguments={{"reward_fn": task.reward_fn, "prompts": task.prompts}}).learn()
print("learnt")
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path / "sub",
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stdout.strip().endswith("learnt"), done.stderr[-3000:]
