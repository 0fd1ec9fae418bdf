"""What only a GPU can show. ``make test-gpu`` runs these tests; without a GPU they fail instead of being skipped."""

from __future__ import annotations

import importlib.util
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import PartialState

import trainkit
from tables import table
from trainkit.config import SamplingConfig
from trainkit.data import Sequences
from trainkit.models import head, joined, make_policy
from trainkit.models.backend import use_fast_and_exact_kernels, use_fast_exact_matmul, use_right_attention
from trainkit.rollouts import CausalSampler
from trainkit.testing import character_tokenizer, tiny_gpt2, tiny_llama
from trainkit.testing.trainers import tiny_trainer
from trainkit.trainer import offloading
from trainkit.trainer.sharding import FSDP2
from trainkit_kit import check_plugin
from trainkit_kit.launching import on_cpu

TRAINERS = trainkit.available_trainers()


@pytest.fixture(autouse=True)
def _on_a_gpu(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("gpu"):
        assert torch.cuda.is_available(), "there is no GPU"
        assert PartialState().device.type == "cuda"


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().cpu().clone() for name, tensor in trainer.unwrapped.state_dict().items()}


@pytest.mark.gpu
@pytest.mark.parametrize("name", TRAINERS)
def test_the_kit_finds_nothing(name: str) -> None:
    """All laws on this device: micro-batches, padding, sampling, log-probabilities, resuming, two precisions."""
    check_plugin(name)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["ppo", "sft"])
def test_greedy_responses_are_those_of_the_cpu(name: str, tmp_path: Path) -> None:
    trainer = tiny_trainer(name, tmp_path / "gpu")
    found = trainer.generate(["ab", "cde"], temperature=0.0)
    assert trainer.unwrapped.model.device.type == "cuda"
    with on_cpu():
        alone = tiny_trainer(name, tmp_path / "cpu").generate(["ab", "cde"], temperature=0.0)
    assert torch.equal(alone.sequences.input_ids, found.sequences.input_ids.cpu())


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["dpo", "kto"])
def test_the_reference_is_on_the_cpu_between_its_passes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tiny_trainer(name, tmp_path / "kept")
    kept.learn()
    monkeypatch.setattr(offloading, "SMALLEST", 1)
    moved = tiny_trainer(name, tmp_path / "moved")
    moved.learn()
    assert {p.device.type for p in moved.models.reference.policy.parameters()} == {"cpu"}
    assert {p.device.type for p in moved.reference.policy.parameters()} == {"cuda"}
    assert all(torch.equal(weights(moved)[key], tensor) for key, tensor in weights(kept).items())


@pytest.fixture
def products(request: pytest.FixtureRequest) -> Iterator[str]:
    """Let products of float32 be made in TF32, if the parameter is "tf32"; return the parameter."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if request.param == "tf32" else before)
    yield request.param
    torch.set_float32_matmul_precision(before)


@pytest.mark.gpu
@pytest.mark.parametrize("products", ["float32", "tf32", "bf16"], indirect=True)
@pytest.mark.parametrize("fields", [tiny_gpt2, tiny_llama])
def test_steps_from_a_graph_draw_the_tokens_of_the_model(fields: Any, products: str) -> None:
    """With and without padding, while the batch shrinks; with rounded products the first tokens have to be the same."""
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = character_tokenizer("abcdefgh")
    torch.manual_seed(0)
    config = AutoConfig.for_model(**fields(len(tokenizer)), initializer_range=0.3)
    model = AutoModelForCausalLM.from_config(config).eval().cuda()
    settings = SamplingConfig(max_new_tokens=40)
    graphed, alone = CausalSampler(model, tokenizer), CausalSampler(model, tokenizer)
    alone.decoder.graphed = False  # type: ignore[attr-defined]
    for queries in ([[1], [2, 3, 4], [5, 6], [1]] * 3, [[1, 2], [3, 4]] * 6, [[1], [2, 3, 4], [5, 6], [1]] * 3):
        with torch.autocast("cuda", torch.bfloat16, enabled=products == "bf16"):
            found, expected = (each.generate(queries, settings, list(range(12))) for each in (graphed, alone))
        if products == "float32":
            assert found.ids == expected.ids
            torch.testing.assert_close(found.logprobs, expected.logprobs, rtol=1e-3, atol=1e-4)
        assert [ids[:1] for ids in found.ids] == [ids[:1] for ids in expected.ids]
    assert graphed.decoder.graphed  # type: ignore[attr-defined]


@pytest.mark.gpu
@pytest.mark.parametrize("products", ["tf32"], indirect=True)
@pytest.mark.usefixtures("products")
def test_prompts_can_be_shared_where_products_are_rounded_to_tf32(tmp_path: Path) -> None:
    trainer = tiny_trainer("rloo", tmp_path, train__share_prompts=True, train__total_steps=2)
    trainer.learn()
    assert trainer.progress.shares_prompts


@pytest.mark.gpu
@table("width", [64, 128, 192])
def test_gradients_through_shared_prompts_are_finite_in_bf16(width: int) -> None:
    """The shorter prompt is padded on the left, which cuDNN's attention does not survive at 64 and 192 keys."""
    from transformers import AutoConfig, AutoModelForCausalLM

    use_right_attention(torch.device("cuda"))
    fields = tiny_llama(50, hidden_size=128, num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=256)
    torch.manual_seed(0)
    policy = make_policy(AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields)).cuda())
    policy.shares_prompts = True
    prompts = torch.randint(50, (2, width)).tolist()
    prompts = [prompts[0], prompts[1][: width // 2]] * 4
    sequences = Sequences.from_lists(prompts, torch.randint(50, (8, 9)).tolist()).to("cuda")
    with torch.autocast("cuda", torch.bfloat16):
        logprobs = policy(sequences).logprobs
    logprobs.sum().backward()
    assert all(bool(each.grad.isfinite().all()) for each in policy.parameters() if each.grad is not None)


@pytest.mark.gpu
@table("shared, way", [(shared, way) for shared in (False, True) for way in ("_by_kernel", "_by_flex")])
def test_joined_rows_are_run_by_the_kernel_for_texts_of_any_lengths_or_flex_attention(
    shared: bool, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    calls, kernel = list[int](), getattr(joined, way)
    monkeypatch.setattr(joined, way, lambda *given, **more: (calls.append(1), kernel(*given, **more))[1])
    monkeypatch.setattr(joined, "_serves", lambda *_: way == "_by_kernel")

    use_fast_and_exact_kernels(torch.device("cuda"), "bf16")
    fields = tiny_llama(50, hidden_size=128, num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=256)
    torch.manual_seed(0)
    policy = make_policy(AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields)).cuda())
    lengths = [(70, 9), (70, 1), (3, 40), (70, 64)]
    prompts, responses = ([torch.arange(n) % 50 for n in column] for column in zip(*lengths, strict=True))
    sequences = Sequences.from_lists([x.tolist() for x in prompts], [x.tolist() for x in responses]).to("cuda")
    gradients = []
    with torch.autocast("cuda", torch.bfloat16):
        assert policy.why_not_joined() is None
        for policy.joins_rows in (True, False):
            policy.shares_prompts = shared and policy.joins_rows
            policy.zero_grad()
            policy(sequences).logprobs.sum().backward()
            gradients.append(torch.cat([each.grad.flatten() for each in policy.parameters() if each.grad is not None]))
    assert float((gradients[0] - gradients[1]).norm() / gradients[1].norm()) < 0.02
    assert calls


@pytest.mark.gpu
@table("settings", [{"temperature": 0.0}, {"temperature": 0.7}, {"min_new_tokens": 6}])
def test_kernels_choose_the_tokens(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**tiny_llama(10))).cuda().eval()
    sampler, found = CausalSampler(model, character_tokenizer("abcdef"), head_alone=True), []
    assert head.kernels_on("cuda") is not None
    for kinds in (frozenset({"cuda"}), frozenset[str]()):
        monkeypatch.setattr(head, "KERNELS", kinds)
        head.kernels_on.cache_clear()
        found.append(sampler.generate([[1, 2], [3]] * 8, SamplingConfig(max_new_tokens=9, **settings), range(16)))
    assert found[0].ids == found[1].ids
    torch.testing.assert_close(found[0].logprobs, found[1].logprobs, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found[0].entropy, found[1].entropy, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
def test_grouped_queries_of_float32_do_not_keep_all_scores() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    use_fast_exact_matmul(torch.device("cuda"))
    fields = tiny_llama(50, hidden_size=128, num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=4096)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields)).cuda()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model.base_model(torch.randint(50, (2, 4096), device="cuda")).last_hidden_state.sum().backward()
    scores = 2 * 8 * 4096**2 * 4
    assert torch.cuda.max_memory_allocated() - before < scores / 2


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["sft", "dpo", "reward"])
def test_offline_runs_end_with_the_weights_of_runs_on_the_cpu(name: str, tmp_path: Path) -> None:
    settings = {"optimizer__kwargs": {"eps": 1e-4}}
    trainer = tiny_trainer(name, tmp_path / "gpu", **settings)
    trainer.learn()
    found = weights(trainer)
    with on_cpu():
        alone = tiny_trainer(name, tmp_path / "cpu", **settings)
        alone.learn()
    for key, tensor in weights(alone).items():
        torch.testing.assert_close(found[key], tensor, rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["ppo", "sft"])
def test_autocast_keeps_the_weights_at_float32(name: str, tmp_path: Path) -> None:
    trainer = tiny_trainer(name, tmp_path, train__mixed_precision="bf16")
    before = weights(trainer)
    trainer.learn()
    after = weights(trainer)
    assert {tensor.dtype for tensor in after.values() if tensor.is_floating_point()} == {torch.float32}
    assert any(not torch.equal(before[key], after[key]) for key in before)


@pytest.mark.gpu
def test_passes_are_in_bf16_and_as_large_as_fits_by_default(tmp_path: Path) -> None:
    trainer = tiny_trainer("sft", tmp_path, train__mixed_precision=None)
    assert trainer.accelerator.mixed_precision == trainer.config.train.mixed_precision == "bf16"
    assert trainer.config.model.dtype == "bfloat16"
    assert trainer.models.row_limit is not None


@pytest.mark.gpu
def test_the_scaler_of_fp16_skips_a_step_that_overflows(tmp_path: Path) -> None:
    trainer = tiny_trainer("sft", tmp_path, train__mixed_precision="fp16", train__total_steps=4)
    loss, skipped = trainer.loss, list[float]()

    class Watch:
        @trainkit.hookimpl
        def log_metrics(self, step: int, metrics: dict[str, float]) -> None:
            if "train/skipped" in metrics:
                skipped.append(metrics["train/skipped"])

    def spoilt(batch: Any) -> Any:
        value, found = loss(batch)
        return (value * 1e30 if trainer.progress.step == 1 else value), found

    trainer.hooks.register(Watch())
    trainer.loss = spoilt
    trainer.learn()
    assert skipped[1] == 1.0
    assert 0.0 in skipped[2:]
    assert all(tensor.isfinite().all() for tensor in weights(trainer).values())


@pytest.mark.gpu
def test_the_optimizer_is_fused_and_steps_as_one_that_is_not(tmp_path: Path) -> None:
    ends = []
    for kwargs in ({"eps": 1e-4}, {"eps": 1e-4, "fused": False}):
        trainer = tiny_trainer("sft", tmp_path / str(len(ends)), optimizer__kwargs=kwargs)
        trainer.learn()
        assert bool(trainer.optimizer.optimizer.defaults["fused"]) == ("fused" not in kwargs)
        ends.append(weights(trainer))
    for key, tensor in ends[0].items():
        torch.testing.assert_close(ends[1][key], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
def test_a_resumed_run_goes_on_as_one_that_was_not_stopped(tmp_path: Path) -> None:
    settings = {"train__save_interval": 3, "train__resume": "auto"}
    straight = tiny_trainer("ppo", tmp_path / "straight", **settings)
    straight.learn()
    tiny_trainer("ppo", tmp_path / "run", **settings, train__total_steps=3).learn()
    resumed = tiny_trainer("ppo", tmp_path / "run", **settings)
    resumed.learn()
    for key, tensor in weights(straight).items():
        torch.testing.assert_close(weights(resumed)[key], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("name", ["ppo", "rloo", "sft"])
def test_a_deterministic_run_resumes_bit_equal(name: str, precision: str, tmp_path: Path) -> None:
    changes = {"train__deterministic": True, "train__mixed_precision": precision, "rollout__top_p": 0.9}
    settings = {**changes, "train__save_interval": 3, "train__resume": "auto"}
    try:
        straight = tiny_trainer(name, tmp_path / "straight", **settings)
        straight.learn()
        tiny_trainer(name, tmp_path / "run", **settings, train__total_steps=3).learn()
        resumed = tiny_trainer(name, tmp_path / "run", **settings)
        resumed.learn()
    finally:
        torch.use_deterministic_algorithms(False)
    for key, tensor in weights(straight).items():
        assert torch.equal(weights(resumed)[key], tensor), key


def fsdp2_of_one(name: str, run_dir: Path, monkeypatch: pytest.MonkeyPatch, backend: str) -> Any:
    """A trainer that divides its model among one process."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    for key, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": 0, "WORLD_SIZE": 1}.items():
        monkeypatch.setenv(key, str(value))
    torch.distributed.init_process_group(backend)
    trainer = tiny_trainer(name, run_dir, optimizer__kwargs={"eps": 1e-4})
    trainer.parallel.sharding = FSDP2(trainer.accelerator)
    return trainer


def require_fsdp2_of_one_equal(name: str, root: Path, monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    alone = tiny_trainer(name, root / "alone", optimizer__kwargs={"eps": 1e-4})
    alone.learn()
    divided = fsdp2_of_one(name, root / "divided", monkeypatch, backend)
    try:
        divided.learn()
        with divided.sharding.unsharded():
            found = weights(divided)
    finally:
        torch.distributed.destroy_process_group()
    for key, tensor in weights(alone).items():
        torch.testing.assert_close(found[key], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["ppo", "dpo", "sft"])
def test_fsdp2_of_one_gpu_ends_as_without_it(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_fsdp2_of_one_equal(name, tmp_path, monkeypatch, "nccl")


@pytest.mark.daily(name=("sft",))
@pytest.mark.parametrize("name", TRAINERS)
def test_fsdp2_of_one_process_ends_as_without_it(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same on this machine's CPU, so that the test above is known to work."""
    if not torch.cuda.is_available():
        require_fsdp2_of_one_equal(name, tmp_path, monkeypatch, "gloo")


@pytest.mark.gpu
def test_vllm_in_process_passes_the_kit() -> None:
    assert importlib.util.find_spec("vllm"), "install trainkit-vllm[gpu]"
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    check_plugin({"name": "vllm", "mode": "process", "kv_cache": 1.0}, model=tiny_llama(10))
