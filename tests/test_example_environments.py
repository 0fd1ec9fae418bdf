"""The environments of the example: what they answer and pay, what their SFT shows, and that all stages run."""

from __future__ import annotations

import json
import random
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner

from tables import table
from trainkit import cli
from trainkit.data.chat import Chat
from trainkit.data.formats import sample_rows
from trainkit.data.pipeline import encode_sample
from trainkit.examples import find_examples
from trainkit.plugins import load_file
from trainkit.rollouts import Turn
from trainkit.testing import tiny_gpt2
from trainkit.testing.trainers import tiny_trainer

FOLDER = find_examples()["environments"].parent


of_reasoning_gym = pytest.mark.needs("reasoning_gym")
"""An extra, which `make test-all` installs."""


def load(name: str) -> ModuleType:
    return load_file(FOLDER / f"{name}.py")


@pytest.fixture(autouse=True)
def _same_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])


# ---------------------------------------------------------------------------------------------------------- guess


def test_guessing_in_the_middle_finds_every_number_in_four_guesses() -> None:
    guess = load("guess")
    for secret in guess.NUMBERS:
        game = guess.Guess({"secret": secret})
        turns = [game.step(str(game.possible[len(game.possible) // 2]))]
        while not turns[-1].done:
            turns.append(game.step(str(game.possible[len(game.possible) // 2])))
        assert len(turns) <= guess.GUESSES
        assert [turn.reward for turn in turns] == [0.0] * (len(turns) - 1) + [1.0]


def test_a_guess_that_an_answer_has_excluded_costs_and_what_is_no_number_ends_the_game() -> None:
    game = load("guess").Guess({"secret": 5})
    assert game.step("8") == Turn("lower\n")
    assert game.step("9") == Turn("lower\n", -0.25)
    assert game.step("3") == Turn("higher\n")
    assert list(game.possible) == [4, 5, 6, 7]
    assert game.step("1") == Turn("higher\n", -0.25)
    assert list(game.possible) == [4, 5, 6, 7]
    assert game.step("g") == Turn(reward=-1.0, done=True)


def test_the_games_that_are_shown_ignore_no_answer_and_have_a_token_for_each_word() -> None:
    guess = load("guess")
    tokenizer, draw = guess.tokenizer(), random.Random(0)
    for _ in range(100):
        prompt, *turns = guess.shown(draw)
        assert prompt == guess.PROMPT
        possible = set(guess.NUMBERS)
        for output, observation in zip(turns[::2], turns[1::2], strict=False):
            number = int(output)
            assert number in possible
            possible = {n for n in possible if (n > number if observation == "higher\n" else n < number)}
        assert {len(tokenizer(turn)["input_ids"]) for turn in turns} == {2}, "a word and the end of the line"


# ----------------------------------------------------------------------------------------------------- calculator


@table("output, result", [
        ("calc(12+34)", "46"), ("calc(12*34)", "408"), ("calc(12-34)", None), ("calc(12+34", None), ("46", None),
        ("calc(1+2)3", None), ("", None),
    ])  # fmt: skip
def test_the_calculator_computes_calls_and_nothing_else(output: str, result: str | None) -> None:
    assert load("calculator").calculate(output) == result


def test_a_call_is_answered_by_a_message_of_the_tool_and_the_answer_is_paid() -> None:
    calculator = load("calculator")
    draw = random.Random(3)
    asked, call, answer = calculator.question(draw)
    made = calculator.Calculator({"episode_seed": 3})
    assert made.reset() == [{"role": "user", "content": asked}]
    assert made.step(call) == Turn([{"role": "tool", "content": answer}])
    assert made.step("calc(10+10)") == Turn([{"role": "tool", "content": "20"}])
    assert made.step(answer) == Turn(reward=1.0, done=True)
    assert calculator.Calculator({"episode_seed": 3}).step(f"{answer}0") == Turn(reward=0.0, done=True)
    samples = calculator.sft(2)["samples"]
    share = sum(len(messages) == 4 for messages in samples) / len(samples)
    assert abs(share - calculator.WITH_TOOL) < 0.05, "most conversations that are shown do without the tool"
    assert samples != calculator.sft(3)["samples"]
    assert samples == calculator.sft(2)["samples"]


def test_conversations_are_shown_with_the_tokens_with_which_they_are_played(tmp_path: Path) -> None:
    """An episode is the rendering of its messages, and SFT reads the same messages as the same text."""
    calculator = load("calculator")
    tokenizer = calculator.tokenizer()
    called = [[{"role": "user", "content": "12 plus 34"}, *_said("calc(12+34)", "46")]]
    ids, chosen = encode_sample(tokenizer, sample_rows(called, None, tokenizer)[0], None)
    text = "user: 12 plus 34\nassistant: calc(12+34)<eos>\ntool: 46\nassistant: 46<eos>"
    assert tokenizer.decode(ids) == text
    outputs = [i for i, output in zip(ids, chosen, strict=True) if output]
    assert tokenizer.decode(outputs) == "calc(12+34)<eos>46<eos>"
    assert text.startswith(Chat(tokenizer, {}, "the prompt").prompt(called[0][:1]))

    given = {"environment": calculator.Calculator, "reward_fn": None, "tokenizer": tokenizer, "prompts": [{}] * 4}
    model = tiny_gpt2(len(tokenizer), n_positions=128)
    played = tiny_trainer("ppo", tmp_path, model=model, arguments=given, rollout__max_turns=2).play([{}] * 4)
    for prompt in played.prompts:
        assert re.fullmatch(r"user: \d\d (plus|times) \d\d\nassistant: ", prompt)
    assert len(set(played.prompts)) == 4, "a question for every episode"


def _said(call: str, result: str) -> list[dict[str, str]]:
    return [
        {"role": "assistant", "content": call},
        {"role": "tool", "content": result},
        {"role": "assistant", "content": result},
    ]


# ------------------------------------------------------------------------------------------------------ reasoning


@pytest.mark.slow
@of_reasoning_gym
def test_a_second_attempt_is_paid_half_of_what_it_improves() -> None:
    reasoning = load("reasoning")
    row = {"entry": {"question": "Spell this word backward (example: sun -> nus): tach", "answer": "hcat"}}
    made = reasoning.Reasoning(row)
    assert made.reset() == "Spell this word backward (example: sun -> nus): tach\n"
    assert made.step("hcut") == Turn(reasoning.AGAIN, 0.75, done=False)
    assert made.step("hcat") == Turn(reasoning.AGAIN, 0.125, done=True)
    again = reasoning.Reasoning(row)
    assert again.step("hcut").reward == 0.75
    assert again.step("hxxx") == Turn(reasoning.AGAIN, 0.0, done=False)
    assert reasoning.Reasoning(row).step("hcat") == Turn(reasoning.AGAIN, 1.0, done=True)


@pytest.mark.slow
@of_reasoning_gym
def test_held_out_questions_are_neither_shown_nor_asked() -> None:
    reasoning = load("reasoning")
    parts = [{row["entry"]["question"] for row in rows} for rows in reasoning.split(1)]
    assert [len(part) for part in parts[:2]] == [reasoning.HELD_OUT, reasoning.SHOWN]
    assert sum(map(len, parts)) == len(set.union(*parts))


@pytest.mark.slow
@of_reasoning_gym
def test_attempts_are_counted_by_their_scores() -> None:
    reasoning = load("reasoning")
    entry = {"question": "", "answer": "hcat"}
    episodes = [[{"output": "hcat"}], [{"output": "hcut"}, {"output": "hcat"}], [{"output": "hcut"}, {"output": "h"}]]
    found = reasoning.metric(turns=episodes, entry=[entry] * 3)
    assert found == {"first right": [1.0, 0.0, 0.0], "either right": [1.0, 1.0, 0.0]}


def test_without_reasoning_gym_the_example_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    for name in [name for name, module in sys.modules.items() if _is_reasoning(module)]:
        monkeypatch.delitem(sys.modules, name)
    result = CliRunner().invoke(cli.app, ["examples", "run", "environments", "--game", "reasoning"])
    assert result.exit_code == 1
    assert "pip install 'trainkit-rl[reasoning]'" in " ".join(result.stderr.split())


def _is_reasoning(module: Any) -> bool:
    return getattr(module, "__file__", None) == str(FOLDER / "reasoning.py")


# ------------------------------------------------------------------------------------------------------ all stages


@pytest.mark.slow
@pytest.mark.parametrize(
    ("game", "metric"),
    [("guess", "won"), ("calculator", "tool"), pytest.param("reasoning", "first right", marks=of_reasoning_gym)],
)
def test_every_game_runs_both_stages_and_reports_what_was_measured(game: str, metric: str, tmp_path: Path) -> None:
    few = ["--steps", "2", "--sft-epochs", "1", "--run-dir", str(tmp_path)]
    result = CliRunner().invoke(cli.app, ["examples", "run", "environments", "--game", game, *few])
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in (tmp_path / f"{game}_ppo" / "metrics.jsonl").read_text().splitlines()]
    found = [line[f"eval/{metric}"] for line in lines if f"eval/{metric}" in line]
    row = next(line for line in result.stdout.splitlines() if line.startswith(f"│ {metric}"))
    assert row.replace("│", " ").split()[-2:] == [f"{found[0]:.3f}", f"{found[-1]:.3f}"]
    assert any(line.get("environment/turns", 0) > 1 for line in lines)
    assert (tmp_path / f"{game}_ppo" / "model" / "model.safetensors").is_file()
