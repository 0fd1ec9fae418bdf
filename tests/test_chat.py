"""Messages are rendered as they say: parts, tool calls, what is not trained on; and the chat templates of families."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from datetime import datetime
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from test_data_check import checked, written
from transformers import PreTrainedTokenizerFast

import trainkit
from tables import table
from test_formats import (
    ANSWER,
    ANSWERED,
    ASK,
    ASKED,
    BAD,
    CHARACTERS,
    CHATML,
    DIALOGUE,
    MARKED,
    says,
    templates,
    tokenizer,
)
from trainkit.config import default_config
from trainkit.data import (
    TEMPLATES,
    Chat,
    preference_rows,
    prompt_rows,
    sample_rows,
    taken_apart,
    unrendered,
    written_prompts,
)
from trainkit.data.chat import STARTS
from trainkit.errors import ConfigError, DataError
from trainkit.models import load_tokenizer
from trainkit.runs import Record, record, run
from trainkit.testing import EOS, character_tokenizer, tiny_gpt2
from trainkit.testing.trainers import tiny_trainer

TOOLED = (
    "{{ tools | tojson }}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}"
    "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
JOINED = TOOLED.replace("{{ call.function.arguments | tojson }}", "{{ '!' + call.function.arguments }}")
"""A template that needs the arguments of calls as text."""


def parts(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text} for text in texts]


def call(arguments: Any, **more: Any) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"type": "function", "function": function, **more}]}


# --------------------------------------------------------------------------------------------------------- content

PICTURE = {"type": "image_url", "image_url": {"url": "x.png"}}
NO_TEXT: dict[str, tuple[Any, str]] = {
    "an image": ([*parts("a"), PICTURE], "part 1 of its content is .*image.*training is on text alone"),
    "a placeholder": ([{"type": "image"}], "part 0 of its content is"),
    "a sound": ([{"type": "input_audio", "input_audio": {"data": ""}}], "part 0"),
    "an unknown part": ([{"type": "thinking", "text": "a"}], "part 0"),
    "text of another type": ([{"type": "text", "text": 3}], "part 0"),
    "a list of texts": (["a"], "part 0"),
    "a number": (3, r"its content should be text, or a list of parts of text; given 3"),
    "a dict": ({"temperature": 3}, "its content should be text.*convert it by json.dumps"),
}


def test_content_in_parts_of_text_is_their_text() -> None:
    made, halves = tokenizer(), parts("y", "o")
    filled = Dataset.from_list([{"messages": [says("user", "hi")]}, {"messages": ANSWER}])  # content is text there
    assert filled[0]["messages"][0]["content"] == "hi"
    answer = [{"role": "assistant", "content": [{**part, "image": None} for part in halves]}]
    (row,) = sample_rows([[{"role": "user", "content": parts("hi")}, *answer]], None, made)
    assert row["turns"] == [ASKED, ANSWERED]
    assert preference_rows([{"prompt": ASK, "chosen": answer, "rejected": BAD}], made)[0]["chosen"] == ANSWERED
    asked = prompt_rows([{"prompt": [{"role": "user", "content": parts("h", "i")}]}])
    assert asked == [{"prompt": ASK}]
    assert Chat(made, {}, "its prompt").prompt([{"from": "human", "value": parts("hi")}]) == ASKED


@table("content, said", NO_TEXT.values())
def test_content_that_is_no_text_is_refused_wherever_messages_are_read(content: Any, said: str, tmp_path: Path) -> None:
    made, wrong = tokenizer(), [{"role": "user", "content": content}]
    with pytest.raises(DataError, match=f"sample 0: message 0.*{said}"):
        sample_rows([[*wrong, *ANSWER]], None, made)
    with pytest.raises(DataError, match=f"sample 0: message 0.*{said}"):
        preference_rows([{"prompt": wrong, "chosen": ANSWER, "rejected": BAD}], made)
    with pytest.raises(DataError, match=f"prompt 0: message 0.*{said}"):
        written_prompts(prompt_rows([{"prompt": wrong}]), made)
    with pytest.raises(DataError, match=f"its prompt: message 0.*{said}"):
        Chat(made, {}, "its prompt").prompt(wrong)
    report = checked(written(tmp_path / "rows.jsonl", [{"messages": [*wrong, *ANSWER]}]), code=1)
    assert "message 0" in report


# ------------------------------------------------------------------------------------------------- tools and calls


def test_what_fills_tables_is_no_part_of_calls_and_tools() -> None:
    talk = [{"messages": [*ASK, call({"a": 1})], "tools": [{"name": "f", "parameters": {"a": 1}}]}]
    talk += [{"messages": [*ASK, call({"b": [1]})], "tools": [{"name": "f", "parameters": {"b": None}}]}]
    rows = Dataset.from_list(talk)
    assert rows[0]["messages"][1]["tool_calls"][0]["function"]["arguments"] == {"a": 1, "b": None}
    texts = ["".join(row["turns"]) for row in sample_rows(rows, None, tokenizer(TOOLED))]
    assert texts[0] == f'[{{"name": "f", "parameters": {{"a": 1}}}}]<user>hi{EOS}<assistant>f{{"a": 1}}{EOS}'
    assert "null" not in texts[1]


@table("template, expected", [(TOOLED, 'f{"a": [1, null]}'), (JOINED, 'f!{"a": [1, null]}')])
@pytest.mark.parametrize("arguments", [{"a": [1, None]}, '{"a": [1, null]}'])
def test_arguments_are_encoded_once(template: str, expected: str, arguments: Any) -> None:
    """Also those of a template that joins them to text, and all calls or tools in JSON text."""
    for message in (call(arguments), {"role": "assistant", "tool_calls": json.dumps(call(arguments)["tool_calls"])}):
        (row,) = sample_rows([{"messages": [*ASK, message], "tools": '[{"name": "f"}]'}], None, tokenizer(template))
        assert row["turns"] == [f'[{{"name": "f"}}]<user>hi{EOS}<assistant>', f"{expected}{EOS}"]


@table(
    "row, said",
    [
        ({"messages": [*ASK, call("later")]}, "message 1: the arguments of a call of 'f' should be a dict, or JSON"),
        ({"messages": [*ASK, call([1])]}, "message 1: the arguments of a call of 'f' should be a dict"),
        ({"messages": [*ASK, {"role": "assistant", "tool_calls": "f(1)"}]}, "tool_calls should be a list of dicts"),
        ({"messages": [*ASK, {"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "a call of a tool should be"),
        ({"messages": [*ASK, *ANSWER], "tools": "search"}, r"tools should be a list, or JSON text of one"),
        ({"messages": [*ASK, *ANSWER], "chat_template_kwargs": "fast"}, "chat_template_kwargs should be a dict"),
    ],
)  # fmt: skip
def test_calls_that_cannot_be_read_are_named(row: Any, said: str) -> None:
    with pytest.raises(DataError, match=f"sample 0.*{said}"):
        sample_rows([row], None, tokenizer(TOOLED))


# --------------------------------------------------------------------------------------------- what is not trained on


@templates
@table("key, no, yes", [("weight", 0, 1), ("weight", 0.0, None), ("train", False, True)])
def test_a_message_that_is_not_to_be_trained_on_is_context(template: str, key: str, no: Any, yes: Any) -> None:
    first, last = dict(DIALOGUE[2], **{key: no}), dict(DIALOGUE[4], **{key: yes})
    talk = [*DIALOGUE[:2], first, DIALOGUE[3], last]
    for row in ({"messages": talk}, {"prompt": talk[:2], "completion": talk[2:]}):
        (read,) = sample_rows([row], None, tokenizer(template))
        assert read["outputs"] == [False, True]
        assert read["turns"][1] == f"b{EOS}"
        assert read["turns"][0].endswith(f"{ASKED}yo{EOS}\n<user>a{EOS}\n<assistant>")


@table(
    "message, said",
    [
        (dict(ANSWER[0], weight=0), "no message of the assistant to learn from.*not excluded by weight or train"),
        (dict(ANSWER[0], weight=0.5), r"message 1: weight should be 0 or 1, false or true; given 0.5"),
        (dict(ANSWER[0], train="no"), "message 1: train should be 0 or 1"),
        (dict(ASK[0], train=True), "message 1: train is True, and its role is 'user'"),
    ],
)
def test_other_weights_are_refused(message: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError, match=said):
        sample_rows([[*ASK, message]], None, tokenizer())


def test_pairs_compare_whole_outputs_and_a_mark_for_several_messages_cannot_exclude_one() -> None:
    with pytest.raises(DataError, match="sample 0: weight or train excludes a message of an output, and pairs compare"):
        preference_rows([{"prompt": ASK, "chosen": [dict(ANSWER[0], weight=0)], "rejected": BAD}], tokenizer())
    whole = "{% generation %}{% for m in messages %}{{ m.content }}{% endfor %}{% endgeneration %}"
    with pytest.raises(DataError, match="marks 1 parts of 2 messages of the assistant"):
        sample_rows([[*ASK, dict(ANSWER[0], weight=0), *ASK, *ANSWER]], None, tokenizer(whole))
    asked = [*ASK, dict(ANSWER[0], weight=0), *ASK]  # of a prompt nothing is trained on
    assert written_prompts([{"prompt": asked}], tokenizer())[0]["prompt"].count("yo") == 1


@table("column", ["image", "pixel_values", "image_grid_thw", "input_features"])
def test_prepared_media_are_refused_as_media_are(column: str) -> None:
    ids, media = {"input_ids": [1, 2, 3]}, {column: [[0.5]]}
    pair = {"input_ids_chosen": [1, 2], "input_ids_rejected": [1, 3]}
    for read, row in ((sample_rows, {**ids, **media}), (preference_rows, {**pair, **media})):
        with pytest.raises(DataError, match=f"sample 0 has the column '{column}', .*training is on text alone"):
            read([row], tokenizer=tokenizer())
    with pytest.raises(DataError, match=f"prompt 0 has the column '{column}'"):
        written_prompts(prompt_rows([{"prompt": "a", **media}]), tokenizer())


# ----------------------------------------------------------------------------------------- the templates of families

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
TALK = [says("system", "be"), *ASK, *ANSWER, says("user", "ok"), says("assistant", " no ")]
CALL = {**call({"x": 1}, id="abcdefghi"), "content": ""}
TOOLS = {"messages": [*ASK, CALL, {**says("tool", "3"), "tool_call_id": "abcdefghi"}, *ANSWER], "tools": [TOOL]}
TWICE = {  # a system message, and two calls at a time
    "messages": [
        says("system", "be"), *ASK, {**CALL, "tool_calls": CALL["tool_calls"] * 2}, says("tool", "3"),
        says("tool", "4"), *ANSWER, says("user", "ok"), says("assistant", "no"),
    ],
    "tools": [TOOL],
}  # fmt: skip
REASONED = [*ASK, {**ANSWER[0], "reasoning_content": "why"}, *ASK, says("assistant", "<think>\nhm\n</think>\n\nyo")]
CALLED = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
IM = "<|im_start|>system\nbe<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
TURN = "⟦yo<|im_end|>⟧\n<|im_start|>user\nok<|im_end|>\n<|im_start|>assistant\n"
QWEN_TOOLS = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with function "
    'signatures within <tools></tools> XML tags:\n<tools>\n{"type": "function", "function": {"name": "f", '
    '"parameters": {"type": "object", "properties": {}}}}\n</tools>\n\nFor each function call, return a json object '
    "with function name and arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n<|im_start|>user\nhi<|im_end|>'
    '\n<|im_start|>assistant\n⟦<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call><|im_end|>⟧\n'
    "<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
)
QWEN_TWICE = (
    f"<|im_start|>system\nbe\n\n{QWEN_TOOLS.partition('⟦')[0]}⟦{CALLED}\n{CALLED}<|im_end|>⟧\n"
    "<|im_start|>user\n<tool_response>\n3\n</tool_response>\n<tool_response>\n4\n</tool_response><|im_end|>\n"
    f"<|im_start|>assistant\n{TURN}"
)
LLAMA = "<|start_header_id|>{}<|end_header_id|>\n\n"
SYSTEM, USER, SAID, TOLD = (LLAMA.format(role) for role in ("system", "user", "assistant", "ipython"))
DATED = "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n"
LLAMA_TURNS = f"be<|eot_id|>{USER}hi<|eot_id|>{SAID}⟦yo<|eot_id|>⟧{USER}ok<|eot_id|>{SAID}⟦no<|eot_id|>⟧"
LLAMA_TOOLS = (
    "Given the following functions, please respond with a JSON for a function call with its proper arguments that best "
    'answers the given prompt.\n\nRespond in the format {"name": function name, "parameters": dictionary of argument '
    'name and its value}.Do not use variables.\n\n{\n    "type": "function",\n    "function": {\n        "name": "f",'
    '\n        "parameters": {\n            "type": "object",\n            "properties": {}\n        }\n    }\n}\n\n'
)
RENDERED: list[tuple[str, dict[str, Any], str]] = [
    ("chatml", {"messages": TALK}, f"{IM}{TURN}⟦ no <|im_end|>⟧"),
    ("smollm2", {"messages": TALK}, f"{IM}{TURN}⟦ no <|im_end|>⟧"),
    (
        "smollm2", {"messages": ASK + ANSWER},
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n⟦yo<|im_end|>⟧",
    ),
    ("qwen2.5", {"messages": TALK}, f"{IM}{TURN}⟦ no <|im_end|>⟧"),
    (
        "qwen2.5", TOOLS,
        "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.\n\n"
        f"{QWEN_TOOLS}⟦yo<|im_end|>⟧",
    ),
    ("qwen2.5", TWICE, f"{QWEN_TWICE}⟦no<|im_end|>⟧"),
    (
        "qwen3", {"messages": REASONED},  # what is before the last question loses its reasoning
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n⟦<think>\nwhy\n</think>\n\nyo<|im_end|>⟧ ‖ "
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyo<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\n⟦<think>\nhm\n</think>\n\nyo<|im_end|>⟧",
    ),
    (  # an answer that is not trained on is not written apart
        "qwen3", {"messages": [*ASK, {**REASONED[1], "weight": 0}, *REASONED[2:]]},
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyo<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\n⟦<think>\nhm\n</think>\n\nyo<|im_end|>⟧",
    ),
    (
        "qwen3", {"messages": [*REASONED[:3], {**REASONED[3], "weight": 0}]},
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n⟦<think>\nwhy\n</think>\n\nyo<|im_end|>⟧",
    ),
    (
        "qwen3", {"prompt": ASK, "completion": ANSWER, "chat_template_kwargs": {"enable_thinking": False}},
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n⟦yo<|im_end|>⟧",
    ),
    ("llama3", {"messages": TALK}, f"<s>{SYSTEM}{LLAMA_TURNS}"),
    ("llama3.1", {"messages": TALK}, f"<s>{SYSTEM}{DATED}{LLAMA_TURNS}"),
    (
        "llama3.1", TOOLS,
        f"<s>{SYSTEM}Environment: ipython\n{DATED}<|eot_id|>{USER}{LLAMA_TOOLS}hi<|eot_id|>{SAID}"
        f'⟦{{"name": "f", "parameters": {{"x": 1}}}}<|eot_id|>⟧{TOLD}"3"<|eot_id|>{SAID}⟦yo<|eot_id|>⟧',
    ),
    (
        "llama3.1", {**TOOLS, "messages": [TALK[0], *TOOLS["messages"], *TALK[-2:]]},
        f"<s>{SYSTEM}Environment: ipython\n{DATED}be<|eot_id|>{USER}{LLAMA_TOOLS}hi<|eot_id|>{SAID}"
        f'⟦{{"name": "f", "parameters": {{"x": 1}}}}<|eot_id|>⟧{TOLD}"3"<|eot_id|>{SAID}⟦yo<|eot_id|>⟧'
        f"{USER}ok<|eot_id|>{SAID}⟦no<|eot_id|>⟧",
    ),
    (
        "gemma", {"messages": TALK},
        "<s><start_of_turn>user\nbe\n\nhi<end_of_turn>\n<start_of_turn>model\n⟦yo<end_of_turn>⟧\n<start_of_turn>user\n"
        "ok<end_of_turn>\n<start_of_turn>model\n⟦no<end_of_turn>⟧",
    ),
    (
        "gpt_oss",
        {
            "messages": [*ASK, *ANSWER],
            "tools": [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {
                "type": "object", "required": ["b"], "properties": {
                    "a": {"type": "string", "description": "e", "enum": ["x", "y"]},
                    "b": {"type": "array", "items": {"type": "integer"}}, "c": {"type": "object"},
            }}}}],
            "chat_template_kwargs": {"model_identity": "I", "reasoning_effort": "high"},
        },
        "<|start|>system<|message|>I\nKnowledge cutoff: 2024-06\nCurrent date: 2025-03-01\n\nReasoning: high\n\n# "
        "Valid channels: analysis, commentary, final. Channel must be included for every message.\nCalls to these "
        "tools must go to the commentary channel: 'functions'."
        "<|end|><|start|>developer<|message|>\n\n# Tools\n\n## functions\n\n"
        'namespace functions {\n\n// d\ntype f = (_: {\n// e\na?: "x" | "y",\nb: number[],\nc?: object,\n}) => any;\n\n'
        "} // namespace functions<|end|><|start|>user<|message|>hi<|end|><|start|>assistant⟦<|channel|>final<|message|>"
        "yo<|return|>⟧",
    ),
    ("mistral", {"messages": TALK}, f"<s>[INST] be\n\nhi[/INST]⟦ yo{EOS}⟧[INST] ok[/INST]⟦ no{EOS}⟧"),
    (
        "mistral", TOOLS,
        '<s>[AVAILABLE_TOOLS] [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", '
        '"properties": {}}}}][/AVAILABLE_TOOLS][INST] hi[/INST]⟦[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}, '
        f'"id": "abcdefghi"}}]{EOS}⟧[TOOL_RESULTS] {{"content": 3, "call_id": "abcdefghi"}}[/TOOL_RESULTS]⟦ yo{EOS}⟧',
    ),
    (
        "phi3", {"messages": TALK},
        "<|system|>\nbe<|end|>\n<|user|>\nhi<|end|>\n<|assistant|>\n⟦yo<|end|>⟧\n<|user|>\nok<|end|>\n<|assistant|>\n"
        f"⟦ no <|end|>\n{EOS}⟧",
    ),
    (
        "deepseek_r1", {"prompt": ASK, "completion": REASONED[1:2]},
        "<s><｜User｜>hi<｜Assistant｜><think>\n⟦why\n</think>\n\nyo<｜end▁of▁sentence｜>⟧",
    ),
    (
        "deepseek_r1", {**TOOLS, "tools": None},
        "<s><｜User｜>hi<｜Assistant｜><think>\n⟦\n</think>\n\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function"
        '<｜tool▁sep｜>f\n```json\n{"x": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>⟧'
        "<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>3<｜tool▁output▁end｜><｜tool▁outputs▁end｜>"
        "⟦yo<｜end▁of▁sentence｜>⟧",
    ),
]  # fmt: skip
"""Rows, and their text with the outputs in brackets, as the published templates of the families write it.

The templates of Mistral and DeepSeek are those that differ from them, in what their comments say.
"""
MARK = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")


def family(name: str, marks: bool = True) -> PreTrainedTokenizerFast:
    made = character_tokenizer(CHARACTERS, bos_token="<s>")
    unmarked = MARK.sub(lambda mark: "{%- endif %}" if mark[1] else "{%- if true %}", TEMPLATES[name])
    made.chat_template = TEMPLATES[name] if marks else unmarked
    STARTS[made] = datetime(2025, 3, 1)
    return made


def bracketed(row: dict[str, Any], made: PreTrainedTokenizerFast) -> str:
    (read,) = sample_rows([row], None, made)
    return " ‖ ".join(
        "".join(f"⟦{text}⟧" if out else text for text, out in zip(each["turns"], each["outputs"], strict=True))
        for each in taken_apart(read)
    )


@table("name, row, expected", RENDERED)
def test_a_template_writes_what_its_family_does_and_marks_the_outputs(
    name: str, row: dict[str, Any], expected: str
) -> None:
    assert bracketed(row, family(name)) == expected


@table("name, row, expected", RENDERED)
def test_outputs_are_the_same_without_marks_where_they_can_be_located(
    name: str, row: dict[str, Any], expected: str
) -> None:
    """Also of Qwen 3, which renders an answer differently when another question follows it."""
    # the end of a line that closes a turn is output, too, unless EOS is before it
    ends = [text.replace("\n⟧", "⟧\n").rstrip("\n") for text in bracketed(row, family(name, marks=False)).split(" ‖ ")]
    assert ends == expected.replace("\n⟧", "⟧\n").split(" ‖ ")


# ------------------------------------------------------------------------- families × turns × system × tools × thinking


@dataclass(frozen=True)
class Family:
    """What a family writes around the texts of a conversation, whose first messages are ``be`` and ``hi``.

    ``hi`` follows ``system`` or ``bare``; the header of the assistant is in ``asked``; a further message of the user
    follows ``again``. An output is ``said`` where others follow, and else ``last``, or ``thought`` with reasoning. With
    tools, the first message follows ``tools_system`` or ``tools``, an output is ``call``, and ``result`` stands before
    the answer to it.
    """

    system: str
    bare: str
    asked: str
    again: str
    said: str
    last: str = ""
    thought: str = ""
    opens: str = ""
    """What the header has besides where the output is the last."""
    tools_system: str = ""
    tools: str = ""
    call: str = ""
    call_last: str = ""
    call_thought: str = ""
    result: str = ""
    keeps: str = ""
    """Until when a call keeps its reasoning: the end of the ``turn``, or the ``answer``."""


CHAT = {"asked": "<|im_end|>\n<|im_start|>assistant\n", "again": "\n<|im_start|>user\n", "said": "{}<|im_end|>"}
IM_SYSTEM, IM_USER = "<|im_start|>system\n", "<|im_end|>\n<|im_start|>user\n"
QWEN_DEFAULT = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
QWEN = {
    "call": f"{CALLED}<|im_end|>",
    "result": "\n<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
}
QWEN_LISTED = QWEN_TOOLS.partition("hi<|im_end|>")[0]
LLAMA_CHAT = {"asked": f"<|eot_id|>{SAID}", "again": USER, "said": "{}<|eot_id|>"}
CALLED_LLAMA = {"call": '{"name": "f", "parameters": {"x": 1}}<|eot_id|>', "result": f'{TOLD}"3"<|eot_id|>{SAID}'}
NO_THOUGHT, THOUGHT = "<think>\n\n</think>\n\n", "<think>\nwhy\n</think>\n\n"
TODAY = "Cutting Knowledge Date: December 2023\nToday Date: 01 Mar 2025\n\n"
OSS = (
    "<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\nKnowledge cutoff: 2024-06\n"
    "Current date: 2025-03-01\n\nReasoning: medium\n\n# Valid channels: analysis, commentary, final. Channel must be "
    "included for every message."
)
OSS_TOLD = f"{OSS}{{}}<|end|><|start|>developer<|message|>{{}}<|end|><|start|>user<|message|>"
OSS_CALLS = "\nCalls to these tools must go to the commentary channel: 'functions'."
OSS_LISTED = "# Tools\n\n## functions\n\nnamespace functions {\n\ntype f = () => any;\n\n} // namespace functions"
OSS_CALL = ' to=functions.f<|channel|>commentary json<|message|>{"x": 1}<|call|>'
ANALYSIS = "<|channel|>analysis<|message|>why<|end|><|start|>assistant"
R1 = "<｜end▁of▁sentence｜>"


def llama(date: str) -> Family:
    """Llama 3.1 and 3.2, which differ in the date."""
    return Family(
        f"<s>{SYSTEM}{date}be<|eot_id|>{USER}", f"<s>{SYSTEM}{date}<|eot_id|>{USER}", **LLAMA_CHAT, **CALLED_LLAMA,
        tools_system=f"<s>{SYSTEM}Environment: ipython\n{date}be<|eot_id|>{USER}{LLAMA_TOOLS}",
        tools=f"<s>{SYSTEM}Environment: ipython\n{date}<|eot_id|>{USER}{LLAMA_TOOLS}",
    )  # fmt: skip


AVAILABLE = (
    '<s>[AVAILABLE_TOOLS] [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", '
    '"properties": {}}}}][/AVAILABLE_TOOLS][INST] '
)
FAMILIES: dict[str, Family] = {
    "plain": Family(
        "### system\nbe\n\n### user\n", "### user\n", "\n\n### assistant\n", "\n\n### user\n", f"{{}}{EOS}"
    ),
    "chatml": Family(f"{IM_SYSTEM}be{IM_USER}", "<|im_start|>user\n", **CHAT),
    "smollm2": Family(
        f"{IM_SYSTEM}be{IM_USER}",
        f"{IM_SYSTEM}You are a helpful AI assistant named SmolLM, trained by Hugging Face{IM_USER}", **CHAT,
    ),
    "qwen2.5": Family(
        f"{IM_SYSTEM}be{IM_USER}", f"{IM_SYSTEM}{QWEN_DEFAULT}{IM_USER}", **CHAT, **QWEN,
        tools_system=f"{IM_SYSTEM}be\n\n{QWEN_LISTED}", tools=f"{IM_SYSTEM}{QWEN_DEFAULT}\n\n{QWEN_LISTED}",
    ),
    "qwen3": Family(
        f"{IM_SYSTEM}be{IM_USER}", "<|im_start|>user\n", **CHAT, **QWEN,
        last=f"{NO_THOUGHT}{{}}<|im_end|>", thought=f"{THOUGHT}{{}}<|im_end|>",
        tools_system=f"{IM_SYSTEM}be\n\n{QWEN_LISTED}", tools=f"{IM_SYSTEM}{QWEN_LISTED}",
        keeps="turn", call_last=f"{NO_THOUGHT}{CALLED}<|im_end|>", call_thought=f"{THOUGHT}{CALLED}<|im_end|>",
    ),
    "llama2": Family(
        "<s>[INST] <<SYS>>\nbe\n<</SYS>>\n\n", "<s>[INST] ", " [/INST]", "<s>[INST] ", f" {{}} {EOS}"
    ),
    "llama3": Family(f"<s>{SYSTEM}be<|eot_id|>{USER}", f"<s>{USER}", **LLAMA_CHAT),
    "llama3.1": llama(DATED),
    "llama3.2": llama(TODAY),
    "mistral": Family(
        "<s>[INST] be\n\n", "<s>[INST] ", "[/INST]", "[INST] ", f" {{}}{EOS}",
        tools_system=f"{AVAILABLE}be\n\n", tools=AVAILABLE,
        call=f'[TOOL_CALLS] [{{"name": "f", "arguments": {{"x": 1}}, "id": "abcdefghi"}}]{EOS}',
        result='[TOOL_RESULTS] {"content": 3, "call_id": "abcdefghi"}[/TOOL_RESULTS]',
    ),
    "gemma": Family(
        "<s><start_of_turn>user\nbe\n\n", "<s><start_of_turn>user\n", "<end_of_turn>\n<start_of_turn>model\n",
        "\n<start_of_turn>user\n", "{}<end_of_turn>",
    ),
    "phi3": Family(
        "<|system|>\nbe<|end|>\n<|user|>\n", "<|user|>\n", "<|end|>\n<|assistant|>\n", "\n<|user|>\n", "{}<|end|>",
        last=f"{{}}<|end|>\n{EOS}",
    ),
    "deepseek_r1": Family(
        "<s>be<｜User｜>", "<s><｜User｜>", "<｜Assistant｜>", "<｜User｜>", f"{{}}{R1}",
        last=f"\n</think>\n\n{{}}{R1}", thought=f"why\n</think>\n\n{{}}{R1}", opens="<think>\n",
    ),
    "gpt_oss": Family(
        OSS_TOLD.format("", "# Instructions\n\nbe"), f"{OSS}<|end|><|start|>user<|message|>",
        "<|end|><|start|>assistant", "<|start|>user<|message|>", "<|channel|>final<|message|>{}<|end|>",
        last="<|channel|>final<|message|>{}<|return|>",
        thought=f"{ANALYSIS}<|channel|>final<|message|>{{}}<|return|>",
        tools_system=OSS_TOLD.format(OSS_CALLS, f"# Instructions\n\nbe\n\n{OSS_LISTED}"),
        tools=OSS_TOLD.format(OSS_CALLS, f"\n\n{OSS_LISTED}"),
        call=OSS_CALL, keeps="answer", call_thought=f"{ANALYSIS}{OSS_CALL}",
        result='<|start|>functions.f to=assistant<|channel|>commentary<|message|>"3"<|end|><|start|>assistant',
    ),
}  # fmt: skip


def expected_of(f: Family, turns: int, system: bool, tools: bool, thinking: bool) -> str:
    """The rows that are trained on: an output is in one of its own if the whole has it, or its prompt, differently."""
    told, rows = (f.tools_system, f.tools) if tools else (f.system, f.bare), list[str]()
    whole = told[0] if system else told[1]
    for turn in range(turns):
        whole += f"{f.again}ok{f.asked}" if turn else f"hi{f.asked}"
        now = whole.replace("⟦", "").replace("⟧", "")  # what the model reads
        for is_call in (True, False) if tools else (False,):
            said, last, thought = (f.call, f.call_last, f.call_thought) if is_call else (f.said, f.last, f.thought)
            said, alone = said.replace("{}", "yo"), ((thinking and thought) or last or said).replace("{}", "yo")
            ends, kept = turn == turns - 1 and not is_call, is_call and f.keeps and thinking
            shown = alone if ends or (kept and turn == turns - 1 and f.keeps == "turn") else said
            same = whole.replace("⟦", "").replace("⟧", "") == now and alone.startswith(shown) and (ends or not f.opens)
            whole += f"{f.opens if ends else ''}⟦{shown}⟧" if same else shown
            if not same:
                rows.append(f"{now}{f.opens}⟦{alone}⟧")
            now += alone if kept else said
            whole, now = (text + (f.result if is_call else "") for text in (whole, now))
    return " ‖ ".join([*rows, whole.rpartition("⟧")[0] + "⟧"] if "⟦" in whole else rows)


def talk_of(turns: int, system: bool, tools: bool, thinking: bool) -> dict[str, Any]:
    why = {"reasoning_content": "why"} if thinking else {}
    messages = [says("system", "be")] if system else []
    for turn in range(turns):
        called = [{**CALL, **why}, {**says("tool", "3"), "tool_call_id": "abcdefghi"}] if tools else []
        messages += [says("user", "ok" if turn else "hi"), *called, {**says("assistant", "yo"), **why}]
    return {"messages": messages, **({"tools": [TOOL]} if tools else {})}


def test_an_answer_apart_ends_with_the_eos_that_the_template_writes_after_its_mark() -> None:
    made = tokenizer(
        "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}"
        "{{ ('why ' if loop.last else '') + m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
        "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    row = {"messages": [*ASK, *ANSWER, *ASK, *ANSWER]}
    first, second = f"<user>hi{EOS}<assistant>", f"yo{EOS}<user>hi{EOS}<assistant>⟦why yo{EOS}⟧"
    assert bracketed(row, made) == f"{first}⟦why yo{EOS}⟧ ‖ {first}{second}"


@table("name", [*FAMILIES])
def test_what_is_trained_on_is_what_the_model_writes_in_each_turn(name: str) -> None:
    f = FAMILIES[name]
    for turns, system, tools, thinking in product(range(1, 5), (False, True), (False, True), (False, True)):
        if tools and not f.call:
            continue
        for marks in (True, False):
            made = family(name, marks)
            if not marks and f.keeps == "answer" and tools and thinking:
                with pytest.raises(DataError, match=r"set tokenizer\.chat_template to that of"):
                    bracketed(talk_of(turns, system, tools, thinking), made)
                continue
            expected = expected_of(f, turns, system, tools, thinking)
            given = bracketed(talk_of(turns, system, tools, thinking), made)
            if not marks:
                given, expected = (
                    " ‖ ".join(part.replace("\n⟧", "⟧\n").rstrip("\n") for part in text.split(" ‖ "))
                    for text in (given, expected)
                )
            assert given == expected, (turns, system, tools, thinking, marks)


def test_answers_that_are_written_differently_later_are_trained_on_in_rows_of_their_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made, rows = family("qwen3"), [{"messages": REASONED}, {"messages": REASONED[2:]}]
    trainer = tiny_trainer("sft", tmp_path / "run")
    trainer.text.tokenizer, trainer.text.limit = made, 512
    trainer.add_samples(rows)
    assert [row["turns"][-1] for row in trainer.pipeline.rows] == [
        f"<think>\n{why}\n</think>\n\nyo<|im_end|>" for why in ("why", "hm", "hm")
    ]
    assert all("apart" not in row and sum(row["outputs"]) == 1 for row in trainer.pipeline.rows)
    assert "2 samples are trained on in 3 rows: the chat template writes answers differently" in caplog.text
    trainer.text.limit = 96
    trainer.add_samples(rows[:1])
    assert [row["turns"][-1][8:11] for row in trainer.pipeline.rows] == ["why"], "the other answer has no room"
    assert "1 of 1 samples were truncated to 96 tokens" in caplog.text
    rated = [{**rows[0], "label": True}]
    for read in (lambda: sample_rows(rated, None, made, rated=True), lambda: sample_rows(rows, [1.0, 2.0], made)):
        with pytest.raises(DataError, match="sample 0 has answers that the chat template writes differently"):
            read()
    made.save_pretrained(tmp_path / "model")
    data, model = written(tmp_path / "rows.jsonl", rows), f"tokenizer.tokenizer_path={tmp_path / 'model'}"
    report = checked(data, model, "--strict")
    assert "1 row with answers that the chat template writes differently when others follow: each is" in report
    first, second = report.partition("sample, row 2:")[::2]
    assert "[[<think>\nwhy\n</think>" in first
    assert "[[<think>\nhm\n</think>" in second


@table("name", [*TEMPLATES])
def test_a_prompt_ends_where_the_output_of_its_completion_begins(name: str) -> None:
    made = family(name)
    asked = written_prompts([{"prompt": TALK[1:4]}], made)[0]["prompt"]
    assert bracketed({"prompt": TALK[1:4], "completion": TALK[4:]}, made).startswith(f"{asked}⟦")
    pair = preference_rows([{"prompt": TALK[1:4], "chosen": TALK[4:], "rejected": BAD}], made)[0]
    assert pair["prompt"] == asked
    assert "no" in pair["chosen"]


@table("role", ["wrong", "name", "file", "twice", "live"])
def test_a_run_takes_a_template_by_its_name_or_from_a_file(role: str, tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text(MARKED)
    tokenizer(None).save_pretrained(tmp_path / "model")
    given = {"name": "qwen3", "file": str(tmp_path / "own.jinja"), "live": "chatml"}.get(role, "qwen")
    settings = {"tokenizer_path": str(tmp_path / "model"), "chat_template": given}
    if role == "twice":
        with pytest.raises(ConfigError, match=r"tokenizer.chat_template and tokenizer.kwargs.chat_template are given"):
            default_config("sft").update({"tokenizer": {**settings, "kwargs": {"chat_template": "x"}}})
        return
    config = default_config("sft").update({"tokenizer": settings})
    if role == "wrong":
        with pytest.raises(ConfigError, match=r"chat_template is 'qwen', which is no file .* plain, .*did you mean"):
            load_tokenizer(config)
        return
    live = tokenizer() if role == "live" else None
    assert load_tokenizer(config, live).chat_template == TEMPLATES.get(given, MARKED)
    assert live is None or live.chat_template == CHATML  # the caller's own does not change


# -------------------------------------------------------------------------------------------- what is not rendered

LOST: list[tuple[str, dict[str, Any], list[str]]] = [
    ("chatml", {"messages": TALK}, []),
    ("chatml", TOOLS, ["tools", "tool_calls"]),
    ("chatml", {"messages": REASONED}, ["reasoning_content"]),
    ("qwen3", TOOLS, []),
    ("qwen3", {"messages": REASONED}, []),  # the first answer is trained on apart
    ("qwen3", {"messages": [*REASONED[2:], *ASK, *ANSWER]}, []),
    ("qwen3", {"prompt": REASONED[:3], "completion": REASONED[3:]}, ["reasoning_content"]),  # of the prompt
    ("qwen3", {"prompt": ASK, "completion": REASONED[1:2]}, []),
    ("qwen2.5", {"messages": REASONED[:2]}, ["reasoning_content"]),
    ("llama3.1", TOOLS, []),  # of which the answer of a tool is JSON
    ("llama3.1", {"messages": [*ASK, {**CALL, "content": "so"}]}, ["content"]),
    ("deepseek_r1", TOOLS, ["tools"]),
    ("plain", {"prompt": ASK, "tools": [TOOL]}, ["tools"]),
    ("plain", {"prompt": ASK, "chosen": REASONED[1:2], "rejected": BAD}, ["reasoning_content"]),
    ("plain", {"prompt": "hi", "completion": "yo"}, []),
]


@table("name, row, parts", LOST)
def test_what_a_template_leaves_out_is_told(name: str, row: dict[str, Any], parts: list[str]) -> None:
    assert unrendered(row, family(name), "sample 0") == parts


def test_runs_and_checks_count_what_is_not_rendered(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"messages": ASK + ANSWER}, {"messages": REASONED[:2]}, {"messages": REASONED[:2], "tools": [TOOL]}]
    family("plain").save_pretrained(tmp_path / "model")
    data, told = written(tmp_path / "rows.jsonl", rows), "with {} that the chat template does not render (row{} {})"
    model = f"tokenizer.tokenizer_path={tmp_path / 'model'}"
    for code, strict in ((0, []), (1, ["--strict"])):
        report = checked(data, model, *strict, code=code)
        assert f"! 2 rows {told.format('reasoning_content', 's', '1, 2')}" in report
        assert f"! 1 row {told.format('tools', '', '2')}" in report
    trainer = tiny_trainer("sft", tmp_path / "run")
    trainer.text.tokenizer = family("plain")
    trainer.add_samples(rows)
    assert "does not render everything that the samples say (reasoning_content of 2, tools of 1)" in caplog.text


# ------------------------------------------------------------------------------------------------------------- dates


def test_a_run_resumes_tomorrow_with_the_date_of_its_first_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two times, so that the second resume does not take the date of the first."""
    made = tokenizer("{{ strftime_now('%d %b %Y') }}" + CHATML)
    settings: dict[str, Any] = {
        "train": {"run_dir": str(tmp_path), "resume": "auto", "save_interval": 1, "trackers": [], "batch_size": 1}
    }
    texts = set()
    for steps, day in ((1, "2025-03-01"), (2, "2025-03-02"), (3, "2025-03-03")):

        class Then(datetime):
            moment = datetime.fromisoformat(f"{day}T12:00:00+00:00")

            @classmethod
            def now(cls, tz: Any = None) -> datetime:
                return cls.moment

        for module in (record, run):
            monkeypatch.setattr(module, "datetime", Then)
        settings["train"]["total_steps"] = steps
        trainer = trainkit.train(tiny_gpt2(len(made)), samples=[[*ASK, *ANSWER]], tokenizer=made, config=settings)
        texts.add(trainer.pipeline.rows[0]["turns"][0])
    assert texts == {f"01 Mar 2025{ASKED}"}
    assert [line["began"][:10] for line in Record(tmp_path).starts] == ["2025-03-01"] * 3
