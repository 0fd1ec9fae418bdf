"""Tests of new_plugin: the conformance checks of trainkit, and its own behaviour."""

from collections.abc import Callable
from pathlib import Path

from trainkit.testing.trainers import tiny_trainer
from trainkit_kit import parametrize_checks


@parametrize_checks("new_plugin")
def test_it_passes(check: Callable[[], None]) -> None:
    """Run one of the conformance checks of trainkit. Each is a test case of its own."""
    check()


def test_responses_are_those_of_the_trained_model(tmp_path: Path) -> None:
    """Check that the engine answers as the trained model itself does, after a step, too."""
    outputs = []
    for engine in ("local", "new_plugin"):
        trainer = tiny_trainer("rloo", tmp_path / engine, rollout__engine=engine, train__total_steps=1)
        trainer.learn()
        outputs.append(trainer.generate(["a", "bc"]).outputs)
    assert outputs[0] == outputs[1]
