"""The speed benchmark runs, and its floor does the work of the model that it stands for."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def speed(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "speed.py"), *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_trainkit_and_the_floor_make_steps_in_turn(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    sizes = ["--models", "S", "--small", "--steps", "1", "--warmup", "0", "--json", str(out)]
    said = speed("--cases", "rloo", "--systems", "trainkit", "bare", *sizes)
    rows = json.loads(out.read_text())["rows"]
    assert [row["system"] for row in rows] == ["trainkit", "bare"], said
    for row in rows:
        (step,) = row["steps"]
        assert step["peak"] >= row["baseline"] > 0
        assert sum(step["phases"].values()) == pytest.approx(step["seconds"])
        assert {"generate", "reference", "forward", "backward", "optimizer"} <= step["phases"].keys()


def test_what_cannot_be_measured_is_said_and_left_out(tmp_path: Path) -> None:
    assert "make .venv-bench/made" in speed(
        "--cases", "sft", "--models", "S", "--systems", "trl", "--trl-python", str(tmp_path / "none")
    )


class Phases(Counter[str]):
    def phase(self, name: str) -> Any:
        self[name] += 1
        return nullcontext()


@pytest.mark.slow
@pytest.mark.parametrize("model", ["S", "M"])
def test_the_floor_learns_with_the_models_own_arithmetic(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS / "speed_systems"))
    import with_bare
    from work import Work

    precision = torch.get_float32_matmul_precision()
    for case, updates in (("sft", 1), ("rloo", 1), ("ppo", 4)):
        work, turns = Work("bare", case, model, rows=4, prompt=6, new=5, samples=2, sft_rows=1), Phases()
        floor = with_bare.Floor(work, turns)
        assert with_bare.check(floor.net) < 1e-4
        before = [parameter.detach().clone() for parameter in floor.trained]
        getattr(floor, case)()
        assert turns["backward"] == updates
        assert any(not torch.equal(a, b) for a, b in zip(before, floor.trained, strict=True))
    assert torch.get_float32_matmul_precision() == precision


def test_the_floors_gradient_is_that_of_the_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS / "speed_systems"))
    from with_bare import HeadLogprobs

    hidden, weight, tokens = torch.randn(5, 3), torch.randn(7, 3), torch.tensor([0, 6, 3, 3, 1])
    grads = []
    for by_hand in (True, False):
        inputs = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        plain = (inputs[0] @ inputs[1].t()).log_softmax(1).gather(1, tokens.unsqueeze(1)).squeeze(1)
        logprobs = HeadLogprobs.apply(*inputs, tokens) if by_hand else plain
        (logprobs * torch.arange(5.0)).sum().backward()
        grads.append([x.grad for x in inputs])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)
