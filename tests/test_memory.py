"""Memory: activations that are computed again, and micro-batches that fit."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoConfig, AutoModelForCausalLM

import forking
from runs import only_new_garbage
from tables import table
from trainkit.data import Sequences
from trainkit.errors import ConfigError, OutOfMemoryError
from trainkit.models import fitting, make_policy, policy
from trainkit.models.backend import attention_as_on
from trainkit.models.recomputing import recompute_activations, recompute_mlps
from trainkit.models.trunk import find_blocks
from trainkit.testing import tiny_bart, tiny_gpt2, tiny_llama, tiny_t5
from trainkit.testing.trainers import tiny_trainer
from trainkit.trainer.sharding import FSDP2, Replicated
from trainkit_kit.checks.tools import flat_gradient

LORA = {"r": 4, "target_modules": "all-linear"}
DROPOUT = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("sft", {}),
    "llama": ("dpo", {"model": tiny_llama(10)}),
    "encoder-decoder": ("rloo", {"model": tiny_t5(10)}),
    "bart": ("rloo", {"model": tiny_bart(10)}),
    "value head": ("ppo", {}),
    "adapter": ("ppo", {"model__peft_config": LORA}),
    "adapter of an offline method": ("sft", {"model__peft_config": LORA}),
    "frozen layers": ("ppo", {"model__num_layers_unfrozen": 1}),
    "frozen layers of an offline method": ("sft", {"model__num_layers_unfrozen": 1}),
    "layers of the critic": ("_test_branch", {}),
    "critic of its own": ("_test_critic", {}),
    "score head": ("reward", {}),
    "dropout": ("sft", {"model": tiny_gpt2(10, **DROPOUT), "model__disable_dropout": False}),
}


@pytest.fixture(autouse=True)
def garbage() -> Iterator[None]:
    """After a lack of memory, garbage is collected."""
    with only_new_garbage():
        yield


def gradient(trainer: Any, batch: Any) -> Tensor:
    """The gradient of a step, as the loop computes it."""
    trainer.updater._gradient(batch, batch.weight)
    return flat_gradient(trainer.unwrapped)


def kept(trainer: Any, batch: Any) -> int:
    """Bytes that the forward pass keeps for the backward pass, apart from parameters."""
    own = {p.untyped_storage().data_ptr() for p in trainer.unwrapped.parameters()}
    sizes: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    prepared = trainer.updater._prepared_for_step(batch)
    trainer.policy.train()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        loss, _ = trainer.updater.measure(prepared)
    del loss
    return sum(size for place, size in sizes.items() if place not in own)


@pytest.mark.daily(case=("bart", "frozen layers", "critic of its own", "dropout"))
@pytest.mark.parametrize("case", CASES)
def test_activations_that_are_computed_again_give_the_same_gradient(case: str, tmp_path: Path) -> None:
    import researchers.critics  # noqa: F401  (registers two algorithms)

    name, changes = CASES[case]
    separate = {"train__share_prompts": False, **changes}  # as with checkpointing
    plain, again = (
        tiny_trainer(name, tmp_path / str(on), train__gradient_checkpointing=on, **separate) for on in (False, True)
    )
    plain.collect()
    for trainer in (plain, again):
        trainer.models.build()
        trainer.policy.double()
    batch = plain.store.experience.map(lambda x: x.double() if x.is_floating_point() else x)
    torch.testing.assert_close(gradient(plain, batch), gradient(again, batch), rtol=1e-10, atol=1e-13)
    assert kept(again, batch) < kept(plain, batch)


@table(
    "name, changes",
    [
        ("sft", {"model": tiny_llama(10)}),
        ("ppo", {"model": tiny_llama(10), "train__share_prompts": False}),
        ("dpo", {"model": tiny_gpt2(10), "model__peft_config": LORA}),
        ("rloo", {"model": tiny_llama(10), "train__share_prompts": False, "train__padding_free": True}),
    ],
)
def test_mlps_alone_can_be_computed_again(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    ways: tuple[Any, ...] = (False, "mlp")
    plain, again = (tiny_trainer(name, tmp_path / str(x), train__gradient_checkpointing=x, **changes) for x in ways)
    plain.collect()
    for trainer in (plain, again):
        trainer.models.build()
        trainer.policy.double()
    batch = plain.store.experience.map(lambda x: x.double() if x.is_floating_point() else x)
    torch.testing.assert_close(gradient(plain, batch), gradient(again, batch), rtol=1e-10, atol=1e-13)
    assert kept(again, batch) < kept(plain, batch)
    if again.needs_reference:
        own, copied = again.unwrapped.model, again.reference.policy.model
        assert all(block.mlp.forward.__self__ is block.mlp for each in (own, copied) for block in find_blocks(each))


def test_models_without_mlps_cannot_compute_them_again(tmp_path: Path) -> None:
    opt = {"model_type": "opt", "vocab_size": 10, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
           "ffn_dim": 32, "max_position_embeddings": 32, "word_embed_proj_dim": 16}  # fmt: skip
    with pytest.raises(ConfigError, match="is 'mlp', and the blocks of OPTForCausalLM have no part named mlp"):
        tiny_trainer("sft", tmp_path, model=opt, train__gradient_checkpointing="mlp").models.build()


@pytest.mark.slow
def test_sampling_is_not_affected_by_checkpointing(tmp_path: Path) -> None:
    """transformers drops caches of checkpointed layers in training mode; the sampler runs in evaluation mode."""
    settings = {
        "model": tiny_llama(10),
        "train__share_prompts": False,
        "train__total_steps": 3,
    }  # as with checkpointing
    runs = [
        tiny_trainer("rloo", tmp_path / str(on), train__gradient_checkpointing=on, **settings) for on in (False, True)
    ]
    for trainer in runs:
        trainer.learn()
    assert torch.equal(*(run.generate(["a", "bcd"]).sequences.input_ids for run in runs))
    for a, b in zip(*(run.unwrapped.parameters() for run in runs), strict=True):
        assert torch.equal(a, b)


def test_frozen_layers_keep_nothing_for_the_backward_pass(tmp_path: Path) -> None:
    """The hook of transformers by which embeddings require a gradient would run it through frozen layers."""
    frozen = tiny_trainer(
        "sft", tmp_path, train__gradient_checkpointing=True, model__num_layers_unfrozen=1, model=tiny_gpt2(10)
    )
    frozen.models.build()
    frozen.policy.train()
    assert not frozen.unwrapped.model.get_input_embeddings()(torch.zeros(1, dtype=torch.long)).requires_grad


def test_models_that_cannot_compute_activations_again_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Linear does not support it .*set it to false"):
        recompute_activations(nn.Linear(2, 2))
    trainer = tiny_trainer("sft", tmp_path)
    trainer.models.build()
    model = copy.deepcopy(trainer.unwrapped)
    type(model.model).supports_gradient_checkpointing = False
    try:
        with pytest.raises(ConfigError, match=r"GPT2LMHeadModel does not support it \(.*\); set it to false"):
            recompute_activations(model)
    finally:
        del type(model.model).supports_gradient_checkpointing


# ------------------------------------------------------------------------------------------- micro-batches that fit


AUTO: dict[str, Any] = {"train__microbatch_size": "auto"}
FULL = RuntimeError("[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory: you tried 1 bytes")


class Full:
    """Memory in which only so many rows of a pass fit: a hook before the forward pass of the language model."""

    def __init__(self, trainer: Any, rows: int, error: Exception = FULL, *, after: int = 0) -> None:
        self.rows, self.error, self.after, self.seen = rows, error, after, []
        trainer.models.load_policy().model.base_model.register_forward_pre_hook(self, with_kwargs=True)

    def __deepcopy__(self, memo: Any) -> Full:
        return self  # the reference, a copy of the model, is limited too

    def __call__(self, module: Any, args: Any, kwargs: Any) -> None:
        if kwargs.get("use_cache") is not False or "input_ids" not in kwargs:  # the sampler's
            return
        rows = len(kwargs["input_ids"])
        self.seen.append((rows, torch.is_grad_enabled()))
        self.after -= 1
        if rows > self.rows and self.after < 0:
            raise self.error


@pytest.mark.daily(name=("sft", "ppo"))
@pytest.mark.parametrize(
    ("name", "error"),
    [("sft", FULL), ("ppo", torch.OutOfMemoryError("CUDA out of memory. Tried 2 GiB")), ("rloo", MemoryError())],
)
def test_a_run_that_is_out_of_memory_equals_one_with_the_size_that_fits(
    name: str, error: Exception, tmp_path: Path
) -> None:
    """With dropout, whose random numbers are drawn anew in every attempt."""
    changes = {"model": tiny_gpt2(10, **DROPOUT), "model__disable_dropout": False, "train__total_steps": 3}
    plenty, scarce = (tiny_trainer(name, tmp_path / each, **changes, **AUTO) for each in ("plenty", "scarce"))
    plenty.progress.microbatch = 2
    full = Full(scarce, 2, error)
    for trainer in (plenty, scarce):
        trainer.learn()
    assert scarce.progress.microbatch == 2
    assert max(rows for rows, _ in full.seen) > full.rows
    for a, b in zip(plenty.unwrapped.parameters(), scarce.unwrapped.parameters(), strict=True):
        assert torch.equal(a, b)


def test_gradients_of_passes_that_fitted_before_are_not_kept(tmp_path: Path) -> None:
    """The second of two micro-batches does not fit: what the first has accumulated must not count twice."""
    changes = {"train__total_steps": 1, "train__max_grad_norm": None, "optimizer__name": "sgd", "optimizer__lr": 1.0}
    fixed = tiny_trainer("sft", tmp_path / "fixed", train__microbatch_size=2, **changes)
    scarce = tiny_trainer("sft", tmp_path / "scarce", **AUTO, **changes)
    scarce.progress.microbatch = 4
    full = Full(scarce, 2, after=1)
    fixed.learn()
    scarce.learn()
    assert full.seen[:2] == [(4, True), (4, True)]
    for a, b in zip(fixed.unwrapped.parameters(), scarce.unwrapped.parameters(), strict=True):
        assert torch.equal(a, b)


@table("name", ["ppo", "dpo"])
def test_passes_without_gradient_are_divided_too(name: str, tmp_path: Path) -> None:
    trainer = tiny_trainer(name, tmp_path, **AUTO)
    full = Full(trainer, 1)
    trainer.progress.microbatch = 1
    trainer.collect()
    trainer.store.experience  # noqa: B018  (DPO makes it when it is read)
    assert set(full.seen) == {(1, False)}
    assert len(full.seen) == 32  # 16 responses in policy and reference; 32 of the pairs in the reference


@table("name, fault", [("ppo", FULL), ("rloo", torch.OutOfMemoryError("CUDA out of memory"))])
def test_responses_that_do_not_fit_at_once_are_sampled_in_parts(
    name: str, fault: Exception, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole, scarce = (tiny_trainer(name, tmp_path / each) for each in ("whole", "scarce"))
    scarce.models.build()
    decoder, sizes = scarce.sampling.engine.sampler.decoder, list[int]()
    prefill = decoder.prefill

    def limited(queries: list[list[int]], room: int) -> Any:
        sizes.append(len(queries))
        if len(queries) > 3:
            raise fault
        return prefill(queries, room)

    decoder.prefill = limited
    for trainer in (whole, scarce):
        trainer.collect()
    assert sizes[:3] == [8, 4, 2]
    assert max(sizes[2:]) == 2, "what was found is kept"
    assert "8 responses at a time do not fit into memory; sampling 4 at a time" in caplog.text
    assert torch.equal(*(each.store.experience.sequences.input_ids for each in (whole, scarce)))
    decoder.prefill = lambda queries, room: limited([*queries] * 4, room)
    with pytest.raises(OutOfMemoryError, match=r"a response of 6 tokens to a prompt of \d does not fit.*bfloat16"):
        scarce.generate(["a", "bc"])


@table("name", ["ppo", "dpo"])
def test_passes_without_gradient_have_a_limited_number_of_tokens(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on GPUs, where 128 rows of 1,500 tokens need 50 GB."""
    whole, parts = (tiny_trainer(name, tmp_path / each) for each in ("whole", "parts"))
    whole.collect()
    expected = whole.store.experience.flatten()
    monkeypatch.setattr(policy, "TOKENS", {"cpu": 25})
    seen = Full(parts, 100).seen
    parts.collect()
    torch.testing.assert_close(parts.store.experience.flatten(), expected, rtol=1e-4, atol=1e-5)
    assert max(rows for rows, _ in seen) <= 25 // 5


def kept_per_token(fields: dict[str, Any], low: bool, recomputes: Any) -> float:
    """Return the bytes per token that a pass keeps for its backward pass on a GPU, from two lengths."""
    model = make_policy(AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields)))
    recompute_mlps(model) if recomputes else None
    model.train()
    totals = []
    for length in (64, 128):
        kept: dict[int, tuple[int, Tensor]] = {}

        def keep(tensor: Tensor, kept: dict[int, tuple[int, Tensor]] = kept) -> Tensor:
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes(), tensor  # which stays alive, and with it the address
            return tensor

        rows = Sequences.from_lists([[1] * 32], [[2] * (length - 32)])
        with (
            attention_as_on("cuda"),
            torch.autocast("cpu", torch.bfloat16, enabled=low),
            saved_tensors_hooks(keep, lambda tensor: tensor),
        ):
            model(rows)
        totals.append(sum(size for size, _ in kept.values()))
    return (totals[1] - totals[0]) / 64


@table(
    "kind, inner, low, recomputes",
    [
        (*each, low, again)
        for each in (("llama", 704), ("qwen2", 1500))
        for low in (True, False)
        for again in (False, "mlp")
    ],
)
def test_the_tokens_that_fit_follow_from_what_a_pass_keeps(kind: str, inner: int, low: bool, recomputes: Any) -> None:
    sizes = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": inner}
    fields = {"model_type": kind, "vocab_size": 64, "hidden_size": 256, **sizes}
    room = 1e9
    tokens = fitting.tokens_that_fit(AutoConfig.for_model(**fields), room, low=low, recomputes=recomputes)
    beside = inner * (8 if low else 16) * (recomputes == "mlp")  # while it is computed again
    assert room / tokens - beside == pytest.approx(kept_per_token(fields, low, recomputes), rel=0.15)


def test_micro_batches_and_sampling_are_sized_by_the_memory_of_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"train__microbatch_size": "auto", "rollout__max_new_tokens": 12}
    trainers: Any = {name: tiny_trainer("rloo", tmp_path / name, **settings) for name in ("whole", "small")}
    for trainer in trainers.values():
        trainer.models.build()
    small, states = trainers["small"], trainers["small"].unwrapped
    kept = 1e6 / fitting.tokens_that_fit(states.model.config, 1e6, low=False, recomputes=False)
    weights = sum(5 * p.nbytes for p in states.parameters())  # with the gradient, two moments, and the reference
    memory = int((weights + 20 * kept) / fitting.STATES) + 1  # 20 tokens
    monkeypatch.setattr("trainkit.trainer.update.memory_of", lambda device: memory)
    assert small.updater.tokens_of_a_micro_batch == 20
    text = states.model.config
    of_a_column = 2 * text.num_hidden_layers * text.hidden_size * 4
    memory = int(47 * of_a_column / fitting.CACHE)  # three rows of 15 columns
    monkeypatch.setattr(fitting, "memory_of", lambda device: memory)
    prefill, sizes, caches = small.sampling.engine.sampler.decoder.prefill, list[int](), list[int]()

    def watched(queries: list[list[int]], room: int) -> Any:
        sizes.append(len(queries))
        caches.append(len(queries) * (max(map(len, queries)) + room))
        return prefill(queries, room)

    small.sampling.engine.sampler.decoder.prefill = watched
    assert fitting.rows_that_fit(states.model, 15) == 3
    small.collect()
    assert max(sizes) == 2
    assert max(caches) <= 47, "with the columns for rows that take others' places"
    monkeypatch.undo()
    trainers["whole"].collect()
    assert torch.equal(*(each.store.experience.sequences.input_ids for each in trainers.values()))


def test_micro_batches_leave_room_for_the_copies_of_weights_in_16_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a weight: itself, its gradient, its copy and two moments, which are in float32."""
    trainer = tiny_trainer("sft", tmp_path, train__microbatch_size="auto", model__dtype="bfloat16")
    trainer.models.build()
    kept = 1e6 / fitting.tokens_that_fit(trainer.unwrapped.model.config, 1e6, low=True, recomputes=False)
    count = sum(p.numel() for p in trainer.unwrapped.parameters())
    memory = int((18 * count + 20 * kept) / fitting.STATES) + 1
    monkeypatch.setattr("trainkit.trainer.update.memory_of", lambda device: memory)
    assert trainer.updater.tokens_of_a_micro_batch == 20


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ppo", "sft"])
def test_resuming_uses_the_size_that_was_found(name: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"train__save_interval": 1, **AUTO}
    straight = tiny_trainer(name, tmp_path / "straight", **changes)
    Full(straight, 3)
    straight.learn()
    stopped = tiny_trainer(name, tmp_path / "stopped", **changes, train__total_steps=3)
    Full(stopped, 3)
    stopped.learn()
    resumed = tiny_trainer(name, tmp_path / "stopped", **changes, train__resume="auto")
    resumed.learn()  # with memory enough for any size
    assert resumed.progress.microbatch == straight.progress.microbatch == 2
    for a, b in zip(straight.unwrapped.parameters(), resumed.unwrapped.parameters(), strict=True):
        assert torch.equal(a, b)


def test_evaluating_does_not_change_the_size(tmp_path: Path) -> None:
    trainer = tiny_trainer("sft", tmp_path, **AUTO)
    trainer.add_eval_samples([("a", "bc")] * 8)
    trainer.progress.microbatch = 8
    Full(trainer, 3)
    trainer.eval_rows = []
    trainer.evaluate()
    assert trainer.progress.microbatch == 8


@table("size", ["auto", 1])
def test_one_row_that_does_not_fit_is_an_error_that_says_what_to_do(size: Any, tmp_path: Path) -> None:
    trainer = tiny_trainer("sft", tmp_path, train__microbatch_size=size)
    Full(trainer, 0)
    before = [parameter.clone() for parameter in trainer.unwrapped.parameters()]
    with pytest.raises(OutOfMemoryError, match=r"1 rows|one row") as caught:
        trainer.learn()
    for told in ("DefaultCPUAllocator", "train.gradient_checkpointing", "model.peft_config", "train.sharding"):
        assert told in str(caught.value)
    assert all(map(torch.equal, before, trainer.unwrapped.parameters()))


def test_other_errors_are_not_taken_for_a_lack_of_memory(tmp_path: Path) -> None:
    trainer = tiny_trainer("sft", tmp_path, **AUTO)
    Full(trainer, 0, RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        trainer.learn()


def test_divided_models_refuse_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Replicated, "repeats", False)  # as of FSDP2 and DeepSpeed
    with pytest.raises(ConfigError, match=r"train.microbatch_size is 'auto'.*give a number"):
        tiny_trainer("sft", tmp_path, **AUTO)
    assert not FSDP2.repeats


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="a process that uses a GPU cannot be forked")
def test_two_processes_agree_on_the_size_that_fits(tmp_path: Path) -> None:
    """One of them is out of memory; both make the step again, and the weights are those of a run with that size."""
    forking.run(Path(__file__).parent / "scarce.py", 2, str(tmp_path), here=True)
    ends = [torch.load(tmp_path / f"{name}.pt") for name in ("fixed", "scarce")]
    assert ends[1].pop("rows") == [2, 2]
    ends[0].pop("rows")
    for name, tensor in ends[0].items():
        torch.testing.assert_close(tensor, ends[1][name], rtol=0, atol=1e-6)


LIMITED = """
import json, resource, sys
from pathlib import Path
import torch
from trainkit.testing import tiny_gpt2
from trainkit.testing.trainers import tiny_trainer

where, limited = Path(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
model = tiny_gpt2(10, n_embd=256, n_layer=4, n_head=4, n_positions=256)
trainer = tiny_trainer(
    "sft", where / "run", model=model, train__microbatch_size="auto" if limited else int(sys.argv[3]),
    train__total_steps=2, train__seq_length=256, arguments={"samples": [("a", "bcdefgh" * 36)] * 16},
)
trainer.models.build()
if limited:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + int(limited) * 2**20,) * 2)
trainer.learn()
torch.save({**trainer.unwrapped.state_dict(), "rows": trainer.progress.microbatch}, where / "end.pt")
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="address space is limited so on Linux alone")
def test_a_process_whose_memory_is_limited_trains_as_one_with_the_size_that_fits(tmp_path: Path) -> None:
    """Under RLIMIT_AS, with errors of the allocator itself, and of oneDNN, whose own needs depend on the processor."""

    def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / name).mkdir()
        command = [sys.executable, "-c", LIMITED, str(tmp_path / name), *arguments]
        return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})

    for limit in range(120, 300, 30):
        done = run(str(limit), str(limit))
        if done.returncode == 0:
            break
        assert "OutOfMemoryError: a micro-batch of one row does not fit into memory" in done.stderr, done.stderr[-3000:]
    end = torch.load(tmp_path / str(limit) / "end.pt")
    rows = end.pop("rows")
    assert rows in (1, 2, 4)
    done = run("fixed", "", str(rows))
    assert done.returncode == 0, done.stderr[-3000:]
    alone = torch.load(tmp_path / "fixed" / "end.pt")
    for name, tensor in end.items():  # products may take other kernels where memory is scarce, which round
        torch.testing.assert_close(tensor, alone[name], rtol=0, atol=1e-5)
