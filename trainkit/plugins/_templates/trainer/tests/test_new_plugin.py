"""Tests of new_plugin: the conformance checks of trainkit, and its own behaviour."""

from collections.abc import Callable
from pathlib import Path

import torch

from trainkit.testing.trainers import tiny_trainer
from trainkit_kit import parametrize_checks


@parametrize_checks("new_plugin")
def test_it_passes(check: Callable[[], None]) -> None:
    """Run one of the conformance checks of trainkit. Each is a test case of its own."""
    check()


def test_the_baseline_is_subtracted_from_every_score(tmp_path: Path) -> None:
    """Check the numbers of this algorithm, which the conformance checks do not know."""
    trainer = tiny_trainer("new_plugin", tmp_path, method__baseline=0.25)
    rollouts = trainer.sample(trainer.pipeline.take(0, 4))
    batch = trainer.experience(rollouts, torch.tensor([0.0, 0.25, 0.5, 1.0]))
    assert batch.advantages.tolist() == [-0.25, 0.0, 0.25, 0.75]
