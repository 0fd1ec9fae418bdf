"""Runs with everything that resuming has to restore, and what is compared of them."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainkit.runs import checkpoint
from trainkit.testing import tiny_gpt2
from trainkit.testing.trainers import language_trainers, tiny_trainer

USUAL = ("ppo", "rloo", "sft")
"""The algorithms of a sample of the battery."""

FULL: dict[str, Any] = {
    "model": tiny_gpt2(10, resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1),
    "model__disable_dropout": False,
    "train__batch_size": 6,  # which does not divide 16 rows: passes end in a smaller batch
    "train__microbatch_size": 4,
    "train__total_steps": 12,
    "train__save_interval": 1,
    "train__keep_checkpoints": 99,
}
"""Dropout, micro-batches and partial epochs; PPO goes twice over each collection, so 12 steps are two of them."""


def full(name: str, run_dir: Path, **changes: Any) -> Any:
    """Return a tiny trainer with `FULL`; trainers of other than language models keep their own model."""
    given = {**FULL, **({"method__ppo_epochs": 2} if name == "ppo" else {}), **changes}
    if name not in language_trainers():
        given = {key: value for key, value in given.items() if not key.startswith("model")}
    return tiny_trainer(name, run_dir, **given)


@contextmanager
def only_new_garbage() -> Iterator[None]:
    """Let garbage collections look at what is made within alone; looking at all imports takes half a second each."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def state(trainer: Any) -> dict[str, Tensor]:
    """Weights and optimizer, every tensor by its path."""
    packer = checkpoint.Packer()
    packer.pack({"model": trainer.unwrapped.state_dict(), "optimizer": trainer.optimizer.state_dict()})
    return {name: tensor.clone() for name, tensor in packer.tensors.items()}


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    """Require the same tensors with the same bits."""
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


def snapshot(run_dir: Path) -> dict[str, tuple[int, bytes]]:
    """Return the time and the content of every file."""
    return {str(p): (p.stat().st_mtime_ns, p.read_bytes()) for p in run_dir.rglob("*") if p.is_file()}


def steps_logged(run_dir: Path) -> list[int]:
    """Return the steps of the lines of metrics."""
    return [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def resumed_at(name: str, steps: Iterable[int], place: Path, **changes: Any) -> int:
    """Resume a run at each of the steps, require the bits and the samples of its end, and return how often it was."""
    straight = full(name, place / "straight", **changes)
    straight.learn()
    end, count = state(straight), 0
    for step in steps:
        path = place / "straight" / "checkpoints" / f"step_{step:08d}"
        resumed = full(name, place / str(step), **changes, train__resume=str(path), train__save_interval=0)
        resumed.learn()
        assert resumed.progress.step == straight.progress.step == 12
        assert resumed.progress.samples == straight.progress.samples
        assert_same(state(resumed), end)
        count += 1
    return count
