"""Weights of bfloat16 with float32 copies in the optimizer, and the sampler's numbers under mixed precision."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

import forking
import trainkit
from tables import table
from trainkit.config.arguments import OPTIMIZERS
from trainkit.runs.symptoms import FIRST_KL, HALF_PRECISION, RATIO
from trainkit.testing import character_tokenizer, tiny_gpt2
from trainkit.testing.trainers import tiny_trainer
from trainkit.trainer.master_weights import MasterWeights, with_masters

BF16 = {"model__dtype": "bfloat16"}


@table("name", OPTIMIZERS)
def test_steps_are_those_of_float32_and_the_weights_are_their_rounding(name: str) -> None:
    """Bit by bit, also after the state was written and read."""
    torch.manual_seed(0)
    cls = getattr(torch.optim, OPTIMIZERS[name])
    start = [torch.randn(8, 8).bfloat16(), torch.randn(3)]  # one is of float32 already
    low, high = ([nn.Parameter(to(each)) for each in start] for to in (torch.clone, Tensor.float))
    made, exact = with_masters(cls)(low, lr=1e-3), cls(high, lr=1e-3)
    for step in range(12):
        for p, q in zip(low, high, strict=True):
            q.grad = torch.randn(q.shape)
            p.grad = q.grad.clone()
        made.step()
        exact.step()
        if step == 6:
            file = io.BytesIO()
            torch.save(made.state_dict(), file)
            file.seek(0)
            made = with_masters(cls)(low, lr=1e-3)
            made.load_state_dict(torch.load(file))
    assert torch.equal(made.masters()[0], high[0].data)
    assert torch.equal(low[0].data, high[0].data.bfloat16())
    assert low[0].dtype == torch.bfloat16
    assert torch.equal(low[1].data, high[1].data)
    assert {each.dtype for each in _tensors(made.state_dict()["state"])} == {torch.float32}


def test_changes_below_the_precision_add_up() -> None:
    """512 steps of 2⁻¹² of a weight of 1: as bfloat16 alone it never moves."""
    ends = []
    for make in (with_masters(torch.optim.SGD), torch.optim.SGD):
        weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        optimizer = make([weight], lr=2.0**-12)
        for _ in range(512):
            weight.grad = torch.ones_like(weight, dtype=weight.grad_dtype)
            optimizer.step()
        ends.append(weight.detach().float())
    assert torch.equal(ends[0], torch.full((4,), 1 - 512 * 2.0**-12))
    assert torch.equal(ends[1], torch.ones(4))


def test_weights_that_were_changed_between_steps_are_kept() -> None:
    weight = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    optimizer = with_masters(torch.optim.SGD)([weight], lr=2.0**-12)
    for value in (None, 3.0):
        if value is not None:
            with torch.no_grad():
                weight[0] = value
        weight.grad = torch.ones(2)
        optimizer.step()
    assert torch.equal(optimizer.masters()[0], torch.tensor([3 - 2.0**-12, 1 - 2 * 2.0**-12]))


def test_a_closure_is_refused() -> None:
    optimizer = with_masters(torch.optim.SGD)([nn.Parameter(torch.ones(2).bfloat16())], lr=0.1)
    with pytest.raises(ValueError, match="a closure is given"):
        optimizer.step(lambda: 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ppo", "dpo"])
def test_a_resumed_run_ends_with_the_same_bits(name: str, tmp_path: Path) -> None:
    ends = []
    for at in (None, 2):
        where = tmp_path / f"run{at}"
        if at is not None:
            tiny_trainer(name, where, **BF16, train__save_interval=2, train__total_steps=2).learn()
        trainer = tiny_trainer(
            name, where, **BF16, train__total_steps=4, train__resume="auto" if at else None, train__save_interval=2
        )
        trainer.learn()
        assert trainer.progress.step == 4
        ends.append([*trainer.unwrapped.parameters(), *trainer.optimizer.optimizer.masters()])
    assert {each.dtype for each in ends[0]} >= {torch.bfloat16, torch.float32}
    assert all(map(torch.equal, *ends))


def test_the_gradient_is_accumulated_in_float32(tmp_path: Path) -> None:
    gradients = []
    for size in (8, 1):
        trainer = tiny_trainer("sft", tmp_path / str(size), **BF16, train__microbatch_size=size, train__total_steps=1)
        kept: list[Tensor] = []
        trainer.sharding.clip = lambda _, trainer=trainer, kept=kept: (
            kept.extend(parameter.grad.clone() for parameter in trainer.unwrapped.parameters()) or torch.ones(())
        )
        trainer.learn()
        gradients.append(torch.cat([each.flatten() for each in kept]))
    one, other = gradients
    assert one.dtype == torch.float32
    assert torch.nn.functional.cosine_similarity(one, other, dim=0) > 1 - 1e-4


@pytest.mark.slow
def test_processes_hold_the_same_weights_and_copies(tmp_path: Path) -> None:
    """Two end with the bits of each other, and with what one process ends with up to rounding."""
    for processes in (1, 2):
        forking.run(Path(__file__).parent / "low_precision.py", processes, str(tmp_path))
    alone, *both = (torch.load(tmp_path / f"{name}.pt") for name in ("1-0", "2-0", "2-1"))
    assert all(map(torch.equal, _tensors(both[0]), _tensors(both[1])))
    for one, other in zip(_tensors(alone["weights"]), _tensors(both[0]["weights"]), strict=True):
        torch.testing.assert_close(one, other, rtol=2**-7, atol=2**-10)


def test_an_optimizer_of_the_user_is_told_to_lose_small_changes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = character_tokenizer("abcdefgh")
    trainer = trainkit.train(
        AutoModelForCausalLM.from_config(AutoConfig.for_model(**tiny_gpt2(len(tokenizer)))).bfloat16(),
        samples=[("ab", "cd")] * 8,
        tokenizer=tokenizer,
        config={"method": "sft", "train": {"total_steps": 1, "batch_size": 4, "run_dir": str(tmp_path / "given")}},
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    assert not isinstance(trainer.optimizer.optimizer, MasterWeights)
    assert "the weights are bfloat16, and the given optimizer makes its steps on them" in caplog.text
    caplog.clear()
    own = tiny_trainer("sft", tmp_path / "own", **BF16)
    own.models.build()
    assert isinstance(own.optimizer.optimizer, MasterWeights)
    assert "the weights are bfloat16" not in caplog.text


@pytest.mark.daily(name=("rloo",))
@pytest.mark.parametrize("name", ["ppo", "rloo", "grpo"])
def test_under_bf16_the_declared_correction_uses_the_numbers_of_the_sampler(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The policy is run for the first collection alone; the ratio of the first update is near 1, and logged.

    On some CPUs the numbers of so small a model are those of its sampler; they count as different here.
    """
    monkeypatch.setattr("trainkit.trainer.correction.SAMPLER_TOLERANCE", -1.0)
    half = {"train__mixed_precision": "bf16", "train__total_steps": 24 if name == "ppo" else 6, "train__health": "warn"}
    runs, lines = {}, {}
    for correction in ("none", "sampler"):
        trainer, counted = tiny_trainer(name, tmp_path / correction, rollout__correction=correction, **half), []

        def count(*_: Any, counted: list[bool] = counted) -> None:
            if not torch.is_grad_enabled():
                counted.append(True)

        trainer.models.build()
        trainer.unwrapped.register_forward_pre_hook(count)
        trainer.learn()
        runs[correction] = len(counted)
        text = (trainer.run_dir / "metrics.jsonl").read_text()
        lines[correction] = [json.loads(line) for line in text.splitlines()]
        assert not (trainer.run_dir / "health.jsonl").exists()
    first = {key: [each for each in found if "time/collect" in each] for key, found in lines.items()}
    assert len(first["sampler"]) == 3
    assert runs["none"] - runs["sampler"] >= 2
    assert [("policy/sampler_kl" in line) for line in first["sampler"]] == [True, False, False]
    assert all(line["policy/ratio"] == pytest.approx(1, abs=1e-6) for line in first["none"])
    for line in first["sampler"]:
        assert abs(line["policy/ratio"] - 1) <= RATIO * HALF_PRECISION
        assert line["policy/approx_kl"] <= FIRST_KL * HALF_PRECISION


def _tensors(found: Any) -> list[Tensor]:
    if isinstance(found, dict):
        return [each for value in found.values() for each in _tensors(value)]
    return [found] if isinstance(found, Tensor) else []
