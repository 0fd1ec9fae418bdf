"""The library for float32 matrix products: the fastest one that is exact on this machine."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar, copy_context
from functools import cache
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from trainkit.models.joined import attend as attend_joined

log = logging.getLogger(__name__)

T = TypeVar("T")

SHAPES = ((256, 512, 1024), (32, 1024, 256))
"""(rows, inner dimension, columns) of the products that are compared: for many tokens, and for one sampled token."""

TOLERANCE = 8.0
"""The largest ratio of the two libraries' errors that counts as exact. Another order of summation gives a ratio of 1
to 4, TF32 over 500, bfloat16 over 5,000."""

TF32 = 2.0**-10
"""The distance from 1 to the next number in TF32."""

_set_here = False
_one_library = False


def use_fast_exact_matmul(device: torch.device, *, one_library: bool = False) -> bool:
    """Use oneDNN for float32 products on the CPU if it computes them in float32; return whether it is used.

    torch passes products to oneDNN where `torch.get_float32_matmul_precision` is "medium", which also allows oneDNN
    to round the factors to bfloat16. CPUs without matrix units for bfloat16 do not round, and many of them (AMD's in
    particular) are about twice as fast as with the default library. So "medium" is tried, and kept if nothing is
    rounded. Attention keeps the default library, because oneDNN is slower for its many small products.

    Other devices do round with "medium": for them a "medium" that this function set is reset to "highest", and
    nothing else is changed. Nothing is changed either if the precision is "high". The setting holds for the whole
    process, and depends only on the CPU and on torch's build.

    Args:
        device: where the models are run.
        one_library: use the default library for all products. Threads that run models at the same time need this:
            attention of one changes the setting, and products of the other would then be rounded differently, depending
            on when they are made.
    """
    global _set_here, _one_library
    chosen, _one_library = torch.get_float32_matmul_precision(), one_library
    if (device.type != "cpu" or one_library) and _set_here and chosen == "medium":
        torch.set_float32_matmul_precision("highest")
        _set_here = False
    register_attention()
    if device.type != "cpu" or one_library or chosen == "high":
        return False
    exact = _medium_is_exact()
    torch.set_float32_matmul_precision("medium" if exact else chosen)
    _set_here = _set_here or (exact and chosen == "highest")
    return exact


def rounding(dtype: torch.dtype, device: torch.device) -> float:
    """Return the relative size to which factors of matrix products are rounded, which is that of ``dtype`` or larger.

    If `torch.get_float32_matmul_precision` is not "highest", factors of float32 may be rounded to TF32, and with
    "medium" on CPUs to bfloat16, unless `use_fast_exact_matmul` has found that this one does not.
    """
    chosen = torch.get_float32_matmul_precision()
    if dtype != torch.float32 or chosen == "highest" or (device.type == "cpu" and _set_here):
        return torch.finfo(dtype).eps
    return torch.finfo(torch.bfloat16).eps if (device.type, chosen) == ("cpu", "medium") else TF32


def use_fast_and_exact_kernels(device: torch.device, precision: str, *, deterministic: bool = False) -> None:
    """Choose the kernels of a run in this process: fast ones, and exact ones where torch's choice is not.

    Args:
        device: the device of the run.
        precision: that of its passes; a warning is logged if ``bf16`` is slow on the device.
        deterministic: whether operations without a kernel that gives the same bits in every run raise an error.
    """
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it is first used
        torch.use_deterministic_algorithms(True)
    use_fast_exact_matmul(device)
    use_exact_convolutions(device)
    use_right_attention(device)
    if precision == "bf16":
        warn_of_slow_bf16(device.type)


def use_exact_convolutions(device: torch.device) -> None:
    """Compute convolutions of float32 on a CUDA device in float32, and with the same bits in every run.

    cuDNN's defaults are TF32, whose products have 10 bits, and algorithms that add in an order that varies. TF32 is
    kept where `torch.get_float32_matmul_precision` allows it for matrix products, too. The settings hold for the whole
    process.
    """
    if device.type == "cuda":
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.allow_tf32 = torch.get_float32_matmul_precision() != "highest"


def use_right_attention(device: torch.device) -> None:
    """Switch cuDNN's attention off on a CUDA device if its gradients are not finite with a mask.

    torch prefers it on Hopper GPUs. With 64, 192, 320, … keys, and a query that may attend to none of them, as those of
    padding at the left, torch 2.11 has gradients of NaN there (https://github.com/pytorch/pytorch/issues/196678).
    The setting holds for the whole process.
    """
    if device.type == "cuda" and torch.backends.cuda.cudnn_sdp_enabled():
        torch.backends.cuda.enable_cudnn_sdp(has_finite_gradients(SDPBackend.CUDNN_ATTENTION, device))


def has_finite_gradients(kernel: SDPBackend, device: torch.device) -> bool:
    """Return whether a kernel of attention exists, and has finite gradients beside a query that attends to nothing."""
    query, key, value = (torch.ones(1, 1, 64, 64, device=device, dtype=torch.bfloat16).requires_grad_() for _ in "qkv")
    mask = torch.ones(64, 64, dtype=torch.bool, device=device).tril(-1)
    try:
        with sdpa_kernel(kernel):
            outputs = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)[:, :, 1:]
            gradients = torch.autograd.grad(outputs.sum(), (query, key, value))
    except RuntimeError:  # it has none on this device
        return False
    return all(bool(gradient.isfinite().all()) for gradient in gradients)


def autocast_dtype(kind: str) -> torch.dtype | None:
    """Return the precision of autocast on devices of this type; None if it is off, or if they have none."""
    on = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if on else None


def dtype_of_attention(tensor: Tensor) -> torch.dtype:
    """Return the precision in which attention to ``tensor`` is computed.

    It is that of autocast, or of the tensor. On CPUs without matrix units for bfloat16 it is float32 instead of
    bfloat16: torch's attention takes up to five times as long in bfloat16 there, for short sequences and for single
    tokens, and at most 1.2 times as long in float32, for long ones.
    """
    dtype = autocast_dtype(tensor.device.type) or tensor.dtype
    kind = _ESTIMATED.get() or tensor.device.type
    return torch.float32 if dtype == torch.bfloat16 and kind == "cpu" and not _has_matrix_units() else dtype


_ESTIMATED: ContextVar[str | None] = ContextVar("_ESTIMATED", default=None)


@contextmanager
def attention_as_on(kind: str) -> Iterator[None]:
    """Let `dtype_of_attention` be that on devices of another type inside the block, to estimate what they need."""
    token = _ESTIMATED.set(kind)
    try:
        yield
    finally:
        _ESTIMATED.reset(token)


@cache
def _has_matrix_units() -> bool:
    return bool(torch.cpu.get_capabilities().get("amx_bf16"))


@cache
def warn_of_slow_bf16(kind: str) -> None:
    """Log a warning, once, if the CPU or CUDA device has no instructions for bfloat16; torch is slower with it then."""
    if kind == "cuda":
        has, name = torch.cuda.is_bf16_supported(including_emulation=False), torch.cuda.get_device_name()
    elif kind == "cpu":
        able = torch.cpu.get_capabilities()
        has = any(able.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))
        name = able.get("cpu_name", able["architecture"])
    else:
        return
    if not has:
        log.warning(
            "train.mixed_precision is 'bf16', and this device (%s) has no instructions for bfloat16: products are "
            "slower than in float32. Set it to 'no' unless you only try out a run for another device",
            name,
        )


@cache
def _medium_is_exact() -> bool:
    """Return whether oneDNN's products are as exact as the default library's; the caller sets the precision after."""
    torch.set_float32_matmul_precision("highest")
    before = list(_errors())
    torch.set_float32_matmul_precision("medium")
    return all(now <= TOLERANCE * old for now, old in zip(_errors(), before, strict=True))


def as_here(call: Callable[[], T]) -> Callable[[], T]:
    """Return a function that makes a call in another thread as it would be made in this one.

    Context variables are those of this thread, and so is what torch keeps for each thread: whether gradients are
    computed, the default device and the current CUDA device. Autocast is off.
    """
    context, grad, default = copy_context(), torch.is_grad_enabled(), torch.get_default_device()
    cuda = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def there() -> T:
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(grad))
            if torch.get_default_device() != default:
                stack.enter_context(default)
            if cuda is not None:
                stack.enter_context(torch.cuda.device(cuda))
            return call()

    return lambda: context.run(there)


def by_default_library(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Return ``function(*tensors)``, with the precision "highest" in the forward and in the backward pass.

    The precision is unchanged if `use_fast_exact_matmul` was told to use one library.
    """
    if _one_library or torch.get_float32_matmul_precision() != "medium" or tensors[0].device.type != "cpu":
        return function(*tensors)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        switch: Any = _Precision.apply
        inside = switch("highest", "medium", *tensors)
        try:
            computed = function(*inside)
        except BaseException:
            torch.set_float32_matmul_precision("medium")
            raise
        result: Tensor = switch("medium", "highest", computed)[0]
        return result
    torch.set_float32_matmul_precision("highest")
    try:
        return function(*tensors)
    finally:
        torch.set_float32_matmul_precision("medium")


class _Precision(torch.autograd.Function):
    """The identity function, which sets one precision in the forward pass and another in the backward pass."""

    @staticmethod
    def forward(ctx: Any, forward: str, backward: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        torch.set_float32_matmul_precision(forward)
        ctx.precision = backward
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        torch.set_float32_matmul_precision(ctx.precision)
        return None, None, *grads


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *args: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """Compute transformers' SDPA attention, with the products of the default library, in `dtype_of_attention`.

    A model that is given ``joined``, `JoinedRows` or `FilledColumns`, attends as its texts do.
    """
    from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward  # all of transformers

    usual, groups = autocast_dtype(query.device.type) or query.dtype, getattr(module, "num_key_value_groups", 1)
    if query.device.type == "cuda" and usual == torch.float32 and groups > 1 and query.size(2) > 1:
        # only torch's slowest kernel, which keeps all scores, has grouped queries in float32 there
        key, value = repeat_kv(key, groups), repeat_kv(value, groups)
        module = SimpleNamespace(is_causal=getattr(module, "is_causal", True))

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if (joined := kwargs.get("joined")) is not None:
            known = {name: kwargs[name] for name in ("scaling", "dropout", "sliding_window") if name in kwargs}
            return attend_joined(query, key, value, joined, **known)
        return sdpa_attention_forward(module, query, key, value, attention_mask, *args, **kwargs)[0]

    if usual == dtype_of_attention(query):
        if "joined" in kwargs:  # autocast casts for torch's own function; rotary positions have made them float32
            query, key, value = query.to(usual), key.to(usual), value.to(usual)
        return by_default_library(attend, query, key, value), None
    attention_mask = _wide(attention_mask)
    kwargs = {name: _wide(value) for name, value in kwargs.items()}  # one may be a bias of positions
    with torch.autocast(query.device.type, enabled=False):
        return by_default_library(attend, query.float(), key.float(), value.float()).to(usual), None


_registered = _attention


def keep_attention_uncompiled() -> None:
    """Let compiled code call the attention, and not contain it. It holds for the whole process."""
    global _registered
    if _registered is _attention:
        _registered = torch.compiler.disable(_attention)
    register_attention()


def register_attention() -> None:
    """Let models with transformers' attention `sdpa` use the one of this module. It holds for the whole process."""
    from transformers import AttentionInterface

    AttentionInterface.register("sdpa", _registered)


def _wide(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


def _errors() -> Iterator[float]:
    """Yield the largest error of each kind of product, compared with float64."""
    generator = torch.Generator().manual_seed(0)
    for rows, inner, columns in SHAPES:
        a, b = (torch.randn(shape, generator=generator) for shape in ((rows, inner), (inner, columns)))
        right = a.double() @ b.double()
        transposed = b.t().contiguous().t()  # as the weight of a linear layer is
        batched = torch.bmm(a.view(2, -1, inner), b.expand(2, -1, -1)).view_as(right)
        for product in (a @ b, a @ transposed, torch.addmm(torch.zeros(columns), a, b), batched):
            yield float((product.double() - right).abs().max())
