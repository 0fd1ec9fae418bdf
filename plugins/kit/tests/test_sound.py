"""The kit says nothing of sound algorithms, however unusual: each module of `sound` is one.

So are the algorithms of `examples/plugins`, such as ReMax, whose own tests run the kit.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

from trainkit_kit import check_plugin

WEEKLY = {"replay", "tool_tree"}
NAMES = sorted(path.stem for path in (Path(__file__).parent / "sound").glob("[a-z]*.py"))


def test_there_are_some() -> None:
    known = {"apo_zero", "awr", "curriculum", "dapo", "dr_grpo", "ema_baseline", "expectile", "length_penalty",
             "replay", "td_lambda", "tool_tree", "tree", "vapo", "vine"}  # fmt: skip
    assert {*NAMES} >= known


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.weekly if name in WEEKLY else pytest.mark.slow) for name in NAMES]
)
def test_the_kit_raises_no_false_alarm(name: str) -> None:
    import_module(f"sound.{name}")
    check_plugin(f"_sound_{name}")
