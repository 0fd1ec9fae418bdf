"""The README's examples run, and so does the example of digits."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner

from trainkit.cli import app

README = Path(__file__).parents[1] / "README.md"


@pytest.mark.slow
def test_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```$", README.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL):
        exec(compile(block, str(README), "exec"), found)
    assert found["images"].shape == (2, 1, 8, 8)
    assert found["trainer"].progress.step == 4


@pytest.mark.slow
@pytest.mark.parametrize("reward", ["digit", "compressibility"])
def test_the_digits_are_drawn_reinforced_and_shown(
    reward: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    short = ["--steps", "1", "--denoiser-steps", "2", "--run-dir", str(tmp_path), "--reward", reward]
    done = CliRunner().invoke(app, ["examples", "run", "ddpo_digits", *short])
    assert done.exit_code == 0, done.output
    lines = [json.loads(line) for line in (tmp_path / "ddpo" / "metrics.jsonl").read_text().splitlines()]
    rewards = [line["eval/reward"] for line in lines if "eval/reward" in line]
    metric = {"digit": "eval/is the digit", "compressibility": "eval/kilobytes"}[reward]
    assert [abs(line[metric]) for line in lines if metric in line] == pytest.approx([abs(r) for r in rewards])
    row = next(line for line in done.stdout.splitlines() if "mean reward" in line)
    assert [f"{rewards[0]:.3f}", f"{rewards[-1]:.3f}"] == row.replace("│", " ").split()[-2:]
    for name in ("before.png", "after.png"):
        with Image.open(tmp_path / name) as grid:
            assert grid.size == (12 * 66, 4 * 66)
