"""Packed weights: products have the bits of torch's own, and are of the weights of the time of sampling."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from tables import table
from trainkit.config import SamplingConfig
from trainkit.rollouts import CausalSampler, packing
from trainkit.rollouts.sampler import Generated
from trainkit.testing import character_tokenizer, tiny_llama

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOKENIZER = character_tokenizer("abcdefgh")
SIZE = len(TOKENIZER)


@pytest.fixture(autouse=True)
def _small_products_by_onednn(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let products of float32 be made by oneDNN, and weights of any size be packed."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    monkeypatch.setattr(packing, "SMALLEST", 0)
    yield
    torch.set_float32_matmul_precision(before)


class Packed:
    """Counts the products that are made with packed weights."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.products, self.weights = 0, 0
        self.inner = torch.ops.mkldnn._linear_pointwise, torch.ops.mkldnn._reorder_linear_weight
        patch.setattr(torch.ops.mkldnn, "_linear_pointwise", self.product)
        patch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", self.weight)

    def product(self, *args: Any) -> Any:
        self.products += 1
        return self.inner[0](*args)

    def weight(self, *args: Any) -> Any:
        self.weights += 1
        return self.inner[1](*args)


@table("autocast", [False, True])
@table("biased", [False, True])
@table("rows", [1, 3, 32])
def test_a_product_has_the_bits_of_torchs(
    rows: int, biased: bool, autocast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(1)
    layer, dtype = nn.Linear(80, 48, bias=biased), torch.bfloat16 if autocast else torch.float32
    by_packs = packing._by_onednn(dtype) and packing._has_the_same_bits(dtype, rows, 48, 80, biased)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), torch.no_grad(), packing.packed(layer):
        counted = Packed(monkeypatch)
        for given in torch.randn(2, rows, 1, 80):
            found, expected = layer(given), F.linear(given, layer.weight, layer.bias)
            assert found.dtype == expected.dtype
            assert torch.equal(found, expected)
    assert (counted.products, counted.weights) == ((2, 1) if by_packs else (0, 0)), "a weight is packed once"


@table(
    "layer, rows, used",
    [
        (nn.Linear(4, 8), 1, True),
        (nn.Linear(4, 8), packing.MOST_ROWS + 1, False),
        (nn.Linear(4, 8).double(), 1, False),
        (nn.Linear(4, 8, device="meta"), 1, False),
        (nn.Linear(4, 4), 1, False),  # it is small
    ],
)
def test_weights_are_packed_where_that_is_faster(
    layer: nn.Linear, rows: int, used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "_has_the_same_bits", lambda *_: True)
    monkeypatch.setattr(packing, "SMALLEST", 32)
    counted, x = Packed(monkeypatch), torch.zeros(rows, 4, dtype=layer.weight.dtype, device=layer.weight.device)
    with torch.no_grad():
        with packing.packed(layer):
            layer(x)
        layer(x)
        assert counted.products == used, "outside the context they are not used"
        torch.set_float32_matmul_precision("highest")
        with packing.packed(layer):
            layer(x)
    assert counted.products == used, "products are made by another library"


@table("fault", [AttributeError, NotImplementedError, RuntimeError])
def test_a_torch_without_these_functions_makes_its_own_products(
    fault: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(*_: Any) -> None:
        raise fault

    packing._has_the_same_bits.cache_clear()
    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", absent)
    layer, x = nn.Linear(4, 8), torch.zeros(5, 4)
    with torch.no_grad(), packing.packed(layer):
        assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))
    packing._has_the_same_bits.cache_clear()


def llama() -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(**tiny_llama(SIZE), initializer_range=0.3)
    return AutoModelForCausalLM.from_config(config).eval()


def sample(sampler: CausalSampler) -> Generated:
    return sampler.generate([[1, 2], [3, 4], [5, 6]] * 4, SamplingConfig(max_new_tokens=40), list(range(12)))


def test_the_bytes_of_all_packed_weights_are_known_before() -> None:
    model = llama()
    linear = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    size = sum(4 * layer.weight.numel() for layer in linear)
    assert packing.bytes_of_packs(model, 4, bf16=False) == size
    assert packing.bytes_of_packs(model, 4, bf16=True) == size / 2
    assert packing.bytes_of_packs(model, packing.MOST_ROWS + 1, bf16=False) == 0


@table("autocast", [False, True])
def test_responses_have_the_bits_of_the_models_own(autocast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of a later call, after the weights have changed."""
    counted, model = Packed(monkeypatch), llama()
    sampler = CausalSampler(model, TOKENIZER)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            found = sample(sampler)
            with monkeypatch.context() as patch:
                patch.setattr(packing, "MOST_ROWS", 0)
                expected = sample(sampler)
        assert len({len(ids) for ids in found.ids}) > 1, "the batch shrinks"
        assert found.ids == expected.ids
        assert torch.equal(found.logprobs, expected.logprobs)  # type: ignore[arg-type]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)
    assert (counted.products > 0) == packing._by_onednn(torch.bfloat16 if autocast else torch.float32)
