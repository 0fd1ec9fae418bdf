"""Memory: activations that are computed again, and micro-batches that fit."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import researchers.critics  # noqa: F401  (registers two algorithms)
from trainkit.errors import ConfigError
from trainkit.models.recomputing import recompute_activations
from trainkit.testing import tiny_bart, tiny_gpt2, tiny_llama, tiny_t5
from trainkit.testing.checks.tools import flat_gradient
from trainkit.testing.trainers import tiny_trainer

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


def gradient(trainer: Any, batch: Any) -> Tensor:
    """The gradient of a step, as the loop computes it."""
    trainer._gradient(batch, batch.weight)
    return flat_gradient(trainer)


def kept(trainer: Any, batch: Any) -> int:
    """Bytes that the forward pass keeps for the backward pass, apart from parameters."""
    own = {p.untyped_storage().data_ptr() for p in trainer.unwrapped.parameters()}
    sizes: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    prepared = trainer._prepared_for_step(batch)
    trainer.policy.train()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        loss, _ = trainer.measure(prepared)
    del loss
    return sum(size for place, size in sizes.items() if place not in own)


@pytest.mark.parametrize("case", CASES)
def test_activations_that_are_computed_again_give_the_same_gradient(case: str, tmp_path: Path) -> None:
    name, changes = CASES[case]
    plain, again = (
        tiny_trainer(name, tmp_path / str(on), train__gradient_checkpointing=on, **changes) for on in (False, True)
    )
    plain.collect()
    for trainer in (plain, again):
        trainer.policy.double()
    batch = plain.store.experience.map(lambda x: x.double() if x.is_floating_point() else x)
    torch.testing.assert_close(gradient(plain, batch), gradient(again, batch), rtol=1e-10, atol=1e-13)
    assert kept(again, batch) < kept(plain, batch)


@pytest.mark.parametrize("name", ["rloo", "ppo"])
def test_sampling_is_not_affected_by_checkpointing(name: str, tmp_path: Path) -> None:
    """transformers drops caches of checkpointed layers in training mode; the sampler runs in evaluation mode."""
    runs = [
        tiny_trainer(name, tmp_path / str(on), train__gradient_checkpointing=on, model=tiny_llama(10))
        for on in (False, True)
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
    frozen.policy.train()
    assert not frozen.unwrapped.model.get_input_embeddings()(torch.zeros(1, dtype=torch.long)).requires_grad


def test_models_that_cannot_compute_activations_again_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Linear does not support it .*set it to false"):
        recompute_activations(nn.Linear(2, 2))
    trainer = tiny_trainer("sft", tmp_path)
    model = copy.deepcopy(trainer.unwrapped)
    type(model.model).supports_gradient_checkpointing = False
    try:
        with pytest.raises(ConfigError, match=r"GPT2LMHeadModel does not support it \(.*\); set it to false"):
            recompute_activations(model)
    finally:
        del type(model.model).supports_gradient_checkpointing
