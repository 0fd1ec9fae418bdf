"""trainkit's kit over new_plugin, and what new_plugin does beyond it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainkit.testing import parametrize_checks
from trainkit.testing.trainers import tiny_trainer


@parametrize_checks("new_plugin")
def test_it_passes(check: Callable[[], None]) -> None:
    """A case for each check of trainkit's kit, with a sentence on what it proves."""
    check()


def test_samples_are_whole_at_first_and_cut_later(tmp_path: Path) -> None:
    """Samples before the first step are trainkit's own; 1000 steps later they are those at ``top_p`` 0.8."""

    def outputs(name: str, step: int, **changes: Any) -> list[str]:
        trainer = tiny_trainer("rloo", tmp_path / name, **changes)
        trainer.progress.step = step
        return list(trainer.generate([{"prompt": "a", "seed": at} for at in range(20)]).outputs)

    core, cut = outputs("core", 0), outputs("cut", 0, rollout__top_p=0.8)
    assert outputs("first", 0, plugins=["new_plugin"]) == core != cut
    assert outputs("later", 1000, plugins=["new_plugin"]) == cut
