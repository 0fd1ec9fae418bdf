"""Log-probabilities and entropies from an output head, in blocks of the vocabulary, without a tensor of all logits."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from trainkit.models.backend import autocast_dtype
from trainkit.models.fitting import first_line
from trainkit.models.stored import StoredLinear

log = logging.getLogger(__name__)

BLOCK = 2**22
"""The number of logits of a block on CPUs: 16 MB in float32."""
NARROWEST = 1024
"""The smallest number of tokens of the vocabulary in a block; products of fewer are slow."""
ALIGNED = 256
"""Blocks have a multiple of this width: an accelerator's kernels for other widths take twice as long."""
KEPT = 2**23
"""The largest number of logits that are kept for the backward pass on CPUs; others are computed again."""

KERNELS = frozenset({"cuda"})
"""The types of devices on which the kernels of `trainkit.models.kernels` are used."""


def at_a_time(count: int, device: torch.device) -> int:
    """Return a number of logits on a device for one on CPUs; small products leave an accelerator idle."""
    return count if device.type == "cpu" else 4 * count


class _Sums(NamedTuple):
    """What is known of each softmax [N] after some blocks of the vocabulary."""

    top: Tensor
    """The largest logit."""
    total: Tensor
    """Σ exp(z − top)."""
    mean: Tensor
    """Σ exp(z − top) · (z − top), for the entropy."""
    chosen: Tensor
    """The logit of the token."""


def _fold(
    product: Tensor, allowed: Tensor | None, at: Tensor, sums: _Sums, temperature: float, entropy: bool, keeps: bool
) -> tuple[_Sums, Tensor | None]:
    """Add a block of the vocabulary to the sums.

    Args:
        product: the logits of a block [N, b] in the precision of the product, which may be overwritten.
        allowed: which may be sampled, bool [b] or [N, b].
        at: the places of the tokens in the block [N]; others are in other blocks.
        sums: the sums of earlier blocks.
        temperature: divides the logits.
        entropy: whether to compute what the entropy needs.
        keeps: whether to return the logits, too.
    """
    top, total, mean, chosen = sums
    logits = _scale(product, allowed, temperature)
    chosen = torch.where(_inside(at, logits), logits.gather(1, _clamped(at, logits)).squeeze(1), chosen)
    before, top = top, torch.maximum(top, logits.amax(1))
    least = top.masked_fill(top == -torch.inf, 0.0)  # no token has been allowed so far
    shifted = logits.sub(least.unsqueeze(1)) if keeps else logits.sub_(least.unsqueeze(1))
    factor = (before - least).exp()
    exps = shifted.exp() if entropy else shifted.exp_()
    if entropy:  # of Σ e·(z − top); −inf · 0 counts as 0
        moved = torch.where(total > 0, total * (before - least), 0.0)
        mean = (mean + moved) * factor + shifted.masked_fill_(exps == 0, 0.0).mul_(exps).sum(1)
    return _Sums(top, total * factor + exps.sum(1), mean, chosen), logits if keeps else None


def _unfold(
    product: Tensor,
    allowed: Tensor | None,
    at: Tensor,
    known: tuple[Tensor, Tensor],
    grads: tuple[Tensor, ...],
    temperature: float,
    kept: bool,
) -> Tensor:
    """Return the gradient of a block of products [N, b]: ∂ log π / ∂z = onehot − p, and ∂H / ∂z = −p·(log p + H).

    Args:
        product: as in `_fold`; if they were ``kept``, the logits, which are not overwritten.
        allowed: as in `_fold`.
        at: as in `_fold`.
        known: log Σ exp z [N], and the entropies [N] or [0].
        grads: the gradients of the log-probabilities and of the entropies.
        temperature: as in `_fold`.
        kept: whether the logits were kept.
    """
    (norms, entropies), gradient = known, grads[0].unsqueeze(1)
    logs = product - norms.unsqueeze(1) if kept else _scale(product, allowed, temperature).sub_(norms.unsqueeze(1))
    if len(entropies):
        grad = logs.exp()
        logs.masked_fill_(grad == 0, 0.0).add_(entropies.unsqueeze(1)).mul_(grads[1].unsqueeze(1)).add_(gradient)
        grad = grad.mul_(logs.neg_())
    else:
        grad = logs.exp_().mul_(-gradient)
    grad.scatter_add_(1, _clamped(at, grad), torch.where(_inside(at, grad), grads[0], 0.0).unsqueeze(1))
    return grad if temperature == 1 else grad.div_(temperature)


class Folds(NamedTuple):
    """What is computed of a block of logits."""

    fold: Callable[..., tuple[_Sums, Tensor | None]]
    unfold: Callable[..., Tensor]


EAGER = Folds(_fold, _unfold)


@cache
def kernels_on(kind: str) -> Any:
    """Return `trainkit.models.kernels` if they run on a type of device and give torch's numbers, else None."""
    if kind not in KERNELS:
        return None
    try:
        from trainkit.models import kernels

        _compare(kernels, torch.device(kind))
    except Exception as error:  # of Triton's compiler, which raises whatever it meets
        log.warning(
            "Triton's kernels for logits are not used (%s: %s); torch's operations are, which are slower",
            type(error).__name__,
            first_line(error),
        )
        return None
    return kernels


def _compare(kernels: Any, device: torch.device) -> None:
    """Compare kernels with torch's operations on a small input.

    Raises:
        AssertionError: their numbers differ.
    """
    logits = torch.linspace(-3, 3, 3 * 300, device=device).sin().mul(4).view(3, 300)
    allowed, at = torch.arange(300, device=device) % 3 > 0, torch.tensor([1, 299, 500], device=device)
    zeros, ones = torch.zeros(3, device=device), torch.ones(3, device=device)
    sums, results = _Sums(torch.full_like(zeros, -torch.inf), zeros, zeros, zeros), []
    for folds in (EAGER, kernels):
        new, _ = folds.fold(logits.bfloat16(), allowed, at, sums, 0.7, True, False)
        known = new.top + new.total.log(), new.total.log() - new.mean / new.total
        results.append((new, folds.unfold(logits.bfloat16(), allowed, at, known, (ones, ones), 0.7, False).bfloat16()))
    torch.testing.assert_close(results[1], results[0])
    weights = torch.where(allowed, logits / 0.7, -torch.inf).softmax(-1)
    tokens = torch.tensor([1, 299, 100], device=device)
    draws = (weights.cumsum(-1) - weights / 2).gather(1, tokens.unsqueeze(1)).squeeze(1)
    chosen, logprobs, entropies = kernels.choose(logits, draws, 0.7, 300, allowed, tokens)
    expected = weights.gather(1, tokens.unsqueeze(1)).squeeze(1).log(), -torch.xlogy(weights, weights).sum(-1)
    torch.testing.assert_close((chosen, logprobs, entropies), (tokens, *expected), rtol=1e-4, atol=1e-5)


def reads_in_blocks(head: Any, states: Tensor) -> bool:
    """Return whether `read_head` gives the log-probabilities of this head: a linear layer without hooks.

    Its weights have the type of the states, unless autocast rounds both.
    """
    if (
        type(head) not in (nn.Linear, StoredLinear)
        or head._forward_hooks
        or head._forward_pre_hooks
        or head._backward_hooks
    ):
        return False
    tensors = [head.weight, *([] if head.bias is None else [head.bias])]
    rounded = _product_dtype(states) != states.dtype
    return all(
        type(tensor) in (Tensor, nn.Parameter) and (rounded or tensor.dtype == states.dtype) for tensor in tensors
    )


def _product_dtype(states: Tensor) -> torch.dtype:
    """Return the type to which the factors of the product are rounded; autocast leaves float64 as it is."""
    autocast = autocast_dtype(states.device.type)
    return states.dtype if autocast is None or states.dtype == torch.float64 else autocast


def read_head(
    head: nn.Linear,
    states: Tensor,
    tokens: Tensor,
    previous: Tensor,
    *,
    temperature: float = 1.0,
    logit_mask: Tensor | None = None,
    vocabulary: int | None = None,
    entropy: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return log softmax(logits / temperature) of tokens, and entropies if asked for, otherwise an empty tensor.

    The logits are those of a linear head, with −inf where ``logit_mask`` forbids a token. If there are more than
    `BLOCK`, the gradient of the head is written block by block, each block once. So it is as exact as that of one
    product, in 16 bits too: sums over tokens and over the vocabulary are in float32, and in float64 for states in it.

    Args:
        head: the head, as `reads_in_blocks` accepts it.
        states: its inputs [N, D].
        tokens: [N].
        previous: the tokens before these [N], for a mask with a row per previous token.
        temperature: divides the logits.
        logit_mask: bool [V] or [V, V], True = allowed; of the first ``vocabulary`` tokens.
        vocabulary: how many tokens have a probability; None: all of the head's. The others are not computed.
        entropy: whether to compute entropies.

    Returns:
        Two tensors in float32, or in float64 for states in it: [N], and [N] or [0].
    """
    weight: Tensor = head.weight
    bias: Tensor | None = head.bias
    if vocabulary is not None and vocabulary < len(weight):
        weight, bias = weight[:vocabulary], None if bias is None else bias[:vocabulary]
    arguments = (states, weight, bias, tokens, previous, logit_mask, temperature, entropy)
    if len(states) * len(weight) <= at_a_time(BLOCK, states.device):
        return _read_at_once(*arguments)
    logprobs, entropies = _Read.apply(*arguments)  # type: ignore[no-untyped-call]
    return logprobs, entropies


def _read_at_once(
    states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tokens: Tensor,
    previous: Tensor,
    logit_mask: Tensor | None,
    temperature: float,
    entropy: bool,
) -> tuple[Tensor, Tensor]:
    """Return what `read_head` does for logits that are few enough for one block; torch's own kernels are faster."""
    product = _product_of(states, weight, bias, slice(None))
    logits = _scale(product, _allowed(logit_mask, previous, slice(None)), temperature)
    logs = logits.log_softmax(-1)
    chosen = logs.gather(1, tokens.unsqueeze(1)).squeeze(1)  # has the bits of `token_logprobs`
    if not entropy:
        return chosen, chosen.new_empty(0)
    finite = logs if logit_mask is None else logs.masked_fill(logs == -torch.inf, 0.0)  # 0 · −inf counts as 0
    return chosen, -(logs.exp() * finite).sum(1)


class _Read(torch.autograd.Function):
    """The function of `read_head`; its positional arguments are the tensors and settings."""

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tokens: Tensor,
        previous: Tensor,
        mask: Tensor | None,
        temperature: float,
        entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies [N]; the sums over the vocabulary are updated block by block."""
        ctx.types = (states.dtype, dtype := _product_dtype(states))
        states = states.to(dtype)
        zeros = states.new_zeros(len(states), dtype=torch.promote_types(dtype, torch.float32))
        sums = _Sums(torch.full_like(zeros, -torch.inf), zeros, zeros, zeros)
        folds = (None if zeros.dtype == torch.float64 else kernels_on(states.device.type)) or EAGER
        ctx.mask, ctx.temperature, ctx.folds, kept = mask, temperature, folds, []
        keeps = any(ctx.needs_input_grad) and states.device.type == "cpu" and len(states) * len(weight) <= KEPT
        for columns in _blocks(states, weight):
            product, allowed = _product_of(states, weight, bias, columns), _allowed(mask, previous, columns)
            sums, logits = folds.fold(product, allowed, tokens - columns.start, sums, temperature, entropy, keeps)
            kept.append(logits)
        norms = sums.top + sums.total.log()
        entropies = sums.total.log() - sums.mean / sums.total if entropy else norms.new_empty(0)
        ctx.save_for_backward(states, weight, bias, tokens, previous, norms, entropies, *(kept if keeps else ()))
        return sums.chosen - norms, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of states, weight and bias."""
        states, weight, bias, tokens, previous, norms, entropies, *kept = ctx.saved_tensors
        (returned, dtype), sums = ctx.types, norms.dtype
        for_states = torch.zeros_like(states, dtype=sums) if ctx.needs_input_grad[0] else None
        for_weight = torch.empty_like(weight, dtype=sums) if ctx.needs_input_grad[1] else None
        for_bias = torch.empty_like(bias, dtype=sums) if ctx.needs_input_grad[2] else None
        for index, columns in enumerate(_blocks(states, weight)):
            product = kept[index] if kept else _product_of(states, weight, bias, columns)
            allowed, at = _allowed(ctx.mask, previous, columns), tokens - columns.start
            grad = ctx.folds.unfold(product, allowed, at, (norms, entropies), grads, ctx.temperature, bool(kept))
            if for_bias is not None:
                torch.sum(grad, 0, dtype=sums, out=for_bias[columns])
            grad = grad.to(dtype)
            if for_states is not None:
                part = weight[columns].to(dtype)
                for_states.addmm_(grad, part) if sums == dtype else for_states.add_(_product(grad, part, sums))
            if for_weight is not None:
                out = for_weight[columns]
                torch.mm(grad.t(), states, out=out) if sums == dtype else out.copy_(_product(grad.t(), states, sums))
        for_states = None if for_states is None else for_states.to(returned)
        return for_states, for_weight, for_bias, None, None, None, None, None


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``a @ b`` of factors in 16 bits; not rounded to these where the device has such products."""
    return torch.mm(a, b, out_dtype=dtype) if a.device.type == "cuda" else a @ b


def _blocks(states: Tensor, weight: Tensor) -> Iterator[slice]:
    """Yield the blocks of the vocabulary, which depend on nothing but the sizes and the device."""
    width = at_a_time(BLOCK, states.device) // max(len(states), 1)
    width = max(width - width % ALIGNED, NARROWEST)
    for start in range(0, len(weight), width):
        yield slice(start, min(start + width, len(weight)))


def _product_of(states: Tensor, weight: Tensor, bias: Tensor | None, columns: slice) -> Tensor:
    """Return the products of a block of the vocabulary [N, b], in their own precision."""
    dtype = _product_dtype(states)
    part = None if bias is None else bias[columns].to(dtype)
    return F.linear(states.to(dtype), weight[columns].to(dtype), part)


def _allowed(mask: Tensor | None, previous: Tensor, columns: slice) -> Tensor | None:
    """Return which tokens of a block are allowed, bool [b] or [N, b]."""
    if mask is None:
        return None
    return mask[columns] if mask.dim() == 1 else mask[:, columns][previous]


def _scale(product: Tensor, allowed: Tensor | None, temperature: float) -> Tensor:
    """Return the logits of products [N, b], in float32 or float64, in the same memory if that is their type."""
    logits = product.to(torch.promote_types(product.dtype, torch.float32))
    if temperature != 1:
        logits.div_(temperature)
    return logits if allowed is None else logits.masked_fill_(~allowed, -torch.inf)


def _inside(at: Tensor, block: Tensor) -> Tensor:
    """Return which tokens have their places ``at`` [N] in a block [N, b]."""
    return (at >= 0) & (at < block.size(1))


def _clamped(at: Tensor, block: Tensor) -> Tensor:
    """Return the places in a block [N, 1]; of tokens of other blocks some place."""
    return at.clamp(0, block.size(1) - 1).unsqueeze(1)
