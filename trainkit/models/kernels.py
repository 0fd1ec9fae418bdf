"""Triton kernels for what is computed of logits: each reads them once, or twice, instead of once per operation.

`trainkit.models.head.kernels_on` returns them where they can be used. Elsewhere, that module and the sampler compute
the same in torch. They are called with contiguous logits.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, attr-defined"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 2048
"""How many logits a program reads at a time; one program computes a row, so that its sums have one order."""
WARPS = 8


@triton.jit
def _scores(logits, allowed, columns, inside, temperature, masked: tl.constexpr):
    scores = tl.load(logits + columns, mask=inside, other=-float("inf")).to(tl.float32) / temperature
    if masked:
        scores = tl.where(tl.load(allowed + columns, mask=inside, other=0) != 0, scores, -float("inf"))
    return scores


@triton.jit
def _added(scores, top, total, mean, entropy: tl.constexpr):
    """Add scores to the sums of `trainkit.models.head`."""
    before = top
    top = tl.maximum(top, tl.max(scores, 0))
    least = tl.where(top == -float("inf"), 0.0, top)
    exps = tl.exp(scores - least)
    factor = tl.exp(before - least)
    if entropy:
        moved = tl.where(total > 0, total * (before - least), 0.0)
        mean = (mean + moved) * factor + tl.sum(tl.where(exps > 0, exps * (scores - least), 0.0), 0)
    return top, total * factor + tl.sum(exps, 0), mean


@triton.jit
def _fold_rows(
    product, allowed, at, sums, count, width, stride, mask_stride, temperature,
    masked: tl.constexpr, entropy: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits, mask = product + row * stride, allowed + row * mask_stride
    top, total, mean = tl.load(sums + row), tl.load(sums + count + row), tl.load(sums + 2 * count + row)
    for start in range(0, width, block):
        columns = start + tl.arange(0, block)
        scores = _scores(logits, mask, columns, columns < width, temperature, masked)
        top, total, mean = _added(scores, top, total, mean, entropy)
    place = tl.load(at + row)
    if (place >= 0) & (place < width):
        tl.store(sums + 3 * count + row, _scores(logits, mask, place, place < width, temperature, masked))
    tl.store(sums + row, top)
    tl.store(sums + count + row, total)
    tl.store(sums + 2 * count + row, mean)


@triton.jit
def _unfold_rows(
    product, allowed, at, norms, entropies, grads, entropy_grads, width, stride, mask_stride, temperature,
    masked: tl.constexpr, entropy: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits, mask = product + row * stride, allowed + row * mask_stride
    norm, grad, place = tl.load(norms + row), tl.load(grads + row), tl.load(at + row)
    for start in range(0, width, block):
        columns = start + tl.arange(0, block)
        logprobs = _scores(logits, mask, columns, columns < width, temperature, masked) - norm
        probabilities = tl.exp(logprobs)
        values = tl.where(columns == place, grad, 0.0) - grad * probabilities
        if entropy:
            surprise = logprobs + tl.load(entropies + row)
            values -= tl.load(entropy_grads + row) * tl.where(probabilities > 0, probabilities * surprise, 0.0)
        values = (values / temperature).to(product.dtype.element_ty)
        tl.store(logits + columns, values, mask=columns < width)


@triton.jit
def _without_ends(exps, columns, ends, end_count):
    for at in range(end_count):
        exps = tl.where(columns == tl.load(ends + at), 0.0, exps)
    return exps


@triton.jit
def _choose_rows(
    logits, allowed, previous, draws, short, ends, tokens, numbers,
    count, width, stride, mask_stride, end_count, temperature,
    masked: tl.constexpr, greedy: tl.constexpr, early: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits, mask = logits + row * stride, allowed + tl.load(previous + row) * mask_stride
    top, total, mean, rest, token = -float("inf"), 0.0, 0.0, 0.0, 0
    for start in range(0, width, block):
        columns = start + tl.arange(0, block)
        scores = _scores(logits, mask, columns, columns < width, temperature, masked)
        if greedy:
            largest = tl.max(scores, 0)
            token = tl.where(largest > top, tl.min(tl.where(scores == largest, columns, width), 0), token)
        before = top
        top, total, mean = _added(scores, top, total, mean, True)
        if early:
            least = tl.where(top == -float("inf"), 0.0, top)
            others = _without_ends(tl.exp(scores - least), columns, ends, end_count)
            rest = rest * tl.exp(before - least) + tl.sum(others, 0)
    if not greedy:  # the last possible token is left where rounding makes the sums smaller than the draw
        hidden = 0
        if early:
            hidden = tl.where((tl.load(short + row) != 0) & (rest > 0), end_count, 0)
        draw, mass, found, start = tl.load(draws + row) * tl.where(hidden > 0, rest, total), 0.0, width, 0
        while (found == width) & (start < width):
            columns = start + tl.arange(0, block)
            exps = tl.exp(_scores(logits, mask, columns, columns < width, temperature, masked) - top)
            if early:
                exps = _without_ends(exps, columns, ends, hidden)
            found = tl.min(tl.where((mass + tl.cumsum(exps, 0) > draw) & (exps > 0), columns, width), 0)
            token = tl.maximum(token, tl.max(tl.where(exps > 0, columns, 0), 0))
            mass += tl.sum(exps, 0)
            start += block
        token = tl.where(found < width, found, token)
    chosen = _scores(logits, mask, token, token < width, temperature, masked)
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(numbers + row, chosen - top - tl.log(total))
    tl.store(numbers + count + row, tl.log(total) - mean / total)


def fold(
    product: Tensor, allowed: Tensor | None, at: Tensor, sums: Any, temperature: float, entropy: bool, keeps: bool
) -> tuple[Any, None]:
    """Do as `trainkit.models.head.Folds.fold` for float32 or 16 bits; ``keeps`` is False."""
    assert not keeps
    new = torch.stack(tuple(sums))
    strides = product.size(1), product.stride(0), _stride(allowed)
    given = new if allowed is None else allowed.view(torch.uint8)
    _fold_rows[(len(product),)](
        product, given, at, new, len(product), *strides, float(temperature),
        masked=allowed is not None, entropy=entropy, block=COLUMNS, num_warps=WARPS,
    )  # fmt: skip
    return type(sums)(*new), None


def unfold(
    product: Tensor,
    allowed: Tensor | None,
    at: Tensor,
    known: tuple[Tensor, Tensor],
    grads: tuple[Tensor, ...],
    temperature: float,
    kept: bool,
) -> Tensor:
    """Do as `trainkit.models.head.Folds.unfold`, in place of ``product`` and in its precision; ``kept`` is False."""
    assert not kept
    (norms, entropies), own = known, [each.contiguous() for each in grads]
    strides = product.size(1), product.stride(0), _stride(allowed)
    given = norms if allowed is None else allowed.view(torch.uint8)
    _unfold_rows[(len(product),)](
        product, given, at, norms, entropies, *own, *strides, float(temperature),
        masked=allowed is not None, entropy=len(entropies) > 0, block=COLUMNS, num_warps=WARPS,
    )  # fmt: skip
    return product


def choose(
    logits: Tensor,
    draws: Tensor,
    temperature: float,
    vocabulary: int,
    mask: Tensor | None,
    previous: Tensor,
    short: Tensor | None = None,
    ends: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sample a token per row by inverse-transform sampling, greedy at temperature 0; return what is known of it.

    Args:
        logits: [b, V] in float32 or 16 bits.
        draws: numbers in [0, 1) [b].
        temperature: divides the logits; at 0 the log-probabilities are those at 1.
        vocabulary: how many of the V tokens have a probability.
        mask: bool [vocabulary], or a row per previous token; True = allowed. None allows all.
        previous: the previous tokens [b].
        short: bool [b], True where none of ``ends`` may be sampled, unless there is nothing else; not for greedy ones.
            Log-probabilities and entropies remain those of all tokens.
        ends: tokens [E].

    Returns:
        Tokens, their log-probabilities, and the entropies of the distributions; all [b].
    """
    tokens, numbers = torch.empty_like(previous), torch.empty((2, len(logits)), device=logits.device)
    given = draws if mask is None else mask.view(torch.uint8)
    early = (draws, previous) if short is None or ends is None else (short.view(torch.uint8), ends)
    strides = len(logits), vocabulary, logits.stride(0), _stride(mask), len(early[1])
    _choose_rows[(len(logits),)](
        logits, given, previous, draws, *early, tokens, numbers, *strides, float(temperature or 1),
        masked=mask is not None, greedy=temperature == 0, early=short is not None, block=COLUMNS, num_warps=WARPS,
    )  # fmt: skip
    return tokens, *numbers


def _stride(mask: Tensor | None) -> int:
    """Return how far apart the rows of a mask are; 0 if all rows have one."""
    return 0 if mask is None or mask.dim() == 1 else mask.stride(0)
