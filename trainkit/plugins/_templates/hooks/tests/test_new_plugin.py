"""Tests of new_plugin: the conformance checks of trainkit, and its own behaviour."""

from collections.abc import Callable
from pathlib import Path

from trainkit.testing.trainers import tiny_trainer
from trainkit_kit import parametrize_checks


@parametrize_checks("new_plugin")
def test_it_passes(check: Callable[[], None]) -> None:
    """Run one of the conformance checks of trainkit. Each is a test case of its own."""
    check()


def test_a_run_ends_at_the_goal(tmp_path: Path) -> None:
    """Check that a run ends at the first evaluation if its goal is below any reward, and at its last step otherwise."""
    for goal, steps in ((-1e9, 1), (1e9, 3)):
        hooks = [{"name": "new_plugin", "goal": goal}]
        place = tmp_path / str(steps)
        trainer = tiny_trainer("rloo", place, plugins=hooks, train__eval_interval=1, train__total_steps=3)
        trainer.learn()
        assert trainer.progress.step == steps
