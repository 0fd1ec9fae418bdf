"""trainkit's kit over new_plugin, and what new_plugin does beyond it."""

import json
from collections.abc import Callable
from pathlib import Path

from trainkit.testing import parametrize_checks
from trainkit.testing.trainers import tiny_trainer


@parametrize_checks("new_plugin")
def test_it_passes(check: Callable[[], None]) -> None:
    """A case for each check of trainkit's kit, with a sentence on what it proves."""
    check()


def test_a_run_leaves_the_newest_metrics(tmp_path: Path) -> None:
    """The file holds the last step's loss and the last evaluation's reward."""
    trainer = tiny_trainer("rloo", tmp_path, plugins=["new_plugin"], train__eval_interval=2, train__total_steps=3)
    trainer.learn()
    newest = json.loads((tmp_path / "new_plugin.json").read_text())
    assert newest["loss/total"]["step"] == 3
    assert newest["eval/reward"]["step"] == 3
