"""Environments: episodes of several turns, whose observations are attended to and never trained on."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import trainkit
from tables import table
from trainkit.config import EnvironmentConfig
from trainkit.data import PLAIN_TEMPLATE
from trainkit.errors import ConfigError, DataError, EpisodeError, RewardError
from trainkit.rollouts import Environment, Turn, assemble
from trainkit.rollouts.environments import call_all
from trainkit.testing import EOS, character_tokenizer, tiny_t5
from trainkit.testing.trainers import LETTERS, Letters, tiny_trainer

ONLINE = ["ppo", "rloo", "grpo", "rft", "online_dpo", "best_of_k", "xpo"]
every_online = pytest.mark.parametrize("name", ONLINE)


def player(place: Path, environment: Any = Letters, name: str = "ppo", **changes: Any) -> Any:
    arguments = {"environment": environment, "reward_fn": None, **changes.pop("arguments", {})}
    return tiny_trainer(name, place, arguments=arguments, **changes)


def fixed(*answers: Any, prompt: Any = None) -> Any:
    """An environment that gives these answers, and is done after the last."""

    class Fixed:
        def __init__(self, row: Any) -> None:
            self.left = list(answers)

        def reset(self) -> Any:
            return prompt

        def step(self, output: str) -> Any:
            answer = self.left.pop(0)
            return answer(output) if callable(answer) else answer

    return Fixed


# ------------------------------------------------------------------------------------------------- what is trained


def test_observations_are_appended_as_ids_and_only_outputs_are_in_the_response_mask(tmp_path: Path) -> None:
    trainer = player(tmp_path, fixed(Turn("hg", 0.5), Turn("f", 1.0), Turn(reward=2.0, done=True)))
    found = trainer.play(["ab", "c"])
    for row in range(2):
        mask, ids = found.sequences.response_mask[row], found.sequences.input_ids[row]
        ids = ids[found.sequences.attention_mask[row]]
        turns = found.turns[row]
        outputs, seen = [turn["output"] for turn in turns], [turn["observation"] for turn in turns]
        assert seen == ["hg", "f", ""]
        text = trainer.tokenizer.decode(ids, skip_special_tokens=True)
        assert text == found.samples[row] == ["ab", "c"][row] + outputs[0] + "hg" + outputs[1] + "f" + outputs[2]
        assert trainer.tokenizer.decode(ids[mask[: len(ids)]], skip_special_tokens=True) == "".join(outputs)
        assert found.queries[row].tolist() == trainer.text.encode(["ab", "c"][row])
        paid = found.rewards[row]
        ends = (mask & ~torch.cat([mask[1:], torch.zeros(1, dtype=torch.bool)])).nonzero().flatten()
        assert paid[ends].tolist() == [0.5, 1.0, 2.0], "each at the last token of the output that it rewards"
        assert float(paid.sum()) == 3.5
    assert found.terminated.tolist() == [True, True]


def test_responses_that_are_no_episodes_have_no_score(tmp_path: Path) -> None:
    trainer = player(tmp_path)
    with pytest.raises(DataError, match=r"no episodes of the environment; give those of play\(\)"):
        trainer.score(trainer.generate(["a"], max_new_tokens=3))


def test_sampling_episodes_makes_the_policy(tmp_path: Path) -> None:
    """As sampling responses does: `trainer.sample` may be the first thing that is asked of a trainer."""
    trainer = tiny_trainer("rloo", tmp_path, arguments={"environment": Letters, "reward_fn": None})
    assert trainer.sample([{"prompt": "a"}]).turns is not None


def test_what_the_sampler_says_of_an_episode_is_what_the_policy_says(tmp_path: Path) -> None:
    trainer = player(tmp_path, rollout__temperature=0.7)
    found = trainer.play(["ab", "c", "def"])
    with torch.no_grad():
        whole = trainer.unwrapped(found.sequences, entropy=True)
    torch.testing.assert_close(found.logprobs, whole.logprobs, rtol=0, atol=1e-5)
    torch.testing.assert_close(found.entropy, whole.entropy, rtol=0, atol=1e-5)
    values = trainer.unwrapped.value_head(found.hidden[found.sequences.response_mask])
    torch.testing.assert_close(found.sequences.place(values), whole.values, rtol=0, atol=1e-5)


@pytest.mark.daily(name=("ppo",))
@every_online
def test_every_online_algorithm_learns_from_episodes_and_resumes_exactly(name: str, tmp_path: Path) -> None:
    changes = {"train__save_interval": 1, "train__batch_size": 4}
    straight = player(tmp_path / "a", name=name, **changes)
    straight.models.build()
    start = {key: tensor.clone() for key, tensor in straight.unwrapped.state_dict().items()}
    straight.learn()
    player(tmp_path / "b", name=name, **changes, train__total_steps=3).learn()
    resumed = player(tmp_path / "b", name=name, **changes, train__resume="auto")
    resumed.learn()
    for key, tensor in straight.unwrapped.state_dict().items():
        assert torch.equal(tensor, resumed.unwrapped.state_dict()[key]), key
    assert any(not torch.equal(tensor, start[key]) for key, tensor in straight.unwrapped.state_dict().items())


@pytest.mark.daily(name=("ppo",))
@every_online
def test_a_run_that_is_stopped_in_the_middle_of_an_episode_resumes_exactly(name: str, tmp_path: Path) -> None:
    class Stops(Letters):
        left: int | None = None
        trainer: Any = None

        def step(self, output: str) -> Turn:
            if Stops.left is not None:
                Stops.left -= 1
                if Stops.left == 0:
                    Stops.trainer.run.stop.asked = signal.SIGTERM
            return super().step(output)

    changes: dict[str, Any] = {"train__save_interval": 2, "rollout__batch_size": 4, "environment__workers": 1}
    changes |= {"method__ppo_epochs": 1} if name == "ppo" else {}
    straight = player(tmp_path / "a", Stops, name, **changes)
    straight.learn()
    stopped = player(tmp_path / "b", Stops, name, **changes)
    Stops.left, Stops.trainer = (86 if name == "xpo" else 43), stopped  # it plays each episode with the reference, too
    with pytest.raises(SystemExit):
        stopped.learn()
    assert 0 < stopped.progress.step < 6
    Stops.left = None
    resumed = player(tmp_path / "b", Stops, name, **changes, train__resume="auto")
    resumed.learn()
    for key, tensor in straight.unwrapped.state_dict().items():
        assert torch.equal(tensor, resumed.unwrapped.state_dict()[key]), key


def test_rewards_per_token_are_those_of_the_outputs_tokens(tmp_path: Path) -> None:
    def reward(outputs: list[str], turns: list[Any], **_: Any) -> list[list[float]]:
        return [[float(at) for at in range(len("".join(turn["output"] for turn in episode)))] for episode in turns]

    trainer = player(tmp_path, fixed(Turn("hg"), Turn(done=True)), arguments={"reward_fn": reward})
    found = trainer.play(["ab", "c"])
    scores = trainer.score(found)
    for row in range(2):
        paid = scores[row][found.sequences.response_mask[row]].tolist()
        letters = len("".join(turn["output"] for turn in found.turns[row]))
        assert paid[:letters] == [float(at) for at in range(letters)]
        assert float(scores[row].sum()) == sum(range(letters)), "none on the environment's tokens"


def test_the_pool_of_rft_keeps_which_tokens_were_the_environments(tmp_path: Path) -> None:
    trainer = player(tmp_path, fixed(Turn("hg"), Turn(reward=1.0, done=True)), name="rft")
    trainer.collect()
    kept = trainer.store.experience
    holes = kept.attention_mask & ~kept.response_mask & ~kept.prompt_mask
    assert holes.sum(1).tolist() == [2] * len(kept)
    assert kept.input_ids[holes].tolist() == trainer.tokenizer("hg")["input_ids"] * len(kept)


def test_ppo_gives_a_turn_its_reward_and_later_turns_none_of_it(tmp_path: Path) -> None:
    """With γ = λ = 1, values 0 and no KL penalty, the return at a token is the sum of the rewards from its turn on."""
    trainer = player(
        tmp_path, fixed(Turn("h", 0.5), Turn("g", 0.25), Turn(reward=2.0, done=True)), method__init_kl_coef=0.0,
        method__lam=1.0, method__gamma=1.0, method__cliprange_reward=None,
    )  # fmt: skip
    trainer.collect()
    x = trainer.store.experience
    for row in range(len(x)):
        returns = x.returns[row][x.sequences.response_mask[row]]
        assert sorted(set(returns.tolist()), reverse=True) == [2.75, 2.25, 2.0]
        assert returns.tolist() == sorted(returns.tolist(), reverse=True)


@pytest.mark.daily(name=("rloo",))
@every_online
def test_reward_functions_add_to_what_the_environment_pays_and_see_the_turns(name: str, tmp_path: Path) -> None:
    seen: list[Any] = []

    def reward(outputs: list[str], turns: list[Any], **_: Any) -> list[float]:
        seen.extend(turns)
        return [10.0] * len(outputs)

    trainer = player(tmp_path, name=name, arguments={"reward_fn": reward})
    found = trainer.play(["ab", "c"])
    scores = trainer.score(found)
    assert seen == found.turns
    paid = torch.tensor([sum(turn["reward"] for turn in turns) for turns in found.turns])
    torch.testing.assert_close(scores.sum(1), paid + 10)
    trainer.learn()


# --------------------------------------------------------------------------------------------------------- episodes


def test_an_episode_is_truncated_at_the_limit_of_turns_and_its_algorithm_hears_it(tmp_path: Path) -> None:
    trainer = player(tmp_path, fixed(*[Turn("h", 1.0)] * 9), rollout__max_turns=3)
    found = trainer.play(["ab"])
    assert [turn["observation"] for turn in found.turns[0]] == ["h", "h", "h"]
    assert found.terminated.tolist() == [False]
    assert float(found.rewards.sum()) == 3.0
    last = found.sequences.attention_mask[0].nonzero()[-1]
    assert bool(found.sequences.response_mask[0, last]), "the last observation is not read, and is not there"


@table("limit", ["rollout__max_episode_tokens", "train__seq_length"])
def test_an_episode_is_truncated_at_the_limit_of_tokens(limit: str, tmp_path: Path) -> None:
    trainer = player(tmp_path, fixed(*[Turn("hhh")] * 99), rollout__max_turns=99, **{limit: 17})
    found = trainer.play(["ab", "defg"])
    assert not found.terminated.any()
    lengths = found.sequences.attention_mask.sum(1)
    assert bool((lengths <= 17).all())
    assert bool((lengths >= 17 - 3).all()), "it goes on as long as an observation and an output fit"


def test_the_environment_may_give_the_prompt_and_then_rows_need_none(tmp_path: Path) -> None:
    class Told:
        def __init__(self, row: Any) -> None:
            self.word = row.get("word", "a")

        def reset(self) -> str:
            return self.word

        def step(self, output: str) -> Turn:
            return Turn(reward=float(len(output)), done=True)

    trainer = player(tmp_path, Told)
    trainer.add_prompt_pipeline([{"word": "bc"}, {"word": "d"}, {}])
    trainer.add_eval_pipeline([{"word": "bc"}])
    trainer.learn()
    played = trainer.collector.collection.rollouts
    assert {row["prompt"] for rollouts in played for row in rollouts.rows} == {"bc", "d", "a"}
    assert trainer.default_prompts() == [{}] * 16


def test_an_environment_without_reset_begins_with_the_prompt_of_the_row(tmp_path: Path) -> None:
    class Short(Environment):
        def __init__(self, row: Any) -> None: ...

        def step(self, output: str) -> Turn:
            return Turn(done=True)

    assert player(tmp_path, Short).play(["ab"]).prompts == ["ab"]
    assert player(tmp_path, lambda row: Short(row)).play(["ab"]).prompts == ["ab"]


def test_every_episode_has_a_seed_of_its_own_and_can_be_replayed(tmp_path: Path) -> None:
    seeds: list[int] = []

    class Seeded(Letters):
        def __init__(self, row: Any) -> None:
            super().__init__(row)
            seeds.append(row["episode_seed"])

    runs = []
    for size in (8, 3):
        trainer = player(tmp_path / str(size), Seeded, name="rloo", rollout__batch_size=size)
        trainer.collect()
        runs.append([turns for rollouts in trainer.collector.collection.rollouts for turns in rollouts.turns])
    assert runs[0] == runs[1], "whatever else is played at the same time"
    assert len(seeds) == 2 * 16
    assert len(set(seeds)) == 4, "the same for the four episodes of a group, which are compared"
    rows = [{"prompt": "ab", "seed": 3}]
    again = [player(tmp_path / "x", Seeded).play(rows).turns for _ in range(2)]
    assert again[0] == again[1]


def test_the_episodes_of_a_group_are_about_one_task(tmp_path: Path) -> None:
    class Drawn(Letters):
        def reset(self) -> str:
            return self.draws.choice(LETTERS)

    class Unseeded(Letters):
        def reset(self) -> str:
            return random.choice(LETTERS)

    trainer = player(tmp_path / "a", Drawn, name="rloo")
    trainer.collect()
    prompts = [prompt for rollouts in trainer.collector.collection.rollouts for prompt in rollouts.prompts]
    assert all(prompts[i : i + 4] == [prompts[i]] * 4 for i in range(0, 16, 4))
    assert len(set(prompts)) > 1
    with pytest.raises(
        EpisodeError, match=r"reset\(\) returned another prompt than in another episode of the same row"
    ):
        player(tmp_path / "b", Unseeded, name="rloo").collect()


def test_coroutines_run_at_the_same_time(tmp_path: Path) -> None:
    running, most = 0, [0]

    class Remote:
        def __init__(self, row: Any) -> None: ...

        async def reset(self) -> str:
            await asyncio.sleep(0)
            return "ab"

        async def step(self, output: str) -> Turn:
            nonlocal running
            running += 1
            most[0] = max(most[0], running)
            await asyncio.sleep(0.05)
            running -= 1
            return Turn(reward=1.0, done=True)

    found = player(tmp_path, Remote, environment__workers=3).play([{}] * 7)
    assert float(found.rewards.sum()) == 7.0
    assert most == [3], "as many as environment.workers"

    async def within_a_loop() -> Any:
        return player(tmp_path, Remote).play([{}])

    assert asyncio.run(within_a_loop()).prompts == ["ab"], "as in a notebook"


# ------------------------------------------------------------------------------------------------------ conversations


def chatty(place: Path, environment: Any, template: str = PLAIN_TEMPLATE, **changes: Any) -> Any:
    letters = "abcdefghijklmnopqrstuvwxyz #\n!<>/"
    tokenizer = character_tokenizer(letters)
    tokenizer.chat_template = template
    prompts = [
        [{"role": "user", "content": "hi"}],
        [{"role": "system", "content": "be"}, {"role": "user", "content": "a"}],
    ]
    arguments = {"environment": environment, "reward_fn": None, "tokenizer": tokenizer, "prompts": prompts}
    arguments |= changes.pop("arguments", {})
    model = {
        "model_type": "gpt2",
        "vocab_size": len(tokenizer),
        "n_positions": 256,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 2,
    }
    return tiny_trainer("ppo", place, model=model, arguments=arguments, **changes)


def test_a_conversation_has_the_templates_text_between_turns_and_the_sampled_ids_as_they_were(tmp_path: Path) -> None:
    answers = [Turn([{"role": "tool", "content": "it is b"}]), Turn("go on"), Turn(done=True)]
    trainer = chatty(tmp_path, fixed(*answers))
    found = trainer.play(trainer.pipeline.rows)
    for row, prompt in enumerate(found.prompts):
        sequences, mask = found.sequences, found.sequences.response_mask[row]
        ids = sequences.input_ids[row][sequences.attention_mask[row]].tolist()
        outputs = [turn["output"] for turn in found.turns[row]]
        drawn = found.responses[row].tolist()
        text = trainer.tokenizer.decode(ids)
        assert text.startswith(prompt)
        ended = [f"{output}{EOS}" for output in outputs]
        between = f"\n\n### tool\nit is b\n\n### assistant\n{ended[1]}\n\n### user\ngo on\n\n### assistant\n"
        assert text.startswith(f"{prompt}{ended[0]}{between}{outputs[2]}")
        assert trainer.tokenizer.decode([i for i, keep in zip(ids, mask.tolist(), strict=False) if keep]) == (
            trainer.tokenizer.decode(drawn)
        )
        assert text.count(EOS) in (2, 3), "one for each turn: sampled, or the template's own after a truncated one"


def test_a_stop_token_that_the_template_writes_too_is_in_the_episode_once(tmp_path: Path) -> None:
    template = PLAIN_TEMPLATE.replace("{{ eos_token }}", "")
    assert template != PLAIN_TEMPLATE
    newline, other = character_tokenizer("abcdefghijklmnopqrstuvwxyz #\n!<>/")("\na")["input_ids"]
    mask = torch.zeros(35, dtype=torch.bool)
    mask[[newline, other]] = True
    changes = {"rollout__stop_token_ids": [newline], "rollout__max_new_tokens": 16, "arguments": {"logit_mask": mask}}
    trainer = chatty(tmp_path, fixed(Turn("go on"), Turn(done=True)), template, **changes)
    found = trainer.play(trainer.pipeline.rows)
    for row, turns in enumerate(found.turns):
        first = turns[0]["output"]
        assert first.endswith("\n")
        ids = found.sequences.input_ids[row][found.sequences.attention_mask[row]]
        assert trainer.tokenizer.decode(ids).startswith(
            f"{found.prompts[row]}{first}\n### user\ngo on\n\n### assistant\n"
        )


def test_an_output_may_continue_a_message_of_the_assistant(tmp_path: Path) -> None:
    trainer = chatty(tmp_path, fixed(Turn("go on"), Turn(done=True)))
    rows = [{"prompt": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "so"}]}]
    found = trainer.play(rows)
    assert found.prompts == ["### user\nhi\n\n### assistant\nso"]
    ids = found.sequences.input_ids[0][found.sequences.attention_mask[0]]
    first = found.turns[0][0]["output"]
    between = f"{EOS}\n\n### user\ngo on\n\n### assistant\n"
    assert trainer.tokenizer.decode(ids).startswith(f"{found.prompts[0]}{first}{between}")


def test_tokens_and_columns_of_a_plugins_sampler_stay_in_the_episode(tmp_path: Path) -> None:
    class Tool:
        @trainkit.hookimpl
        def make_sampler(self, trainer: Any) -> Any:
            def sampler(rows: Any, queries: Any, settings: Any, seeds: Any, purpose: str) -> Any:
                ids = trainer.tokenizer("bhc")["input_ids"]
                return assemble(
                    trainer.tokenizer,
                    [{**row, "calls": row.get("calls", 0) + 1} for row in rows],
                    queries,
                    [ids] * len(rows),
                    sampled=[[True, False, True]] * len(rows),
                    terminated=torch.ones(len(rows), dtype=torch.bool),
                    logprobs=None,
                    stops=[],
                    skip_special_tokens=True,
                )

            return sampler

    trainer = player(tmp_path, fixed(Turn("g"), Turn(done=True)), callbacks=[Tool()])
    found = trainer.play(["ab"])
    assert found.outputs == ["bhcgbhc"]
    assert trainer.tokenizer.decode(found.responses[0]) == "bcbc"
    assert found.columns["calls"] == [2]


REWRITING = PLAIN_TEMPLATE.replace(
    "{{ message['content'] }}{{ eos_token }}",
    "{{ message['content'].split('</think>')[-1] if not loop.last else message['content'] }}{{ eos_token }}",
)


NO_SYSTEM = PLAIN_TEMPLATE.replace("in messages %}", "in messages if message.role != 'system' %}", 1)
UNPROMPTED = PLAIN_TEMPLATE.replace("add_generation_prompt", "false")


@table(
    "template, said",
    [
        (REWRITING, r"prompt 0, message 1 \(a trial answer .*think.*renders what came before it diff"),
        (NO_SYSTEM, r"prompt 1, message 0: the chat template does not render .* 'system' \('be'"),
        (UNPROMPTED, r"'### assistant.*before an answer, and not at the end of a .*add_generation_p"),
    ],
)
def test_a_template_that_episodes_cannot_use_is_refused_at_construction(
    template: str, said: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=said):
        chatty(tmp_path, Letters, template)


FAILING = {"environment__on_error": "fail_episode"}
OF_TOOLS = PLAIN_TEMPLATE.replace(
    "{% for message in messages %}", "{% for message in messages if message.role != 'tool' %}"
)


def test_an_observation_that_the_template_does_not_render_is_an_error(tmp_path: Path) -> None:
    trainer = chatty(tmp_path, fixed(Turn([{"role": "tool", "content": "two"}]), Turn(done=True)), OF_TOOLS)
    said = (
        r"Fixed, prompt 0 \(prompt .*\), turn 1: the chat template does not render the message of the role 'tool' "
        r"\('two' \(str\)\); use a template that supports the role, or another role, such as 'user'"
    )
    for _ in range(2):
        with pytest.raises(EpisodeError, match=said):
            trainer.play()
    lenient = chatty(tmp_path, fixed(Turn([{"role": "tool", "content": "two"}])), OF_TOOLS, **FAILING)
    assert lenient.play().failed.all(), "not the first alone"
    good = chatty(tmp_path, fixed(Turn([{"role": "user", "content": "two"}]), Turn(done=True)), OF_TOOLS)
    assert good.play().terminated.all()


def test_whether_the_template_renders_a_role_is_tried_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trainkit.rollouts import episodes

    tried: list[str] = []
    honest = episodes._is_ignored

    def noted(chat: Any, messages: Any, index: int) -> bool:
        tried.append(messages[index]["role"])
        return honest(chat, messages, index)

    monkeypatch.setattr(episodes, "_is_ignored", noted)
    observation = [{"role": "tool", "content": "two"}, {"role": "user", "content": "ok"}]
    trainer = chatty(tmp_path, fixed(Turn(observation), Turn(observation), Turn(done=True)))
    assert tried == ["user", "system", "user"], "the messages of the two kinds of prompts"
    tried.clear()
    for _ in range(2):
        trainer.play()
    assert tried == ["tool", "user"]


WRONG_MESSAGES = {
    "content None": ({"role": "tool", "content": None}, r"of the role 'tool' with the content None"),
    "content of a number": ({"role": "tool", "content": 2}, r"with the content 2 \(int\); the content should be text"),
    "content in parts": ({"role": "user", "content": [{"type": "text"}]}, "the content should be text"),
    "no role": ({"content": "a"}, "message 2 should be a dict with 'role' and 'content'"),
    "the model's role": (
        {"role": "assistant", "content": "a"},
        "a message of the role 'assistant', which is that of the model's outputs; use 'user' or 'tool'",
    ),
}


@table("message, said", WRONG_MESSAGES.values())
def test_an_observation_of_wrong_messages_is_a_fault(message: Any, said: str, tmp_path: Path) -> None:
    trainer = chatty(tmp_path, fixed(Turn([message])))
    with pytest.raises(EpisodeError, match=f"turn 1: .*{said}"):
        trainer.play(trainer.pipeline.rows[:1])
    lenient = chatty(tmp_path, fixed(Turn([message])), environment__on_error="fail_episode")
    assert lenient.play().failed.all()


# ------------------------------------------------------------------------------------------------------------- faults


def raising(_: str) -> Any:
    raise OSError("no server")


def _stop(_: str) -> Any:
    raise StopIteration


FAULTS = {
    "raises": (
        fixed(raising),
        r"Fixed, prompt 1 \(prompt 'c', episode_seed \d+\), turn 1: step\(output\) raised OSError",
    ),
    "no turn": (fixed("text"), r"step\(output\) returned 'text' \(str\); return Turn\(observation, reward, done\)"),
    "a reward of text": (fixed(Turn("a", "1")), r"the reward of its Turn is '1' \(str\); it should be a finite number"),  # type: ignore[arg-type]
    "a reward that is not finite": (fixed(Turn("a", float("nan"))), r"the reward of its Turn is nan"),
    "done that is no bool": (fixed(Turn("a", 0.0, "no")), r"done of its Turn is 'no' \(str\)"),  # type: ignore[arg-type]
    "an empty observation": (
        fixed(Turn("")),
        r"the observation of its Turn is '' \(str\); unless the episode is done, it should be text, or a list of mess",
    ),
    "a long observation": (
        fixed(Turn("a" * 90)),
        r"its observation has 90 tokens, and an episode may have 64; shorten",
    ),
    "the class Turn": (fixed(lambda _: Turn), r"step\(output\) returned <class .*Turn'> \(type\); return Turn\("),
    "an observation that is a message": (
        fixed(Turn({"role": "user", "content": "a"})),
        r"a list of messages, which are",
    ),  # type: ignore[arg-type]
    "an observation of strings": (fixed(Turn(["a"])), r"a list of messages, which are dicts with 'role' and 'content'"),  # type: ignore[list-item]
    "no text": (fixed(_stop), r"raised StopIteration$"),
    "messages after text": (
        fixed(Turn([{"role": "user", "content": "a"}])),
        "its observation is messages, and its prompt is text",
    ),
    "not of the vocabulary": (fixed(Turn("zzz")), r"turn 1: its observation 'zzz' \(str\) cannot be encoded"),
    "turn 2": (fixed(Turn("a"), raising), r"turn 2: step\(output\) raised OSError: no server"),
    "a turn at reset": (
        fixed(prompt=Turn(done=True)),
        r"reset\(\) returned a Turn; an episode cannot be done at reset",
    ),
    "no turn before the first output": (fixed(prompt=5), r"Fixed, prompt 0 \([^)]*\): reset\(\) returned 5"),
    "no text at reset": (fixed(prompt=5), r"reset\(\) returned 5 \(int\); return text, or a list of messages"),
    "nothing with step": (
        lambda row: object(),
        r"<lambda>, prompt 0 .*has no method step; write step\(output\) -> Turn",
    ),
}


@table("environment, said", FAULTS.values())
def test_a_fault_names_class_row_and_turn(environment: Any, said: str, tmp_path: Path) -> None:
    good = Letters

    def one_is_bad(row: Any) -> Any:
        return environment(row) if row.get("prompt") != "ab" or "prompt 1" not in said else good(row)

    one_is_bad.__qualname__ = getattr(environment, "__qualname__", "x").rpartition(".")[2]
    trainer = player(tmp_path, one_is_bad if "prompt 1" in said else environment, train__seq_length=64)
    with pytest.raises(EpisodeError, match=said):
        trainer.play(["ab", "c"])


def test_a_row_without_a_prompt_needs_an_environment_that_gives_one(tmp_path: Path) -> None:
    with pytest.raises(EpisodeError, match=r"prompt 0 \(number 3.*reset\(\) returned no prompt, and the row has none"):
        player(tmp_path).play([{"number": 3}])


def raising_at(row_id: int) -> Any:
    class Picky(Letters):
        def __init__(self, row: Any) -> None:
            super().__init__(row)
            self.bad = row.get("id") == row_id

        def step(self, output: str) -> Turn:
            return raising(output) if self.bad else super().step(output)

    return Picky


def test_an_error_names_the_prompt_by_its_index_and_columns(tmp_path: Path) -> None:
    rows = [{"prompt": "ab", "id": at, "level": "x" * 60} for at in range(8)]
    said = (
        r"Picky, prompt 5 \(prompt 'ab', id 5, level 'x{38}…, episode_seed \d+\), turn 1: step\(output\) raised OSErr"
    )
    for play in ("play", "train", "evaluate"):
        trainer = player(tmp_path / play, raising_at(5), train__eval_interval=1 if play == "evaluate" else 0)
        trainer.add_prompt_pipeline(rows)
        trainer.add_eval_pipeline(rows)
        with pytest.raises(EpisodeError, match=said):
            trainer.play(rows) if play == "play" else trainer.learn()
    with pytest.raises(EpisodeError, match=r"Picky, a prompt \(prompt 'ab', seed 3, id 5, episode_seed"):
        trainer.play([{"prompt": "ab", "seed": 3, "id": 5}])
    dropping = player(tmp_path / "drop", raising_at(5), rollout__overlong_prompts="drop")
    with pytest.raises(EpisodeError, match=r"Picky, a prompt \(prompt 'ab', id 5, level"):
        dropping.play([{"prompt": "a" * 99}, *rows])
    many = [{"prompt": "ab", "id": 5, **{f"c{at}": at for at in range(9)}}]
    with pytest.raises(EpisodeError, match=r"c0 0, c1 1, c2 2, c3 3, …, episode_seed"):
        trainer.play(many)


class NoArgument(Letters):
    def __init__(self) -> None:
        super().__init__({"episode_seed": 1})


class NoConstructor:
    def step(self, output: str) -> Turn:
        return Turn(done=True)


class TwoOutputs(Letters):
    def step(self, output: str, info: Any) -> Turn:  # type: ignore[override]
        return Turn(done=True)


class NoOutput(Letters):
    def step(self) -> Turn:  # type: ignore[override]
        return Turn(done=True)


class SeededReset(Letters):
    def reset(self, seed: int) -> str:
        return "ab"


class Nothing: ...


SIGNATURES = {
    "no step": (Nothing, r"the environment .*Nothing has no method step; write step"),
    "an instance": (Letters({"episode_seed": 1}), "should be a class or function that is called with a row"),
    "a constructor without a row": (NoArgument, r"made by NoArgument\(row\), .*; write def __init__\(self, row\)"),
    "no constructor": (NoConstructor, r"made by NoConstructor\(row\), .*; write def __init__\(self, row\)"),
    "a function without a row": (lambda: Letters({}), r"<lambda>\(row\), which cannot be called so: too many"),
    "step with two outputs": (TwoOutputs, r"missing a required argument: 'info'; write def step\(self, output\)"),
    "step without output": (NoOutput, r"NoOutput: step\(output\) cannot be .*; write def step\(self, output\)"),
    "reset with a seed": (SeededReset, r"reset\(\) cannot be called so: .*'seed'; write def reset\(self\)"),
}


@table("environment, said", SIGNATURES.values())
def test_an_environment_that_cannot_be_called_is_refused_at_construction(
    environment: Any, said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=said):
        player(tmp_path, environment)


def test_static_methods_and_further_defaults_fit(tmp_path: Path) -> None:
    class Fits:
        def __init__(self, row: Any, size: int = 3) -> None: ...

        @staticmethod
        def reset() -> str:
            return "ab"

        def step(self, output: str, *more: Any, **others: Any) -> Turn:
            return Turn(done=True)

    assert player(tmp_path, Fits).play([{}]).terminated.all()


def test_what_cannot_have_an_environment_or_has_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is an encoder-decoder, which reads one prompt and writes one output"):
        player(tmp_path, model=tiny_t5(10))
    with pytest.raises(ConfigError, match="fail_reward has an effect only if on_error is 'fail_episode'"):
        player(tmp_path, environment__fail_reward=1.0)
    with pytest.raises(ConfigError, match=r"play\(\) needs an environment"):
        tiny_trainer("ppo", tmp_path).play(["a"])
    trainer = tiny_trainer("sft", tmp_path)
    with pytest.raises(ConfigError, match="'sft' learns from samples, not from the rewards of an environment"):
        type(trainer)(trainer.config, tokenizer=trainer.tokenizer, environment=Letters)
    online = tiny_trainer("rloo", tmp_path)
    single = type("Single", (type(online),), {"environments": False})  # an algorithm of responses to prompts alone
    with pytest.raises(ConfigError, match="'rloo' does not learn from environments; give a reward function"):
        single(online.config, tokenizer=online.tokenizer, environment=Letters)


def test_an_environment_of_a_function_is_checked_when_it_is_made(tmp_path: Path) -> None:
    with pytest.raises(EpisodeError, match=r"\): the environment .*NoOutput.*; write def step\(self, output\)"):
        player(tmp_path, lambda row: NoOutput(row)).play(["ab"])


BAD_STEPS = {
    "raises": raising,
    "too long": Turn("a" * 90),
    "not of the vocabulary": Turn("zzz"),
    "messages after text": Turn([{"role": "user", "content": "a"}]),
    "exits": lambda _: sys.exit(3),
}


@table("answer", BAD_STEPS.values())
def test_any_fault_of_a_step_ends_its_episode_alone(answer: Any, tmp_path: Path) -> None:
    changes = {"environment__on_error": "fail_episode", "environment__fail_reward": -1.0, "train__seq_length": 64}
    trainer = player(tmp_path, fixed(Turn("h", 0.5), answer), **changes)
    found = trainer.play(["ab", "c"])
    assert found.failed.all()
    assert not found.terminated.any()
    for turns in found.turns:
        assert [turn["reward"] for turn in turns] == [0.5, -1.0]
        assert "error" not in turns[0]
        assert turns[1]["observation"] == ""
        assert ", turn 2: " in turns[1]["error"]


def test_an_observation_that_leaves_no_room_truncates_the_episode(tmp_path: Path) -> None:
    changes = {"environment__on_error": "fail_episode", "train__seq_length": 64}
    for length, failed in ((62, False), (64, False), (65, True)):
        found = player(tmp_path, fixed(Turn("a" * length)), **changes).play(["ab"])
        assert found.failed.tolist() == [failed]
        assert not found.terminated.any()
        assert found.sequences.input_ids.size(1) < 62, "the observation is not read"


def test_the_first_failure_is_logged_and_every_one_is_recorded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    changes = {"environment__on_error": "fail_episode", "train__eval_interval": 3}
    trainer = player(tmp_path, raising_at(1), **changes)
    rows = [{"prompt": "ab", "id": 0}, {"prompt": "c", "id": 1}]
    trainer.add_prompt_pipeline(rows)
    trainer.add_eval_pipeline(rows)
    trainer.learn()
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(told) == 1, "once"
    assert "Picky, prompt 1 (prompt 'c', id 1, episode_seed" in told[0]
    assert "step(output) raised OSError: no server. The episode ends with the reward 0" in told[0]
    lines = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    for line in lines:
        errors = [turn["error"] for turn in line["episode"] if "error" in turn]
        assert len(errors) == (line["prompt"] == "c")
        assert all("raised OSError: no server" in error for error in errors)
    assert {line["kind"] for line in lines} == {"evaluation", "rollout"}


def test_a_collection_of_failures_is_a_warning_that_cannot_control_the_terminal(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def quoting(output: str) -> Any:
        raise ValueError(f"\x1b]0;title\x07 {output}\n\x1b[31m")

    trainer = player(tmp_path, fixed(quoting), environment__on_error="fail_episode")
    trainer.collect()
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(told) == 3
    assert "all responses have equal scores" in told[2]
    assert told[1].startswith("step 0: all 16 episodes of the collection failed: fixed.<locals>.Fixed, prompt 0 (")
    assert all("ValueError" in line and line.isprintable() for line in told[:2]), "it cannot control the terminal"


def interrupting(_: str) -> Any:
    raise KeyboardInterrupt


@table("on_error", ["raise", "fail_episode"])
@table("kind", ["plain", "async"])
def test_an_interrupt_stops_the_run_and_an_exit_is_a_failure(kind: str, on_error: str, tmp_path: Path) -> None:
    def made(fault: Any) -> Any:
        class Async(Letters):
            async def step(self, output: str) -> Turn:  # type: ignore[override]
                await asyncio.sleep(0)
                return fault(output) if self.draws.random() < 2 else Turn()

        return Async if kind == "async" else fixed(fault)

    with pytest.raises(KeyboardInterrupt):
        player(tmp_path, made(interrupting), environment__on_error=on_error).play(["ab", "c"])
    exiting = player(tmp_path, made(lambda _: sys.exit(3)), environment__on_error=on_error)
    if on_error == "raise":
        with pytest.raises(EpisodeError, match=r"step\(output\) raised SystemExit: 3$"):
            exiting.play(["ab", "c"])
    else:
        assert exiting.play(["ab", "c"]).failed.all()


@table("overlong", ["error", "drop"])
def test_a_prompt_of_reset_that_is_too_long_is_not_advised_to_be_dropped(overlong: Any, tmp_path: Path) -> None:
    trainer = player(tmp_path, fixed(prompt="a" * 99), rollout__overlong_prompts=overlong)
    said = r"its prompt has 99 tokens, and at most 58 leave room .* or set rollout.overlong_prompts to 'truncate'$"
    with pytest.raises(EpisodeError, match=r"Fixed, .*prompt.*\(episode_seed \d+\): " + said):
        trainer.play([{}])
    with pytest.raises(EpisodeError, match=r"\(episode_seed \d+\): its prompt 'zz' \(str\) cannot be encoded"):
        player(tmp_path, fixed(prompt="zz")).play([{}])


def test_an_episode_that_fails_can_end_with_a_reward_and_is_counted(tmp_path: Path) -> None:
    class Flaky(Letters):
        def __init__(self, row: Any) -> None:
            super().__init__(row)
            self.bad = row["prompt"] == "ab"

        def step(self, output: str) -> Turn:
            return raising(output) if self.bad and self.turn == 1 else super().step(output)

    changes = {"environment__on_error": "fail_episode", "environment__fail_reward": -1.0}
    trainer = player(tmp_path, Flaky, **changes)
    found = trainer.play(["ab", "c"])
    assert found.failed.tolist() == [True, False]
    assert found.terminated.tolist() == [False, True]
    assert found.turns[0][-1]["reward"] == -1.0
    trainer.add_prompt_pipeline(["ab", "c"])
    trainer.add_eval_pipeline(["ab", "c"])
    trainer.learn()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    collected = [line for line in lines if "environment/failures" in line]
    assert {line["environment/failures"] for line in collected} == {0.5}
    assert all(line["environment/turns"] == 2 and line["time/environment"] >= 0 for line in collected)
    assert trainer.evaluate()["eval/failed"] == 0.5


def test_calls_that_take_too_long_are_given_up_and_never_repeated() -> None:
    go_on, calls = threading.Event(), []

    def stuck() -> int:
        calls.append("stuck")
        go_on.wait(20)
        return 1

    started = time.monotonic()
    config = EnvironmentConfig(workers=2, timeout=0.3)
    found = call_all([stuck, lambda: 2, lambda: 3, stuck, lambda: 5], config)
    go_on.set()
    assert time.monotonic() - started < 5, "the others did not wait for those that are stuck"
    assert [result.value for result in found] == [None, 2, 3, None, 5]
    assert [result.given_up for result in found] == [True, False, False, True, False]
    assert calls == ["stuck", "stuck"]


def test_coroutines_that_take_too_long_are_cancelled() -> None:
    cancelled: list[bool] = []

    async def slow() -> int:
        try:
            await asyncio.sleep(20)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise
        return 1

    async def quick() -> int:
        return 2

    found = call_all([slow, quick], EnvironmentConfig(timeout=0.2))
    assert [result.given_up for result in found] == [True, False]
    assert found[1].value == 2
    assert cancelled == [True]


def test_a_timeout_says_so(tmp_path: Path) -> None:
    class Stuck(Letters):
        def step(self, output: str) -> Turn:
            time.sleep(1)
            return super().step(output)

    trainer = player(tmp_path, Stuck, environment__timeout=0.1)
    with pytest.raises(EpisodeError, match=r"step\(output\) took longer than environment.timeout, 0.1 s"):
        trainer.play(["ab"])


@pytest.mark.slow
def test_a_process_can_exit_with_a_call_that_never_returns(tmp_path: Path) -> None:
    script = """
import threading, sys
from trainkit.config import EnvironmentConfig
from trainkit.rollouts.environments import call_all
found = call_all([threading.Event().wait], EnvironmentConfig(timeout=0.2))
print(found[0].given_up)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["True"]


# --------------------------------------------------------------------------------------------------------- arguments


def test_train_takes_an_environment_alone(tmp_path: Path) -> None:
    trainer = tiny_trainer("ppo", tmp_path / "x")
    config = trainer.config.update({"train.run_dir": str(tmp_path / "run"), "train.eval_interval": 3})
    trained = trainkit.train(
        tokenizer=trainer.tokenizer, environment=Letters, prompts=["ab", "c"], config=config, method="ppo"
    )
    assert trained.progress.step == 6
    records = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert all([set(turn) for turn in record["episode"]] for record in records)
    assert {record["kind"] for record in records} == {"evaluation", "rollout"}
    assert trained.evaluate()["eval/turns"] == 2


@table(
    "changes, named",
    [
        ({"rollout__max_turns": 3}, "rollout.max_turns is set, and there is no environment; give one, or remove it"),
        ({"environment__timeout": 3.0}, "environment.timeout is set"),
        ({"rollout__max_episode_tokens": 30}, "rollout.max_episode_tokens is set"),
        (
            {"rollout__max_turns": 3, "environment__timeout": 3.0},
            "environment.timeout and rollout.max_turns are set, and there is no environment; give one, or remove them",
        ),
    ],
)
def test_settings_of_environments_need_one(changes: Any, named: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=named):
        tiny_trainer("ppo", tmp_path, **changes)


def test_generate_answers_once_and_without_a_prompt_points_to_play(tmp_path: Path) -> None:
    trainer = player(tmp_path)
    found = trainer.generate(["ab"])
    assert found.turns is None
    assert found.rewards is None
    for rows in ([{"level": 1}], [{}], [{"prompt": None}]):
        with pytest.raises(DataError, match=r"generate\(\) needs prompts, and row 0 has none; .* call play\(rows\)"):
            trainer.generate(rows)
    with pytest.raises(DataError, match="row 1 has none; give it under the key 'prompt'"):
        tiny_trainer("ppo", tmp_path).generate(["a", {"level": 1}])


def test_play_says_what_it_plays(tmp_path: Path) -> None:
    trainer = player(tmp_path)
    with pytest.raises(DataError, match=r"play\(\) takes one prompt or a list of prompts; given 3 \(int\)"):
        trainer.play(3)
    trainer.eval_rows = []
    with pytest.raises(
        DataError, match=r"play\(\) plays the evaluation prompts, and there are none; give rows: play\("
    ):
        trainer.play()


def test_an_episode_is_replayed_by_its_seed(tmp_path: Path) -> None:
    seeds: list[int] = []

    class Drawn(Letters):
        def __init__(self, row: Any) -> None:
            super().__init__(row)
            seeds.append(row["episode_seed"])

        def reset(self) -> str:
            return "".join(self.draws.choice(LETTERS) for _ in range(8))

    trainer = player(tmp_path, Drawn)
    first = trainer.play([{}, {}])
    again = trainer.play([{"episode_seed": seeds[1]}, {"prompt": "ab", "episode_seed": seeds[0]}])
    assert again.prompts == first.prompts[::-1]
    assert seeds[2:] == seeds[1::-1]
    with pytest.raises(DataError, match=r"prompt 0 has the episode_seed -1 .*should be a non-negative integer"):
        trainer.play([{"episode_seed": -1}])
    with pytest.raises(DataError, match="prompt 0 has a column 'episode_seed', and trainkit gives reward functions or"):
        trainer.add_prompt_pipeline([{"prompt": "ab", "episode_seed": 5}])


# ------------------------------------------------------------------------------------------------------------- step


def test_step_takes_episodes_with_the_samplers_numbers(tmp_path: Path) -> None:
    trainer = player(tmp_path, name="rloo")
    found = trainer.play([prompt for prompt in ("ab", "c") for _ in range(4)])
    before = trainer.unwrapped.state_dict()["model.transformer.h.0.mlp.c_fc.bias"].clone()
    metrics = trainer.step(found, [1.0, 0.0, 2.0, 0.5] * 2)
    assert metrics["reward/mean"] == pytest.approx(0.875)
    assert metrics["policy/ratio"] == pytest.approx(1.0, abs=1e-5)
    assert not torch.equal(trainer.unwrapped.state_dict()["model.transformer.h.0.mlp.c_fc.bias"], before)


def test_step_takes_ids_with_masks_as_trl_did(tmp_path: Path) -> None:
    trainer = tiny_trainer("ppo", tmp_path)
    responses = [torch.tensor([1, 2, 3, 4]), torch.tensor([5, 6])]
    masks = [torch.tensor([True, False, False, True]), torch.tensor([1, 1])]
    seen: list[Any] = []
    honest = trainer.experience
    trainer.experience = lambda rollouts, scores: (seen.append(rollouts), honest(rollouts, scores))[1]
    trainer.step(["ab", "c"], responses, [1.0, 0.0], response_masks=masks)
    (rollouts,) = seen
    assert [r.tolist() for r in rollouts.responses] == [[1, 4], [5, 6]]
    assert rollouts.sequences.attention_mask.sum(1).tolist() == [6, 3]
    trainer.step(["ab", "c"], responses, [1.0, 0.0], [mask.tolist() for mask in masks])
    for wrong, said in (
        (masks[:1], "there are 2 responses and 1 response_masks"),
        ([masks[0][:2], masks[1]], "response mask 0 is .* for a response of 4 tokens"),
        ([masks[0] & False, masks[1]], "True for at least one"),
    ):
        with pytest.raises(DataError, match=said):
            trainer.step(["ab", "c"], responses, [1.0, 0.0], response_masks=wrong)


def test_step_with_another_number_of_arguments_shows_both_forms(tmp_path: Path) -> None:
    trainer = tiny_trainer("ppo", tmp_path)
    rollouts = trainer.generate(["ab"])
    forms = r"call step\(rollouts, scores\) or step\(queries, responses, scores, response_masks=None\)"
    for arguments in ((), (rollouts,), (rollouts, [1.0], [2.0]), (["ab"], [[1]]), (["ab"], [[1]], [1.0], None, None)):
        with pytest.raises(TypeError, match=forms):
            trainer.step(*arguments)


def test_temperatures_and_stop_strings_apply_to_every_turn(tmp_path: Path) -> None:
    trainer = player(tmp_path, fixed(Turn("h"), Turn("g"), Turn(done=True)), rollout__stop_sequences=["b"])
    found = trainer.play(["ab", "cd", "e", "fg"] * 4)
    for turns in found.turns:
        assert all("b" not in turn["output"] for turn in turns)
    stop = trainer.tokenizer.convert_tokens_to_ids("b")
    assert any(stop in ids.tolist() for ids in found.responses), "it is among the tokens"
    greedy = [trainer.play(["ab"], temperature=0).turns for _ in range(2)]
    assert greedy[0] == greedy[1]


def test_step_refuses_episodes_that_were_taken_apart(tmp_path: Path) -> None:
    trainer = player(tmp_path)
    found = trainer.play(["ab", "c"])
    before = {key: value.clone() for key, value in trainer.unwrapped.state_dict().items()}
    scores = found.rewards.sum(1).tolist()
    for arguments in ((found.queries, found.responses, scores), (found.queries, found.responses, scores, None)):
        with pytest.raises(DataError, match=r"without the environment's observations.*; call step\(rollouts, scores\)"):
            trainer.step(*arguments)
    assert all(torch.equal(value, before[key]) for key, value in trainer.unwrapped.state_dict().items())
    after = found.sequences.attention_mask & ~found.sequences.prompt_mask
    responses = [ids[keep] for ids, keep in zip(found.sequences.input_ids, after, strict=True)]
    masks = [mask[keep] for mask, keep in zip(found.sequences.response_mask, after, strict=True)]
    trainer.step(found.queries, responses, scores, masks)


def test_step_takes_the_rewards_of_episodes_as_they_are(tmp_path: Path) -> None:
    """Rewards [B, T] of `play` are those that a run trains on; sums over an episode are not, for PPO."""
    trainer = player(tmp_path, method__init_kl_coef=0.0)
    found = trainer.play(["ab", "c"])
    seen: list[torch.Tensor] = []
    honest = trainer.experience
    trainer.experience = lambda rollouts, scores: (seen.append(scores), honest(rollouts, scores))[1]
    trainer.step(found, found.rewards)
    torch.testing.assert_close(seen[0], found.rewards, rtol=0, atol=0)
    torch.testing.assert_close(seen[0], trainer.score(found), rtol=0, atol=0)
    for wrong, said in (
        (found.rewards * float("nan"), "the reward nan of row 0, token 0, is not finite"),
        (found.rewards + 1, r"the reward 1 of row 0, token 0, is at no response token; give finite rewards where"),
    ):
        with pytest.raises(RewardError, match=said):
            trainer.step(found, wrong)
    with pytest.raises(RewardError, match="2-D array of shape"):
        trainer.step(found, found.rewards[:, :-1])


@table(
    "name, given",
    [
        ("sft", {}),
        ("dpo", {"samples": ["a", "b"]}),
        ("ilql", {"config": {"rollout": {"max_turns": 3}}}),
        ("reward", {}),
        ("ddpo", {"samples": ["a", "b"]}),
    ],
)
def test_a_method_that_cannot_play_says_so_before_anything_else(name: str, given: Any) -> None:
    config = {**given.get("config", {}), "train": {"trackers": []}}
    arguments = {"model_path": "nowhere", "environment": Letters, **given, "config": config}
    said = (
        rf"method '{name}' learns from .* and cannot use an environment. Remove environment.* or use a method that can:"
    )
    with pytest.raises(ConfigError, match=said) as error:
        trainkit.train(method=name, **arguments)
    able = str(error.value).rpartition(": ")[2].split(", ")
    assert {*ONLINE} <= {*able}
    assert not {"sft", "dpo", "ilql", "reward", "ddpo"} & {*able}
