"""Tests of new_plugin: the conformance checks of trainkit, and its own behaviour."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainkit.testing.trainers import tiny_trainer
from trainkit_kit import parametrize_checks


@parametrize_checks("new_plugin")
def test_it_passes(check: Callable[[], None]) -> None:
    """Run one of the conformance checks of trainkit. Each is a test case of its own."""
    check()


def test_samples_are_whole_at_first_and_cut_later(tmp_path: Path) -> None:
    """Check that samples before the first step are trainkit's own, and 1000 steps later those at ``top_p`` 0.8."""

    def outputs(name: str, step: int, **changes: Any) -> list[str]:
        trainer = tiny_trainer("rloo", tmp_path / name, **changes)
        trainer.progress.step = step
        return list(trainer.generate([{"prompt": "a", "seed": at} for at in range(20)]).outputs)

    core, cut = outputs("core", 0), outputs("cut", 0, rollout__top_p=0.8)
    assert outputs("first", 0, plugins=["new_plugin"]) == core != cut
    assert outputs("later", 1000, plugins=["new_plugin"]) == cut
