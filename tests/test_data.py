"""Batches of named tensors: masks come from lengths, and nothing that is real is lost on any round trip."""

from __future__ import annotations

from collections import Counter
from dataclasses import FrozenInstanceError, dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tables import table
from trainkit.data import Batch, Preferences, Rollouts, Sequences, TokenBatch
from trainkit.data.batches import BATCH_CLASSES, pass_cost

EOS = 3
IDS = st.lists(st.integers(0, 9), max_size=5)
PAIRS = st.lists(st.tuples(IDS, IDS), min_size=1, max_size=6)
"""Prompts and responses, rows of any length, empty ones included."""


@dataclass(frozen=True)
class Experience(TokenBatch):
    logprobs: Tensor  # [B, T]
    scores: Tensor  # [B]
    hidden: Tensor  # [B, T, D]


@dataclass(frozen=True)
class Pair(Batch):
    chosen: Sequences
    rejected: Sequences
    margins: Tensor  # [B]


def sequences(pairs, pad_id=0):
    return Sequences.from_lists([p for p, _ in pairs], [r for _, r in pairs], pad_id)


def experience(pairs):
    """Rows whose tensors all tell which token they belong to."""
    batch = sequences(pairs)
    rows, width = batch.input_ids.shape
    at = (torch.arange(rows * width).reshape(rows, width) + 1.0) * batch.attention_mask
    return Experience(batch, at, torch.arange(rows).float(), torch.stack([at, -at], dim=-1))


def pair(pairs):
    """Chosen and rejected of different widths."""
    return Pair(sequences(pairs), sequences([(p, r + p) for p, r in pairs[::-1]]), torch.arange(len(pairs)).float())


KINDS = st.sampled_from([sequences, experience, pair])


def rows_of(batch):
    """Each row as plain data, without its padding."""
    if isinstance(batch, Pair):
        return list(zip(rows_of(batch.chosen), rows_of(batch.rejected), [float(m) for m in batch.margins], strict=True))
    if isinstance(batch, Sequences):
        return [(tuple(q.tolist()), tuple(r.tolist())) for q, r in zip(batch.queries, batch.responses, strict=True)]
    real = batch.sequences.attention_mask
    tokens = torch.cat([batch.logprobs[..., None], batch.hidden], dim=-1)
    return [
        (row, tuple(tokens[i, real[i]].flatten().tolist()), float(batch.scores[i]))
        for i, row in enumerate(rows_of(batch.sequences))
    ]


def assert_same(a, b):
    """The same class, names, shapes, types and values."""
    left, right = a.flatten(), b.flatten()
    assert type(a) is type(b)
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(left[name], right[name], rtol=0, atol=0)


# ---------------------------------------------------------------------------------------------------- from_lists


def test_masks_come_from_lengths_even_where_text_holds_the_pad_id():
    # EOS is the pad id, stands inside a prompt, and ends the first response: it is real, chosen and trained.
    batch = Sequences.from_lists([[EOS, 7], [EOS]], [[5, EOS], []], pad_id=EOS)
    assert batch.input_ids.tolist() == [[EOS, 7, 5, EOS], [EOS, EOS, EOS, EOS]]
    assert batch.attention_mask.tolist() == [[True, True, True, True], [True, False, False, False]]
    assert batch.response_mask.tolist() == [[False, False, True, True], [False, False, False, False]]


def test_whole_rows_keep_what_was_chosen_between_what_was_not():
    # Row 0 is prompt, choice, a tool's answer, choice; row 1 is shorter and holds the pad id as a choice.
    chosen = [[False, True, False, True], [False, True]]
    batch = Sequences.from_rows([[1, 2, 3, 4], [5, EOS]], chosen, pad_id=EOS)
    assert batch.input_ids.tolist() == [[1, 2, 3, 4], [5, EOS, EOS, EOS]]
    assert batch.attention_mask.tolist() == [[True] * 4, [True, True, False, False]]
    assert batch.response_mask.tolist() == [chosen[0], [False, True, False, False]]
    assert [r.tolist() for r in batch.responses] == [[2, 4], [EOS]]


@given(PAIRS, st.integers(0, 9))
def test_sequences_give_back_the_lists_they_were_made_of(pairs, pad_id):
    batch = sequences(pairs, pad_id)
    assert [(q.tolist(), r.tolist()) for q, r in zip(batch.queries, batch.responses, strict=True)] == pairs


@given(PAIRS)
def test_weight_counts_response_tokens_and_lengths_count_all(pairs):
    batch = sequences(pairs)
    assert batch.weight.item() == sum(len(r) for _, r in pairs)
    assert batch.weight.dtype == torch.float32
    assert batch.lengths.tolist() == [len(p) + len(r) for p, r in pairs]
    assert len(batch) == len(pairs)


@given(PAIRS)
def test_sequences_are_exactly_as_wide_as_the_longest_row(pairs):
    batch = sequences(pairs)
    assert batch.input_ids.shape == (len(pairs), max(len(p) + len(r) for p, r in pairs))
    assert (batch.input_ids.dtype, batch.attention_mask.dtype) == (torch.long, torch.bool)


def test_no_rows_make_an_empty_batch():
    batch = Sequences.from_lists([], [])
    assert batch.input_ids.shape == (0, 0)
    assert (batch.input_ids.dtype, batch.response_mask.dtype) == (torch.long, torch.bool)


def test_prompts_without_responses_are_refused():
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        Sequences.from_lists([[1], [2]], [[3]])


@table("wrong", ["attention_mask", "response_mask"])
@table("dtype", [torch.long, torch.float32])
def test_masks_that_are_not_boolean_are_refused(wrong, dtype):
    fields = dict.fromkeys(("input_ids", "attention_mask", "response_mask"), torch.ones(1, 2, dtype=torch.bool))
    with pytest.raises(TypeError, match="masks are boolean"):
        Sequences(**{**fields, wrong: torch.ones(1, 2, dtype=dtype)})


# -------------------------------------------------------------------------------------------------- position_ids


@given(PAIRS, st.integers(0, 3))
def test_position_ids_count_real_tokens_wherever_the_padding_is(pairs, left):
    batch = sequences(pairs)
    moved = batch.map(lambda x: torch.nn.functional.pad(x, (left, 0)))
    for positions, real in zip(moved.position_ids, moved.attention_mask, strict=True):
        assert positions[real].tolist() == list(range(int(real.sum())))
        assert (positions >= 0).all()


# --------------------------------------------------------------------------------- select, trim, split, cat, map


@settings(max_examples=90)
@given(KINDS, PAIRS, st.integers(1, 7))
def test_micro_batches_hold_every_row_once_and_weigh_as_much_as_the_batch(make, pairs, size):
    batch = make(pairs)
    parts = batch.split(size)
    assert all(1 <= len(part) <= size for part in parts)
    assert len(parts) == -(-len(pairs) // size)
    assert Counter(row for part in parts for row in rows_of(part)) == Counter(rows_of(batch))
    assert sum(part.weight for part in parts) == batch.weight


@given(PAIRS, st.integers(1, 7))
def test_micro_batches_go_by_length_longest_first(pairs, size):
    lengths = [n for part in experience(pairs).split(size) for n in part.lengths.tolist()]
    if size < len(pairs):
        assert lengths == sorted(lengths, reverse=True)
    else:
        assert lengths == [len(p) + len(r) for p, r in pairs]


@given(PAIRS, st.integers(1, 7))
def test_micro_batches_are_no_wider_than_their_longest_row(pairs, size):
    for part in experience(pairs).split(size):
        widest = int(part.lengths.max())
        assert part.sequences.input_ids.shape[1] == widest
        assert part.logprobs.shape[1] == part.hidden.shape[1] == widest
        assert part.hidden.shape[2] == 2


def test_without_a_micro_batch_size_the_batch_is_the_only_one():
    batch = experience([([1], [2]), ([3, 4], [5])])
    assert batch.split(None) == [batch]
    assert batch.split(None, tokens=10**6) == [batch]


@settings(max_examples=90)
@given(KINDS, PAIRS, st.data())
def test_select_takes_the_rows_in_the_order_asked_for(make, pairs, data):
    chosen = data.draw(st.lists(st.integers(0, len(pairs) - 1), min_size=1, max_size=8))
    batch = make(pairs)
    rows = rows_of(batch)
    assert rows_of(batch.select(torch.tensor(chosen))) == [rows[i] for i in chosen]


@settings(max_examples=90)
@given(KINDS, PAIRS)
def test_trim_drops_what_is_padding_in_every_row_and_nothing_else(make, pairs):
    tight = make(pairs)
    wide = tight.map(lambda x: torch.nn.functional.pad(x, (0, 0) * (x.dim() - 2) + (0, 3)) if x.dim() >= 2 else x)
    assert_same(wide.trim(), tight)
    assert_same(tight.trim(), tight)


def test_trim_keeps_padding_inside_and_on_the_left():
    mask = torch.tensor([[False, True, False, True, False]])
    batch = Sequences(torch.arange(5)[None], mask, mask)
    assert batch.trim().attention_mask.tolist() == [[False, True, False, True]]


@settings(max_examples=90)
@given(KINDS, PAIRS, PAIRS)
def test_cat_holds_all_rows_in_order_and_pads_with_false(make, first, second):
    a, b = make(first), make(second)
    joined = type(a).cat([a, b])
    assert rows_of(joined) == rows_of(a) + rows_of(b)
    assert joined.weight == a.weight + b.weight


@settings(max_examples=90)
@given(KINDS, PAIRS, st.data())
def test_cat_of_pieces_is_the_batch_again(make, pairs, data):
    batch = make(pairs)
    cut = data.draw(st.integers(0, len(pairs)))
    order = torch.arange(len(pairs))
    pieces = [batch.select(rows) for rows in (order[:cut], order[cut:]) if len(rows)]
    assert_same(type(batch).cat(pieces), batch)


def test_cat_pads_short_batches_on_the_right():
    a, b = sequences([([1], [2])]), sequences([([3, 4], [5, 6])])
    joined = Sequences.cat([a, b])
    assert joined.input_ids.tolist() == [[1, 2, 0, 0], [3, 4, 5, 6]]
    assert joined.attention_mask.tolist() == [[True, True, False, False], [True, True, True, True]]
    assert joined.response_mask.tolist() == [[False, True, False, False], [False, False, True, True]]


def test_map_and_to_reach_every_tensor_of_a_nested_batch():
    batch = pair([([1], [2])])
    shapes = []
    batch.map(lambda x: shapes.append(tuple(x.shape)) or x)
    assert shapes == [(1, 2)] * 3 + [(1, 3)] * 3 + [(1,)]
    assert {x.device.type for x in batch.to("meta").flatten().values()} == {"meta"}


# --------------------------------------------------------------------------------------- flatten, weights, frozen


def test_flatten_holds_every_tensor_itself():
    batch = experience([([1], [2]), ([3, 4], [5])])
    flat = batch.flatten()
    assert flat["sequences.input_ids"] is batch.sequences.input_ids
    assert [flat[name] is getattr(batch, name) for name in ("logprobs", "scores", "hidden")] == [True] * 3
    assert list(batch.flatten("store.")) == [f"store.{name}" for name in flat]


def test_a_batch_class_is_known_by_its_full_name_from_its_definition_on():
    assert BATCH_CLASSES[f"{__name__}.Experience"] is Experience
    assert BATCH_CLASSES["trainkit.data.batches.Sequences"] is Sequences
    assert Counter(BATCH_CLASSES.values())[Pair] == 1


def test_flatten_names_nested_tensors_by_their_path():
    names = list(pair([([1], [2])]).flatten())
    inner = ["input_ids", "attention_mask", "response_mask"]
    assert names == [f"chosen.{n}" for n in inner] + [f"rejected.{n}" for n in inner] + ["margins"]


def test_a_batch_of_rows_weighs_its_rows_and_one_of_tokens_its_response_tokens():
    pairs = [([1], [2, 3]), ([4, 5], [6])]
    assert pair(pairs).weight.item() == 2
    assert pair(pairs).lengths.tolist() == [5, 4], "of the longer side"
    assert experience(pairs).weight.item() == 3
    assert experience(pairs).lengths.tolist() == [3, 3]


def test_batches_are_frozen():
    with pytest.raises(FrozenInstanceError):
        sequences([([1], [2])]).input_ids = torch.zeros(1, 2)


# ------------------------------------------------------------------------------------------------------ Rollouts


def rollouts(*rows):
    pairs = [([1, 2], [3]) for _ in rows]
    width = torch.zeros(len(rows), 3)
    ended = torch.ones(len(rows), dtype=torch.bool)
    prompts = [row["prompt"] for row in rows]
    return Rollouts(list(rows), sequences(pairs), width, ended, prompts, [" out"] * len(rows))


def test_columns_have_none_where_a_row_lacks_them_and_leave_the_prompt_out():
    both = rollouts({"prompt": "a", "answer": 1}, {"prompt": "b", "level": "hard"}, {"prompt": "c", "answer": 0})
    assert both.columns == {"answer": [1, None, 0], "level": [None, "hard", None]}
    assert rollouts({"prompt": "a"}).columns == {}


def test_samples_are_prompt_and_output_together():
    assert rollouts({"prompt": "one"}, {"prompt": "two"}).samples == ["one out", "two out"]


def test_rollouts_give_the_ids_of_their_sequences():
    taken = rollouts({"prompt": "a"}, {"prompt": "b"})
    assert len(taken) == 2
    assert [q.tolist() for q in taken.queries] == [[1, 2], [1, 2]]
    assert [r.tolist() for r in taken.responses] == [[3], [3]]


def test_micro_batches_of_so_many_tokens_count_the_longest_row_of_each() -> None:
    batch = experience([([1], [2] * n) for n in (3, 9, 1, 9, 3, 4)])  # with their prompts 4, 10, 2, 10, 4 and 5 tokens
    parts = [part.lengths.tolist() for part in batch.split(None, tokens=20)]
    assert parts == [[10, 10], [5, 4, 4, 2]]
    assert [len(part) for part in batch.split(None, tokens=1)] == [1] * 6
    assert [len(part) for part in batch.split(4)] == [4, 2]
    assert [len(part) for part in batch.split(3, tokens=20)] == [2, 3, 1]


def test_micro_batches_of_so_many_tokens_are_about_equally_large() -> None:
    batch = experience([([1], [2] * 9)] * 32)  # 32 rows of 10 tokens
    assert [len(part) for part in batch.split(None, tokens=260)] == [16, 16]
    assert [len(part) for part in batch.split(None, tokens=310)] == [16, 16]
    assert [len(part) for part in batch.split(None, tokens=100)] == [8, 8, 8, 8]
    assert [len(part) for part in batch.split(26)] == [26, 6]


def test_a_pass_costs_more_tokens_the_smaller_the_model_is() -> None:
    def cost(parameters: int, device: str = "cpu") -> int:
        return pass_cost(torch.nn.Linear(parameters, 1, bias=False, device="meta"), torch.device(device))

    assert [cost(size) for size in (10**4, 4 * 10**5, 2 * 10**7, 10**9)] == [48 + 512, 48 + 200, 48 + 4, 48]
    assert cost(10**4, "cuda") == cost(10**9, "cuda") == 4096


def test_a_pair_takes_up_two_rows_as_wide_as_its_longer_side() -> None:
    short, long = Sequences.from_lists([[1]], [[2]]), Sequences.from_lists([[1]], [[2, 3, 4]])
    assert Preferences(short, long).lengths.tolist() == [8]
    both = Preferences.cat([Preferences(short, long)] * 4)
    assert [len(micro) for micro in both.split(None, 16)] == [2, 2]
