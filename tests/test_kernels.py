"""Triton's kernels for logits give torch's numbers, in Triton's interpreter, and compile for GPUs."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from tables import table
from trainkit.config import SamplingConfig
from trainkit.models import head as module
from trainkit.models.head import kernels_on, read_head
from trainkit.rollouts import CausalSampler
from trainkit.testing import character_tokenizer, tiny_llama

pytestmark = [
    pytest.mark.engines,  # whose environment has Triton
    pytest.mark.filterwarnings("ignore:(invalid|divide by zero).*:RuntimeWarning"),  # NumPy's, in what is not taken
]
V, D, N = 700, 16, 6


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    assert os.environ.get("TRITON_INTERPRET") == "1", "as make engines sets it; Triton reads it when it is imported"
    found = importlib.import_module("trainkit.models.kernels")
    monkeypatch.setattr(found, "COLUMNS", 128)
    monkeypatch.setattr(module, "KERNELS", frozenset({"cpu"}))
    for name, value in {"BLOCK": N * 256, "NARROWEST": 256, "KEPT": 0}.items():
        monkeypatch.setattr(module, name, value)
    kernels_on.cache_clear()
    yield found
    kernels_on.cache_clear()


def masks() -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(3)
    each = [torch.rand((V,) * dims, generator=generator) < 0.4 for dims in (1, 2)]
    for mask in each:
        mask[..., :300], mask[..., 310] = False, True  # whole blocks are forbidden
    return [None, *each]


@table("dims", [0, 1, 2])
@table("entropy", [False, True])
@table("dtype", [torch.float32, torch.bfloat16])
def test_blocks_of_logits(
    dims: int, entropy: bool, dtype: torch.dtype, kernels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, mask = nn.Linear(D, V, bias=dims == 1).to(dtype), masks()[dims]
    states, factors = torch.randn(N, D, dtype=dtype).requires_grad_(), torch.randn(2, N)
    tokens, previous, results = torch.tensor([310, 5, 310, 699, 400, 310]), torch.arange(N), []
    for kinds in (frozenset[str](), frozenset({"cpu"})):
        monkeypatch.setattr(module, "KERNELS", kinds)
        kernels_on.cache_clear()
        assert (kernels_on("cpu") is kernels) == bool(kinds)
        logprobs, entropies = read_head(
            head, states, tokens, previous, temperature=0.7, logit_mask=mask, entropy=entropy
        )
        loss = (logprobs.masked_fill(logprobs == -torch.inf, 0) * factors[0]).sum()
        loss = loss + (entropies * factors[1]).sum() if entropy else loss
        results.append((logprobs, entropies, *torch.autograd.grad(loss, [states, *head.parameters()])))
    for expected, given in zip(*results, strict=True):
        if dtype == torch.float32:
            torch.testing.assert_close(given, expected, rtol=1e-5, atol=1e-5)
        elif len(expected):
            finite = expected.isfinite()
            assert (given - expected)[finite].norm() <= 1e-2 * expected[finite].norm()


@table("temperature", [0.0, 0.7])
@table("dims", [0, 1, 2])
def test_tokens(temperature: float, dims: int, kernels: Any) -> None:
    """Of 16 draws in each of three distributions; a head of more columns than there are tokens."""
    logits, mask = torch.randn(3, V + 20).mul(3).repeat_interleave(16, 0), masks()[dims]
    draws, previous = torch.rand(len(logits)), torch.tensor([5, 6, 7]).repeat_interleave(16)
    draws[0], draws[16] = 0, 1 - 2**-24
    tokens, logprobs, entropies = kernels.choose(logits, draws, temperature, V, mask, previous)
    allowed = torch.ones(V, dtype=torch.bool) if mask is None else mask if dims == 1 else mask[previous]
    scores = (logits[:, :V] / (temperature or 1)).masked_fill(~allowed, -torch.inf)
    expected = torch.distributions.Categorical(logits=scores.double())
    torch.testing.assert_close(logprobs.double(), expected.log_prob(tokens), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropies.double(), expected.entropy(), rtol=1e-5, atol=1e-5)
    if temperature == 0:
        assert torch.equal(tokens, scores.argmax(-1))
        return
    own, upper = expected.probs.gather(1, tokens[:, None])[:, 0], expected.probs.cumsum(-1).gather(1, tokens[:, None])
    assert (own > 0).all()
    assert (draws <= upper[:, 0] + 1e-6).all()
    assert (draws >= upper[:, 0] - own - 1e-6).all()


def test_some_tokens_are_not_drawn_at_first(kernels: Any) -> None:
    """In the first row; the second has no others."""
    logits, ends, short = torch.randn(2, V).repeat_interleave(16, 0), torch.tensor([4, 600]), torch.ones(32).bool()
    logits[:, 4] = logits[:, 600] = 6.0
    logits[16:] = logits[16:].masked_fill(logits[16:] < 6, -torch.inf)
    draws, previous = torch.rand(32), torch.zeros(32, dtype=torch.long)
    tokens, logprobs, entropies = kernels.choose(logits, draws, 1.0, V, None, previous, short, ends)
    expected = torch.distributions.Categorical(logits=logits.double())
    torch.testing.assert_close(logprobs.double(), expected.log_prob(tokens), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropies.double(), expected.entropy(), rtol=1e-5, atol=1e-5)
    weights = expected.probs.index_fill(1, ends, 0)
    mass = torch.where((weights.sum(-1) > 0)[:, None], weights, expected.probs).cumsum(-1)
    assert torch.equal(tokens, torch.searchsorted(mass, draws.double()[:, None] * mass[:, -1:], right=True)[:, 0])
    assert torch.isin(tokens, ends).tolist() == [False] * 16 + [True] * 16
    tokens, *_ = kernels.choose(logits, draws, 1.0, V, None, previous, ~short, ends)
    assert torch.isin(tokens, ends).any()


def test_the_sampler_chooses_the_same_tokens(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**tiny_llama(10))).eval()
    calls, own = [], kernels.choose
    monkeypatch.setattr(kernels, "choose", lambda *given: calls.append(given) or own(*given))
    sampler, results = CausalSampler(model, character_tokenizer("abcdef"), head_alone=True), []
    for kinds in (frozenset({"cpu"}), frozenset[str]()):
        monkeypatch.setattr(module, "KERNELS", kinds)
        kernels_on.cache_clear()
        for settings in ({"temperature": 0.0}, {"temperature": 0.8, "min_new_tokens": 3}, {"top_k": 3}):
            before = len(calls)
            results.append(sampler.generate([[1, 2], [3]], SamplingConfig(max_new_tokens=4, **settings), [1, 2]))
            assert (len(calls) > before) == bool(kinds and "top_k" not in settings)
    for given, expected in zip(results[:3], results[3:], strict=True):
        assert given.ids == expected.ids
        torch.testing.assert_close(given.logprobs, expected.logprobs)
        torch.testing.assert_close(given.entropy, expected.entropy)


def test_kernels_with_other_numbers_are_not_used(
    kernels: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    own = kernels.fold
    monkeypatch.setattr(kernels, "fold", lambda product, *rest: own(product * 1.1, *rest))
    assert kernels_on("cpu") is None
    assert "Triton's kernels for logits are not used (AssertionError: " in caplog.text


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from trainkit.models import kernels

types = dict.fromkeys(("count", "width", "stride", "mask_stride"), "i32") | {"temperature": "fp32", "allowed": "*u8"}
types |= dict.fromkeys(("sums", "norms", "entropies", "grads", "entropy_grads", "draws", "numbers"), "*fp32")
types |= dict.fromkeys(("at", "previous", "tokens", "ends"), "*i64") | {"short": "*u8", "end_count": "i32"}
settings = {kernels._fold_rows: "entropy", kernels._unfold_rows: "entropy", kernels._choose_rows: "greedy"}
for kernel, switch in settings.items():
    for on, dtype in ((False, "*bf16"), (True, "*fp32"), (True, "*bf16")):
        own = types | {"product": dtype, "logits": dtype}
        signature = {name: own.get(name, "constexpr") for name in kernel.arg_names}
        chosen = {"masked": on, switch: on, "early": not on, "block": kernels.COLUMNS}
        constants = {name: value for name, value in chosen.items() if name in kernel.arg_names}
        source = ASTSource(kernel, signature, constants)
        made = triton.compile(source, target=GPUTarget("cuda", CAPABILITY, 32), options={"num_warps": kernels.WARPS})
        assert made.asm["cubin"]
        print(kernel.__name__, made.metadata.shared, made.metadata.num_warps)
"""


@table("capability", [80, 90])
def test_they_compile_for_gpus(capability: int) -> None:
    """To machine code, with each of their settings."""
    given = {**os.environ, "TRITON_INTERPRET": "0"}
    program = [sys.executable, "-W", "ignore", "-c", COMPILE.replace("CAPABILITY", str(capability))]
    printed = subprocess.run(program, env=given, check=True, capture_output=True, text=True).stdout
    assert printed.count("_rows ") == 9
