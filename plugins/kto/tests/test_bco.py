"""BCO: golden numbers, the shift, and labels that cannot be trained on."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from trainkit.errors import DataError
from trainkit.testing.trainers import SAMPLES, tiny_trainer
from trainkit_kto import LabelledBatch, bco_loss


def test_the_loss_equals_the_golden_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rewards 1, −1 and .5 with δ = .25: margins .75, −(−1 − .25) and −.25; the loss is log(1 + exp(−m))."""
    expected = torch.tensor([0.3868710061, 0.2519290813, 0.8259394199], dtype=torch.float64)
    margins = torch.tensor([0.75, 1.25, -0.25], dtype=torch.float64)
    torch.testing.assert_close(bco_loss(margins), expected, atol=1e-9, rtol=0)
    trainer = tiny_trainer("bco", tmp_path, method__beta=0.5)
    trainer.seen = {"desirable": [1, 0.75], "undesirable": [1, -0.25]}
    logps = torch.tensor([-1.0, -5.0, -3.0], dtype=torch.float64)
    monkeypatch.setattr("trainkit_kto.trainer.response_logprobs", lambda *_: logps)
    monkeypatch.setattr(type(trainer), "policy", None)
    ref_logps = logps - torch.tensor([2.0, -2.0, 1.0], dtype=torch.float64)
    loss, found = trainer.loss(LabelledBatch(None, ref_logps, torch.tensor([True, False, False])))  # type: ignore[arg-type]
    assert float(loss) == pytest.approx(float(expected.mean()), abs=1e-9)
    assert found["rewards/shift"].compute() == 0.25
    assert found["rewards/margins"].compute() == pytest.approx((0.75 + 1.25 - 0.25) / 3)


def test_the_shift_is_midway_between_the_mean_rewards_of_both_labels(tmp_path: Path) -> None:
    """A step without one of the labels moves the mean of the other: δ = ½ (.4 − .2), ½ (.4 + .4), ½ (.7 + .8/3)."""
    trainer, nan = tiny_trainer("bco", tmp_path), math.nan
    assert trainer.shift == 0
    for good, bad, shift in ((0.4, -0.2, 0.1), (nan, 1.0, 0.4), (1.0, 0.0, (0.7 + 0.8 / 3) / 2), (nan, nan, 29 / 60)):
        trainer.judge({"rewards/desirable": good, "rewards/undesirable": bad})
        assert trainer.shift == pytest.approx(shift)


def test_labels_of_one_kind_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="all 16 samples are labelled True, and the algorithm needs desirable samples"):
        tiny_trainer("bco", tmp_path, arguments={"samples": SAMPLES, "rewards": [True] * 16})
