"""The reference of offline methods leaves an accelerator after its only pass, and whoever asks for it gets it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import trainkit
from runs import only_new_garbage
from tables import table
from trainkit.models import Reference
from trainkit.testing.trainers import tiny_trainer
from trainkit.trainer import offloading

PAIRS = [{"prompt": "a", "chosen": "bc", "rejected": "d"}, {"prompt": "ef", "chosen": "g", "rejected": "ha"}] * 4
LABELS = [{"prompt": "a", "output": "bc", "label": True}, {"prompt": "ef", "output": "g", "label": False}] * 4
HELD_OUT = {"dpo": PAIRS, "kto": LABELS}


@pytest.fixture(autouse=True)
def garbage() -> Iterator[None]:
    with only_new_garbage():
        yield


@pytest.fixture
def offloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat this device as an accelerator, from which a copy is moved, and any reference as large."""
    monkeypatch.setattr(offloading, "SMALLEST", 1)
    can = offloading.can_offload
    monkeypatch.setattr(offloading, "can_offload", lambda *args: can(*args[:3], "cuda"))


class Watch:
    """A callback that looks whether the reference's weights of the start still exist at each step."""

    def __init__(self, asks: bool = False) -> None:
        self.asks, self.alive, self.told, self.first = asks, list[bool](), list[Tensor](), dict[str, Tensor]()

    @trainkit.hookimpl
    def on_train_begin(self, trainer: Any) -> None:
        weight = next(iter(trainer.reference.policy.parameters()))
        self.storage = weakref.ref(weight.untyped_storage())
        self.first = {name: tensor.clone() for name, tensor in trainer.reference.policy.state_dict().items()}

    @trainkit.hookimpl
    def on_step(self, trainer: Any) -> None:
        gc.collect()
        self.alive.append(self.storage() is not None)
        if self.asks:
            for name, tensor in trainer.reference.policy.state_dict().items():
                assert torch.equal(tensor, self.first[name])


def run(name: str, path: Path, watch: Watch | None = None, **changes: Any) -> Any:
    trainer = tiny_trainer(
        name, path, callbacks=[watch or Watch()], train__total_steps=4, optimizer__lr=1e-2, **changes
    )
    trainer.learn()
    return trainer


def weights(trainer: Any) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in trainer.unwrapped.parameters()]


@pytest.mark.daily(name=("dpo",))
@pytest.mark.parametrize("name", ["dpo", "kto"])
def test_its_weights_leave_the_device_and_the_run_ends_with_the_same_bits(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    kept, left = Watch(), Watch(asks=True)
    usual = weights(run(name, tmp_path / "kept", kept))
    request.getfixturevalue("offloaded")
    moved = weights(run(name, tmp_path / "left", left))
    assert (kept.alive, left.alive) == ([True] * 4, [False] * 4)
    assert all(map(torch.equal, usual, moved))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dpo", "kto"])
@pytest.mark.usefixtures("offloaded")
def test_a_run_that_resumes_without_it_ends_with_the_same_bits(name: str, tmp_path: Path) -> None:
    usual = weights(run(name, tmp_path / "whole"))
    first = tiny_trainer(name, tmp_path / "cut", train__total_steps=4, optimizer__lr=1e-2, train__save_interval=2)
    first.update = _stopping(first)
    with pytest.raises(KeyboardInterrupt):
        first.learn()
    watch = Watch(asks=True)
    second = run(name, tmp_path / "cut", watch, train__save_interval=2, train__resume="auto")
    assert watch.alive == [False] * 2
    assert all(map(torch.equal, watch.first.values(), first.reference.policy.state_dict().values()))
    assert all(map(torch.equal, usual, weights(second)))


def _stopping(trainer: Any) -> Any:
    honest = trainer.update

    def update(batch: Any) -> Any:
        if trainer.progress.step == 2:
            raise KeyboardInterrupt
        return honest(batch)

    return update


@table("name", ["dpo", "kto"])
@pytest.mark.usefixtures("offloaded")
def test_held_out_samples_are_prepared_before_it_leaves(name: str, tmp_path: Path) -> None:
    trainer = tiny_trainer(name, tmp_path, train__total_steps=4, train__eval_interval=2)
    trainer.add_eval_samples(HELD_OUT[name])
    trainer.begin()
    trainer.collect()
    trainer.store.made(torch.arange(1))
    assert trainer.evaluator.held_out is not None
    assert trainer.evaluate()["eval/rewards/margins"] == 0


@pytest.mark.usefixtures("offloaded")
def test_one_that_shares_frozen_layers_leaves_with_its_own_alone(tmp_path: Path) -> None:
    trainer = tiny_trainer("dpo", tmp_path, model__num_layers_unfrozen=1)
    trainer.begin()
    shared = {p.data_ptr() for p in trainer.unwrapped.parameters() if not p.requires_grad}
    trainer.collect()
    trainer.store.made(torch.arange(1))
    kept = {p.data_ptr() for p in trainer.reference.policy.parameters()}
    assert shared
    assert shared < kept


def test_it_stays_on_a_cpu_and_where_more_than_experience_is_made_of_it(tmp_path: Path) -> None:
    for name, device, moved in (("dpo", "cuda", True), ("dpo", "cpu", False), ("ppo", "cuda", False)):
        trainer = tiny_trainer(name, tmp_path)
        trainer.models.build()
        assert type(trainer.reference) is Reference
        assert offloading.can_offload(trainer, trainer.reference, trainer.sharding, device) == moved
