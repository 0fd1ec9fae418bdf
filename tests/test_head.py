"""The output head in blocks of the vocabulary: the numbers and gradients of all logits at once."""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

import trainkit.models.head as module
import trainkit.models.policy as policies
from tables import table
from trainkit.data import Sequences
from trainkit.functional import allow_logits, entropy_from_logits, token_logprobs
from trainkit.models import make_policy
from trainkit.models.head import read_head, reads_in_blocks
from trainkit.models.reference import Frozen
from trainkit.testing import tiny_llama

N, V, D = 20, 50, 8
ONE, AGAIN, KEPT = (2**22, 1024, 2**23), (64, 7, 0), (64, 7, 2**23)
"""Sizes with which there is one block, with which blocks are computed again in the backward pass, and kept for it."""


def mask_of(dims: int, generator: torch.Generator) -> Tensor | None:
    """A mask that forbids whole blocks, and allows token 20 everywhere."""
    if not dims:
        return None
    mask = torch.rand((V,) * dims, generator=generator) < 0.4
    mask[..., :14], mask[..., 20] = False, True
    return mask


def set_sizes(patch: pytest.MonkeyPatch, sizes: tuple[int, ...]) -> None:
    for name, value in zip(("BLOCK", "NARROWEST", "KEPT"), sizes, strict=True):
        patch.setattr(module, name, value)


@table(
    "sizes, dims, entropy, bias, temperature",
    [  # bias and temperature are in pairs with all others
        (sizes, dims, entropy, (i + dims) % 2 == 0, (0.7, 1.0)[(i + dims + entropy) % 2])
        for i, sizes in enumerate((ONE, AGAIN, KEPT))
        for dims, entropy in product((0, 1, 2), (False, True))
    ],
)
def test_numbers_and_gradients_are_those_of_all_logits(
    sizes: tuple[int, ...],
    dims: int,
    entropy: bool,
    bias: bool,
    temperature: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_sizes(monkeypatch, sizes)
    generator = torch.Generator().manual_seed(1)
    head = nn.Linear(D, V, bias=bias).double()
    states = torch.randn(N, D, dtype=torch.float64, generator=generator).requires_grad_()
    mask = mask_of(dims, generator)
    previous = torch.randint(V, (N,), generator=generator)
    tokens = torch.randint(V, (N,), generator=generator) if mask is None else torch.full((N,), 20)
    factors = torch.randn(2, N, dtype=torch.float64, generator=generator)
    assert reads_in_blocks(head, states)

    def at_once() -> tuple[Tensor, Tensor]:
        logits = allow_logits(head(states) / temperature, previous, mask)
        return token_logprobs(logits, tokens), entropy_from_logits(logits)

    def in_blocks() -> tuple[Tensor, Tensor]:
        settings = {"temperature": temperature, "logit_mask": mask, "entropy": entropy}
        return read_head(head, states, tokens, previous, **settings)

    found = []
    for read in (at_once, in_blocks):
        logprobs, entropies = read()
        loss = (factors[0] * logprobs).sum() + ((factors[1] * entropies).sum() if entropy else 0)
        found.append(
            (logprobs, *([entropies] if entropy else []), *torch.autograd.grad(loss, [states, *head.parameters()]))
        )
    for expected, given in zip(*found, strict=True):
        torch.testing.assert_close(given, expected, rtol=1e-11, atol=1e-11)


@table("sizes", [ONE, AGAIN, KEPT])
def test_without_gradient_or_entropy_the_numbers_have_the_same_bits(
    sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reference is read without them, and the divergence before the first update is 0."""
    set_sizes(monkeypatch, sizes)
    head, states, tokens = nn.Linear(D, V), torch.randn(N, D), torch.arange(N)
    with torch.no_grad():
        alone = read_head(head, states, tokens, tokens)[0]
    assert torch.equal(read_head(head, states, tokens, tokens)[0], alone)
    assert torch.equal(read_head(head, states, tokens, tokens, entropy=True)[0], alone)


@table("sizes, calls", [(AGAIN, 16), (KEPT, 8)])
def test_logits_are_computed_again_only_if_they_are_too_many_to_keep(
    sizes: tuple[int, ...], calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In eight blocks of at most 7 tokens."""
    set_sizes(monkeypatch, sizes)
    own, seen = module._product_of, []
    monkeypatch.setattr(module, "_product_of", lambda *given: seen.append(given[-1]) or own(*given))
    head, states, tokens = nn.Linear(D, V), torch.randn(N, D), torch.arange(N)
    read_head(head, states, tokens, tokens)[0].sum().backward()
    assert len(seen) == calls


def test_only_what_is_trained_gets_a_gradient() -> None:
    head, states, tokens = nn.Linear(D, V).requires_grad_(False), torch.randn(N, D).requires_grad_(), torch.arange(N)
    read_head(head, states, tokens, tokens)[0].sum().backward()
    assert states.grad is not None
    assert head.weight.grad is None


def test_other_heads_are_left_to_their_own_forward_pass() -> None:
    states = torch.randn(N, D)

    class Scaled(nn.Linear):
        pass

    hooked = nn.Linear(D, V)
    hooked.register_forward_hook(lambda *_: None)
    for head in (Scaled(D, V), hooked, nn.Linear(D, V).bfloat16()):
        assert not reads_in_blocks(head, states)


def errors_in_16_bits(
    patch: pytest.MonkeyPatch, rows: int, *, autocast: bool = True, entropy: bool = False, divergence: bool = False
) -> tuple[float, float]:
    """Return the relative errors of the head's gradient: of many blocks or chunks, and of one product.

    A row has 64 tokens. The loss has terms of one sign, as that of SFT: their sums grow with the rows.
    """
    torch.manual_seed(1)
    fields = {**tiny_llama(512), "hidden_size": 64, "num_hidden_layers": 1, "max_position_embeddings": 128}
    config = AutoConfig.for_model(**fields, tie_word_embeddings=False)
    model, other = (AutoModelForCausalLM.from_config(config) for _ in range(2))
    sequences = Sequences.from_lists(torch.randint(512, (rows, 2)).tolist(), torch.randint(512, (rows, 64)).tolist())

    def gradient(dtype: torch.dtype, *, blocks: bool) -> Tensor:
        set_sizes(patch, (2**12, 64, 0) if blocks else (2**40, 1024, 2**40))
        patch.setattr(policies, "CHUNK", 2**12 if blocks else 2**40)
        rounded = autocast and dtype == torch.bfloat16
        kept = torch.float32 if rounded else dtype
        policy, reference = (make_policy(copy.deepcopy(each).to(kept)) for each in (model, other))
        weight: Any = policy.model.get_output_embeddings().weight
        weight.grad_dtype = torch.promote_types(kept, torch.float32)  # as `MasterWeights` has it
        with torch.autocast("cpu", dtype, enabled=rounded):
            found = policy(
                sequences, entropy=entropy, reference=Frozen(lambda: reference).load() if divergence else None
            )
        loss = found.divergence if divergence else found.entropy if entropy else -found.logprobs
        loss.sum().backward()
        return weight.grad.double()

    exact = gradient(torch.float64, blocks=False)
    many, one = (float((gradient(torch.bfloat16, blocks=x) - exact).norm() / exact.norm()) for x in (True, False))
    return many, one


@table("autocast, entropy, divergence", [(a, e, d) for a in (True, False) for e, d in ((0, 0), (1, 0), (0, 1))])
def test_in_16_bits_the_gradient_is_as_exact_as_that_of_one_product(
    autocast: bool, entropy: bool, divergence: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many blocks or chunks there are: what they add is in float32 (law 3)."""
    kind = {"autocast": autocast, "entropy": entropy, "divergence": divergence}
    many, one = errors_in_16_bits(monkeypatch, 32, **kind)
    assert many <= 1.2 * one


@pytest.mark.slow
@pytest.mark.parametrize("rows", [256, 1024])
@pytest.mark.parametrize("divergence", [False, True])
def test_it_is_for_any_number_of_tokens(divergence: bool, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    many, one = errors_in_16_bits(monkeypatch, rows, divergence=divergence)
    assert many <= 1.2 * one


@table("divergence", [False, True])
def test_sums_in_16_bits_are_found(divergence: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the chunks of a pass have one cast of the weights, as autocast does it, whose gradient they sum."""
    monkeypatch.setattr(policies, "reads_in_blocks", lambda *_: False)
    monkeypatch.setattr(policies, "autocast_dtype", lambda kind: None)
    many, one = errors_in_16_bits(monkeypatch, 32, divergence=divergence)
    assert many > 1.5 * one
