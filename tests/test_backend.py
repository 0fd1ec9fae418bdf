"""The matrix-product backend: fast where that is exact, and untouched everywhere else."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from tables import table
from trainkit.config import default_config
from trainkit.errors import CheckpointError, ConfigError
from trainkit.models import backend, unloaded
from trainkit.models.backend import (
    TF32,
    TOLERANCE,
    by_default_library,
    dtype_of_attention,
    rounding,
    use_fast_exact_matmul,
)
from trainkit.testing import tiny_llama
from trainkit.testing.trainers import tiny_trainer
from trainkit.trainer.launch import default_precision, with_precision

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    backend._medium_is_exact.cache_clear()
    yield
    backend._medium_is_exact.cache_clear()
    torch.set_float32_matmul_precision(before)


def test_products_stay_float32_whatever_is_chosen() -> None:
    before = list(backend._errors())
    chosen = use_fast_exact_matmul(CPU)
    assert torch.get_float32_matmul_precision() == ("medium" if chosen else "highest")
    assert all(now <= TOLERANCE * old for now, old in zip(backend._errors(), before, strict=True))


def test_rounded_factors_are_caught_in_every_kind_of_product() -> None:
    exact = list(backend._errors())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = list(backend._errors())
    assert all(after > 100 * TOLERANCE * before for after, before in zip(rounded, exact, strict=True))


def test_a_backend_that_rounds_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = iter([[1.0, 1.0], [2.0, 500.0]])
    monkeypatch.setattr(backend, "_errors", lambda: iter(next(errors)))
    assert not use_fast_exact_matmul(CPU)
    assert torch.get_float32_matmul_precision() == "highest"


@table(
    "chosen, device, expected",
    [
        ("highest", "cuda", 2.0**-23),
        ("high", "cuda", TF32),
        ("medium", "cuda", TF32),
        ("highest", "cpu", 2.0**-23),
        ("medium", "cpu", 2.0**-7),
    ],
)
def test_rounding_is_that_of_the_products(
    chosen: str, device: str, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "_set_here", False)
    torch.set_float32_matmul_precision(chosen)
    assert rounding(torch.float32, torch.device(device)) == expected
    assert rounding(torch.float64, torch.device(device)) == 2.0**-52
    assert rounding(torch.bfloat16, torch.device(device)) == 2.0**-7


def test_rounding_of_exact_products_by_onednn_is_that_of_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_set_here", False)
    monkeypatch.setattr(backend, "_medium_is_exact", lambda: True)
    assert use_fast_exact_matmul(CPU)
    assert rounding(torch.float32, CPU) == 2.0**-23


def test_the_choice_is_the_same_every_time_and_draws_nothing() -> None:
    state = torch.get_rng_state()
    choices = []
    for _ in range(2):
        backend._medium_is_exact.cache_clear()
        torch.set_float32_matmul_precision("highest")
        choices.append(use_fast_exact_matmul(CPU))
    assert choices[0] == choices[1]
    assert torch.equal(state, torch.get_rng_state())


@table("own", ["highest", "medium"])
def test_threads_that_run_models_at_the_same_time_have_one_library(own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention of one would change it for the products of the other; a precision that the user has set stays."""
    monkeypatch.setattr(backend, "_set_here", False)
    monkeypatch.setattr(backend, "_medium_is_exact", lambda: True)
    torch.set_float32_matmul_precision(own)
    assert use_fast_exact_matmul(CPU)
    assert not use_fast_exact_matmul(CPU, one_library=True)
    assert torch.get_float32_matmul_precision() == own
    by_default_library(attend, *torch.ones(3, 1, 1, 4, 8).unbind())
    assert seen[-1] == own
    assert use_fast_exact_matmul(CPU)
    by_default_library(attend, *torch.ones(3, 1, 1, 4, 8).unbind())
    assert (seen[-1], torch.get_float32_matmul_precision()) == ("highest", "medium")


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    seen.append(torch.get_float32_matmul_precision())
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


seen: list[str] = []


@pytest.mark.parametrize("trained", [True, False])
def test_attention_is_bit_equal_to_that_of_the_default_library_and_the_precision_comes_back(trained: bool) -> None:
    def run(guarded: bool) -> list[torch.Tensor]:
        tensors = [torch.randn(2, 2, 40, 64, generator=torch.Generator().manual_seed(i)) for i in range(3)]
        tensors = [tensor.requires_grad_(trained) for tensor in tensors]
        out = by_default_library(attend, *tensors) if guarded else attend(*tensors)
        assert torch.get_float32_matmul_precision() == ("medium" if guarded else "highest")
        if trained:
            out.square().sum().backward()
        return [out, *(tensor.grad for tensor in tensors if tensor.grad is not None)]

    plain = run(guarded=False)
    torch.set_float32_matmul_precision("medium")
    guarded = run(guarded=True)
    assert torch.get_float32_matmul_precision() == "medium"
    assert seen[-2:] == ["highest", "highest"]
    assert len(plain) == len(guarded) == (4 if trained else 1)
    assert all(torch.equal(a, b) for a, b in zip(plain, guarded, strict=True))


@table("mask", [None, "bool", "float"])
@table("autocast", [True, False])
def test_attention_in_bfloat16_is_computed_in_float32(
    autocast: bool, mask: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU without matrix units; the states of a model in bfloat16, or of one in float32 under autocast."""
    monkeypatch.setattr(backend, "_has_matrix_units", lambda: False)
    dtype = torch.float32 if autocast else torch.bfloat16
    draws = torch.Generator().manual_seed(0)
    tensors = [torch.randn(2, 2, 7, 8, generator=draws).to(dtype).requires_grad_() for _ in range(3)]
    allowed = torch.ones(2, 1, 7, 7, dtype=torch.bool).tril()
    given = {None: None, "bool": allowed, "float": torch.zeros(2, 1, 7, 7).masked_fill(~allowed, -1e9).to(dtype)}[mask]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found, _ = backend._attention(torch.nn.Module(), *tensors, given)
    assert found.dtype == torch.bfloat16
    found.sum().backward()
    wide = [tensor.detach().double().requires_grad_() for tensor in tensors]
    right = torch.nn.functional.scaled_dot_product_attention(*wide, is_causal=True).transpose(1, 2)
    torch.testing.assert_close(found.double(), right, rtol=2**-8, atol=1e-6)  # rounded once, at the end
    right.sum().backward()
    for narrow, exact in zip(tensors, wide, strict=True):
        torch.testing.assert_close(narrow.grad.double(), exact.grad, rtol=2**-8, atol=1e-5)  # type: ignore[union-attr]


@table(
    "units, autocast, dtype, expected",
    [
        (False, True, torch.float32, torch.float32),
        (False, False, torch.bfloat16, torch.float32),
        (False, False, torch.float64, torch.float64),
        (True, True, torch.float32, torch.bfloat16),
        (True, False, torch.bfloat16, torch.bfloat16),
    ],
)
def test_the_precision_of_attention_is_that_of_autocast_only_with_matrix_units(
    units: bool, autocast: bool, dtype: torch.dtype, expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "_has_matrix_units", lambda: units)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        assert dtype_of_attention(torch.zeros(1, dtype=dtype)) == expected


@table("device, precision", [("cuda", "highest"), ("mps", "highest"), ("cpu", "high")])
def test_other_devices_and_a_users_choice_are_left_alone(device: str, precision: str) -> None:
    torch.set_float32_matmul_precision(precision)
    assert not use_fast_exact_matmul(torch.device(device))
    assert torch.get_float32_matmul_precision() == precision


def test_a_trainer_chooses_at_construction(tmp_path: Path) -> None:
    expected = use_fast_exact_matmul(CPU)
    torch.set_float32_matmul_precision("highest")
    tiny_trainer("sft", tmp_path)
    assert torch.get_float32_matmul_precision() == ("medium" if expected else "highest")


@table("able, told", [({}, True), ({"amx_bf16": True}, False), ({"bf16": True}, False)])
def test_bf16_on_a_cpu_without_instructions_for_it_is_said_to_be_slow(
    able: dict[str, bool], told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"architecture": "x86_64", "cpu_name": "Some", **able})
    backend.warn_of_slow_bf16.cache_clear()
    for _ in range(2):  # once
        tiny_trainer("sft", tmp_path, train__mixed_precision="bf16")
    said = [record.message for record in caplog.records if "this device (Some) has no instructions" in record.message]
    assert len(said) == told
    backend.warn_of_slow_bf16.cache_clear()


@table(
    "cuda, able, on_cpu, expected",
    [
        (True, True, "false", "bf16"),
        (True, False, "false", "no"),
        (True, True, "true", "no"),
        (False, True, "false", "no"),
    ],
)
def test_passes_are_in_bf16_on_gpus_that_have_it(
    cuda: bool, able: bool, on_cpu: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", on_cpu)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: able)
    assert default_precision() == expected


def test_the_precision_that_is_chosen_is_that_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that it is resumed with it, or an error says that the device has another."""
    monkeypatch.setattr("trainkit.trainer.loop.default_precision", lambda: "bf16")
    trainer = tiny_trainer("sft", tmp_path, train__mixed_precision=None, train__total_steps=1, train__save_interval=1)
    trainer.learn()
    assert trainer.accelerator.mixed_precision == "bf16"
    monkeypatch.undo()
    changes = {"train__mixed_precision": None, "train__total_steps": 2, "train__resume": "auto"}
    resumed = tiny_trainer("sft", tmp_path, **changes)
    with pytest.raises(
        CheckpointError, match=r"(?s)model\.dtype: 'bfloat16' -> 'float32'.*train\.mixed_precision: 'bf16' -> None"
    ):
        resumed.learn()


ADAPTER = {"r": 2, "target_modules": "all-linear"}


@table(
    "usual, given, changes, expected",
    [
        ("bf16", {}, {}, ("bfloat16", "bf16")),
        ("bf16", {}, {"model.num_layers_unfrozen": 1}, ("bfloat16", "bf16")),
        ("no", {}, {}, ("float32", None)),
        ("bf16", {}, {"train.mixed_precision": "bf16"}, ("float32", "bf16")),
        ("bf16", {}, {"train.mixed_precision": "no"}, ("float32", "no")),
        ("bf16", {}, {"model.dtype": "float32"}, ("float32", "bf16")),
        ("bf16", {}, {"model.dtype": "float16"}, ("float16", "bf16")),
        ("bf16", {}, {"model.peft_config": ADAPTER}, ("float32", "bf16")),
        ("bf16", {}, {"train.sharding": "fsdp2"}, ("float32", "bf16")),
        ("bf16", {"given": True}, {}, ("float32", "bf16")),
        ("bf16", {"low": False}, {}, ("float32", "bf16")),
    ],
)
def test_weights_are_in_bf16_by_default_where_passes_are_and_the_optimizer_has_copies(
    usual: Any, given: dict[str, bool], changes: dict[str, Any], expected: tuple[str, str | None]
) -> None:
    made = with_precision(default_config("sft").update(changes), usual, **{"low": True, **given})
    assert (made.model.dtype, made.train.mixed_precision) == expected


@pytest.mark.daily(name=("ppo",))
@pytest.mark.parametrize("name", ["ppo", "ilql", "reward", "dpo"])
def test_algorithms_are_trained_in_the_default_precision_of_gpus(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("trainkit.trainer.loop.default_precision", lambda: "bf16")
    caplog.set_level("INFO")
    trainer = tiny_trainer(name, tmp_path, train__mixed_precision=None, train__total_steps=2)
    trainer.learn()
    assert trainer.unwrapped.model.dtype == torch.bfloat16
    assert {each.dtype for each in trainer.optimizer.optimizer.masters()} == {torch.float32}
    assert caplog.text.count("weights are in bfloat16, with float32 copies") == 1
    assert "dtype: bfloat16" in (tmp_path / "config.yaml").read_text()


def half_alone(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **kwargs: Any
) -> Any:
    """Attention that float32 cannot have, as FlashAttention's; transformers casts for it under autocast."""
    if not torch.is_autocast_enabled("cpu"):
        raise RuntimeError("FlashAttention only supports fp16 and bf16")
    return sdpa_attention_forward(module, *(x.bfloat16() for x in (query, key, value)), *rest, **kwargs)


@table(
    "name, changes",
    [
        ("sft", {}),
        ("rloo", {"train__share_prompts": True}),
        ("ppo", {"model__num_layers_unfrozen": 1}),
        ("dpo", {"model__peft_config": {"r": 2, "target_modules": ["q_proj"]}}),
        ("reward", {}),
    ],
)
def test_a_model_with_attention_for_half_precision_is_run_so_wherever_it_is_run(
    name: str, changes: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The checks of a new policy, the sampler's steps, and the export that is loaded again."""
    AttentionInterface.register("half_alone", half_alone)
    AttentionMaskInterface.register("half_alone", sdpa_mask)
    settings = {"train__mixed_precision": "bf16", "train__total_steps": 2, "train__verify_export": True, **changes}
    kwargs = {"attn_implementation": "half_alone"}
    trainer = tiny_trainer(name, tmp_path, model=tiny_llama(10), model__kwargs=kwargs, **settings)
    trainer.learn()
    assert trainer.unwrapped.model.config._attn_implementation == "half_alone"
    assert "cannot be sampled from with a key-value cache" not in caplog.text
    assert not trainer.unwrapped.needs_mask


@table(
    "name, changes, said",
    [
        ("rloo", {"train__share_prompts": True}, "gives other numbers when it continues from a prompt"),
        ("sft", {"train__padding_free": True}, "gives other numbers for joined rows"),
        ("sft", {"method__packing": True, "train__seq_length": 16}, "cannot be trained on packed rows"),
    ],
)
@pytest.mark.parametrize("precision", ["bf16", "no"])
def test_a_policy_is_checked_in_the_precision_of_training_too(
    precision: str, name: str, changes: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a kernel that in 16 bits attends to tokens that come later."""
    right = backend._registered

    def wrong(module: Any, query: torch.Tensor, *rest: Any, **kwargs: Any) -> Any:
        outputs, weights = right(module, query, *rest, **kwargs)
        return outputs + outputs.mean(1, keepdim=True) if torch.is_autocast_enabled("cpu") else outputs, weights

    monkeypatch.setattr(backend, "_registered", wrong)
    trainer = tiny_trainer(name, tmp_path, model=tiny_llama(10), train__mixed_precision=precision, **changes)
    with pytest.raises(ConfigError, match=said) if precision == "bf16" else nullcontext():
        trainer.models.build()
    if precision == "no":
        assert not trainer.unwrapped.needs_mask


@pytest.mark.parametrize("free", [10**9, 10])
def test_a_model_that_will_be_divided_is_tried_on_the_device_if_it_fits(
    free: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unloaded, "free_memory", lambda device: free)
    model = torch.nn.Linear(2, 2)
    with unloaded.as_trained(unloaded.Trial(torch.device("meta"), divided=True)):
        unloaded.place(model)
    assert model.weight.is_meta is (free > 10)


@pytest.mark.parametrize("saved", [True, False])
def test_an_attention_without_its_package_says_so(saved: bool, tmp_path: Path) -> None:
    model: Any = tiny_llama(10)
    if saved:
        AutoModelForCausalLM.from_config(AutoConfig.for_model(**model)).save_pretrained(tmp_path / "model")
        model = str(tmp_path / "model")
    changes = {"model__model_path": model, "model__kwargs": {"attn_implementation": "flash_attention_2"}}
    with pytest.raises(ConfigError, match="'flash_attention_2', which computes in 16 bits, and the run"):
        tiny_trainer("sft", tmp_path / "run", **changes)
    trainer = tiny_trainer("sft", tmp_path / "run", train__mixed_precision="bf16", **changes)
    with pytest.raises(ConfigError, match=r"\(model.model_path\) cannot be loaded: FlashAttention2.* Install it"):
        trainer.models.build()


def test_kernels_can_be_deterministic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    try:
        for deterministic in (False, True):
            trainer = tiny_trainer("ppo", tmp_path / str(deterministic), train__deterministic=deterministic)
            assert torch.are_deterministic_algorithms_enabled() is deterministic
            trainer.learn()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_attention_of_cudnn_is_used_only_if_its_gradients_are_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice; the probe runs on the CPU with the kernel that is there, and finds none of cuDNN."""
    assert backend.has_finite_gradients(SDPBackend.MATH, CPU)
    assert not backend.has_finite_gradients(SDPBackend.CUDNN_ATTENTION, CPU)
    chosen = list[bool]()
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", chosen.append)
    monkeypatch.setattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda: True)
    for finite in (True, False):
        monkeypatch.setattr(backend, "has_finite_gradients", lambda kernel, device, finite=finite: finite)
        backend.use_right_attention(torch.device("cuda"))
        backend.use_right_attention(CPU)
    assert chosen == [True, False]


class Waits(TorchDispatchMode):
    """Collects the calls for which the host would wait for a GPU: of values, and of sizes that depend on values."""

    KINDS = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "_unique2", "unique_dim", "masked_select")

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        by_mask = name in ("index", "index_put", "index_put_") and any(
            at is not None and at.dtype == torch.bool for at in args[1]
        )
        if name in self.KINDS or by_mask:
            self.calls.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("name", "joined"), [("rloo", False), ("dpo", False), ("sft", True)])
def test_a_step_waits_for_the_device_at_most_ten_times(name: str, joined: bool, tmp_path: Path) -> None:
    """Outside of sampling, with one micro-batch and an optimizer that reads nothing."""
    changes = {"train__total_steps": 2, "optimizer__name": "sgd", "train__padding_free": joined}
    trainer, waits = tiny_trainer(name, tmp_path, **changes), Waits()
    update = trainer.updater.update

    def counted(batch: Any) -> Any:
        if trainer.progress.step == 0:  # the first one makes checks
            return update(batch)
        with waits:
            return update(batch)

    trainer.updater.update = counted
    trainer.learn()
    assert 3 <= len(waits.calls) <= 9, waits.calls  # and one for all metrics, when they are logged


def test_a_device_without_bf16_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: Any) -> None:
        raise ValueError("bf16 mixed precision requires PyTorch >= 1.10 and a supported device.")  # of accelerate

    monkeypatch.setattr("trainkit.trainer.launch.Accelerator", refuse)
    with pytest.raises(ConfigError, match=r"train.mixed_precision is 'bf16', and this device cannot.*set it to 'no'"):
        tiny_trainer("sft", tmp_path, train__mixed_precision="bf16")
