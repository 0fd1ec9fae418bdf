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
from trainkit.rollouts.packing import Packs
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


@table("autocast", [False, True])
@table("biased", [False, True])
@table("rows", [1, 3, 32])
def test_a_product_has_the_bits_of_torchs(rows: int, biased: bool, autocast: bool) -> None:
    draws = torch.Generator().manual_seed(1)
    weight, bias = torch.randn(48, 80, generator=draws), torch.randn(48, generator=draws) if biased else None
    packs = Packs()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), torch.no_grad():
        x = torch.randn(rows, 1, 80, generator=draws)
        product = packs.linear(x, weight, bias)
        if product is None:  # on this machine they would differ, or there is no oneDNN
            dtype = torch.bfloat16 if autocast else torch.float32
            assert not (packing._by_onednn(dtype) and packing._has_the_same_bits(dtype, rows, 48, 80, biased))
            return
        other = torch.randn(rows, 1, 80, generator=draws)
        for given in (x, other):
            found, expected = product(given, weight, bias), F.linear(given, weight, bias)
            assert found.dtype == expected.dtype
            assert torch.equal(found, expected)
        assert packs.linear(other, weight, bias) is not None
    assert len(packs.packed) == 1, "a weight is packed once"


def test_weights_are_packed_where_that_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_has_the_same_bits", lambda *_: True)
    weight = torch.zeros(8, 4)
    assert Packs().linear(torch.zeros(1, 4), weight) is not None
    assert Packs().linear(torch.zeros(packing.MOST_ROWS + 1, 4), weight) is None
    assert Packs().linear(torch.zeros(1, 4).double(), weight.double()) is None
    assert Packs().linear(torch.zeros(1, 4, device="meta"), weight) is None
    torch.set_float32_matmul_precision("highest")
    assert Packs().linear(torch.zeros(1, 4), weight) is None, "products are made by another library"
    torch.set_float32_matmul_precision("medium")
    monkeypatch.setattr(packing, "SMALLEST", 33)
    assert Packs().linear(torch.zeros(1, 4), weight) is None


@table("fault", [AttributeError, NotImplementedError, RuntimeError])
def test_a_torch_without_these_functions_makes_its_own_products(
    fault: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(*_: Any) -> None:
        raise fault

    packing._has_the_same_bits.cache_clear()
    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", absent)
    assert Packs().linear(torch.zeros(5, 4), torch.zeros(8, 4)) is None
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
    made = list[bool]()
    linear = Packs.linear

    def watched(*args: Any) -> Any:
        made.append((found := linear(*args)) is not None)
        return found

    monkeypatch.setattr(Packs, "linear", watched)
    model = llama()
    packed, alone = CausalSampler(model, TOKENIZER), CausalSampler(model, TOKENIZER)
    alone.decoder.taped = {False: False, True: False}  # type: ignore[attr-defined]
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            found, expected = sample(packed), sample(alone)
        assert len({len(ids) for ids in found.ids}) > 1, "the batch shrinks"
        assert found.ids == expected.ids
        assert torch.equal(found.logprobs, expected.logprobs)  # type: ignore[arg-type]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)
    assert packed.decoder.taped[False]  # type: ignore[attr-defined]
    assert any(made) == packing._by_onednn(torch.bfloat16 if autocast else torch.float32)
