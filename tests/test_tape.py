"""Tapes: a recorded step has the bits of the model's own, and what cannot be recorded is not."""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from tables import table
from trainkit.config import SamplingConfig
from trainkit.models import backend, use_fast_exact_matmul
from trainkit.rollouts import CausalSampler, decoding
from trainkit.rollouts.sampler import Generated
from trainkit.rollouts.tape import TapeError, record
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


def without_tapes(sampler: CausalSampler) -> CausalSampler:
    sampler.decoder.taped = {False: False, True: False}  # type: ignore[attr-defined]
    return sampler


def same(one: Generated, other: Generated) -> bool:
    numbers = zip((one.logprobs, one.entropy, one.hidden), (other.logprobs, other.entropy, other.hidden), strict=True)
    return one.ids == other.ids and all(a is b or torch.equal(a, b) for a, b in numbers)


@table(
    "fields, head_alone, hidden, autocast",
    [
        (tiny_gpt2(SIZE), False, False, False),
        (tiny_gpt2(SIZE), True, True, True),
        (tiny_llama(SIZE), False, True, True),
        (NEOX, True, True, False),
    ],
)
def test_responses_from_a_tape_have_the_bits_of_the_models_own(
    fields: dict[str, Any], head_alone: bool, hidden: bool, autocast: bool
) -> None:
    """With and without padding, while responses end and the batch shrinks."""
    use_fast_exact_matmul(torch.device("cpu"))
    model = make(fields)
    found = CausalSampler(model, TOKENIZER, head_alone=head_alone, hidden=hidden)
    alone = without_tapes(CausalSampler(model, TOKENIZER, head_alone=head_alone, hidden=hidden))
    for queries in (EVEN, UNEVEN, EVEN):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            taped, own = sample(found, queries), sample(alone, queries)
        assert len({len(ids) for ids in taped.ids}) > 1, "the batch shrinks"
        assert same(taped, own)
    assert found.decoder.taped[False]  # type: ignore[attr-defined]
    older = autocast and version("torch") < "2.13"  # then a cached cast may give other bits, and the tape is not taken
    assert found.decoder.taped[True] or older  # type: ignore[attr-defined]


class Casts(TorchDispatchMode):
    """Notes the shapes of what is cast."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default:
            self.shapes.append(tuple(args[0].shape))
        return func(*args, **(kwargs or {}))


def test_a_tape_of_autocast_casts_each_weight_once() -> None:
    """In inference mode autocast keeps no casts, and a step would make them anew."""
    sampler = CausalSampler(make(tiny_llama(SIZE)), TOKENIZER)
    weights = {tuple(weight.shape) for weight in sampler.model.parameters() if weight.dim() == 2}
    with torch.autocast("cpu", torch.bfloat16):
        sample(sampler, EVEN)
        with Casts() as casts:
            sample(sampler, EVEN)
    assert sampler.decoder.taped[False]  # type: ignore[attr-defined]
    assert casts.shapes
    assert not weights & {*casts.shapes}


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
        sampler = without_tapes(CausalSampler(model, TOKENIZER))  # tries the model without autocast
        seen.clear()
        with torch.autocast("cpu", torch.bfloat16):
            responses.append(sample(sampler, EVEN))
        if len(responses) == 1:
            assert seen == {torch.bfloat16 if units else torch.float32}
    assert same(*responses)


def test_a_later_call_samples_with_the_weights_of_that_time() -> None:
    model = make(tiny_llama(SIZE))
    sampler = CausalSampler(model, TOKENIZER)
    before = sample(sampler, EVEN)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    after = sample(sampler, EVEN)
    assert not same(before, after)
    assert same(after, sample(without_tapes(CausalSampler(model, TOKENIZER)), EVEN))


def counts_tokens(model: PreTrainedModel) -> None:
    """Let the embeddings depend on a number that Python counts, as positions do that are not passed to a model."""
    inner, calls = model.base_model.wte.forward, iter(range(10**6))

    def forward(ids: Tensor) -> Tensor:
        states: Tensor = inner(ids) * (1 + next(calls) % 7)
        return states

    model.base_model.wte.forward = forward


def looks_at_values(model: PreTrainedModel) -> None:
    """Let the step depend on the values of a tensor, as a mixture of experts does."""
    inner = model.base_model.ln_f.forward

    def forward(states: Tensor) -> Tensor:
        found: Tensor = inner(states)
        return found if float(states.sum()) > 0 else -found

    model.base_model.ln_f.forward = forward


def has_a_hook(model: PreTrainedModel) -> None:
    """Let a hook change a result."""
    model.base_model.ln_f.register_forward_hook(lambda _, __, found: found * 2)


@table(
    "change, said",
    [
        (counts_tokens, "the next step makes other calls"),
        (looks_at_values, "it calls __float__"),
        (has_a_hook, "it has hooks"),
    ],
)
def test_steps_that_cannot_be_recorded_are_made_by_the_model(
    change: Any, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One line in the log says why, and nothing else differs."""
    caplog.set_level("INFO", "trainkit.rollouts.decoding")
    found = []
    for tapes in (True, False):
        model = make(tiny_gpt2(SIZE))
        sampler = CausalSampler(model, TOKENIZER, head_alone=True)
        change(model)
        found.append([sample(sampler if tapes else without_tapes(sampler), EVEN) for _ in range(2)])
        if tapes:
            assert sampler.decoder.taped == {False: False}  # type: ignore[attr-defined]
            model_said = [each.getMessage() for each in caplog.records]
    assert model_said == [f"the steps of GPT2LMHeadModel are not recorded: {said}"]
    if change is not counts_tokens:  # it counts the steps that were made twice, too
        assert same(found[0][0], found[1][0])
        assert same(found[0][1], found[1][1])


def test_a_tape_reads_inputs_and_weights_anew() -> None:
    layer = nn.Linear(3, 2)
    x, y = torch.randn(4, 3), torch.randn(4, 3)

    def step(states: Tensor) -> tuple[Tensor, None]:
        states.size(0)
        states.exp()  # leads to nothing
        one, other = torch.cat([states, states + 1]).chunk(2)
        return layer(one) * layer(other).sigmoid(), None

    with torch.no_grad():
        tape, (found, nothing) = record(step, (x,), layer.parameters())
        assert nothing is None
        assert torch.equal(found, step(x)[0])
        assert "exp" not in [call[0].__name__ for call in tape.calls]
        layer.weight.mul_(2)
        assert torch.equal(tape.play(y)[0], step(y)[0])


@table(
    "step, said",
    [
        (lambda x: (x[x > 0],), "it calls gt"),
        (lambda x: (x[x.long()],), "it calls long"),
        (lambda x: (x[torch.tensor([0])],), "it calls tensor"),
        (lambda x: (x * x.sum().item(),), "it calls item"),
        (lambda x: (x + OTHER,), "it reads a tensor that is neither an input nor a weight"),
        (lambda x: (x[OTHER],), "it calls __getitem__"),
        (lambda _: (OTHER,), "it reads a tensor that is neither an input nor a weight"),
    ],
)
def test_what_may_differ_in_the_next_step_is_not_recorded(step: Any, said: str) -> None:
    with torch.no_grad(), pytest.raises(TapeError, match=said):
        record(step, (torch.ones(2),), ())


OTHER = torch.tensor([0, 1])
