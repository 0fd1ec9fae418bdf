"""The experience of a dataset is made of the rows of a step when the first pass comes to it, and used again."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import trainkit
from runs import assert_same, state
from tables import table
from test_processes import succeed
from trainkit.testing import tiny_gpt2, tiny_t5
from trainkit.testing.trainers import tiny_trainer
from trainkit.trainer import offloading


class Counts:
    """A callback that notes the rows of experience that it observes."""

    def __init__(self) -> None:
        self.observed: list[int] = []

    @trainkit.hookimpl
    def on_experience(self, experience: Any) -> None:
        self.observed.append(len(experience))


def counted(name: str, run_dir: Path, **changes: Any) -> tuple[Any, list[int], list[int]]:
    """Return a trainer with 16 samples in steps of 4; the rows that it makes experience of; those that are observed."""
    counts, made = Counts(), list[int]()
    usual = {"train__batch_size": 4, "train__keep_checkpoints": 99, **changes}
    trainer = tiny_trainer(name, run_dir, callbacks=[counts], **usual)
    make = trainer.make_experience

    def counting(rows: Any) -> Any:
        made.append(len(rows))
        return make(rows)

    trainer.make_experience = counting
    return trainer, made, counts.observed


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "dpo": ("dpo", {}),
    "kto": ("kto", {"rollout__batch_size": 3}),
    "trunk": ("dpo", {"model__num_layers_unfrozen": 1}),
    "adapter": ("dpo", {"model__peft_config": {"peft_type": "LORA", "r": 2}}),
    "encoder-decoder": ("dpo", {"model": tiny_t5(10)}),
    "another reference": ("kto", {"model__reference_path": tiny_gpt2(10, n_embd=32)}),
    "no reference": ("dpo", {"method__reference_free": True}),
}


@table("kind", ["dpo", "kto"])
def test_a_run_makes_the_experience_that_it_uses(kind: str, tmp_path: Path) -> None:
    name, changes = KINDS[kind]
    trainer, made, observed = counted(name, tmp_path, train__total_steps=2, **changes)
    trainer.learn()
    assert sum(made) == trainer.progress.samples == 8
    assert observed == [4, 4]
    longer, made, observed = counted(name, tmp_path / "longer", train__total_steps=6, **changes)
    longer.learn()
    assert sum(made) == longer.progress.samples == 16
    assert observed == [4] * 4


@pytest.mark.daily(kind=("dpo",))
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_is_resumed_or_lengthened_ends_with_the_bits_of_a_straight_one(kind: str, tmp_path: Path) -> None:
    name, changes = KINDS[kind]
    changes = {"train__save_interval": 1, **changes}
    straight, _, _ = counted(name, tmp_path / "straight", train__total_steps=7, **changes)
    straight.learn()
    short, _, _ = counted(name, tmp_path / "short", train__total_steps=3, **changes)
    short.learn()
    of = {3: tmp_path / "short" / "checkpoints" / "step_00000003"}
    for step in (1, 3, 4, 6):
        path = of.get(step, tmp_path / "straight" / "checkpoints" / f"step_{step:08d}")
        changed = {"train__total_steps": 7, "train__resume": str(path), **changes}
        resumed, made, observed = counted(name, tmp_path / f"resumed-{step}", **changed)
        resumed.run.allow_drift = True
        resumed.learn()
        assert_same(state(straight), state(resumed))
        assert sum(made) <= 16
        assert len(observed) == max(4 - step, 0), "what is made again is not observed again"


@pytest.mark.daily(kind=("dpo",))
@pytest.mark.parametrize("kind", KINDS)
def test_when_it_is_made_changes_nothing(kind: str, tmp_path: Path) -> None:
    """Rows that are read when the weights have moved have the reference's numbers of the start."""
    name, changes = KINDS[kind]
    usual, _, _ = counted(name, tmp_path / "usual", train__total_steps=6, **changes)
    usual.learn()
    early, _, _ = counted(name, tmp_path / "early", train__total_steps=6, **changes)
    early.collect()
    early.store.made(torch.arange(9, 16))
    early.learn()
    late = counted(name, tmp_path / "late", train__total_steps=6, **changes)[0]
    late.hooks.register(ReadsAll())
    late.learn()
    weights = [[p.detach() for p in trainer.unwrapped.parameters()] for trainer in (usual, early, late)]
    assert all(map(torch.equal, weights[0], weights[1]))
    assert all(map(torch.equal, weights[0], weights[2]))


class ReadsAll:
    """A callback that reads the whole collection after the second step."""

    @trainkit.hookimpl
    def on_step(self, trainer: Any, step: int) -> None:
        if step == 2:
            assert len(trainer.store.experience) == 16


def test_an_algorithm_that_compares_rows_sees_all_before_the_first_step(tmp_path: Path) -> None:
    trainer, made, observed = counted("dpo", tmp_path, train__total_steps=1)
    seen: list[int] = []

    def prepare(experience: Any) -> Any:
        seen.append(len(experience))
        return experience

    trainer.prepare_experience = prepare
    trainer.learn()
    assert (seen, sum(made), observed) == ([16], 16, [16])


def test_a_part_may_be_of_several_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device to which the reference is moved for it."""
    monkeypatch.setattr(offloading.ReferenceOffloading, "steps_at_a_time", lambda self: 3)
    straight, made, observed = counted("dpo", tmp_path / "straight", train__total_steps=6, train__save_interval=2)
    straight.learn()
    assert (made, observed, straight.progress.samples) == ([8, 4, 4], [12, 4], 16)
    path = str(tmp_path / "straight" / "checkpoints" / "step_00000002")
    resumed, _, observed = counted("dpo", tmp_path / "resumed", train__total_steps=6, train__resume=path)
    resumed.learn()
    assert (observed, resumed.progress.samples) == ([4], 16)
    assert_same(state(straight), state(resumed))


@table("call", [0, 2])
def test_a_signal_while_it_is_made_ends_the_run_at_once(call: int, tmp_path: Path) -> None:
    straight, _, _ = counted("dpo", tmp_path / "straight", train__total_steps=5)
    straight.learn()
    stopped, made, _ = counted("dpo", tmp_path / "stopped", train__total_steps=5, train__save_interval=9)
    make = stopped.make_experience

    def stopping(rows: Any) -> Any:
        if len(made) == call:
            os.kill(os.getpid(), signal.SIGTERM)
        return make(rows)

    stopped.make_experience = stopping
    with pytest.raises(SystemExit):
        stopped.learn()
    assert (stopped.progress.step, len(made)) == (call, call)
    changes = {"train__save_interval": 9, "train__resume": "auto"}
    again, made, _ = counted("dpo", tmp_path / "stopped", train__total_steps=5, **changes)
    again.learn()
    assert_same(state(straight), state(again))
    assert again.progress.samples == 16


TWO = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import torch
from test_offline import counted

def weights(trainer):
    with trainer.sharding.unsharded():
        return [parameter.detach().clone() for parameter in trainer.unwrapped.parameters()]

torch.set_num_threads(1)
for name, sharding in (("dpo", "none"), ("kto", "none"), ("dpo", "fsdp2")):
    root, usual = Path(sys.argv[1]) / name / sharding, {"train__sharding": sharding, "train__total_steps": 6}
    straight, made, _ = counted(name, root / "straight", train__save_interval=1, **usual)
    straight.learn()
    assert sum(made) == 8, made
    end = weights(straight)
    for step in (2, 5):
        path = root / "straight" / "checkpoints" / f"step_{step:08d}"
        resumed, _, _ = counted(name, root / f"resumed-{step}", train__resume=str(path), **usual)
        resumed.learn()
        assert all(map(torch.equal, end, weights(resumed))), (name, sharding, step)
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_two_processes_make_it_together(tmp_path: Path) -> None:
    succeed(TWO, 2, str(tmp_path), str(Path(__file__).parent))
