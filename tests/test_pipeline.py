"""Rows, prompts and samples: a stream that one integer describes, and ids with BOS once, EOS once, nothing lost."""

from __future__ import annotations

import copy
import logging
import os
import subprocess
import sys
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from tables import table
from trainkit.data import Pipeline, PromptEncoder, Row, preference_rows, prompt_rows, sample_rows
from trainkit.data.pipeline import encode_continuation, encode_joint, encode_pair, encode_sample
from trainkit.errors import DataError
from trainkit.seeding import PLACE, Place
from trainkit.testing import EOS, character_tokenizer

BOS = "<bos>"
LETTERS = "abcdef"


def numbered(count: int) -> list[Row]:
    return [{"prompt": str(i)} for i in range(count)]


def indices(rows: list[Row]) -> list[int]:
    return [int(row["prompt"]) for row in rows]


# ------------------------------------------------------------------------------------------------ Pipeline.take


@given(st.integers(1, 12), st.integers(0, 1000), st.integers(0, 3))
def test_every_epoch_gives_each_row_once(count: int, seed: int, epoch: int) -> None:
    pipeline = Pipeline(numbered(count), seed=seed)
    assert sorted(indices(pipeline.take(epoch * count, count))) == list(range(count))


@given(st.integers(1, 9), st.integers(0, 40), st.integers(0, 40), st.integers(0, 20))
def test_the_stream_goes_on_from_any_integer(count: int, start: int, first: int, second: int) -> None:
    """Across epoch boundaries too, and also by a pipeline that has been asked for nothing before."""
    pipeline = Pipeline(numbered(count), seed=3)
    whole = Pipeline(numbered(count), seed=3).take(start, first + second)
    assert pipeline.take(start, first) + pipeline.take(start + first, second) == whole
    assert Pipeline(numbered(count), seed=3).take(start + first, second) == whole[first:]


@given(st.integers(1, 9), st.integers(0, 20), st.integers(0, 24), st.integers(1, 5))
def test_shards_partition_the_stream(count: int, start: int, amount: int, world: int) -> None:
    pipeline = Pipeline(numbered(count), seed=3)
    whole = pipeline.take(start, amount)
    shards = [Pipeline(numbered(count), seed=3).take(start, amount, rank=r, world=world) for r in range(world)]
    assert [shards[i % world][i // world] for i in range(amount)] == whole
    assert sum(map(len, shards)) == amount


def test_take_across_the_end_of_an_epoch_is_the_end_of_one_and_the_beginning_of_the_next() -> None:
    pipeline = Pipeline(numbered(5), seed=1)
    assert indices(pipeline.take(3, 4)) == [*pipeline.order(0)[3:], *pipeline.order(1)[:2]]
    orders = [pipeline.order(epoch) for epoch in range(4)]
    assert indices(pipeline.take(4, 12)) == [orders[0][4], *orders[1], *orders[2], orders[3][0]]


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = [tuple(Pipeline(numbered(50), seed=seed).order(epoch)) for seed in (0, 1, 2) for epoch in (0, 1, 2)]
    assert len(set(orders)) == 9
    assert tuple(range(50)) not in orders


def test_order_does_not_depend_on_what_was_drawn_before_nor_on_global_generators() -> None:
    fresh = Pipeline(numbered(30), seed=4).order(2)
    used = Pipeline(numbered(30), seed=4)
    used.take(0, 100)
    torch.rand(3)
    assert used.order(2) == fresh


def test_without_shuffling_every_epoch_keeps_the_given_order() -> None:
    assert indices(Pipeline(numbered(3), seed=7, shuffle=False).take(1, 6)) == [1, 2, 0, 1, 2, 0]


@pytest.mark.slow
def test_order_is_the_same_in_every_process() -> None:
    """String hashes, which differ between processes, have no part in it."""
    code = "from trainkit.data.pipeline import Pipeline; p = Pipeline(range(20), seed=5); print(p.order(0), p.order(7))"
    found = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    ]
    here = Pipeline(range(20), seed=5)
    assert found == [f"{here.order(0)} {here.order(7)}\n"] * 2


def test_a_dataset_is_read_row_by_row_as_rows_are_taken() -> None:
    from datasets import Dataset

    class Counted:
        """A dataset that notes what is read."""

        def __init__(self, dataset: Dataset) -> None:
            self.dataset, self.read = dataset, []

        def __len__(self) -> int:
            return len(self.dataset)

        def __getitem__(self, index: int) -> Row:
            self.read.append(index)
            return self.dataset[index]

    rows = Counted(Dataset.from_list(numbered(100)))
    pipeline = Pipeline(rows, seed=2)
    assert rows.read == []
    taken = pipeline.take(98, 4)
    assert rows.read == [*pipeline.order(0)[98:], *pipeline.order(1)[:2]]
    places = [(98, 0), (99, 0), (100, 1), (101, 1)]
    assert taken == [{"prompt": str(i), PLACE: Place(*at, i)} for i, at in zip(rows.read, places, strict=True)]


def test_a_pipeline_over_nothing_is_refused() -> None:
    with pytest.raises(DataError, match="no rows to train on; give at least one"):
        Pipeline([])


# -------------------------------------------------------------------------------------------------- prompt_rows


def test_prompts_may_be_strings_dicts_or_any_finite_iterable_of_them() -> None:
    from datasets import Dataset

    mixed = ["a", {"prompt": "b", "answer": 7}]
    expected = [{"prompt": "a"}, {"prompt": "b", "answer": 7}]
    assert prompt_rows(mixed) == expected
    assert prompt_rows(tuple(mixed)) == expected
    assert prompt_rows(iter(mixed)) == expected
    assert prompt_rows(Dataset.from_list([{"prompt": "b", "answer": 7}])) == expected[1:]


def test_the_callers_dicts_are_copied_so_that_rows_can_be_made_twice() -> None:
    prompts = [{"prompt": "a", "answer": 1}, {"prompt": "b", "answer": 2}]
    before = copy.deepcopy(prompts)
    first = prompt_rows(prompts)
    for row in first:
        row.clear()
    assert prompts == before
    assert prompt_rows(prompts) == before


BAD_PROMPTS: dict[str, tuple[Any, str]] = {
    "nothing": ([], "prompts is empty; give at least one"),
    "a lone string": ("abc", r"prompts should be a list .*'abc'.*Write \[prompt\]"),
    "a lone dict": ({"prompt": "a"}, r"prompts should be a list .*Write \[prompt\]"),
    "an empty prompt": (["a", ""], "prompt 1 is empty"),
    "an empty prompt in a dict": ([{"prompt": ""}], "prompt 0 is empty"),
    "None": (["a", "b", None], r"prompt 2 should be a string.*None \(NoneType\)"),
    "None in a dict": ([{"prompt": None}], r"prompt 0 should be a string.*None \(NoneType\)"),
    "an int": (["a", 7], r"prompt 1 should be a string.*7 \(int\)"),
    "a list": (["a", ["b"]], r"prompt 1 should be a string.*\['b'\] \(list\)"),
    "bytes": ([b"a"], r"prompt 0 should be a string.*b'a' \(bytes\)"),
    "half a surrogate pair": (["a", "b\ud800"], "prompt 1 contains a character that cannot be encoded"),
    "another key": (
        [{"prompt": "a"}, {"text": "b"}],
        "prompt 1 has the columns text.*language modelling; expected here: prompt",
    ),
    "a column that functions could not tell": (
        ["a", {"prompt": "b", "outputs": ["c"]}],
        "prompt 1 has a column 'outputs'.*rename the column",
    ),
}


@table("prompts, said", BAD_PROMPTS.values())
def test_a_prompt_that_cannot_be_used_is_one_error_that_names_its_index(prompts: Any, said: str) -> None:
    with pytest.raises(DataError, match=said):
        prompt_rows(prompts)


@given(st.text(max_size=5))
def test_every_text_is_a_prompt_and_nothing_else_is(text: str) -> None:
    if text and not any("\ud800" <= c <= "\udfff" for c in text):
        assert prompt_rows([text]) == [{"prompt": text}]
    else:
        with pytest.raises(DataError, match="prompt 0"):
            prompt_rows([text])


# ------------------------------------------------------------------------------------------------ PromptEncoder


def tokenizer(template: str = "$A", *, bos: str | None = BOS, pad: str = "<pad>") -> PreTrainedTokenizerFast:
    """One token per letter; what the tokenizer adds to a text is what stands around ``$A`` in the template."""
    made = character_tokenizer(LETTERS, bos_token=bos, pad_token=pad)
    special = [(token, made.get_vocab()[token]) for token in sorted({bos or EOS, EOS})]
    made.backend_tokenizer.post_processor = TemplateProcessing(single=template, special_tokens=special)
    return made


def ids_of(made: PreTrainedTokenizerFast, *tokens: str) -> list[int]:
    return [made.get_vocab()[token] for token in tokens]


PIECES = st.lists(st.sampled_from([*"abc", BOS, EOS]), min_size=1, max_size=5)
"""Texts as the tokens they consist of, special ones spelled out."""


@given(PIECES, st.sampled_from(["$A", f"{BOS} $A", f"$A {EOS}", f"{BOS} $A {EOS}"]))
def test_bos_is_added_once_if_the_tokenizer_adds_it_and_eos_never(pieces: list[str], template: str) -> None:
    """What the text spells out stays; what the tokenizer puts in front stands there once; nothing is appended."""
    made = tokenizer(template)
    begins = [BOS] if template.startswith(BOS) and pieces[0] != BOS else []
    assert PromptEncoder(made, None)("".join(pieces)) == ids_of(made, *begins, *pieces)


@given(PIECES, st.sampled_from(["$A", f"{EOS} $A", f"{EOS} $A {EOS}"]))
def test_a_tokenizer_whose_bos_is_its_eos_is_no_exception(pieces: list[str], template: str) -> None:
    pieces = [EOS if piece == BOS else piece for piece in pieces]
    made = tokenizer(template, bos=EOS)
    begins = [EOS] if template.startswith(EOS) and pieces[0] != EOS else []
    assert PromptEncoder(made, None)("".join(pieces)) == ids_of(made, *begins, *pieces)


def test_a_tokenizer_without_bos_adds_none() -> None:
    made = tokenizer(f"$A {EOS}", bos=None)
    assert PromptEncoder(made, None)("abc") == ids_of(made, *"abc")


def test_token_ids_are_taken_as_they_are() -> None:
    encode = PromptEncoder(tokenizer(f"{BOS} $A {EOS}"), None)
    assert encode([3, 1, 2]) == [3, 1, 2]
    assert encode((3, 1, 2)) == [3, 1, 2]
    assert encode(torch.tensor([3, 1, 2])) == [3, 1, 2]
    assert encode(torch.tensor([3, 1, 2], dtype=torch.int32)) == [3, 1, 2]


@table("ids", [[1.0, 2.0], torch.tensor([1.0]), torch.tensor([[1, 2]]), ["a"], [None]])
def test_what_is_neither_text_nor_ids_is_refused(ids: Any) -> None:
    with pytest.raises(DataError, match="token ids should be a 1-D integer tensor or a list of int"):
        PromptEncoder(tokenizer(), None)(ids)


def test_no_ids_are_refused() -> None:
    with pytest.raises(DataError, match=r"the prompt \[\] \(list\) has no tokens"):
        PromptEncoder(tokenizer(), None)([])


@table("template", ["$A", f"{BOS} $A {EOS}"])
def test_text_that_the_tokenizer_drops_is_refused_even_if_bos_would_be_left(template: str) -> None:
    made = tokenizer(template)
    made.backend_tokenizer.normalizer = normalizers.Strip()
    with pytest.raises(DataError, match=r"prompt 1 '  ' \(str\) has no tokens; give text that the tokenizer keeps"):
        PromptEncoder(made, None).fit(prompt_rows(["a", "  "]))


def test_text_that_the_tokenizer_cannot_encode_is_named() -> None:
    with pytest.raises(DataError, match=r"prompt 1 'axb' \(str\) cannot be encoded by the tokenizer") as caught:
        PromptEncoder(tokenizer(), None).fit(prompt_rows(["a", "axb"]))
    assert caught.value.__cause__ is not None


# ---------------------------------------------------------------------------------------------- overlong prompts

LONG = prompt_rows(["ab", "abcde", "abc", "fedcba", "abcd"])
"""Of 2, 5, 3, 6 and 4 tokens."""


def test_an_overlong_prompt_is_an_error_that_names_it_and_what_to_do() -> None:
    with pytest.raises(DataError, match=r"prompt 1 has 5 tokens, and at most 4 .*rollout.overlong_prompts"):
        PromptEncoder(tokenizer(), 4).fit(LONG)


def test_a_prompt_of_exactly_the_budget_fits() -> None:
    assert PromptEncoder(tokenizer(), 6, "error").fit(LONG) == LONG


def test_a_truncated_prompt_keeps_its_tail_and_the_count_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    made = tokenizer()
    encode = PromptEncoder(made, 4, "truncate")
    with caplog.at_level(logging.WARNING):
        rows = encode.fit(LONG)
    assert rows == LONG
    assert [encode(row["prompt"]) for row in rows] == [
        ids_of(made, *tail) for tail in ("ab", "bcde", "abc", "dcba", "abcd")
    ]
    assert caplog.messages == ["2 of 5 prompts were truncated to their end: more than 4 tokens"]


def test_a_prompt_may_keep_its_beginning_and_what_the_tokenizer_writes_after_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = tokenizer()
    assert PromptEncoder(made, 4, "truncate_right").fit(LONG) == LONG
    assert caplog.messages == ["2 of 5 prompts were truncated to their beginning: more than 4 tokens"]
    assert PromptEncoder(made, 4, "truncate_right")("fedcba") == ids_of(made, *"fedc")
    ended = tokenizer(f"{BOS} $A {EOS}")
    read = PromptEncoder(ended, 4, "truncate_right", ends=True)
    assert read("fedcba") == ids_of(ended, BOS, "f", "e", EOS)
    with pytest.raises(DataError, match=r"special tokens, which truncation keeps \(2\), and may have no more than 2"):
        PromptEncoder(ended, 2, "truncate_right", ends=True)("fedcba")


def test_dropped_prompts_are_left_out_and_the_count_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        rows = PromptEncoder(tokenizer(), 4, "drop").fit(LONG)
    assert rows == [LONG[0], LONG[2], LONG[4]]
    assert caplog.messages == ["2 of 5 prompts were dropped: more than 4 tokens"]


@table("overlong", ["error", "truncate", "truncate_right", "drop"])
def test_nothing_is_logged_when_every_prompt_fits(overlong: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert PromptEncoder(tokenizer(), 6, overlong).fit(LONG) == LONG
    assert caplog.messages == []


def test_dropping_every_prompt_is_an_error() -> None:
    with pytest.raises(DataError, match="all 5 prompts are longer than 1 tokens and were dropped; none is left"):
        PromptEncoder(tokenizer(), 1, "drop").fit(LONG)


@table("budget", [0, -3])
def test_truncating_to_no_room_at_all_is_an_error(budget: int) -> None:
    """A slice from -0 would be the whole prompt, one from 3 its wrong end."""
    with pytest.raises(DataError, match="max_new_tokens leaves no room for a prompt"):
        PromptEncoder(tokenizer(), budget, "truncate").fit(LONG)


@given(st.text("abc", min_size=1, max_size=9), st.integers(2, 6))
def test_truncation_gives_bos_and_the_last_tokens_of_the_whole(text: str, budget: int) -> None:
    made = tokenizer(f"{BOS} $A")
    assert PromptEncoder(made, budget, "truncate")(text) == ids_of(made, BOS, *text[1 - budget :])


# -------------------------------------------------------------------------------------------------- sample_rows

SAMPLES: dict[str, tuple[Any, list[str], list[bool]]] = {
    "text": ("a", ["a"], [True]),
    "one turn": (["a"], ["a"], [True]),
    "a pair": (("a", "b"), ["a", "b"], [False, True]),
    "a pair in a list": (["a", "b"], ["a", "b"], [False, True]),
    "four turns": (["a", "b", "c", "d"], ["a", "b", "c", "d"], [False, True, False, True]),
    "prompt and output": ({"prompt": "a", "output": "b"}, ["a", "b"], [False, True]),
    "prompt and completion": ({"prompt": "a", "completion": "b"}, ["a", "b"], [False, True]),
    "output alone": ({"output": "b"}, ["b"], [True]),
}


@table("sample, turns, outputs", SAMPLES.values())
def test_every_form_of_sample_becomes_turns_of_which_the_last_is_an_output(
    sample: Any, turns: list[str], outputs: list[bool]
) -> None:
    assert sample_rows([sample]) == [{"turns": turns, "outputs": outputs}]


def test_further_keys_of_a_sample_are_kept_and_the_callers_dict_is_not_changed() -> None:
    sample = {"prompt": "a", "output": "b", "source": "web"}
    before = dict(sample)
    assert sample_rows([sample]) == [{"turns": ["a", "b"], "outputs": [False, True], "source": "web"}]
    assert sample == before


def test_each_sample_gets_its_reward() -> None:
    rows = sample_rows(iter(["a", "b", "c"]), rewards=iter([0.5, -1, True]))
    assert [(row["turns"], row["reward"]) for row in rows] == [(["a"], 0.5), (["b"], -1.0), (["c"], 1.0)]
    assert {type(row["reward"]) for row in rows} == {float}


BAD_SAMPLES: dict[str, tuple[Any, Any, str]] = {
    "nothing": ([], None, "samples is empty; give at least one"),
    "a lone string": ("abc", None, r"samples should be a list.*Write \[sample\]"),
    "a lone dict": ({"prompt": "a", "output": "b"}, None, r"samples should be a list.*Write \[sample\]"),
    "three turns": (["a", ["a", "b", "c"]], None, "sample 1 has 3 turns; turns alternate"),
    "no turns": (["a", []], None, "sample 1 has no turns"),
    "None": ([None], None, r"sample 0 should be text.*None \(NoneType\)"),
    "an int": (["a", "b", 3], None, r"sample 2 should be text.*3 \(int\)"),
    "an empty text": (["a", ""], None, "sample 1 is empty"),
    "an empty output": ([("a", "")], None, "sample 0 is empty"),
    "no text among turns": ([("a", 1)], None, r"sample 0 .*holds 1 \(int\)"),
    "a dict without output": (
        [{"prompt": "a"}],
        None,
        "sample 0 .*prompt-only; expected here: text",
    ),
    "half a surrogate pair": ([("a", "\udfff")], None, "sample 0 contains a character that cannot be encoded"),
    "too few rewards": (["a", "b"], [1.0], "2 samples and 1 rewards; give one reward per sample"),
    "too many rewards": (["a"], [1.0, 2.0], "1 samples and 2 rewards"),
    "a reward that is no number": (["a", "b"], [1.0, "2"], r"reward 1 should be a finite number; given '2' \(str\)"),
    "no reward": (["a", "b"], [None, 1.0], r"reward 0 should be a finite number; given None \(NoneType\)"),
    "a NaN for a reward": (["a"], [float("nan")], "reward 0 should be a finite number; given nan"),
    "an infinite reward": (["a", "b"], [1.0, float("inf")], "reward 1 should be a finite number; given inf"),
}


@table("samples, rewards, said", BAD_SAMPLES.values())
def test_a_sample_that_cannot_be_used_is_one_error_that_names_its_index(samples: Any, rewards: Any, said: str) -> None:
    with pytest.raises(DataError, match=said):
        sample_rows(samples, rewards)


# ------------------------------------------------------------------------------------------------ encode_sample


def encoded(made: PreTrainedTokenizerFast, sample: Any, limit: int | None = None) -> tuple[list[int], str]:
    """Ids of a sample, and its mask as a string with an x for every token that is trained."""
    ids, chosen = encode_sample(made, sample_rows([sample])[0], limit)
    assert len(ids) == len(chosen)
    return ids, "".join("x" if c else "." for c in chosen)


PADS = ["<pad>", EOS]
every_pad = pytest.mark.parametrize("pad", PADS)


@every_pad
def test_the_output_and_one_eos_are_trained_and_the_prompt_is_read(pad: str) -> None:
    """Also where padding has EOS's id."""
    made = tokenizer(f"{BOS} $A {EOS}", pad=pad)
    assert encoded(made, ("ab", "cd")) == (ids_of(made, BOS, *"abcd", EOS), "...xxx")


@every_pad
def test_every_output_of_a_dialogue_is_trained_and_eos_ends_the_last(pad: str) -> None:
    made = tokenizer(f"{BOS} $A {EOS}", pad=pad)
    assert encoded(made, ["ab", "c", "d", "ef"]) == (ids_of(made, BOS, *"abcdef", EOS), "...x.xxx")


@every_pad
def test_eos_that_the_output_spells_out_is_not_doubled(pad: str) -> None:
    made = tokenizer(pad=pad)
    assert encoded(made, ("ab", f"c{EOS}")) == (ids_of(made, *"abc", EOS), "..xx")


def test_eos_in_a_prompt_is_read_and_the_outputs_own_is_trained() -> None:
    made = tokenizer()
    assert encoded(made, (f"a{EOS}", "b")) == (ids_of(made, "a", EOS, "b", EOS), "..xx")


@table("template", ["$A", f"{BOS} $A", f"{BOS} $A {EOS}"])
@table("text", ["abc", f"{BOS}abc"])
def test_text_alone_is_trained_after_one_bos(template: str, text: str) -> None:
    """Whether or not the tokenizer adds BOS by itself, and whether or not the text spells it out."""
    made = tokenizer(template)
    assert encoded(made, text) == (ids_of(made, BOS, *"abc", EOS), ".xxxx")


def test_without_bos_the_first_token_of_a_text_is_context() -> None:
    """Nothing precedes it, so there is no state that it could be chosen in."""
    made = tokenizer(bos=None)
    assert encoded(made, "abc") == (ids_of(made, *"abc", EOS), ".xxx")
    assert encoded(made, "a") == (ids_of(made, "a", EOS), ".x")


def test_a_text_that_is_eos_alone_still_has_one_to_train() -> None:
    made = tokenizer(bos=None)
    assert encoded(made, EOS) == (ids_of(made, EOS, EOS), ".x")


@every_pad
@table("limit, mask", [(6, "...xxx"), (5, "...xx"), (4, "...x")])
def test_a_sample_that_is_cut_has_no_eos(limit: int, mask: str, pad: str) -> None:
    made = tokenizer(f"{BOS} $A", pad=pad)
    whole = ids_of(made, BOS, *"abcd", EOS)
    assert encoded(made, ("ab", "cd"), limit) == (whole[:limit], mask)


def test_a_tokenizer_that_truncates_on_the_left_leaves_the_end_and_its_eos() -> None:
    """The first token is context, because nothing precedes it: BOS, or without one the first that is left."""
    made, bare = tokenizer(f"{BOS} $A"), tokenizer(bos=None)
    made.truncation_side = bare.truncation_side = "left"
    bos, whole = ids_of(made, BOS), ids_of(made, *"abcd", EOS)
    found = [encoded(made, ("ab", "cd"), limit) for limit in (6, 5, 3, 2)]
    assert found == [
        (bos + whole[left:], mask) for left, mask in enumerate(["...xxx", "..xxx", "", ".xx", ".x"]) if mask
    ]
    assert [encoded(bare, ("ab", "cd"), limit) for limit in (4, 2)] == [(whole[1:], ".xxx"), (whole[3:], ".x")]


def test_a_sample_whose_output_is_cut_off_wholly_is_refused_by_name() -> None:
    with pytest.raises(DataError, match="sample 7 has no output within the first 3 tokens; shorten its prompt"):
        encode_sample(tokenizer(f"{BOS} $A"), sample_rows([("ab", "cd")])[0], 3, "sample 7")


@table("sample", ["  ", ("a", "  "), ["a", "b", "  ", "c"]])
def test_a_turn_that_the_tokenizer_drops_is_refused_by_name(sample: Any) -> None:
    made = tokenizer()
    made.backend_tokenizer.normalizer = normalizers.Strip()
    with pytest.raises(DataError, match=r"sample 7 holds '  ' \(str\), which has no tokens"):
        encode_sample(made, sample_rows([sample])[0], None, "sample 7")


def test_a_turn_that_the_tokenizer_cannot_encode_is_named() -> None:
    with pytest.raises(DataError, match=r"sample 7 'x' \(str\) cannot be encoded"):
        encode_sample(tokenizer(), sample_rows([("a", "x")])[0], None, "sample 7")


TURNS = st.lists(st.tuples(*[st.text(LETTERS, min_size=1, max_size=4)] * 2), min_size=1, max_size=3)


@given(TURNS, st.sampled_from(["$A", f"{BOS} $A {EOS}"]), st.sampled_from(PADS), st.integers(1, 30))
def test_a_dialogue_is_its_turns_in_order_then_eos(
    turns: list[tuple[str, str]], template: str, pad: str, limit: int
) -> None:
    made = tokenizer(template, pad=pad)
    begins = [BOS] if BOS in template else []
    letters = [*begins, *(c for pair in turns for text in pair for c in text), EOS]
    mask = "." * len(begins) + "".join("." * len(p) + "x" * len(o) for p, o in turns) + "x"
    sample = [text for pair in turns for text in pair]
    if "x" in mask[:limit]:
        assert encoded(made, sample, limit) == (ids_of(made, *letters)[:limit], mask[:limit])
    else:
        with pytest.raises(DataError, match="no output within the first"):
            encoded(made, sample, limit)


@given(PIECES, PIECES, st.sampled_from(["$A", f"{BOS} $A {EOS}"]))
def test_prompts_have_the_ids_in_a_sample_that_they_have_when_generating(
    prompt: list[str], output: list[str], template: str
) -> None:
    made = tokenizer(template)
    ids, mask = encoded(made, ("".join(prompt), "".join(output)))
    when_generating = PromptEncoder(made, None)("".join(prompt))
    assert ids[: len(when_generating)] == when_generating
    assert mask == "." * len(when_generating) + "x" * (len(ids) - len(when_generating))
    assert ids[-1] == made.eos_token_id
    assert len(ids) - len(when_generating) == len(output) + (output[-1] != EOS)


# --------------------------------------------------------------------------------------------------------- pairs


def test_a_pair_keeps_its_columns_and_is_a_copy() -> None:
    pair = {"prompt": "a", "chosen": "b", "rejected": "c", "margin": 2.0}
    (row,) = preference_rows([pair])
    assert row == pair
    assert row is not pair


@table(
    "sample, said",
    [
        ({"prompt": "a", "chosen": "b"}, "has the columns prompt, chosen, .*expected here: prompt, chosen, rejected"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "is no preference"),
        ({"prompt": "a", "chosen": "", "rejected": "b"}, "chosen is empty"),
        ({"prompt": 1, "chosen": "a", "rejected": "b"}, "prompt should be text"),
        ("text", "is 'text'.*expected here: prompt, chosen, rejected"),
    ],
)
def test_a_faulty_pair_is_named(sample: Any, said: str) -> None:
    good = {"prompt": "a", "chosen": "b", "rejected": "c"}
    with pytest.raises(DataError, match=f"sample 1.*{said}"):
        preference_rows([good, sample])


def sides(tokenizer: Any, prompt: str, chosen: str, rejected: str, limit: int | None = None) -> list[tuple[str, str]]:
    """Each side of a pair as it is encoded: the prompt's text and the output's."""
    row = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    found = []
    for ids, mask in encode_pair(tokenizer, row, limit)[:2]:
        start = mask.index(True)
        assert mask == [False] * start + [True] * (len(ids) - start)
        found.append((tokenizer.decode(ids[:start]), tokenizer.decode(ids[start:])))
    return found


def test_a_pair_that_is_too_long_loses_the_same_beginning_of_its_prompt_on_both_sides() -> None:
    """The longer side decides; not the response while the prompt has tokens, of which one is left."""
    made = character_tokenizer("abcdefgh")
    assert sides(made, "abc", "de", "f") == [("abc", "de<eos>"), ("abc", "f<eos>")]
    assert sides(made, "abc", "de", "f", 6) == [("abc", "de<eos>"), ("abc", "f<eos>")]
    assert sides(made, "abc", "de", "f", 5) == [("bc", "de<eos>"), ("bc", "f<eos>")]
    assert sides(made, "abc", "defgh", "f", 4) == [("c", "def"), ("c", "f<eos>")]


def test_outputs_that_are_still_too_long_lose_their_beginning_on_the_left() -> None:
    made = character_tokenizer("abcdefgh")
    made.truncation_side = "left"
    assert sides(made, "abc", "de", "f", 5) == [("bc", "de<eos>"), ("bc", "f<eos>")]
    assert sides(made, "abc", "defgh", "f", 4) == [("f", "gh<eos>"), ("c", "f<eos>")]


def test_what_was_cut_is_told() -> None:
    row = {"prompt": "abc", "chosen": "de", "rejected": "f"}
    assert [encode_pair(character_tokenizer("abcdef"), row, limit)[2] for limit in (None, 6, 5)] == [False, False, True]


@table(
    "row, limit, said",
    [
        ({"chosen": "B", "rejected": "b"}, None, "same tokens as chosen and as rejected; remove it"),
        ({"chosen": "bbbc", "rejected": "bbbd"}, 4, "within 4 tokens; raise train.seq_length"),
        ({"chosen": "b", "rejected": "b<eos>"}, None, "same tokens"),
    ],
)
def test_sides_that_are_the_same_as_tokens_are_refused(row: dict[str, str], limit: int | None, said: str) -> None:
    made = character_tokenizer("abcd")
    made.backend_tokenizer.normalizer = normalizers.Lowercase()
    with pytest.raises(DataError, match=f"sample 3 has .*{said}"):
        encode_pair(made, {"prompt": "a", **row}, limit, "sample 3")


TEXTS = [
    "the cat sat on the mat",
    "a cat and a dog",
    "naïve café — déjà vu",
    "日本語 text 日本",
    "x  y\n\nz\t1234",
    "🙂🙃 ok",
] * 8
UNTYPICAL = st.text(st.sampled_from("the catsonmd  \n\té—日本🙂1x"), min_size=1, max_size=12)


@cache
def byte_pairs(bos: bool = False, prefix_space: bool = False, trim: bool = True) -> Any:
    """A byte-level BPE tokenizer as GPT-2's, trained on a few lines; with ``bos`` it begins every text as Llama 3's."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    made.decoder = decoders.ByteLevel()
    special = ["<bos>", "<eos>", "<pad>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        TEXTS,
        trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    steps: list[Any] = [processors.ByteLevel(trim_offsets=trim)]
    if bos:
        steps.append(processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)]))
    made.post_processor = processors.Sequence(steps)
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        clean_up_tokenization_spaces=False,
    )


BYTE_PAIRS = [{}, {"bos": True}, {"prefix_space": True}, {"trim": False}]


def in_bytes(made: Any, ids: list[int]) -> list[int]:
    """How many bytes of text each token holds."""
    special = set(made.all_special_ids)
    return [0 if i in special else len(token) for i, token in zip(ids, made.convert_ids_to_tokens(ids), strict=True)]


@table("kind", BYTE_PAIRS)
@given(prompt=UNTYPICAL, output=UNTYPICAL)
def test_the_tokens_of_a_side_are_those_of_its_text_and_split_where_the_output_begins(
    kind: dict[str, bool], prompt: str, output: str
) -> None:
    """BOS and EOS once; the first token of the output is the first that holds a byte of it."""
    made = byte_pairs(**kind)
    ids, mask = encode_joint(made, prompt, output)
    start, ends = mask.index(True), in_bytes(made, ids)
    assert mask == [False] * start + [True] * (len(ids) - start)
    assert ids.count(made.bos_token_id) == (ids[0] == made.bos_token_id) == kind.get("bos", False)
    assert ids.count(made.eos_token_id) == 1
    assert ids[-1] == made.eos_token_id
    assert start > 0
    whole = made(prompt + output)["input_ids"]
    added = kind.get("prefix_space", False) and prompt[0] != " "
    held, size = sum(ends[:start]) - added, len(prompt.encode())
    assert held <= size
    if ids[:-1] == whole:
        assert held + ends[start] > size
    else:  # one token for the prompt and the beginning of the output, and nothing before it
        assert ids[:-1] == made(prompt)["input_ids"] + encode_continuation(made, output, ids[start - 1])
        assert ends[0] - added < in_bytes(made, whole)[0]


@table("kind", BYTE_PAIRS)
@settings(max_examples=25)
@given(prompt=UNTYPICAL, chosen=UNTYPICAL, rejected=UNTYPICAL, limit=st.integers(2, 20))
def test_cut_sides_are_ends_of_the_whole_ones_and_answer_to_one_prompt(
    kind: dict[str, bool], prompt: str, chosen: str, rejected: str, limit: int
) -> None:
    made, row = byte_pairs(**kind), {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    assume(chosen != rejected)
    whole = encode_pair(made, row, None)[:2]
    try:
        *found, cut = encode_pair(made, row, limit)
    except DataError:
        assert max(len(ids) for ids, _ in whole) > limit
        return
    assert cut == (max(len(ids) for ids, _ in whole) > limit)
    starts = []
    for (ids, mask), (part, part_mask) in zip(whole, found, strict=True):
        start = mask.index(True) - part_mask.index(True)
        starts.append(start)
        bos = kind.get("bos", False)
        assert part == [*ids[:bos], *ids[start + bos : start + limit]]
        assert part_mask == [*mask[:bos], *mask[start + bos : start + limit]]
        assert part_mask[0] is False
        assert part_mask.index(True) <= len(part) <= limit
    assert starts[0] == starts[1]


@given(prompt=UNTYPICAL, output=UNTYPICAL)
def test_bos_and_eos_that_a_text_spells_out_are_not_added_again(prompt: str, output: str) -> None:
    made = byte_pairs(bos=True)
    ids, _ = encode_joint(made, "<bos>" + prompt, output + "<eos>")
    assert (ids.count(made.bos_token_id), ids.count(made.eos_token_id)) == (1, 1)
    assert ids[0] == made.bos_token_id
    assert ids[-1] == made.eos_token_id


def test_an_eos_inside_a_text_is_a_token_like_others() -> None:
    """Chat templates end every turn with one."""
    made = byte_pairs()
    ids, mask = encode_joint(made, "the cat<eos>", "sat<eos>on")
    assert made.decode(ids) == "the cat<eos>sat<eos>on<eos>"
    assert made.decode([i for i, chosen in zip(ids, mask, strict=True) if chosen]) == "sat<eos>on<eos>"
