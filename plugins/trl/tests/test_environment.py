"""Episodes with tools and best-of-n sampling, in the manner of TRL's tests and examples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, GPT2Config

from tables import table
from trainkit.errors import DataError
from trainkit.testing import character_tokenizer
from trainkit_trl import (
    AutoModelForCausalLMWithValueHead,
    BestOfNSampler,
    PPOConfig,
    PPOTrainer,
    TextEnvironment,
    TextHistory,
    set_seed,
)
from trainkit_trl.environment.base_environment import StringStoppingCriteria

TOKENIZER = character_tokenizer("abcdefgh<>/:. 0123456789+-*=qrtsulpomniTUnkw", bos_token=None)


class Scripted:
    """A model that writes given texts, one for each call and row."""

    def __init__(self, *turns: list[str]) -> None:
        self.turns, self.seen = list(turns), list[list[str]]()

    def parameters(self) -> Any:
        return iter([torch.zeros(1)])

    def generate(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, stopping_criteria: Any, **_: Any) -> Any:
        rows = zip(input_ids, attention_mask, strict=True)
        self.seen.append([str(TOKENIZER.decode(ids[mask.bool()])) for ids, mask in rows])
        texts, ids = self.turns.pop(0), input_ids
        longest = max(map(len, texts))
        for at in range(longest):
            pad = TOKENIZER.pad_token_id
            letters = [TOKENIZER.encode(text[at])[0] if at < len(text) else pad for text in texts]
            ids = torch.cat([ids, torch.tensor(letters)[:, None]], dim=1)
            if all(criterion(ids, None) for criterion in stopping_criteria):
                break
        return ids


class Renewing(TextEnvironment):
    """Returns other episodes than it was given."""

    def step(self, history: TextHistory) -> TextHistory:
        renewed = TextHistory("d", torch.tensor(TOKENIZER.encode("d")))
        renewed.append_segment("e", torch.tensor(TOKENIZER.encode("e")), system=False)
        renewed.complete()
        return renewed


def test_the_episodes_that_a_subclass_returns_are_those_that_go_on() -> None:
    model, rewarded = Scripted(["<request><T>1<call>"]), list[list[str]]()

    def reward_fn(texts: list[str]) -> list[float]:
        rewarded.append(texts)
        return [0.0] * len(texts)

    environment = Renewing(model, TOKENIZER, {"T": lambda query: query}, reward_fn, "")
    assert environment.run(["a"])[4][0].text == "de"
    assert rewarded == [["e"]]


def test_a_tool_answers_and_its_answer_is_not_of_the_model() -> None:
    """One episode calls a tool and submits, the other one writes neither and ends."""
    model = Scripted(["<request><T>1+2<call>", "abc"], ["3<submit>"])
    rewarded: list[list[str]] = []

    def reward_fn(texts: list[str], answers: list[str]) -> list[torch.Tensor]:
        rewarded.append(texts)
        return [torch.tensor(float(a in text)) for text, a in zip(texts, answers, strict=True)]

    env = TextEnvironment(model, TOKENIZER, {"T": lambda query: str(sum(map(int, query.split("+"))))}, reward_fn, "q:")
    queries, responses, masks, rewards, histories = env.run(["1+2", "d"], answers=["3", "x"])
    assert [TOKENIZER.decode(query) for query in queries] == ["q:1+2", "q:d"]
    assert TOKENIZER.decode(responses[0]) == "<request><T>1+2<call>3<response>3<submit>"
    assert TOKENIZER.decode(responses[1])[:3] == "abc"
    called, answered, ended = len("<request><T>1+2<call>"), len("3<response>"), len("3<submit>")
    assert masks[0].tolist() == [1] * called + [0] * answered + [1] * ended
    assert set(masks[1].tolist()) == {1}
    assert [float(reward) for reward in rewards] == [1.0, 0.0]
    assert rewarded[0][0] == "3<submit>"
    assert model.seen[1] == ["q:1+2<request><T>1+2<call>3<response>"]
    assert [history.completed for history in histories] == [True, True]
    assert histories[0].last_text_segment == "3<submit>"


@table(
    "call, result",
    [
        ("<request><T>x<call>", "Tool error: invalid literal for int() with base 10: 'x'<response>"),
        ("<request><W>1<call>", "Unknown tool W.<response>"),
        ("<request>1<call>", "Unknown tool call: <request>1<call><response>"),
        ("<request><L>1<call>", "lllllll...<response>"),
    ],
)
def test_what_goes_wrong_is_the_result(call: str, result: str) -> None:
    tools = {"T": int, "L": lambda _: "l" * 40}
    env = TextEnvironment(
        Scripted(), character_tokenizer("".join(map(chr, range(32, 127)))), tools, lambda texts: texts,
        max_tool_reponse=100 if "L" not in call else 10,
    )  # fmt: skip
    history = TextHistory("q", torch.tensor([1]))
    history.append_segment(call, torch.tensor([2]), system=False)
    assert env.step(history).last_text_segment == result
    assert history.token_masks.tolist()[:2] == [0, 1]


def test_tools_are_functions_by_name_or_objects() -> None:
    with pytest.raises(ValueError, match=r"tools should be functions by name, or a list of objects; given 3 \(int\)"):
        TextEnvironment(Scripted([]), TOKENIZER, 3, lambda texts: [0.0])


def test_an_episode_ends_by_its_length_and_its_turns() -> None:
    env = TextEnvironment(Scripted(["<request><T>1<call>"]), TOKENIZER, {"T": str}, lambda texts: [0.0], max_turns=1)
    *_, histories = env.run(["a"])
    assert (histories[0].completed, histories[0].truncated) == (False, False)
    env = TextEnvironment(Scripted(["<request><T>1<call>"]), TOKENIZER, {"T": str}, lambda texts: [0.0], max_length=5)
    *_, histories = env.run(["a"])
    assert (histories[0].completed, histories[0].truncated) == (True, True)
    with pytest.raises(ValueError, match="Can't append empty text"):
        histories[0].append_segment("", torch.tensor([1]))
    with pytest.raises(DataError, match="reward_fn should be a function; given None"):
        TextEnvironment(Scripted(), TOKENIZER, {})
    with pytest.raises(DataError, match="returned 2 rewards for 1 episodes"):
        TextEnvironment(Scripted(["a"]), TOKENIZER, {}, lambda texts: [1, 2]).run(["a"])


def test_stop_strings_are_counted_for_each_row() -> None:
    stops = StringStoppingCriteria(["b"], TOKENIZER)
    rows = [TOKENIZER.encode(text) for text in ("qab", "qcb")]
    assert not stops(torch.tensor([row[:2] for row in rows]), None)
    assert stops(torch.tensor(rows), None)
    assert stops.generated_tokens == [2, 2]


def tiny() -> Any:
    set_seed(0)
    config = GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=len(TOKENIZER), n_positions=64)
    return AutoModelForCausalLMWithValueHead.from_pretrained(AutoModelForCausalLM.from_config(config))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:there is no dataset")
def test_a_loop_with_a_tool_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is paid for the letters a of its turns; the mask keeps the tool's letters out of the loss."""
    monkeypatch.chdir(tmp_path)
    model = tiny()
    config = PPOConfig(batch_size=16, mini_batch_size=16, learning_rate=1e-2, init_kl_coef=0.0, adap_kl_ctrl=False)
    trainer = PPOTrainer(config, model, None, TOKENIZER)
    kwargs = {"do_sample": True, "max_new_tokens": 6, "top_k": 0}

    def pay(texts: list[str]) -> list[torch.Tensor]:
        return [torch.tensor(float(text.count("a"))) for text in texts]

    env = TextEnvironment(model, TOKENIZER, {"T": str}, pay, max_turns=2, generation_kwargs=kwargs)
    means = []
    for _ in range(8):
        queries, responses, masks, rewards, _ = env.run(["b", "c"] * 8)
        trainer.step(queries, responses, rewards, masks)
        means.append(float(torch.stack(rewards).mean()))
    assert sum(means[-3:]) / 3 > sum(means[:3]) / 3 + 0.7


def test_best_of_n_returns_the_texts_with_the_highest_scores() -> None:
    seen: list[list[str]] = []

    def value(text: str) -> float:
        return float(text.count("a")) + len(set(text)) / 100

    def count(texts: list[str]) -> list[float]:
        seen.append(texts)
        return [value(text) for text in texts]

    sampler = BestOfNSampler(tiny(), TOKENIZER, count, lambda: 6, sample_size=5, seed=1, n_candidates=2,
                             generation_config=GenerationConfig(do_sample=True, top_k=0, pad_token_id=1))  # fmt: skip
    for query, prompts in (([1, 2], 1), (torch.tensor([1, 2]), 1), ([[1], [2, 3]], 2), ([torch.tensor([3])] * 2, 2)):
        seen.clear()
        found = sampler.generate(query)
        assert len(found) == len(seen) == prompts
        for best, texts in zip(found, seen, strict=True):
            assert len(texts) == 5
            assert [value(text) for text in best] == sorted(map(value, texts), reverse=True)[:2]
            assert set(best) <= set(texts)
    with pytest.raises(ValueError, match="lower n_candidates"):
        BestOfNSampler(tiny(), TOKENIZER, count, lambda: 4, sample_size=2, n_candidates=3)
    with pytest.raises(ValueError, match="model should be an AutoModelForCausalLMWithValueHead"):
        BestOfNSampler(tiny().pretrained_model, TOKENIZER, count, lambda: 4)
