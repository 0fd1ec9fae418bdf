"""Passes without padding: rows joined into one give the numbers of padded rows, in every structure that rows have."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import researchers.critics  # noqa: F401  (registers them)
from passes import MODELS, make, padded_on_the_left, results, rows, with_turns
from tables import table
from trainkit.data import Sequences
from trainkit.errors import ConfigError
from trainkit.models import backend, make_policy
from trainkit.models import joined as joined_module
from trainkit.models.backend import use_fast_exact_matmul
from trainkit.models.joined import FilledColumns, JoinedRows, attend, different_prompts
from trainkit.models.policy import Policy
from trainkit.models.recomputing import recompute_activations
from trainkit.models.trunk import freeze_below
from trainkit.testing import tiny_gpt2, tiny_llama, tiny_t5
from trainkit.testing.trainers import tiny_trainer

LORA = {"r": 2, "target_modules": ["q_proj"], "init_lora_weights": False}
CANNOT = ("bloom", "falcon", "gemma2")
"""Architectures whose attention is not transformers' "sdpa", or adds something to the products."""


@pytest.fixture(autouse=True, scope="module")
def kernels() -> None:
    use_fast_exact_matmul(torch.device("cpu"))  # as a run does; it registers the attention


def packed() -> Sequences:
    return rows().packed([2, 3, 1])


# ----------------------------------------------------------------------------------------------------------- the layout


def test_tokens_are_joined_as_far_as_their_states_are_needed() -> None:
    sequences = Sequences.from_lists([[1, 2], [3], [1, 2]], [[4, 5, 6], [7], [8, 9]])
    joined = JoinedRows.of_rows(sequences, shared=False)
    assert joined.ids.tolist() == [1, 2, 4, 5, 3, 1, 2, 8], "all but the last token of each row"
    assert joined.positions.tolist() == [0, 1, 2, 3, 0, 0, 1, 2]
    assert joined.queries.tolist() == joined.keys.tolist() == [0, 4, 5, 8]
    assert joined.key_index is None
    assert joined.read.tolist() == [1, 2, 3, 4, 6, 7]
    assert joined.longest == (4, 4)


def test_a_shared_prompt_is_there_once_and_its_keys_are_those_of_all_its_rows() -> None:
    sequences = Sequences.from_lists([[1, 2], [3], [1, 2]], [[4, 5, 6], [7], [8, 9]])
    joined = JoinedRows.of_rows(sequences, shared=True)
    assert joined.ids.tolist() == [1, 2, 3, 4, 5, 8], "two prompts, and what follows them in rows 0 and 2"
    assert joined.positions.tolist() == [0, 1, 0, 2, 3, 2]
    assert joined.queries.tolist() == [0, 2, 3, 5, 6]
    assert joined.keys.tolist() == [0, 2, 3, 7, 10]
    assert joined.key_index is not None
    assert joined.key_index.tolist() == [0, 1, 2, 0, 1, 3, 4, 0, 1, 5]
    assert joined.read.tolist() == [1, 3, 4, 2, 1, 5]
    assert joined.longest == (2, 4)


def test_a_token_attends_to_its_own_text_up_to_itself_within_the_window() -> None:
    joined = JoinedRows.of_rows(Sequences.from_lists([[1], [1]], [[2, 3, 4], [5, 6, 7]]), shared=True)
    query, key, value = torch.randn(3, 1, 1, 5, 4, dtype=torch.float64).unbind()
    reached = {0: [0], 1: [0, 1], 2: [0, 1, 2], 3: [0, 3], 4: [0, 3, 4]}  # the prompt, and two tokens of each row
    for width, expected in ((None, reached), (2, {at: seen[-2:] for at, seen in reached.items()})):
        found = attend(query, key, value, joined, sliding_window=width)
        assert found.shape == (1, 5, 1, 4)
        for at, seen in expected.items():
            weights = torch.softmax(key[0, 0, seen] @ query[0, 0, at] / 2, 0)
            torch.testing.assert_close(found[0, at, 0], weights @ value[0, 0, seen])


def by_texts(
    query: Tensor, key: Tensor, value: Tensor, queries: Tensor, keys: Tensor, longest_query: int, longest_key: int, *,
    scale: float | None, window_size: tuple[int, int], enable_gqa: bool = False, seqused_k: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute what torch documents of `varlen_attn`."""
    assert {each.dtype for each in (queries, keys)} == {torch.int32}
    outputs = []
    for at in range(len(queries) - 1):
        q = query[queries[at] : queries[at + 1]]
        count = int(keys[at + 1] - keys[at] if seqused_k is None else seqused_k[at])
        assert len(q) <= longest_query
        assert count <= longest_key
        k, v = (each[keys[at] : keys[at] + count] for each in (key, value))
        behind = torch.arange(count) - (torch.arange(len(q)) + count - len(q)).unsqueeze(1)  # of the query
        mask = torch.ones_like(behind, dtype=torch.bool)
        mask = mask if window_size[0] < 0 else mask & (behind >= -window_size[0])
        mask = mask if window_size[1] < 0 else mask & (behind <= window_size[1])
        q, k, v = (each.transpose(0, 1) for each in (q, k, v))
        found = F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=enable_gqa)
        outputs.append(found.transpose(0, 1))
    return torch.cat(outputs)


@table("width, groups", list(product((None, 2), (1, 3))))
def test_the_kernel_for_texts_is_given_what_it_needs(
    width: int | None, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Joined rows, and the filled columns of a cache, beside which there is anything."""
    rows, columns = Sequences.from_lists([[1], [1]], [[2, 3, 4], [5, 6, 7]]), 7
    filled = FilledColumns(torch.tensor([0, 2, 4]), torch.tensor([6, 4, 1]))
    cases: list[tuple[Any, int, int, int]] = [(JoinedRows.of_rows(rows, shared=True), 1, 5, 5), (filled, 3, 1, columns)]
    for joined, texts, queries, keys in cases:
        query = torch.randn(texts, 2 * groups, queries, 8)
        key, value = (torch.randn(texts, keys, 2, 8).transpose(1, 2) for _ in range(2))
        if joined is filled:
            key[:, :, 6], value[0, :, 6] = 9.0, 9.0
        found = []
        for there in (False, True):
            monkeypatch.setattr(joined_module, "_has_kernel", lambda *_, there=there: there)
            monkeypatch.setattr(joined_module, "_kernel", lambda: (by_texts, inspect.signature(by_texts).parameters))
            found.append(attend(query, key, value, joined, scaling=0.3, sliding_window=width))
        assert found[0].shape == (texts, queries, 2 * groups, 8)
        torch.testing.assert_close(*found)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@table("width, groups, shared", list(product((None, 2), (1, 3), (False, True))))
def test_where_that_kernel_does_not_serve_flex_attention_does(
    width: int | None, groups: int, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads of other sizes, and windows where the kernel has none; torch has no gradient of it on CPUs."""
    joined = JoinedRows.of_rows(rows(), shared=shared)
    monkeypatch.setattr(joined_module, "_kernel", lambda: (refused, ["query", "key", "value"]))
    sizes = (4, 264) if width is None else (8,)
    for size in sizes:
        query = torch.randn(1, 2 * groups, len(joined.ids), size)
        key, value = torch.randn(2, 1, 2, len(joined.ids), size)
        found = []
        for there in (False, True):
            monkeypatch.setattr(joined_module, "_has_kernel", lambda *_, there=there: there)
            found.append(attend(query, key, value, joined, scaling=0.3, sliding_window=width))
        torch.testing.assert_close(*found)
    filled, query = FilledColumns(torch.tensor([0, 2]), torch.tensor([6, 4])), torch.randn(2, 2, 1, sizes[0])
    keys = torch.randn(2, 2, 7, sizes[0])
    assert attend(query, keys, keys, filled, sliding_window=width).isfinite().all()


def test_a_kernel_that_is_missing_does_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", None)
    joined_module._kernel.cache_clear()
    try:
        assert not joined_module._serves(torch.zeros(1, 1, 1, 8), None)
    finally:
        monkeypatch.undo()
        joined_module._kernel.cache_clear()
    assert joined_module._serves(torch.zeros(1, 1, 1, 8), None)


def refused(*_: Any, **__: Any) -> Tensor:
    """Stand in for a kernel that is not called."""
    raise AssertionError("the kernel does not serve")


# ---------------------------------------------------------------------------------------------------------- the numbers


def assert_same(policy: Policy, sequences: Sequences, shared: bool, tolerance: float, **wanted: Any) -> None:
    """The outputs and gradients of joined rows are those of padded ones."""
    one, gradients = results(policy, sequences, shared, joined=True, **wanted)
    other, expected = results(policy, sequences, False, **wanted)
    for name, part in one._asdict().items():
        if isinstance(part, Tensor):
            torch.testing.assert_close(part, getattr(other, name), rtol=tolerance, atol=tolerance, msg=name)
    assert {*gradients} == {*expected}
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    off = {name: float((gradient - expected[name]).abs().max()) / largest for name, gradient in gradients.items()}
    assert max(off.values()) <= tolerance, off


@table(
    "name, sequences, shared",
    [
        *product(("gpt2", "llama"), (rows, with_turns, padded_on_the_left), (False, True)),
        *zip(
            [name for name in MODELS if name not in ("gpt2", "llama", *CANNOT)],
            [with_turns, padded_on_the_left] * 4,
            [True, False, False, True] * 2,
            strict=False,
        ),
        ("gpt2", packed, True),
        ("llama", packed, False),
        ("mistral", packed, False),
    ],
)
def test_outputs_and_gradients_are_those_of_padded_rows(
    name: str, sequences: Callable[[], Sequences], shared: bool
) -> None:
    policy = make_policy(make(name), temperature=0.7, value_head=True)
    assert policy.why_not_joined() is None
    assert_same(policy, sequences(), shared, 1e-5, entropy=True, mean_logits=True)


def with_own_layers(kind: str) -> Policy:
    """A policy with frozen lower layers, or a critic with layers of its own, or both."""
    model = make("gpt2", torch.float64, n_layer=3)  # whose norms and positions are in float64, too
    if "frozen" in kind:
        freeze_below(model, 2)
    own = {"none": None, "layers": 1, "model": make("gpt2", torch.float64, n_embd=32)}[kind.split(",")[0]]
    return make_policy(model, value_head=True, critic=own).eval()


OWN_LAYERS = ("none", "layers", "model", "none, frozen", "layers, frozen", "model, frozen")


@table("kind, shared, means", list(product(OWN_LAYERS, (False, True), (False, True))))
def test_layers_of_a_critic_and_above_stored_frozen_ones_give_the_same_in_float64(
    kind: str, shared: bool, means: bool
) -> None:
    policy, sequences = with_own_layers(kind), with_turns()
    assert policy.why_not_joined() is None
    plain = policy.through_trunk(sequences)
    policy.joins_rows, policy.shares_prompts = True, shared
    stored = policy.through_trunk(sequences)
    assert (stored.trunk is not None) == ("frozen" in kind)
    if stored.trunk is not None:
        at = sequences.attention_mask
        torch.testing.assert_close(stored.trunk[at], plain.trunk[at], rtol=1e-12, atol=1e-12)
    found, gradients = in_float64(policy, stored, means)
    policy.joins_rows = policy.shares_prompts = False
    expected, others = in_float64(policy, plain, means)
    assert len(found) == len(expected) == 2 + means
    assert {*gradients} == {*others}
    for one, other in (*zip(found[:2], expected, strict=False), *((gradients[name], others[name]) for name in others)):
        assert one.any()
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(found[2:], expected[2:])  # means of logits are in float32


def in_float64(policy: Policy, sequences: Sequences, means: bool) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The states that are read, and the gradients of a sum with another weight for each number of them."""
    policy.zero_grad()
    averaged: list[Tensor] = []
    (states, *_), valued = policy._states_and_critics(sequences, averaged if means else None)
    for part in (states, valued):
        part.backward(torch.linspace(-1, 1, part.numel(), dtype=part.dtype).view_as(part), retain_graph=True)
    return [states, valued, *averaged], {
        name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None
    }


def test_a_critic_whose_rows_cannot_be_joined_is_told() -> None:
    policy = make_policy(make("llama"), value_head=True, critic=make("bloom"))
    assert policy.why_not_joined() is not None
    assert "Bloom" in str(policy.why_not_joined())


@table("shared", [False, True])
def test_they_are_equal_to_1e_12_in_float64(shared: bool) -> None:
    policy = make_policy(make("gpt2", torch.float64), value_head=True)
    policy.double()
    states = []
    for joined in (True, False):
        policy.joins_rows, policy.shares_prompts = joined, joined and shared
        states.append(policy._states(with_turns())[0])
    torch.testing.assert_close(*states, rtol=1e-12, atol=1e-12)


@table("shared", [False, True])
def test_activations_are_computed_again_with_the_same_gradient(shared: bool) -> None:
    """Prompts are shared with activation checkpointing, too, which keeps no keys and values."""
    policy = make_policy(make("llama"))
    expected = results(policy, rows(), shared, joined=True)[1]
    recompute_activations(policy)
    calls: list[int] = []
    policy.model.model.layers[0].input_layernorm.register_forward_hook(lambda *_: calls.append(1))
    found = results(policy.train(), rows(), shared, joined=True)[1]
    assert len(calls) == 2
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name


def test_under_autocast_attention_gets_tensors_of_its_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels for texts of any lengths take no float32, which rotary positions make of queries and keys."""
    policy, dtypes = make_policy(make("llama")), set[torch.dtype]()

    def noted(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        dtypes.update(each.dtype for each in (query, key, value))
        return attend(query, key, value, *args, **kwargs)

    monkeypatch.setattr(backend, "attend_joined", noted)
    monkeypatch.setattr(backend, "_has_matrix_units", lambda: True)  # otherwise this CPU computes it in float32
    policy.joins_rows = True
    with torch.autocast("cpu", torch.bfloat16):
        assert policy(rows()).logprobs.isfinite().all()
    assert dtypes == {torch.bfloat16}


def test_one_pass_runs_the_tokens_that_are_needed() -> None:
    policy, shapes = make_policy(make("llama")), list[tuple[int, ...]]()
    policy.model.get_input_embeddings().register_forward_hook(
        lambda _, inputs, __: shapes.append(tuple(inputs[0].shape))
    )
    sequences = rows()
    for joined, shared in ((True, False), (True, True)):
        policy.joins_rows, policy.shares_prompts = joined, shared
        policy(sequences)
    separate = int(sequences.lengths.sum()) - len(sequences)
    prompts = int(sum((unique >= 0).sum() for unique in different_prompts(sequences)[0]))
    assert shapes == [(1, separate), (1, prompts + int(sequences.response_mask.sum()) - len(sequences))]


def test_architectures_that_cannot_are_told() -> None:
    for name in CANNOT:
        why = make_policy(make(name)).why_not_joined()
        assert name == "gemma2" or why is not None  # up to transformers 5.18 sdpa does not cap its scores
        assert why is None or type(make(name)).__name__ in why
    eager = make_policy(make("llama", attn_implementation="eager"))
    assert eager.why_not_joined() == "the attention of LlamaForCausalLM is 'eager', not 'sdpa'"
    seeing = make_policy(make("llama"))
    seeing.model.model.layers[0].self_attn.is_causal = False  # one whose layers attend to what follows
    assert seeing.why_not_joined() == "LlamaForCausalLM gives other numbers for joined rows"


# -------------------------------------------------------------------------------------------------------------- in runs

RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "groups": ("rloo", {"train__share_prompts": True}),
    "rows": ("ppo", {"train__share_prompts": None}),
    "pairs": ("dpo", {"train__share_prompts": True}),
    "scores of pairs": ("reward", {"train__share_prompts": True}),
    "scores": ("reward", {"train__share_prompts": False}),
    "packed": ("sft", {"method__packing": True, "train__seq_length": 16}),
    "adapter": ("grpo", {"model": tiny_llama(10), "model__peft_config": LORA, "method__kl_coef": 0.1}),
    "activations computed again": ("online_dpo", {"train__gradient_checkpointing": True}),
    "value heads": ("ilql", {}),
    "unpaired": ("kto", {}),
    "layers of the critic on frozen ones": ("_test_branch", {"model__num_layers_unfrozen": 1}),
    "critic of its own": ("_test_critic", {}),
    "pairs and frozen layers": ("dpo", {"model__num_layers_unfrozen": 1}),
    "scores and frozen layers": ("reward", {"model__num_layers_unfrozen": 1}),
    "chosen reference": ("grpo", {"method__kl_coef": 0.1, "model__reference_path": tiny_gpt2(10)}),
}


@pytest.mark.daily(case=("groups", "pairs", "packed", "scores"))
@pytest.mark.parametrize("case", [*RUNS])
def test_a_run_of_joined_rows_ends_with_the_same_weights(case: str, tmp_path: Path) -> None:
    name, changes = RUNS[case]
    usual = {"train__microbatch_size": 3, "optimizer__name": "sgd", "optimizer__lr": 0.1, "train__total_steps": 2}
    ends = []
    for joined in (True, False):
        trainer = tiny_trainer(name, tmp_path / str(joined), train__padding_free=joined, **{**usual, **changes})
        trainer.learn()
        assert trainer.unwrapped.joins_rows is joined
        if trainer.needs_reference:
            assert trainer.reference.policy.joins_rows is joined
        ends.append(trainer.unwrapped.state_dict())
    for key, tensor in ends[0].items():
        torch.testing.assert_close(tensor, ends[1][key], rtol=1e-3, atol=2e-5, msg=key)


@table(
    "name, changes, said",
    [
        ("sft", {"model": tiny_t5(10)}, "T5ForConditionalGeneration is not a causal model"),
        ("sft", {"model__kwargs": {"attn_implementation": "eager"}}, "the attention of GPT2LMHeadModel is 'eager'"),
    ],
)
def test_what_cannot_be_joined_is_refused_if_it_is_asked_for(
    name: str, changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    trainer = tiny_trainer(name, tmp_path, train__padding_free=True, **changes)
    with pytest.raises(ConfigError, match=f"train.padding_free is true, and rows cannot be joined: {said}"):
        trainer.models.build()


def test_rows_are_padded_on_a_cpu_unless_joined_ones_are_asked_for(tmp_path: Path) -> None:
    trainer = tiny_trainer("sft", tmp_path)
    trainer.models.build()
    assert not trainer.unwrapped.joins_rows


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sft", "rloo", "dpo"])
def test_the_kit_passes_on_joined_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import trainkit
    from trainkit_kit import check_trainer

    cls = trainkit.get_trainer(name).method_class
    train = {**cls.section_defaults.get("train", {}), "padding_free": True}
    monkeypatch.setattr(cls, "section_defaults", {**cls.section_defaults, "train": train})
    checks = ["micro_batches", "accumulation", "two_processes", "resume_every_step", "mask_law", "padding_amount",
              "padding_side", "batch_mates", "row_order", "determinism", "export"]  # fmt: skip
    assert len(check_trainer(name, only=checks).results) >= len(checks)
