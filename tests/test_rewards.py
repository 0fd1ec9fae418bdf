"""The boundary to reward and metric functions: which forms pass, what they become, and one clear error for the rest."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tables import table
from trainkit.data import Rollouts, Sequences
from trainkit.errors import DataError, RewardError
from trainkit.rollouts import check_scores, metrics, score
from trainkit.rollouts import rewards as rewards_module
from trainkit.testing.trainers import tiny_trainer

PROMPTS = ("p", "pqr", "pq")
OUTPUTS = ("abc", "d", "efgh")


def rollouts(outputs: tuple[str, ...] = OUTPUTS, /, **columns: list[Any]) -> Rollouts:
    """Three ragged rows, one token per character: prompts of 1, 3, 2 tokens, responses of 3, 1, 4; T = 6."""
    rows = [
        {"prompt": prompt, **{name: values[i] for name, values in columns.items()}} for i, prompt in enumerate(PROMPTS)
    ]
    ids = [[[ord(c) for c in text] for text in texts] for texts in (PROMPTS, outputs)]
    return Rollouts(rows, Sequences.from_lists(*ids), None, torch.tensor([True] * 3), list(PROMPTS), list(outputs))


def judge_that_returns(value: Any) -> Any:
    def judge(**_: Any) -> Any:
        return value

    return judge


def scored(value: Any, given: Rollouts | None = None) -> Tensor:
    return score(judge_that_returns(value), given or rollouts(), tokenizer=None)


# --------------------------------------------------------------------------------------------- a score per sample

ACCEPTED: dict[str, Any] = {
    "list of float": [1.0, 0.0, 2.5],
    "tuple": (1.0, 0.0, 2.5),
    "list of int": [1, 0, 2],
    "list of bool": [True, False, True],
    "list of mixed numbers": [True, 0, 2.5],
    "range": range(3),
    "float64 array": np.array([1.0, 0.0, 2.5]),
    "float32 array": np.array([1.0, 0.0, 2.5], dtype=np.float32),
    "float16 array": np.array([1.0, 0.0, 2.5], dtype=np.float16),
    "int array": np.array([1, 0, 2]),
    "bool array": np.array([True, False, True]),
    "strided array": np.array([1.0, 9.0, 0.0, 9.0, 2.5])[::2],
    "float32 tensor": torch.tensor([1.0, 0.0, 2.5]),
    "float64 tensor": torch.tensor([1.0, 0.0, 2.5], dtype=torch.float64),
    "bfloat16 tensor": torch.tensor([1.0, 0.0, 2.5], dtype=torch.bfloat16),
    "int tensor": torch.tensor([1, 0, 2]),
    "bool tensor": torch.tensor([True, False, True]),
    "tensor with a gradient": torch.tensor([1.0, 0.0, 2.5], requires_grad=True),
    "0-d tensors in a list": [torch.tensor(1.0), torch.tensor(0), torch.tensor(True)],
    "0-d tensor with a gradient in a list": [torch.tensor(1.0, requires_grad=True), 0.0, 2.5],
    "0-d arrays in a list": [np.array(1.0), np.array(0), np.array(2.5)],
    "NumPy scalars in a list": [np.float32(1.0), np.int64(0), np.float64(2.5)],
    "NumPy bools in a list": [np.bool_(True), np.bool_(False), np.bool_(True)],
    "largest float32": [torch.finfo(torch.float32).max, -torch.finfo(torch.float32).max, 0.0],
}


@table("value", ACCEPTED.values())
def test_one_number_per_sample_becomes_float32_scores(value: Any) -> None:
    found = scored(value)
    assert found.dtype == torch.float32
    assert not found.requires_grad
    assert found.tolist() == [v.item() if hasattr(v, "item") else float(v) for v in value]


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=3, max_size=3))
def test_scores_are_passed_on_exactly(values: list[float]) -> None:
    for form in (values, tuple(values), np.array(values), torch.tensor(values, dtype=torch.float64)):
        assert scored(form).tolist() == values


# ------------------------------------------------------------------------------------------------- dense rewards

REWARDS = ([1.0, 0.0, 2.0], [3.0], [4.0, 5.0])
"""Per token: for all of a response of 3 and of 1, for the first two tokens of a response of 4."""

STANDING = [
    [0, 1, 0, 2, 0, 0],  # a prompt of 1
    [0, 0, 0, 3, 0, 0],  # a prompt of 3
    [0, 0, 4, 5, 0, 0],  # a prompt of 2; tokens without a reward have 0
]

DENSE: dict[str, Any] = {
    "list of lists": [list(r) for r in REWARDS],
    "tuple of tuples": tuple(tuple(r) for r in REWARDS),
    "list of lists of int": [[int(v) for v in r] for r in REWARDS],
    "list of 1-D tensors": [torch.tensor(r) for r in REWARDS],
    "list of 1-D int tensors": [torch.tensor(r).long() for r in REWARDS],
    "list of 1-D arrays": [np.array(r) for r in REWARDS],
    "list of lists of 0-d tensors": [[torch.tensor(v) for v in r] for r in REWARDS],
    "a list, a tensor and an array": [list(REWARDS[0]), torch.tensor(REWARDS[1]), np.array(REWARDS[2])],
    "array of lists": np.array([list(r) for r in REWARDS], dtype=object),
}


@table("value", DENSE.values())
def test_dense_rewards_stand_at_the_response_tokens_from_the_first_on(value: Any) -> None:
    found = scored(value)
    assert found.dtype == torch.float32
    assert found.tolist() == STANDING


def test_a_row_without_dense_rewards_has_zeros() -> None:
    assert scored([[], [3.0], [4.0, 5.0]]).tolist() == [[0.0] * 6, *STANDING[1:]]
    assert scored([[], torch.tensor([]), ()]).tolist() == [[0.0] * 6] * 3


def test_lists_of_one_number_are_plain_where_every_response_has_one_token() -> None:
    """A score per sample and a reward for the first token are then the same."""
    one_token = rollouts(("a", "b", "c"))
    assert scored([[1.0], [2.0], [3.0]], one_token).tolist() == [[0, 1, 0, 0], [0, 0, 0, 2], [0, 0, 3, 0]]


@given(st.data())
def test_every_dense_reward_stands_at_its_own_token(data: st.DataObject) -> None:
    numbers = st.floats(-1e6, 1e6, width=32)
    rewards = [data.draw(st.lists(numbers, max_size=len(output))) for output in OUTPUTS]
    if all(len(row) == 1 for row in rewards):
        rewards[0] = []  # all of length one is ambiguous, and refused
    found, mask = scored(rewards), rollouts().sequences.response_mask
    assert found[~mask].abs().sum() == 0
    for row, (given_, output) in enumerate(zip(rewards, OUTPUTS, strict=True)):
        assert found[row, mask[row]].tolist() == given_ + [0.0] * (len(output) - len(given_))


def merging_tokenizer() -> Any:
    """Return a tokenizer of letters that encodes "ab" and "abc" as one token each."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    vocab = {token: index for index, token in enumerate(("a", "b", "c", "d", "ab", "abc", "</s>"))}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b"), ("ab", "c")]))
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>")


@table(
    "sampled, text, values, expected",
    [
        # "ab", "d" where a, b, d and EOS were sampled: ab ends with b
        ([0, 1, 3, 6], "abd", [0.5, 2.0], [0.0, 0.5, 2.0, 0.0]),
        # with a reward for EOS, whose text is empty: it goes to the last token with text
        ([0, 1, 3, 6], "abd", [0.5, 2.0, 4.0], [0.0, 0.5, 6.0, 0.0]),
        # "abc" where ab and c were sampled
        ([4, 2], "abc", [3.0], [0.0, 3.0]),
        # the tokens are those that were sampled, so nothing moves
        ([4, 3, 6], "abd", [0.5, 2.0], [0.5, 2.0, 0.0]),
        # as many as were sampled: they are rewards of those
        ([0, 1, 3], "abd", [1.0, 2.0, 3.0], [1.0, 2.0, 3.0]),
        # neither the sampled tokens nor those of the text: as before, from the first on
        ([0, 1, 3, 3, 3], "abddd", [1.0, 2.0, 3.0], [1.0, 2.0, 3.0, 0.0, 0.0]),
    ],
)
def test_rewards_of_the_tokens_of_a_text_go_to_the_sampled_tokens(
    sampled: list[int], text: str, values: list[float], expected: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    rewards_module._say_moved.cache_clear()
    other = [2, 3, 2]  # a second row, since lists of one number would be ambiguous
    sequences = Sequences.from_lists([[0], [0]], [sampled, other])
    given = Rollouts([{"prompt": "a"}] * 2, sequences, None, torch.tensor([True] * 2), ["a", "a"], [text, "cdc"])
    for _ in range(2):
        found = score(judge_that_returns([values, [1.0, 1.0, 1.0]]), given, merging_tokenizer())
    assert found[0, 1 : 1 + len(sampled)].tolist() == expected
    moved = expected[: len(values)] != values
    assert caplog.text.count("each goes to the sampled token with the last character of its own") == moved


# ------------------------------------------------------------------------------------------------ what is refused


def numbers_one_by_one() -> Any:
    yield from (1.0, 2.0, 3.0)


REFUSED: dict[str, tuple[Any, str]] = {
    "None": (None, r"returned None \(NoneType\)"),
    "str": ("123", r"returned '123' \(str\)"),
    "bytes": (b"123", r"returned b'123' \(bytes\)"),
    "dict": ({0: 1.0, 1: 2.0, 2: 3.0}, r"returned \{.*\} \(dict\)"),
    "set": ({1.0, 2.0, 3.0}, r"returned \{1.0, 2.0, 3.0\} \(set\)"),
    "frozenset": (frozenset({1.0, 2.0, 3.0}), r"\(frozenset\)"),
    "float": (1.0, r"returned 1.0 \(float\)"),
    "bool": (True, r"returned True \(bool\)"),
    "NumPy scalar": (np.float64(1.0), r"returned np.float64\(1.0\)"),
    "0-d tensor": (torch.tensor(1.0), r"0-D array of shape \(\)"),
    "0-d array": (np.array(1.0), r"0-D array of shape \(\)"),
    "generator": (numbers_one_by_one(), r"\(generator\)"),
    "no numbers": ([], r"0 scores for 3 samples"),
    "too few": ([1.0, 2.0], r"2 scores for 3 samples"),
    "too many": (torch.zeros(4), r"4 scores for 3 samples"),
    "too few rows of dense rewards": ([[1.0, 2.0], [3.0]], r"2 scores for 3 samples"),
    "tensor [B, 1]": (torch.zeros(3, 1), r"2-D array of shape \(3, 1\).*write \.squeeze\(1\)"),
    "tensor [B, T]": (torch.zeros(3, 6), r"2-D array of shape \(3, 6\).*a list per sample"),
    "array [B, 1]": (np.zeros((3, 1)), r"2-D array of shape \(3, 1\)"),
    "array [B, T, D]": (np.zeros((3, 4, 2)), r"3-D array of shape \(3, 4, 2\)"),
    "None inside": ([1.0, None, 3.0], r"None \(NoneType\) for sample 1"),
    "str inside": ([1.0, 2.0, "3"], r"'3' \(str\) for sample 2"),
    "array of str": (np.array(["1", "2", "3"]), r"\(str\) for sample 0"),
    "complex": (torch.tensor([1j, 2j, 3j]), r"\(complex\) for sample 0"),
    "dict inside": ([1.0, {"score": 1.0}, 1.0], r"\(dict\) for sample 1"),
    "a list among numbers": ([1.0, [2.0], 3.0], r"\[2.0\] \(list\) for sample 1"),
    "lists in lists": ([[[1.0]], [[2.0]], [[3.0], [4.0]]], r"\[1.0\] \(list\) for sample 0"),
    "2-D tensors in a list": ([torch.zeros(1, 1)] * 3, r"\(Tensor\) for sample 0"),
    "None in dense rewards": ([[1.0, None], [2.0], []], r"None \(NoneType\) for sample 0"),
    "NaN": ([1.0, float("nan"), 3.0], r"nan \(float\) for sample 1; numbers must be finite"),
    "inf": (torch.tensor([1.0, 2.0, float("inf")]), r"returned inf \(float\) for sample 2"),
    "-inf": (np.array([-np.inf, 2.0, 3.0]), r"returned -inf \(float\) for sample 0"),
    "finite only in float64": ([1.0, 1e39, 3.0], r"1e\+39 \(float\) for sample 1; numbers must be finite in float32"),
    "an int beyond every float": ([1.0, 2.0, 10**400], r"\(int\) for sample 2; numbers must be finite in float32"),
    "NaN in dense rewards": ([[1.0], [float("nan")], [1.0, 2.0]], r"nan \(float\) for sample 1"),
    "inf in dense rewards": ([torch.tensor([1.0, torch.inf]), [1.0], []], r"returned inf \(float\) for sample 0"),
    "masked array": (np.ma.array([1.0, 2.0, 3.0], mask=[False, True, False]), r"a masked array, .*by .filled\(0\)"),
    "masked array without a mask": (np.ma.array([1.0, 2.0, 3.0]), "a masked array"),
    "masked number inside": ([1.0, np.ma.masked, 3.0], "a masked array"),
    "masked arrays of dense rewards": ([np.ma.array([], mask=[])] * 3, "a masked array"),
    "meta tensor": (torch.zeros(3, device="meta"), "a tensor on the device 'meta', which has no data"),
    "meta tensors inside": ([torch.zeros((), device="meta")] * 3, "a tensor on the device 'meta'"),
    "meta tensors of dense rewards": ([torch.zeros(0, device="meta")] * 3, "a tensor on the device 'meta'"),
    "more dense rewards than tokens": ([[1.0], [1.0, 2.0], []], r"2 rewards for sample 1, whose response has 1 token"),
    "lists of one number each": ([[1.0], [2.0], [3.0]], r"a score per sample or a reward for the first token"),
    "tensors of one number each": ([torch.ones(1)] * 3, r"a score per sample or a reward for the first token"),
}


@table("value, said", REFUSED.values())
def test_anything_else_is_one_error_that_names_the_function_and_what_is_allowed(value: Any, said: str) -> None:
    with pytest.raises(RewardError, match=said) as caught:
        scored(value)
    text = str(caught.value)
    assert caught.value.__cause__ is None
    assert f"judge_that_returns.<locals>.judge ({__name__})" in text
    assert "return one finite number per sample" in text
    assert "or for dense rewards one list, array or 1-D tensor per sample" in text


ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=3)
    | st.binary(max_size=3)
    | st.floats().map(torch.tensor)
    | st.floats(width=32).map(np.float32)
    | st.lists(st.floats(), max_size=4).map(torch.tensor)
    | st.lists(st.floats(), max_size=4).map(np.array)
    | st.integers(0, 3).map(lambda n: torch.zeros(n, 2)),
    lambda inner: (
        st.lists(inner, min_size=3, max_size=3)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=2), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(ANYTHING)
def test_whatever_comes_back_is_finite_scores_or_a_reward_error(value: Any) -> None:
    batch = rollouts()
    try:
        found = check_scores(value, batch, "judge")
    except RewardError:
        return
    assert found.shape in (torch.Size([3]), batch.sequences.input_ids.shape)
    assert found.dtype == torch.float32
    assert found.isfinite().all()


# ------------------------------------------------------------------------------------------------------ the call


def test_the_function_gets_texts_tokenizer_and_columns_by_keyword() -> None:
    seen: dict[str, Any] = {}

    def judge(**given_: Any) -> list[float]:
        seen.update(given_)
        return [0.0] * 3

    tokenizer = object()
    score(judge, rollouts(answer=["x", "y", "z"], level=[1, 2, 3]), tokenizer)
    assert seen == {
        "samples": ["pabc", "pqrd", "pqefgh"],
        "prompts": ["p", "pqr", "pq"],
        "outputs": ["abc", "d", "efgh"],
        "tokenizer": tokenizer,
        "answer": ["x", "y", "z"],
        "level": [1, 2, 3],
    }


def test_functions_compute_in_the_precision_of_their_tensors_whatever_calls_them() -> None:
    seen = []

    def judge(outputs: list[str], **_: Any) -> list[float]:
        seen.append((torch.ones(2, 2) @ torch.ones(2, 2)).dtype)
        return [0.0] * len(outputs)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        score(judge, rollouts(), None)
        metrics(lambda **given_: {"zero": judge(**given_)}, rollouts())
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16, "around them it still holds"
    assert seen == [torch.float32] * 2


def test_a_column_that_a_row_lacks_is_none_there() -> None:
    batch = rollouts()
    batch.rows[1]["answer"] = "y"
    assert score(lambda answer, **_: [{None: 0, "y": 1}[a] for a in answer], batch, None).tolist() == [0, 1, 0]


@table("name", ["samples", "prompts", "outputs", "tokenizer"])
def test_a_column_with_the_name_of_an_argument_is_refused_by_name(name: str) -> None:
    with pytest.raises(RewardError, match=rf"judge .*column '{name}'.*rename"):
        score(judge_that_returns([0.0] * 3), rollouts(**{name: [1, 2, 3]}), None)


@table("name", ["fn", "reward_fn", "self", "rollouts"])
def test_every_other_column_name_reaches_the_function(name: str) -> None:
    def judge(**given_: Any) -> Any:
        return given_[name]

    assert score(judge, rollouts(**{name: [1, 2, 3]}), None).tolist() == [1, 2, 3]


def test_a_function_that_raises_is_named_and_its_error_is_the_cause() -> None:
    cause = ZeroDivisionError("no such game")

    def judge(**_: Any) -> Any:
        raise cause

    with pytest.raises(
        RewardError, match=r"judge .* raised ZeroDivisionError: no such game .*3 samples.*answer"
    ) as caught:
        score(judge, rollouts(answer=["x", "y", "z"]), None)
    assert caught.value.__cause__ is cause


def test_a_function_of_another_signature_is_told_which_keywords_it_gets() -> None:
    def judge(texts: list[str]) -> list[float]:
        return [0.0 for _ in texts]

    with pytest.raises(RewardError, match=r"keywords samples, prompts, outputs, tokenizer") as caught:
        score(judge, rollouts(), None)
    assert isinstance(caught.value.__cause__, TypeError)


def test_an_interrupt_passes_through() -> None:
    def judge(**_: Any) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score(judge, rollouts(), None)


class Judge:
    def __call__(self, **_: Any) -> None: ...

    def method(self, **_: Any) -> None: ...


@table(
    "fn, name",
    [
        (Judge(), "Judge"),
        (Judge().method, "Judge.method"),
        (functools.partial(Judge(), extra=1), "Judge"),
        (functools.partial(functools.partial(Judge().method), extra=1), "Judge.method"),
    ],
)
def test_every_kind_of_callable_is_named_in_errors(fn: Any, name: str) -> None:
    with pytest.raises(RewardError, match=rf"^{name} \({__name__}\) returned None"):
        score(fn, rollouts(), None)


# ---------------------------------------------------------------------------------------------- copies go in (C7)


def spoil(samples: Any, prompts: Any, outputs: Any, **columns: Any) -> Any:
    """Change everything that can be changed, in place."""
    for texts in (samples, prompts, outputs):
        texts[0] = "spoilt"
        texts.reverse()
        texts.append("spoilt")
    for name, values in columns.items():
        if name != "tokenizer":
            for value in values:
                value["facts"].append("spoilt")
                value["more"] = "spoilt"
            values.clear()
    return [1.0, 2.0, 3.0]


def spoilt_metric(**given_: Any) -> dict[str, float]:
    return {"sum": sum(spoil(**given_))}


@table("call", [lambda batch: score(spoil, batch, None), lambda batch: metrics(spoilt_metric, batch)])
def test_a_function_that_changes_its_inputs_changes_nothing_in_the_rollouts(call: Any) -> None:
    batch = rollouts(meta=[{"facts": ["x"]}, {"facts": ["y"]}, {"facts": []}])
    before = copy.deepcopy(batch)
    call(batch)
    assert (batch.rows, batch.prompts, batch.outputs) == (before.rows, before.prompts, before.outputs)
    assert batch.samples == before.samples
    for name, tensor in batch.sequences.flatten().items():
        assert torch.equal(tensor, before.sequences.flatten()[name]), name


def test_training_ends_bit_equal_whatever_the_function_does_to_its_inputs(tmp_path: Path) -> None:
    def honest(outputs: list[str], meta: list[Any], **_: Any) -> list[float]:
        return [float(len(o) % 3 + len(m["facts"])) for o, m in zip(outputs, meta, strict=True)]

    def spoiling(outputs: list[str], meta: list[Any], **rest: Any) -> list[float]:
        found = honest(outputs, meta)
        spoil(outputs=outputs, meta=meta, **rest)
        return found

    ends = []
    for fn in (honest, spoiling):
        trainer = tiny_trainer("ppo", tmp_path / fn.__name__, method__ppo_epochs=1)
        trainer.add_prompt_pipeline([{"prompt": p, "meta": {"facts": []}} for p in ("a", "bc", "def")])
        trainer.reward_fn = fn
        trainer.learn()
        ends.append(trainer.unwrapped.state_dict())
    assert [name for name in ends[0] if not torch.equal(ends[0][name], ends[1][name])] == []


# ------------------------------------------------------------------------------------------------------- metrics


def measured(value: Any) -> dict[str, Any]:
    return metrics(judge_that_returns(value), rollouts())


METRICS: dict[str, tuple[Any, Any]] = {
    "float": (0.5, 0.5),
    "int": (3, 3.0),
    "bool": (True, 1.0),
    "0-d tensor": (torch.tensor(0.5), 0.5),
    "0-d array": (np.array(0.5), 0.5),
    "NumPy scalar": (np.float32(0.5), 0.5),
    "list": ([1, 2.5, True], [1.0, 2.5, 1.0]),
    "tuple": ((1.0, 2.0, 3.0), [1.0, 2.0, 3.0]),
    "tensor [B]": (torch.tensor([1, 2, 3]), [1.0, 2.0, 3.0]),
    "array [B]": (np.array([1.0, 2.0, 3.0]), [1.0, 2.0, 3.0]),
}


@table("value, expected", METRICS.values())
def test_a_metric_is_a_number_or_a_number_per_sample(value: Any, expected: Any) -> None:
    assert measured({"m": value, "other": 1.0}) == {"m": expected, "other": 1.0}


REFUSED_METRICS: dict[str, tuple[Any, str]] = {
    "no mapping": ([1.0, 2.0, 3.0], r"\(list\); return a dict of name -> number or list of numbers"),
    "None": (None, r"None \(NoneType\); return a dict"),
    "a number": (1.0, r"1.0 \(float\); return a dict"),
    "str": ({"m": "1"}, r"\['m'\] returned '1' \(str\)"),
    "no number": ({"m": None}, r"\['m'\] returned None"),
    "NaN": ({"m": float("nan")}, r"\['m'\] returned nan"),
    "inf for a sample": ({"m": [1.0, float("inf"), 2.0]}, r"\['m'\] returned inf \(float\) for sample 1"),
    "too few": ({"m": [1.0, 2.0]}, r"2 values of 'm' for 3 samples"),
    "2-D": ({"m": torch.zeros(3, 1)}, r"(?s)\['m'\] returned .*\(Tensor\)"),
    "lists in a list": ({"m": [[1.0], [2.0], [3.0]]}, r"\['m'\] returned \[1.0\] \(list\) for sample 0"),
}


@table("value, said", REFUSED_METRICS.values())
def test_other_metrics_are_one_error_that_names_the_function(value: Any, said: str) -> None:
    with pytest.raises(RewardError, match=said) as caught:
        measured(value)
    assert str(caught.value).startswith("judge_that_returns.<locals>.judge")
    assert "return a dict of name -> number or list of numbers" in str(caught.value)


def test_no_metrics_are_no_error() -> None:
    assert measured({}) == {}


def test_a_metric_function_gets_texts_and_columns_but_no_tokenizer() -> None:
    seen: dict[str, Any] = {}

    def measure(**given_: Any) -> dict[str, float]:
        seen.update(given_)
        return {}

    metrics(measure, rollouts(answer=["x", "y", "z"]))
    assert list(seen) == ["samples", "prompts", "outputs", "answer"]


def test_a_metric_function_that_raises_is_named_and_its_error_is_the_cause() -> None:
    def measure(**_: Any) -> Any:
        raise KeyError("gone")

    with pytest.raises(RewardError, match=r"measure .* raised KeyError: 'gone'") as caught:
        metrics(measure, rollouts())
    assert isinstance(caught.value.__cause__, KeyError)


# ---------------------------------------------------------------------------------------------- on from a trainer


def test_scores_given_to_step_pass_the_same_boundary(tmp_path: Path) -> None:
    trainer = tiny_trainer("ppo", tmp_path)
    drawn = trainer.generate(["a", "bc"])
    with pytest.raises(RewardError, match=r"^step\(scores=\.\.\.\) returned 1 scores for 2 samples"):
        trainer.step(drawn.queries, drawn.responses, [1.0])
    assert trainer.progress.step == 0


def test_integer_and_float_rewards_train_alike(tmp_path: Path) -> None:
    """Integer rewards are not truncated on the way."""
    ends = []
    for kind in (int, float):
        trainer = tiny_trainer("ppo", tmp_path / kind.__name__, method__ppo_epochs=1, train__total_steps=2)
        trainer.reward_fn = lambda outputs, kind=kind, **_: [kind(len(o) % 3) for o in outputs]
        trainer.learn()
        ends.append(trainer.unwrapped.state_dict())
    assert [name for name in ends[0] if not torch.equal(ends[0][name], ends[1][name])] == []


@pytest.mark.daily(method=("rloo",))
@pytest.mark.parametrize(
    ("method", "said"),
    [
        ("rloo", "rloo: the 4 responses to each prompt have equal scores in the whole collection (the first has 0.5)"),
        ("ppo", "ppo: all responses have equal scores in the whole collection (the first has 0.5)"),
        ("rft", "rft: the 4 responses to each prompt have equal scores in the whole collection (the first has 0.5)"),
        ("ddpo", "ddpo: all images of the collection have the reward 0.5, so the rewards say nothing"),
    ],
)
def test_scores_that_are_all_equal_are_told_once(
    method: str, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for rewards, times in (
        (lambda prompts, **_: [0.5] * len(prompts), 1),
        (lambda prompts, **_: [float(n % 3) for n, _ in enumerate(prompts)], 0),
    ):
        caplog.clear()
        tiny_trainer(method, tmp_path / str(times), arguments={"reward_fn": rewards}).learn()
        assert sum(said in record.getMessage() for record in caplog.records) == times


def test_scores_that_differ_between_processes_are_not_all_equal(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every score of one process is 1, and every score of the other 0; then there is no other process."""
    trainer = tiny_trainer("ppo", tmp_path)
    other = torch.tensor([0.0, 4.0, 0.0, 0.0], dtype=torch.float64)  # differ, responses, largest, −smallest
    with monkeypatch.context() as patch:
        patch.setattr(trainer.parallel, "max", lambda x: torch.maximum(x, other))
        trainer.scoring._warn_of_equal_scores(torch.ones(4))
        assert not caplog.records
    trainer.scoring._warn_of_equal_scores(torch.zeros(0))
    assert not caplog.records
    trainer.scoring._warn_of_equal_scores(torch.ones(4))
    assert len(caplog.records) == 1


def test_a_loop_of_the_users_own_without_a_reward_function_is_told_what_is_missing(tmp_path: Path) -> None:
    trainer = tiny_trainer("ppo", tmp_path, arguments={"reward_fn": None})
    with pytest.raises(DataError, match="'ppo' learns from reward_fn and prompts; give reward_fn"):
        trainer.collect()
    with pytest.raises(DataError, match="give reward_fn"):
        trainer.score(trainer.generate(["a"]))
