"""Dataset formats: known by their columns, as text or as conversations; a wrong one is an error that shows the way."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

import trainkit
from tables import table
from trainkit.data import (
    PLAIN_TEMPLATE,
    Chat,
    formatted,
    preference_rows,
    prompt_rows,
    recognise,
    sample_rows,
    written_prompts,
)
from trainkit.data.pipeline import encode_sample
from trainkit.errors import DataError
from trainkit.testing import EOS, character_tokenizer, tiny_gpt2
from trainkit.testing.trainers import tiny_trainer

CHATML = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MARKED = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}"
    "{% endgeneration %}{% else %}{{ m.content }}{{ eos_token }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
FORGETFUL = "{% for m in messages %}<{{ m.role }}>{% if loop.last %}{{ m.content }}{% endif %}{% endfor %}"
CHARACTERS = "".join(map(chr, range(32, 127))) + "\n"
templates = pytest.mark.parametrize("template", [CHATML, MARKED], ids=["prefixes", "marks"])


def tokenizer(template: str | None = CHATML) -> PreTrainedTokenizerFast:
    made = character_tokenizer(CHARACTERS)
    made.chat_template = template
    return made


def says(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


ASK, ANSWER, BAD = [says("user", "hi")], [says("assistant", "yo")], [says("assistant", "no")]
ASKED, ANSWERED = f"<user>hi{EOS}\n<assistant>", f"yo{EOS}"
DIALOGUE = [says("system", "s"), *ASK, *ANSWER, says("user", "a"), says("assistant", "b")]

ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "text": ({"text": "ab"}, "language modelling"),
    "messages": ({"messages": DIALOGUE}, "language modelling"),
    "prompt": ({"prompt": "a"}, "prompt-only"),
    "prompt and completion": ({"prompt": "a", "completion": "b"}, "prompt-completion"),
    "prompt and output": ({"prompt": "a", "output": "b"}, "prompt-completion"),
    "a label that is no truth value": ({"prompt": "a", "completion": "b", "label": 3}, "prompt-completion"),
    "unpaired": ({"prompt": "a", "completion": "b", "label": False}, "unpaired preference"),
    "pair": ({"prompt": "a", "chosen": "b", "rejected": "c"}, "preference"),
    "pair without prompt": ({"chosen": "ab", "rejected": "ac"}, "implicit preference"),
    "Alpaca": ({"instruction": "a", "input": "b", "output": "c", "text": "abc"}, "prompt-completion"),
    "Alpaca without input": ({"instruction": "a", "output": "c"}, "prompt-completion"),
    "Alpaca with a label": ({"instruction": "a", "output": "c", "label": True}, "unpaired preference"),
    "ShareGPT": ({"conversations": [{"from": "human", "value": "a"}]}, "language modelling"),
    "half a pair": ({"prompt": "a", "chosen": "b"}, None),
    "none of them": ({"question": "a", "answer": "b"}, None),
}  # fmt: skip


@table("row, form", ROWS.values())
def test_a_format_is_known_by_its_columns(row: dict[str, Any], form: str) -> None:
    assert recognise(row) == form


# ---------------------------------------------------------------------------------------------------- conversations


@templates
def test_all_that_the_assistant_says_is_output_and_eos_ends_it(template: str) -> None:
    (row,) = sample_rows([{"messages": DIALOGUE, "source": "web"}], None, tokenizer(template))
    assert row == {
        "source": "web",
        "turns": [f"<system>s{EOS}\n{ASKED}", ANSWERED, f"\n<user>a{EOS}\n<assistant>", f"b{EOS}"],
        "outputs": [False, True, False, True],
    }


@templates
def test_of_prompt_and_completion_only_the_completion_is_output(template: str) -> None:
    (row,) = sample_rows([{"prompt": DIALOGUE[:4], "completion": DIALOGUE[4:]}], None, tokenizer(template))
    assert row["turns"][1:] == [f"b{EOS}"]
    assert row["turns"][0].endswith(f"<assistant>yo{EOS}\n<user>a{EOS}\n<assistant>")


@templates
@given(st.lists(st.tuples(st.text("ab", min_size=1, max_size=4), st.text("cd", min_size=1, max_size=4)), min_size=1))
def test_a_conversation_loses_nothing_and_trains_one_eos_per_answer(
    template: str, turns: list[tuple[str, str]]
) -> None:
    """What the template writes, to the last EOS; every answer with its EOS, and nothing else, is trained."""
    made = tokenizer(template)
    talk = [says(role, text) for turn in turns for role, text in zip(("user", "assistant"), turn, strict=True)]
    (row,) = sample_rows([talk], None, made)
    ids, chosen = encode_sample(made, row, None)
    whole = made.apply_chat_template(talk, tokenize=False).rstrip("\n")
    assert made.decode(ids) == whole
    assert [i for i, keep in zip(ids, chosen, strict=True) if keep] == [
        i for _, answer in turns for i in [*made(answer)["input_ids"], made.eos_token_id]
    ]


def test_what_follows_the_last_answer_trains_nothing_and_is_left_off() -> None:
    (row,) = sample_rows([[*ASK, *ANSWER, *ASK]], None, tokenizer())
    assert row["turns"] == [ASKED, ANSWERED]


def test_eos_behind_the_marks_belongs_to_the_output() -> None:
    outside = MARKED.replace("{{ eos_token }}{% endgeneration %}", "{% endgeneration %}{{ eos_token }}")
    (row,) = sample_rows([[*ASK, *ANSWER]], None, tokenizer(outside))
    assert row["turns"] == [ASKED, ANSWERED]


def test_the_plain_template_needs_no_new_tokens() -> None:
    (row,) = sample_rows([[*ASK, *ANSWER]], None, tokenizer(PLAIN_TEMPLATE))
    assert row["turns"] == ["### user\nhi\n\n### assistant\n", ANSWERED]


def test_conversational_prompts_end_where_the_assistant_begins_and_one_that_it_has_begun_goes_on() -> None:
    prompts = [{"prompt": ASK, "answer": 3}, ASK, {"prompt": [*ASK, says("assistant", "y")]}, "plain"]
    rows = written_prompts(prompt_rows(prompts), tokenizer())
    assert rows == [{"prompt": ASKED, "answer": 3}, {"prompt": ASKED}, {"prompt": ASKED + "y"}, {"prompt": "plain"}]


def test_tools_and_further_settings_go_to_the_template() -> None:
    made = tokenizer("{{ tools[0].name }}{{ mood }}{% for m in messages %}{{ m.content }}{% endfor %}")
    row = {"prompt": ASK, "tools": [{"name": "f"}], "chat_template_kwargs": {"mood": "!"}}
    assert Chat(made, row, "prompt 0").prompt(ASK) == "f!hi"


def test_a_tables_empty_cells_are_no_part_of_a_message() -> None:
    from datasets import Dataset

    rows = Dataset.from_list([{"messages": [says("user", "hi"), {**says("assistant", "yo"), "name": "x"}]}])
    assert rows[0]["messages"][0]["name"] is None
    made = tokenizer(CHATML.replace("{{ m.content }}", "{{ m.content }}{{ 'None!' if 'name' in m and not m.name }}"))
    assert sample_rows(rows, None, made)[0]["turns"] == [ASKED, ANSWERED]


BAD_TALK: dict[str, tuple[Any, str | None, str]] = {
    "no template": ([*ASK, *ANSWER], None, r"no chat template.*Set tokenizer.chat_template to .*qwen3.*to 'plain'"),
    "nobody answers": (ASK, CHATML, "has no message of the assistant to learn from"),
    "nobody asks": (ANSWER, CHATML, "begins with a message of the assistant"),
    "no role": ([{"content": "x"}], CHATML, "message 0 should be a dict with 'role' and 'content'"),
    "no content": ([{"role": "user", "content": None}, *ANSWER], CHATML, "message 0 should be a dict with .*None"),
    "messages in text": ({"messages": "[]"}, CHATML, r"should be a list of messages.*convert it by json.loads"),
    "no messages": ({"messages": []}, CHATML, r"messages should be a list of messages"),
    "no text": ({"prompt": "a", "completion": None}, CHATML, "completion should be text, or a list of messages; given"),
    "a label in text": ({"prompt": "a", "completion": "b", "label": "0"}, CHATML, "it is a truth value as text"),
    "a sender that is not known": (
        [{"from": "observation", "value": "x"}], CHATML,
        r"message 0 is from 'observation' \(str\); known are human, gpt, user, assistant, system, tool",
    ),
    "a template that does not grow": (
        DIALOGUE, FORGETFUL,
        r"renders the beginning .* differently.*tokenizer.chat_template to .*qwen3.*\{% generation %\}",
    ),
    "a template that fails": ([*ASK, *ANSWER], "{{ raise_exception('never') }}", "cannot render it: never"),
    "text beside messages": ({"prompt": "a", "completion": ANSWER}, CHATML, "mixes text and messages"),
}  # fmt: skip


@table("sample, template, said", BAD_TALK.values())
def test_a_conversation_that_cannot_be_read_is_named(sample: Any, template: str | None, said: str) -> None:
    with pytest.raises(DataError, match=re.compile(f"sample 1.*{said}", re.DOTALL)):
        sample_rows(["fine", sample], None, tokenizer(template))


# ---------------------------------------------------------------------------------------------- Alpaca and ShareGPT

BELOW = "Below is an instruction that describes a task"
RESPONSE = "Write a response that appropriately completes the request.\n\n### Instruction:\nAdd."
ALPACA: dict[str, tuple[dict[str, Any], str, str]] = {
    "with an input": (
        {"instruction": "Add.", "input": "1 2", "output": "3"}, "Add.\n1 2",
        f"{BELOW}, paired with an input that provides further context. {RESPONSE}\n\n### Input:\n1 2\n\n"
        "### Response:\n",
    ),
    "an empty input": (
        {"instruction": "Add.", "input": "", "output": "3"}, "Add.", f"{BELOW}. {RESPONSE}\n\n### Response:\n"
    ),
    "no input": ({"instruction": "Add.", "output": "3"}, "Add.", f"{BELOW}. {RESPONSE}\n\n### Response:\n"),
}  # fmt: skip


@table("row, asked, prompt", ALPACA.values())
def test_alpaca_is_a_conversation_with_a_chat_template_and_its_own_text_without(
    row: dict[str, Any], asked: str, prompt: str
) -> None:
    (talk,) = sample_rows([row], None, tokenizer())
    assert talk == sample_rows([[says("user", asked), says("assistant", "3")]], None, tokenizer())[0]
    assert sample_rows([row], None, tokenizer(None)) == [{"turns": [prompt, "3"], "outputs": [False, True]}]
    assert sample_rows([row]) == sample_rows([row], None, tokenizer(None))


def test_alpaca_keeps_its_other_columns_and_takes_labels() -> None:
    row = {"instruction": "a", "input": None, "output": "b", "text": "the whole", "id": 3}
    assert sample_rows([row], None, tokenizer())[0].keys() == {"turns", "outputs", "text", "id"}
    assert sample_rows([{**row, "label": False}], None, tokenizer(), rated=True)[0]["reward"] == 0
    for column in ("instruction", "output"):
        with pytest.raises(DataError, match="sample 0 is empty"):
            sample_rows([{**row, column: ""}], None, tokenizer())


def test_messages_of_sharegpt_are_read_wherever_messages_are() -> None:
    names = {"user": "human", "assistant": "gpt"}
    shared = [{"from": names.get(m["role"], m["role"]), "value": m["content"]} for m in DIALOGUE]
    expected = sample_rows([{"messages": DIALOGUE}], None, tokenizer())
    for row in ({"conversations": shared}, {"messages": shared}, {"conversations": DIALOGUE}, shared):
        assert sample_rows([row], None, tokenizer()) == expected
    ask, answer, bad = ([{"from": names[m["role"]], "value": m["content"]}] for m in (*ASK, *ANSWER, *BAD))
    pair = {"prompt": ASKED, "chosen": ANSWERED, "rejected": f"no{EOS}"}
    for row in ({"prompt": ask, "chosen": answer, "rejected": bad}, {"chosen": ask + answer, "rejected": ask + bad}):
        assert preference_rows([row], tokenizer()) == [pair]
    assert prompt_rows([{"prompt": ask}, ask]) == [{"prompt": ASK}, {"prompt": ASK}]


# ------------------------------------------------------------------------------------------------------------ pairs

PAIRS: dict[str, tuple[dict[str, Any], tuple[str, str, str]]] = {
    "text": ({"prompt": "a", "chosen": "b", "rejected": "c"}, ("a", "b", "c")),
    "a word's end": ({"chosen": "Is it? It is.", "rejected": "Is it? It isn't."}, ("Is it? It", " is.", " isn't.")),
    "a line's end": ({"chosen": "Q\nA: 4", "rejected": "Q\nB: 4"}, ("Q\n", "A: 4", "B: 4")),
    "one continues the other": ({"chosen": "Q: a b", "rejected": "Q: a"}, ("Q:", " a b", " a")),
    "no words": ({"chosen": "abcd", "rejected": "abdc"}, ("ab", "cd", "dc")),
    "messages": ({"prompt": ASK, "chosen": ANSWER, "rejected": BAD}, (ASKED, ANSWERED, f"no{EOS}")),
    "messages that begin alike": ({"chosen": ASK + ANSWER, "rejected": ASK + BAD}, (ASKED, ANSWERED, f"no{EOS}")),
}


@table("pair, expected", PAIRS.values())
def test_pairs_have_a_prompt_and_two_sides(pair: dict[str, Any], expected: tuple[str, str, str]) -> None:
    (row,) = preference_rows([{**pair, "margin": 1.5}], tokenizer())
    assert row.pop("margin") == 1.5
    assert row == dict(zip(("prompt", "chosen", "rejected"), expected, strict=True))


@given(st.text("ab \n", min_size=2), st.text("ab \n", min_size=2))
def test_prompt_and_side_are_the_whole_text_again(chosen: str, rejected: str) -> None:
    if chosen == rejected or chosen[0] != rejected[0]:
        chosen, rejected = "a" + chosen, "a" + rejected + "c"
    (row,) = preference_rows([{"chosen": chosen, "rejected": rejected}])
    assert (row["prompt"] + row["chosen"], row["prompt"] + row["rejected"]) == (chosen, rejected)
    assert row["prompt"]
    assert row["chosen"]
    assert row["rejected"]


def test_sides_that_do_not_begin_alike_have_no_prompt() -> None:
    with pytest.raises(DataError, match="sample 0: chosen and rejected have no common beginning"):
        preference_rows([{"chosen": "abc", "rejected": "xbc"}])
    with pytest.raises(DataError, match="sample 0: chosen and rejected have no common beginning"):
        preference_rows([{"chosen": ANSWER, "rejected": BAD}], tokenizer())


# ---------------------------------------------------------------------------------------------------- what is wrong

WRONG: dict[str, tuple[Any, str, str]] = {
    "other columns": (
        {"question": "a", "answer": "b"}, "sft",
        '[{"prompt": row["question"], "completion": row["answer"]} for row in samples]',
    ),
    "pairs": (
        {"prompt": "a", "chosen": "b", "rejected": "c"}, "sft",
        '[{"prompt": row["prompt"], "completion": row["chosen"]} for row in samples]',
    ),
    "pairs without prompt": ({"chosen": "ab", "rejected": "ac"}, "sft", '[{"text": row["chosen"]} for row in samples]'),
    "labels": (
        {"prompt": "a", "completion": "b", "label": True}, "sft",
        '[{"prompt": row["prompt"], "completion": row["completion"]} for row in samples if row["label"]]',
    ),
}  # fmt: skip


@table("row, method, line", WRONG.values())
def test_the_lines_that_an_error_shows_are_the_way_out(row: Any, method: str, line: str, tmp_path: Path) -> None:
    trainer = tiny_trainer(method, tmp_path)
    with pytest.raises(DataError, match=r"sample 0 has the columns .*expected here: text") as caught:
        trainer.add_samples([row])
    assert f"samples = {line}" in str(caught.value)
    trainer.add_samples(eval(line, {"samples": [row]}))
    assert len(trainer.pipeline) == 1


def test_labels_are_rewards_for_whom_learns_from_rewards() -> None:
    rows = sample_rows(
        [{"prompt": "a", "completion": "b", "label": label} for label in (True, False)], rated=True
    )  # fmt: skip
    assert [row["reward"] for row in rows] == [1.0, 0.0]
    with pytest.raises(DataError, match="give one of the two"):
        sample_rows([{"prompt": "a", "completion": "b", "label": True}], [1.0], rated=True)
    with pytest.raises(DataError, match="sample 0 has no reward"):
        sample_rows(["text"], rated=True)
    with pytest.raises(
        DataError, match=r"sample 0 has no reward; its label is 2 \(int\), and labels are true or false"
    ):
        sample_rows([{"prompt": "a", "completion": "b", "label": 2}], rated=True)


def test_a_column_is_the_reward_for_whom_learns_from_rewards() -> None:
    row = {"prompt": "a", "completion": "b"}
    rows = sample_rows([{**row, "reward": reward} for reward in (0.5, np.float32(-1))], rated=True)
    assert [row["reward"] for row in rows] == [0.5, -1.0]
    for wrong in ("0.5", float("inf"), [1]):
        with pytest.raises(DataError, match="sample 0: reward should be a finite number; given"):
            sample_rows([{**row, "reward": wrong}], rated=True)
    for missing in (None, float("nan"), ""):
        with pytest.raises(DataError, match="sample 0 has no reward"):
            sample_rows([{**row, "reward": missing}], rated=True)
    with pytest.raises(DataError, match="sample 0 has a reward and a label; list one"):
        sample_rows([{**row, "reward": 0.5, "label": True}], rated=True)


@table("read", [sample_rows, prompt_rows, preference_rows])
def test_a_dataset_of_several_splits_is_an_error_that_names_one(read: Any) -> None:
    from datasets import Dataset, DatasetDict

    with pytest.raises(DataError, match=r"splits train, test; give one of them: \w+=dataset\['train'\]"):
        read(DatasetDict(train=Dataset.from_list([{"text": "a"}]), test=Dataset.from_list([{"text": "a"}])))


def test_a_dataset_of_torch_has_as_many_rows_as_it_says(tmp_path: Path) -> None:
    """Its `__getitem__` need not raise IndexError, which is how Python finds the end of what has nothing else."""

    class Endless(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> str:
            return "ab"

    assert formatted(Endless(), str.upper) == ["AB"] * 3
    for name, kind in (("ppo", "prompts"), ("sft", "samples")):
        trainer = tiny_trainer(name, tmp_path / name)
        assert len(getattr(trainer, f"read_{kind}")(Endless())) == 3
        assert len(getattr(trainer, f"read_{kind}")(formatted(Endless(), None))) == 3


def test_a_formatting_function_makes_the_rows_and_its_errors_name_one() -> None:
    assert formatted([{"q": "a"}, {"q": "b"}], lambda row: (row["q"], "x")) == [("a", "x"), ("b", "x")]
    with pytest.raises(DataError, match=r"formatting_func raised KeyError at sample 1.*'q'"):
        formatted([{"q": "a"}, {"p": "b"}], lambda row: row["q"])
    with pytest.raises(DataError, match="formatting_func returned None for sample 0"):
        formatted(["a"], lambda row: None)


def test_a_model_generates_from_conversations(tmp_path: Path) -> None:
    made = tokenizer()
    trainer = trainkit.train(
        tiny_gpt2(len(made)),
        samples=[{"messages": DIALOGUE}],
        tokenizer=made,
        config={"train": {"run_dir": str(tmp_path), "trackers": []}, "rollout": {"max_new_tokens": 2}},
    )
    assert trainer.generate(ASK).prompts == trainer.generate({"prompt": ASK}).prompts == [ASKED]
    assert trainer.generate([ASK, "hi"]).prompts == [ASKED, "hi"]


def test_conversational_pairs_and_prompts_train_with_the_usual_call(tmp_path: Path) -> None:
    made, seen = tokenizer(), []
    pairs = [{"chosen": ASK + ANSWER, "rejected": ASK + BAD}, {"prompt": ASK, "chosen": ANSWER, "rejected": BAD}]

    def reward(outputs: list[str], prompts: list[str], level: list[int], **_: Any) -> list[float]:
        seen.extend(zip(prompts, level, strict=True))
        return [float(len(output)) for output in outputs]

    def config(name: str) -> dict[str, Any]:
        return {
            "rollout": {"max_new_tokens": 3, "num_rollouts": 4},
            "train": {"batch_size": 2, "total_steps": 2, "run_dir": str(tmp_path / name), "trackers": []},
        }

    dpo = trainkit.train(tiny_gpt2(len(made)), samples=pairs, tokenizer=made, config=config("dpo"))
    assert dpo.config.method.name == "dpo"
    assert dpo.pipeline.rows == [{"prompt": ASKED, "chosen": ANSWERED, "rejected": f"no{EOS}"}] * 2
    prompts = [{"prompt": ASK, "level": 1}]
    trainkit.train(tiny_gpt2(len(made)), reward, prompts=prompts, tokenizer=made, config=config("ppo"))
    assert set(seen) == {(ASKED, 1)}


@table("label", [True, 1, np.True_, torch.tensor(1)])
def test_a_label_is_true_or_one_of_any_library(label: Any) -> None:
    row = {"prompt": "a", "completion": "b", "label": label}
    assert recognise(row) == "unpaired preference"
    assert sample_rows([row], rated=True)[0]["reward"] == 1.0
    assert recognise({**row, "label": "spam"}) == "prompt-completion"  # a column like any other


def test_rewards_are_numbers_of_any_library() -> None:
    rows = sample_rows(["ab", "cd", "ef"], [np.float32(0.5), torch.tensor(2.0), 1])
    assert [row["reward"] for row in rows] == [0.5, 2.0, 1.0]
    with pytest.raises(DataError, match="reward 1 should be a finite number"):
        sample_rows(["ab", "cd"], [1.0, torch.tensor(float("nan"))])
