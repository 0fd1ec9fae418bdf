"""Tests of new_plugin: the conformance checks of trainkit, and its own behaviour."""

import json
from collections.abc import Callable
from pathlib import Path

from trainkit.testing.trainers import tiny_trainer
from trainkit_kit import parametrize_checks


@parametrize_checks("new_plugin")
def test_it_passes(check: Callable[[], None]) -> None:
    """Run one of the conformance checks of trainkit. Each is a test case of its own."""
    check()


def test_a_run_leaves_the_newest_metrics(tmp_path: Path) -> None:
    """Check that the file holds the loss of the last step and the reward of the last evaluation."""
    tracker = {"name": "new_plugin", "file": "newest.json"}
    trainer = tiny_trainer("rloo", tmp_path, train__trackers=[tracker], train__eval_interval=2, train__total_steps=3)
    trainer.learn()
    newest = json.loads((tmp_path / "newest.json").read_text())
    assert newest["loss/total"]["step"] == 3
    assert newest["eval/reward"]["step"] == 3
