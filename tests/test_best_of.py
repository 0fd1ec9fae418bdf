"""Best-of-n sampling: `best_of` of a trainer, and `trainkit generate --best-of`."""

from __future__ import annotations

import itertools
import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import trainkit
from tables import table
from trainkit.cli import app
from trainkit.errors import ConfigError, DataError, RewardError
from trainkit.testing import character_tokenizer
from trainkit.testing.trainers import LETTERS, Letters, count_first_letters, tiny_trainer
from trainkit_kit.checks.traces import metric_lines, require_same_lines

V = len(LETTERS)


def rank(outputs: list[str], **_: Any) -> list[float]:
    """Score a letter by its place in the alphabet: 1 to 8."""
    return [1.0 + LETTERS.index(output) for output in outputs]


def uniform(run_dir: Path, **changes: Any) -> Any:
    """Return a trainer whose model gives equal probabilities to the eight letters, and responds with one of them."""
    tokenizer = character_tokenizer(LETTERS)
    mask = torch.zeros(len(tokenizer), dtype=torch.bool)
    mask[tokenizer.convert_tokens_to_ids(list(LETTERS))] = True
    arguments = {"reward_fn": rank, "logit_mask": mask}
    trainer = tiny_trainer(
        "ppo", run_dir, arguments=arguments, rollout__max_new_tokens=1, rollout__batch_size=500, **changes
    )
    with torch.no_grad():
        trainer.models.build()
        for weight in trainer.unwrapped.model.parameters():
            weight.zero_()
    return trainer


def moments(values: Tensor) -> tuple[float, float]:
    return float(values.double().mean()), float(values.double().std()) / math.sqrt(len(values))


@pytest.mark.daily(n=(5,))
@pytest.mark.parametrize("n", [1, 2, 5, 16])
def test_the_expected_best_score_is_that_of_the_closed_form(n: int, tmp_path: Path) -> None:
    """P(max ≤ m) = (m / V)ⁿ, so E max = Σ_{m=1}^{V} (1 − ((m − 1) / V)ⁿ) = V − Σ_{m<V} (m / V)ⁿ."""
    expected = V - sum((m / V) ** n for m in range(1, V))
    rollouts, scores = uniform(tmp_path).best_of(["a"] * 1000, n)
    mean, error = moments(scores)
    assert len(rollouts) == len(scores) == 1000
    assert abs(mean - expected) < 4 * error, (mean, expected, error)  # P(|z| > 4) is 6e-5, and the seed is fixed
    assert rank(rollouts.outputs) == scores.tolist()


def test_the_second_best_has_the_expectation_of_its_order_statistic(tmp_path: Path) -> None:
    """P(second of n ≤ m) = pⁿ + n pⁿ⁻¹ (1 − p) with p = m / V; E = V − Σ_{m<V} of it."""
    n, expected = 4, float(V)
    for p in (m / V for m in range(1, V)):
        expected -= p**n + n * p ** (n - 1) * (1 - p)
    _, scores = uniform(tmp_path).best_of(["a"] * 1000, n, keep=2)
    first, second = scores.view(-1, 2).unbind(1)
    assert bool((first >= second).all())
    mean, error = moments(second)
    assert abs(mean - expected) < 4 * error


def test_the_best_are_those_of_the_n_responses_in_the_order_of_their_scores(tmp_path: Path) -> None:
    """All n are kept, so the responses to a prompt are known; fewer are the first of them."""
    prompts = ["ab", {"prompt": "c", "tag": 1}, {"prompt": "c", "seed": 3}]
    every, all_scores = tiny_trainer("ppo", tmp_path, rollout__batch_size=4).best_of(prompts, 6, keep=6)
    best, scores = tiny_trainer("ppo", tmp_path, rollout__batch_size=7).best_of(prompts, 6, keep=2)
    assert all_scores.view(3, 6).tolist() == [sorted(each, reverse=True) for each in all_scores.view(3, 6).tolist()]
    assert count_first_letters(every.outputs) == all_scores.tolist()
    chosen = [0, 1, 6, 7, 12, 13]
    assert best.outputs == [every.outputs[index] for index in chosen]
    assert scores.tolist() == all_scores[chosen].tolist()
    assert len({*every.outputs[:6]}) > 1, "each response has random numbers of its own"
    assert best.rows == [{"prompt": "ab"}] * 2 + [{"prompt": "c", "tag": 1}] * 2 + [{"prompt": "c", "seed": 3}] * 2
    assert best.logprobs is not None
    assert best.logprobs.shape == best.sequences.response_mask.shape


def test_the_first_response_is_that_of_generate_and_more_responses_are_never_worse(tmp_path: Path) -> None:
    made = [tiny_trainer("ppo", tmp_path).best_of(["ab", "c", "d"], n)[1] for n in (1, 2, 4, 8)]
    alone = tiny_trainer("ppo", tmp_path).best_of(["ab", "c", "d"], 1)[0]
    assert alone.outputs == tiny_trainer("ppo", tmp_path).generate(["ab", "c", "d"]).outputs
    for fewer, more in itertools.pairwise(made):
        assert bool((more >= fewer).all())
    assert made[0].tolist() != made[-1].tolist()


def test_a_call_draws_new_responses_and_a_seed_repeats_its_own(tmp_path: Path) -> None:
    trainer = tiny_trainer("ppo", tmp_path)
    rows = [{"prompt": "ab", "seed": 5}, {"prompt": "ab"}]
    first, second = (trainer.best_of(rows, 4, keep=4)[0].outputs for _ in range(2))
    assert first[:4] == second[:4]
    assert first[4:] != second[4:]


def test_of_equal_scores_the_response_that_was_sampled_first_is_better(tmp_path: Path) -> None:
    seen: list[str] = []

    def same(outputs: list[str], **_: Any) -> list[float]:
        seen.extend(outputs)
        return [1.0] * len(outputs)

    rollouts, scores = tiny_trainer("ppo", tmp_path).best_of(["ab", "c"], 5, keep=2, reward_fn=same)
    assert len(seen) == 10
    assert rollouts.outputs == [seen[0], seen[1], seen[5], seen[6]]
    assert scores.tolist() == [1.0] * 4


def test_rewards_per_token_are_summed(tmp_path: Path) -> None:
    def each(outputs: list[str], **_: Any) -> list[list[float]]:
        return [[float(letter in LETTERS[:4]) for letter in output] for output in outputs]

    dense = tiny_trainer("ppo", tmp_path, rollout__min_new_tokens=6).best_of(["ab", "c"], 6, reward_fn=each)
    whole = tiny_trainer("ppo", tmp_path, rollout__min_new_tokens=6).best_of(["ab", "c"], 6)
    assert dense[0].outputs == whole[0].outputs
    assert dense[1].tolist() == whole[1].tolist()


def test_any_model_of_text_is_sampled_with_a_function_and_columns_reach_it(tmp_path: Path) -> None:
    given: list[Any] = []

    def tagged(outputs: list[str], tag: list[int], **rest: Any) -> list[float]:
        given.append((tag, sorted(rest)))
        return [float(len(output)) for output in outputs]

    trainer = tiny_trainer("sft", tmp_path)
    rollouts, scores = trainer.best_of([{"prompt": "a", "tag": 7}], 3, reward_fn=tagged)
    assert given == [([7] * 3, ["prompts", "samples", "tokenizer"])]
    assert scores.tolist() == [float(len(rollouts.outputs[0]))]
    with pytest.raises(ConfigError, match="has no reward function; give reward_fn"):
        trainer.best_of(["a"], 3)


def test_episodes_are_chosen_by_the_sum_of_their_rewards(tmp_path: Path) -> None:
    given = {"environment": Letters, "reward_fn": None}
    trainer = tiny_trainer("ppo", tmp_path, arguments=given, rollout__max_turns=3)
    rollouts, scores = trainer.best_of(["ab", "c"], 5, keep=5)
    assert rollouts.rewards is not None
    assert scores.tolist() == rollouts.rewards.sum(1).tolist()
    assert scores.view(2, 5).tolist() == [sorted(each, reverse=True) for each in scores.view(2, 5).tolist()]
    assert len({*scores.tolist()}) > 1
    observed = [turns[0]["observation"] for turns in rollouts.turns or []]
    assert [len({*observed[:5]}), len({*observed[5:]})] == [1, 1], "the episodes of a prompt have one environment"


def test_the_best_can_be_trained_on(tmp_path: Path) -> None:
    trainer = tiny_trainer("ppo", tmp_path)
    trainer.models.build()
    before = {name: value.clone() for name, value in trainer.unwrapped.state_dict().items()}
    trainer.step(*trainer.best_of(["ab", "c", "d", "e"], 4, keep=2))
    assert any(not torch.equal(value, before[name]) for name, value in trainer.unwrapped.state_dict().items())


class Chooser:
    """An observer that samples the best of three at every step."""

    def __init__(self) -> None:
        self.calls = 0

    @trainkit.hookimpl
    def on_step(self, trainer: Any) -> None:
        trainer.best_of(["ab", "c"], 3, keep=2)
        self.calls += 1


@pytest.mark.daily(name=("ppo",))
@pytest.mark.parametrize("name", ["ppo", "online_dpo"])
def test_training_is_not_affected(name: str, tmp_path: Path) -> None:
    """Law 8: the weights and the logged numbers are bit-equal, and the global generators are as they were."""
    chooser, found = Chooser(), []
    for observers in ([], [chooser]):
        run = tmp_path / str(len(observers))
        states = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
        trainer = tiny_trainer(name, run, callbacks=observers)
        trainer.learn()
        assert torch.equal(states[0], torch.get_rng_state())
        assert (states[1], states[2]) == (np.random.get_state()[1].tolist(), random.getstate())
        found.append((trainer.unwrapped.state_dict(), metric_lines(run, training=True)))
    assert chooser.calls == 6
    assert all(torch.equal(found[0][0][name], value) for name, value in found[1][0].items())
    require_same_lines(found[0][1], found[1][1], "runs with and without an observer")


def infinite(outputs: list[str], **_: Any) -> list[float]:
    return [math.inf] * len(outputs)


def too_few(outputs: list[str], **_: Any) -> list[float]:
    return [1.0] * (len(outputs) - 1)


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "n is 0": ({"n": 0}, ConfigError, r"n is 0 \(int\); give an integer of at least 1"),
    "n is no integer": ({"n": 2.0}, ConfigError, "n is 2.0 "),
    "n is a truth value": ({"n": True}, ConfigError, "n is True"),
    "keep is 0": ({"n": 3, "keep": 0}, ConfigError, r"keep is 0 \(int\); give an integer from 1 to n, which is 3"),
    "keep is above n": (
        {"n": 3, "keep": 4},
        ConfigError,
        r"keep is 4 \(int\); give an integer from 1 to n, which is 3",
    ),
    "no function": ({"n": 3, "reward_fn": 7}, ConfigError, "reward_fn should be a function; given 7 "),
    "greedy": ({"n": 3, "temperature": 0}, ConfigError, "temperature is 0, so that all 3 responses"),
    "one token": ({"n": 3, "top_k": 1}, ConfigError, "top_k is 1, so that all 3 responses"),
    "a setting": ({"n": 3, "temperatur": 1}, ConfigError, "temperatur"),
    "infinite": ({"n": 3, "reward_fn": infinite}, RewardError, "infinite .* must be finite"),
    "too few": ({"n": 3, "reward_fn": too_few}, RewardError, "too_few .* returned 2 scores for 3 samples"),
    "no prompts": ({"n": 3, "prompts": []}, DataError, "prompts is empty"),
    "a row without a prompt": ({"n": 3, "prompts": [{"tag": 1}]}, DataError, r"best_of\(\) needs prompts"),
    "not prompts": ({"n": 3, "prompts": 5}, DataError, r"best_of\(\) takes one prompt or a list"),
    "none": ({"n": 3, "prompts": None}, DataError, "prompts is empty"),
}


@pytest.fixture
def plain(tmp_path: Path) -> Any:
    return tiny_trainer("ppo", tmp_path)


@table("given, error, told", REFUSED.values())
def test_what_cannot_be_chosen_from_is_refused(
    given: dict[str, Any], error: type[Exception], told: str, plain: Any
) -> None:
    with pytest.raises(error, match=told):
        plain.best_of(**{"prompts": ["a"], **given})


def test_one_greedy_response_is_the_best_of_one(plain: Any) -> None:
    assert plain.best_of(["a"], 1, temperature=0)[0].outputs == plain.generate(["a"], temperature=0).outputs


def test_scores_that_training_drops_and_a_reward_model_are_refused(tmp_path: Path) -> None:
    trainer = tiny_trainer("ppo", tmp_path, reward__on_nonfinite="drop_row")
    nan = math.nan
    with pytest.raises(RewardError, match="the score of sample 1 is nan"):
        trainer.best_of(["a"], 3, reward_fn=lambda outputs, **_: [1.0, nan, 2.0])
    with pytest.raises(ConfigError, match=r"generates none, so best_of\(\) has no use"):
        tiny_trainer("reward", tmp_path).best_of(["a"], 2, reward_fn=rank)


# ------------------------------------------------------------------------------------------------ from the command line


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has ended, beside prompts and a reward function."""
    folder = tmp_path_factory.mktemp("run")
    tiny_trainer("ppo", folder / "ppo", train__total_steps=1).learn()
    (folder / "reward.py").write_text("from trainkit.testing.trainers import count_first_letters\n")
    (folder / "prompts.jsonl").write_text("".join(f'{{"prompt": "{p}", "n": {n}}}\n' for n, p in enumerate("abcde")))
    return folder


def written(run: Path, out: Path, *given: str, code: int = 0) -> str:
    """Return what `trainkit generate` says."""
    wanted = ["generate", str(run / "ppo"), "--prompts", str(run / "prompts.jsonl"), "--out", str(out), *given]
    result = CliRunner().invoke(app, wanted)
    assert result.exit_code == code, result.output
    return result.output


def test_the_command_writes_the_best_of_the_responses_that_it_writes_without(run: Path, tmp_path: Path) -> None:
    best, every = tmp_path / "best.jsonl", tmp_path / "all.jsonl"
    paid = ("--reward-fn", f"{run / 'reward.py'}:count_first_letters")
    written(run, best, "--best-of", "6", *paid, "--samples-per-prompt", "2", "--batch-size", "4")
    written(run, every, "--samples-per-prompt", "6")
    found, lines = ([json.loads(line) for line in out.read_text().splitlines()] for out in (best, every))
    expected = []
    for start in range(0, len(lines), 6):
        scored = [{**line, "score": count_first_letters([line["output"]])[0]} for line in lines[start : start + 6]]
        expected += sorted(scored, key=lambda line: -line["score"])[:2]
    assert found == expected


def test_a_file_of_the_best_is_continued_within_a_prompt_and_not_by_others(run: Path, tmp_path: Path) -> None:
    out, paid = tmp_path / "best.jsonl", ("--reward-fn", f"{run / 'reward.py'}:count_first_letters")
    given = ("--samples-per-prompt", "2", "--best-of", "3", *paid)
    written(run, out, *given)
    whole = out.read_text()
    out.write_text("".join(whole.splitlines(keepends=True)[:5]))
    assert "10 responses to 5 prompts, of which 5 were there" in written(run, out, *given, "--batch-size", "5")
    assert out.read_text() == whole
    changed = ("--samples-per-prompt", "2", "--best-of", "4", *paid)
    assert "begun with best_of 3, and given is 4" in written(run, out, *changed, code=1)
    assert "begun with best_of 3, and given is None" in written(run, out, "--samples-per-prompt", "2", code=1)


@pytest.mark.slow
def test_the_command_says_what_is_missing(run: Path, tmp_path: Path) -> None:
    out, paid = tmp_path / "best.jsonl", ("--reward-fn", f"{run / 'reward.py'}:count_first_letters")
    assert "give --best-of and --reward-fn, or neither" in written(run, out, "--best-of", "3", code=2)
    assert "give --best-of and --reward-fn, or neither" in written(run, out, *paid, code=2)
    too_many = ("--best-of", "3", *paid, "--samples-per-prompt", "4")
    assert "--samples-per-prompt is 4, and --best-of 3" in written(run, out, *too_many, code=2)
    greedy = ("--best-of", "3", *paid, "--temperature", "0")
    assert "temperature is 0, so that all 3 responses" in written(run, out, *greedy, code=2)
