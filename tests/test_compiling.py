"""Compiled blocks give the numbers of the model, for any length, and are not sampled with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import AutoConfig, AutoModelForCausalLM

from tables import table
from trainkit.data import Sequences
from trainkit.errors import ConfigError
from trainkit.models import compiling, make_policy
from trainkit.testing import tiny_llama, tiny_t5
from trainkit.testing.trainers import tiny_trainer
from trainkit.trainer.sharding import Replicated

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch's own reads
LORA = {"r": 2, "target_modules": "all-linear"}


@pytest.fixture(autouse=True)
def counter(monkeypatch: pytest.MonkeyPatch) -> Iterator[CompileCounterWithBackend]:
    """Counts what is compiled, by a backend that differentiates as the usual one and generates no code."""
    counted = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(compiling, "BACKEND", counted)
    torch._dynamo.reset()
    yield counted
    torch._dynamo.reset()


def test_twenty_shapes_are_compiled_at_most_twice(counter: CompileCounterWithBackend) -> None:
    """Once for one row, and once for any other number of rows of any length."""
    policy = make_policy(AutoModelForCausalLM.from_config(AutoConfig.for_model(**tiny_llama(10)))).eval()
    first = 0
    shapes, expected = [(rows, length) for rows in (2, 1, 3, 5, 8) for length in (3, 7, 12, 20)], []
    for compiled in (False, True):
        if compiled:
            assert compiling.compile_blocks(policy.model) is None
        for at, (rows, length) in enumerate(shapes):
            ids = torch.randint(9, (rows, length + 2), generator=torch.Generator().manual_seed(length))
            policy.zero_grad()
            policy(Sequences.from_lists(ids[:, :2].tolist(), ids[:, 2:].tolist())).logprobs.sum().backward()
            gradient = torch.cat([p.grad.flatten() for p in policy.parameters()])
            if not compiled:
                expected.append(gradient)
                continue
            torch.testing.assert_close(gradient, expected[at], rtol=1e-4, atol=1e-5)
            first = first or counter.frame_count
    assert 0 < first < counter.frame_count <= 2 * first


RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "packed rows": ("sft", {"method__packing": True, "train__seq_length": 16}),
    "activations computed again, a reference": ("rloo", {"train__gradient_checkpointing": True}),
    "an adapter, joined rows": ("ppo", {"model__peft_config": LORA, "train__padding_free": True}),
    "frozen layers": ("dpo", {"model__num_layers_unfrozen": 1}),
    "scores": ("reward", {}),
}


OFTEN = ("packed rows", "frozen layers")


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=getattr(pytest.mark, "slow" if name in OFTEN else "weekly")) for name in RUNS]
)
def test_a_compiled_run_ends_with_the_same_weights(
    case: str, tmp_path: Path, counter: CompileCounterWithBackend
) -> None:
    name, changes = RUNS[case]
    usual = {"optimizer__name": "sgd", "optimizer__lr": 0.1, "train__total_steps": 2, "train__microbatch_size": 3}
    ends, texts = [], []
    for compiled in (True, False):
        trainer = tiny_trainer(name, tmp_path / str(compiled), train__compile=compiled, **{**usual, **changes})
        trainer.learn()
        assert compiling.is_compiled(trainer.unwrapped.model) is compiled
        if trainer.needs_reference:
            assert compiling.is_compiled(trainer.reference.policy.model) is compiled
        ends.append({key: value.clone() for key, value in trainer.unwrapped.state_dict().items()})
        before = counter.frame_count
        if trainer.online:
            texts.append(trainer.generate(["a", "bc"]).outputs)
        assert counter.frame_count == before, "sampling compiles nothing"
    for key, tensor in ends[0].items():
        torch.testing.assert_close(tensor, ends[1][key], rtol=1e-3, atol=2e-5, msg=key)
    assert texts[:1] == texts[1:]


def wrong(graph: Any, inputs: Any) -> Any:
    return lambda *args: [each * 2 if torch.is_tensor(each) else each for each in graph(*args)]


def broken(graph: Any, inputs: Any) -> Any:
    raise OSError("no compiler")


@table(
    "name, changes, backend, said",
    [
        ("sft", {"model": tiny_t5(10)}, "aot_eager", "T5ForConditionalGeneration is not a causal model"),
        ("sft", {}, wrong, "compiled blocks of GPT2LMHeadModel give other numbers"),
        ("sft", {}, broken, "compiled blocks of GPT2LMHeadModel give an error (BackendCompilerFailed"),
    ],
)
def test_what_cannot_be_compiled_is_an_error(
    name: str, changes: dict[str, Any], backend: Any, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "BACKEND", backend)
    with pytest.raises(ConfigError, match=f"train.compile is true, and .*{said.replace('(', chr(92) + '(')}"):
        tiny_trainer(name, tmp_path, train__compile=True, **changes).models.build()


def test_divided_models_are_not_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Replicated, "keeps_sharded", True)  # as of FSDP2 and DeepSpeed
    with pytest.raises(ConfigError, match=r"train.compile is true, and with train.sharding .*not built for compiled"):
        tiny_trainer("sft", tmp_path, train__compile=True)


@pytest.mark.weekly
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_code_that_is_generated_gives_the_same_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "BACKEND", "inductor")
    ends = []
    for compiled in (True, False):
        trainer = tiny_trainer("rloo", tmp_path / str(compiled), train__compile=compiled, train__total_steps=2)
        trainer.learn()
        ends.append(torch.cat([p.detach().flatten() for p in trainer.unwrapped.parameters()]))
    torch.testing.assert_close(*ends, rtol=1e-3, atol=1e-4)
