"""Steps of fixed shapes: they draw the tokens of the model's own steps. tests/test_gpu.py replays them as graphs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from tables import table
from trainkit.config import SamplingConfig
from trainkit.models import backend, stored, use_fast_exact_matmul
from trainkit.rollouts import CausalSampler, decoding, graphs
from trainkit.rollouts.sampler import Generated
from trainkit.testing import character_tokenizer, tiny_gpt2, tiny_llama

if TYPE_CHECKING:
    from transformers import PreTrainedModel


TOKENIZER = character_tokenizer("abcdefgh")
SIZE = len(TOKENIZER)
NEOX = {
    "model_type": "gpt_neox",
    "vocab_size": SIZE,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
}
ROOM = 40
EVEN, UNEVEN = [[1, 2], [3, 4], [5, 6], [1, 2]] * 3, [[1], [2, 3, 4], [5, 6], [1]] * 3


def make(fields: dict[str, Any], **more: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(**fields, initializer_range=0.3)
    return AutoModelForCausalLM.from_config(config, **more).eval()


def sample(sampler: CausalSampler, queries: list[list[int]]) -> Generated:
    return sampler.generate(queries, SamplingConfig(max_new_tokens=ROOM), list(range(len(queries))))


def same(one: Generated, other: Generated) -> bool:
    numbers = zip((one.logprobs, one.entropy, one.hidden), (other.logprobs, other.entropy, other.hidden), strict=True)
    return one.ids == other.ids and all(a is b or torch.equal(a, b) for a, b in numbers)


@pytest.fixture(autouse=True)
def _fixed_shapes_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "GRAPHED", {"cpu"})


def without_graphs(sampler: CausalSampler) -> CausalSampler:
    sampler.decoder.graphed = False  # type: ignore[attr-defined]
    return sampler


@table(
    "fields, head_alone, hidden, queries",
    [
        (tiny_gpt2(SIZE), False, False, EVEN),
        (tiny_gpt2(SIZE), True, True, UNEVEN),
        (tiny_llama(SIZE), False, True, UNEVEN),
        (NEOX, True, True, EVEN),
    ],
)
def test_steps_of_fixed_shapes_draw_the_tokens_of_the_models_own(
    fields: dict[str, Any], head_alone: bool, hidden: bool, queries: list[list[int]]
) -> None:
    """With and without padding, while responses end and the batch shrinks."""
    model = make(fields)
    found = CausalSampler(model, TOKENIZER, head_alone=head_alone, hidden=hidden)
    alone = without_graphs(CausalSampler(model, TOKENIZER, head_alone=head_alone, hidden=hidden))
    for _ in range(2):
        fixed, expected = sample(found, queries), sample(alone, queries)
        assert len({len(ids) for ids in fixed.ids}) > 1, "the batch shrinks"
        assert fixed.ids == expected.ids
        for one, other in ((fixed.logprobs, expected.logprobs), (fixed.entropy, expected.entropy)):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
        if hidden:
            torch.testing.assert_close(fixed.hidden, expected.hidden, rtol=1e-4, atol=1e-5)
    assert found.decoder.graphed is True  # type: ignore[attr-defined]


def test_they_are_made_under_autocast() -> None:
    model = make(tiny_llama(SIZE))
    found, alone = CausalSampler(model, TOKENIZER), without_graphs(CausalSampler(model, TOKENIZER))
    with torch.autocast("cpu", torch.bfloat16):
        fixed, expected = sample(found, UNEVEN), sample(alone, UNEVEN)
    assert found.decoder.graphed is True  # type: ignore[attr-defined]
    first = [(one[0], other[0]) for one, other in zip(fixed.ids, expected.ids, strict=True)]
    assert all(one == other for one, other in first), "prompts are read by the model's own pass"


@table("fields", [tiny_llama(SIZE), tiny_gpt2(SIZE), {**tiny_llama(SIZE), "tie_word_embeddings": True}])
def test_under_autocast_they_read_casts_of_their_own(fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Autocast frees its own when a thread that trains leaves it. Embeddings stay as they are, also tied ones."""
    model, used, reads = make(fields), stored.Casts.used, list[tuple[bool, torch.dtype, torch.dtype]]()
    found, alone = CausalSampler(model, TOKENIZER), without_graphs(CausalSampler(model, TOKENIZER))

    @contextmanager
    def watched(casts: stored.Casts) -> Iterator[None]:
        with used(casts):
            weights = model.lm_head.weight, model.get_input_embeddings().weight
            reads.append((torch.is_autocast_cache_enabled(), *(weight.dtype for weight in weights)))
            yield

    monkeypatch.setattr(stored.Casts, "used", watched)
    with torch.autocast("cpu", torch.bfloat16):
        fixed, expected = sample(found, EVEN), sample(alone, EVEN)
    assert found.decoder.graphed is True  # type: ignore[attr-defined]
    assert len(reads) > max(map(len, fixed.ids)), "the prompts, and every step"
    assert {*reads} == {(False, torch.bfloat16, torch.float32)}
    at = torch.tensor([0, *map(len, fixed.ids[:-1])]).cumsum(0)  # the first token of each response
    assert [ids[0] for ids in fixed.ids] == [ids[0] for ids in expected.ids]
    first = torch.tensor([0, *map(len, expected.ids[:-1])]).cumsum(0)
    assert torch.equal(fixed.logprobs[at], expected.logprobs[first]), "the pass over the prompts has the same bits"
    assert model.lm_head.weight.dtype == torch.float32
    assert model.lm_head.weight.requires_grad


@table(
    "fields, more, why",
    [
        (tiny_llama(SIZE), {"attn_implementation": "eager"}, "its attention is eager"),
        ({**tiny_llama(SIZE), "model_type": "mistral", "sliding_window": 8}, {}, "its cache has layers"),
    ],
)
def test_models_that_they_do_not_fit_make_their_own(
    fields: dict[str, Any], more: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = make(fields, **more)
    found, alone = CausalSampler(model, TOKENIZER), without_graphs(CausalSampler(model, TOKENIZER))
    with caplog.at_level("INFO", "trainkit"):
        assert same(sample(found, EVEN), sample(alone, EVEN))
    assert found.decoder.graphed is False  # type: ignore[attr-defined]
    assert why in caplog.text


def test_steps_that_differ_from_the_models_own_are_not_taken(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Attention to the newest token alone."""
    model, columns = make(tiny_llama(SIZE)), graphs.FilledColumns
    found, alone = CausalSampler(model, TOKENIZER), without_graphs(CausalSampler(model, TOKENIZER))
    monkeypatch.setattr(graphs, "FilledColumns", lambda begins, counts: columns(begins + counts - 1, counts * 0 + 1))
    with caplog.at_level("INFO", "trainkit"):
        assert same(sample(found, EVEN), sample(alone, EVEN))
    assert found.decoder.graphed is False  # type: ignore[attr-defined]
    assert "their logits differ by" in caplog.text


@table("dtype, by", [(torch.float32, 0.01), (torch.bfloat16, 0.5)])
def test_the_log_probabilities_of_the_likeliest_tokens_are_compared_too(dtype: torch.dtype, by: float) -> None:
    """A likely token that is off by less than what the logits of a large vocabulary may be off by."""
    expected = torch.randn(2, 50_000, generator=torch.Generator().manual_seed(0)) * 4
    logits = expected.clone()
    logits[0, expected[0].argmax()] -= by
    size = torch.finfo(dtype).eps
    assert "their log-probabilities differ by" in decoding._difference_of_steps(logits, expected, size)
    assert not decoding._difference_of_steps(expected * (1 + size / 2), expected, size)


def during_a_capture() -> RuntimeError:
    """The error at the end of a capture during which memory did not suffice."""
    error = RuntimeError("CUDA error: operation failed due to a previous error during capture")
    error.__context__ = torch.OutOfMemoryError("CUDA out of memory")
    return error


@table(
    "fault, said",
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "CUDA out of memory"),
        (RuntimeError("CUDA error: out of memory"), "CUDA error: out of memory"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), "CUDA error: CUBLAS_STATUS_ALLOC_FAILED"),
        (during_a_capture(), "CUDA error: operation failed"),
    ],
)
def test_rows_without_memory_for_a_graph_make_their_own_steps_and_others_are_replayed(
    fault: Exception, said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = make(tiny_llama(SIZE))
    found, alone = CausalSampler(model, TOKENIZER), without_graphs(CausalSampler(model, TOKENIZER))
    play, faults = decoding.FixedStep.play, [fault]

    def scarce(step: Any, last: torch.Tensor, lengths: torch.Tensor, width: int) -> Any:
        if faults:
            raise faults.pop()
        return play(step, last, lengths, width)

    monkeypatch.setattr(decoding.FixedStep, "play", scarce)
    with caplog.at_level("INFO", "trainkit"):
        assert sample(found, EVEN).ids == sample(alone, EVEN).ids
    assert found.decoder.graphed is True, "as soon as there are fewer rows"  # type: ignore[attr-defined]
    assert f"are not replayed as graphs: {said}" in caplog.text


@table("fields, units", [(tiny_gpt2(SIZE), True), (tiny_llama(SIZE), False)])
def test_states_are_cached_in_the_precision_of_attention_and_responses_keep_their_bits(
    fields: dict[str, Any], units: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With matrix units for bfloat16 and without; otherwise attention casts all of them in each step."""
    use_fast_exact_matmul(torch.device("cpu"))
    monkeypatch.setattr(backend, "_has_matrix_units", lambda: units)
    model, seen = make(fields), set[torch.dtype]()
    update = decoding._Preallocated.update

    def watched(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        found = update(*args, **kwargs)
        seen.update(each.dtype for each in found)
        return found

    monkeypatch.setattr(decoding._Preallocated, "update", watched)
    responses = []
    for dtype in (backend.dtype_of_attention, lambda states: states.dtype):
        monkeypatch.setattr(decoding, "dtype_of_attention", dtype)
        sampler = without_graphs(CausalSampler(model, TOKENIZER))  # tries the model without autocast
        seen.clear()
        with torch.autocast("cpu", torch.bfloat16):
            responses.append(sample(sampler, EVEN))
        if len(responses) == 1:
            assert seen == {torch.bfloat16 if units else torch.float32}
    assert same(*responses)
