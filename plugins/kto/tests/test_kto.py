"""KTO: golden numbers, mismatched samples, the reference point of a step, labels, and that it learns."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import trainkit
from tables import table
from trainkit.data import Sequences
from trainkit.errors import ConfigError, DataError
from trainkit.testing import tiny_gpt2
from trainkit.testing.trainers import SAMPLES, tiny_trainer
from trainkit_kit import Bandit
from trainkit_kto import KTOBatch, kto_loss

POINTS = {"mismatched": {}, "zero": {"method__reference_point": "zero"}}
LABELLED = [{"prompt": p, "completion": c, "label": p == c} for p in "abcd" for c in "abcd"]


# --------------------------------------------------------------------------------------------------- golden numbers


class Answers:
    """The policy of a trainer: answers with given log-probabilities [B, T], whatever it is asked."""

    def __init__(self, logprobs: Tensor) -> None:
        self.logprobs = logprobs

    def __call__(self, sequences: Sequences) -> Any:
        return self


def known(trainer: Any, logprobs: Tensor, kl: float | None, monkeypatch: pytest.MonkeyPatch) -> KTOBatch:
    """Three samples, of which the first and the last are desirable, with prompts of one token; ``policy`` is set.

    log π of the outputs are (−1, −2), (−1, −0.5, −1.5) and (−4), and log π_ref −4, −2 and −3.5, so r is 1, −1, −0.5.
    """
    sequences = Sequences.from_lists([[1], [1], [1]], [[2, 3], [2, 3, 4], [2]])
    ref_logps = torch.tensor([-4, -2, -3.5], dtype=torch.float64)
    monkeypatch.setattr(type(trainer), "policy", Answers(logprobs))
    given = None if kl is None else torch.full((3,), kl, dtype=torch.float64)
    return KTOBatch(sequences, ref_logps, torch.tensor([True, False, True]), kl=given)


def logprobs() -> Tensor:
    nan = float("nan")
    rows = [[nan, -1, -2, nan], [nan, -1, -0.5, -1.5], [nan, -4, nan, nan]]
    return torch.tensor(rows, dtype=torch.float64, requires_grad=True)


CASES = {
    # β(r − z) = .5(1 − .4) = .3; β(z − r) = .5(.4 + 1) = .7; .5(−.5 − .4) = −.45.
    # σ(−m) = .425557483, .331812228, .610639234; times λ = 1.5, 2, 1.5 the mean is (.638336225 + .663624456 +
    # .915958851) / 3
    "z": (0.4, 0.739306510676),
    # z = −.6 is clamped to 0: m = .5, .5, −.25; σ(−m) = .377540669, .377540669, .562176501;
    # (.566311003 + .755081338 + .843264751) / 3
    "z below 0": (-0.6, 0.721552364),
    # without z the same
    "no z": (None, 0.721552364),
}


@table("kl, expected", CASES.values())
def test_the_loss_equals_the_golden_numbers(
    kl: float | None, expected: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """β = .5, λ_D = 1.5, λ_U = 2; padding may be NaN."""
    trainer = tiny_trainer(
        "kto", tmp_path, method__beta=0.5, method__desirable_weight=1.5, method__undesirable_weight=2.0
    )
    loss, found = trainer.loss(known(trainer, logprobs(), kl, monkeypatch))
    assert float(loss.detach()) == pytest.approx(expected, abs=1e-8)
    # rewards .5r = .5, −.5, −.25; r is on the right side of z in the first two samples, not in the last
    assert found["rewards/desirable"].compute() == pytest.approx((0.5 - 0.25) / 2)
    assert found["rewards/undesirable"].compute() == pytest.approx(-0.5)
    assert found["rewards/accuracies"].compute() == pytest.approx(2 / 3)
    point = 0.2 if kl == 0.4 else 0
    assert found["rewards/margins"].compute() == pytest.approx((0.5 + 0.5 - 0.25 - point) / 3)
    assert found["logps/desirable"].compute() == pytest.approx(-3.5)
    assert found["logps/undesirable"].compute() == pytest.approx(-3)
    assert kl is None or found["policy/kl"].compute() == pytest.approx(kl)


@table("kl", [0.4, -0.6, None])
def test_the_gradient_equals_finite_differences(
    kl: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = tiny_trainer("kto", tmp_path, method__desirable_weight=1.5)
    at = logprobs()
    trainer.loss(known(trainer, at, kl, monkeypatch))[0].backward()
    slopes = torch.zeros_like(at)
    for index in at.detach().isfinite().nonzero().tolist():
        sides = []
        for step in (1e-6, -1e-6):
            moved = logprobs().detach()
            moved[tuple(index)] += step
            sides.append(float(trainer.loss(known(trainer, moved, kl, monkeypatch))[0]))
        slopes[tuple(index)] = (sides[0] - sides[1]) / 2e-6
    torch.testing.assert_close(torch.nan_to_num(at.grad), slopes, rtol=1e-6, atol=1e-9)
    assert (slopes[[0, 2]].sum() < 0) & (slopes[1].sum() > 0)


@given(st.floats(-50, 50), st.floats(0.1, 5))
def test_the_loss_is_the_weight_less_the_value(margin: float, weight: float) -> None:
    """λ − λσ(m), whose slope −λσ(m)(1 − σ(m)) is largest at z."""
    x = torch.tensor(margin, dtype=torch.float64, requires_grad=True)
    loss = kto_loss(x, torch.tensor(weight, dtype=torch.float64))
    loss.backward()
    value = 1 / (1 + math.exp(-margin))
    assert float(loss.detach()) == pytest.approx(weight - weight * value, abs=1e-12)
    assert float(x.grad) == pytest.approx(-weight * value * (1 - value), abs=1e-12)


# ------------------------------------------------------------------------------------------------ mismatched samples


@table("size", [3, 16])
def test_mismatched_samples_follow_the_row(size: int, tmp_path: Path) -> None:
    """They are made of the dataset in its order, whatever the order and the parts in which it is collected."""
    trainer = tiny_trainer("kto", tmp_path, arguments={"samples": LABELLED, "rewards": None}, rollout__batch_size=size)
    given = trainer.pipeline.rows
    expected = {"".join(row["turns"]): "".join(row["mismatched"]["turns"]) for row in given}
    assert len(expected) == len(given) == 16
    trainer.collect()
    batch = trainer.store.experience
    for own, other in zip(texts(trainer, batch.own), texts(trainer, batch.mismatched), strict=True):
        assert other == expected[own]


def texts(trainer: Any, x: Sequences) -> list[str]:
    """The sequences as text."""
    rows = [ids[real] for ids, real in zip(x.input_ids, x.attention_mask, strict=True)]
    return [trainer.tokenizer.decode(ids, skip_special_tokens=True) for ids in rows]


# -------------------------------------------------------------------------------------------- steps and the reference


def collected(tmp_path: Path, **changes: Any) -> Any:
    """A trainer with one collection, whose policy is no longer the reference."""
    trainer = tiny_trainer("kto", tmp_path, **{"train__max_grad_norm": None, **changes})
    trainer.collect()
    generator = torch.Generator().manual_seed(0)
    for parameter in trainer.unwrapped.parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    return trainer


def wide_logps(trainer: Any, sequences: Sequences) -> Tensor:
    """log π of the outputs [B] in float64, from the logits of the model."""
    model, ids, mask = trainer.unwrapped.model, sequences.input_ids, sequences.response_mask[:, 1:]
    logits = model(ids, attention_mask=sequences.attention_mask).logits[:, :-1].double()
    return (logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1) * mask).sum(1)


@table("changes, sign, size", [({}, 1, 5), ({}, -1, None), (POINTS["zero"], 1, 5)])
def test_a_step_follows_the_gradient_of_the_formula_in_float64(
    changes: dict[str, Any], sign: int, size: int | None, tmp_path: Path
) -> None:
    """The whole path against the equations, with a z above and below 0, in one and in several micro-batches."""
    weights = {"method__desirable_weight": 1.3, "method__undesirable_weight": 0.7, "method__beta": 0.3}
    trainer = collected(tmp_path, train__microbatch_size=size, **weights, **changes)
    batch, z = trainer.store.experience, torch.zeros(())
    if batch.mismatched is not None:  # move the reference, so that z is far from 0
        batch = replace(batch, mismatched_ref_logps=batch.mismatched_ref_logps - sign * 2)
        with torch.no_grad():
            z = (wide_logps(trainer, batch.mismatched) - batch.mismatched_ref_logps).mean()
        assert (z > 0.5) if sign > 0 else (z < -0.5)
    r, z = wide_logps(trainer, batch.own) - batch.ref_logps, z.clamp(min=0)
    good = 1.3 * (1 - torch.sigmoid(0.3 * (r - z)))
    bad = 0.7 * (1 - torch.sigmoid(0.3 * (z - r)))
    formula = torch.where(batch.desirable, good, bad).mean()
    expected = [g.clone() for g in torch.autograd.grad(formula, list(trainer.unwrapped.parameters()))]
    seen: list[Tensor] = []
    trainer.optimizer.optimizer.register_step_pre_hook(
        lambda *_: seen.extend(p.grad.clone() for p in trainer.unwrapped.parameters())
    )
    found = trainer.update(batch)
    assert found["loss/total"].compute() == pytest.approx(float(formula.detach()), rel=1e-5)
    for a, b in zip(seen, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-6)


def test_before_the_first_update_all_rewards_are_zero(tmp_path: Path) -> None:
    """Exactly, also at another temperature and with dropout configured; the loss is λ/2."""
    model = tiny_gpt2(10, resid_pdrop=0.5, attn_pdrop=0.5)
    trainer = tiny_trainer("kto", tmp_path, model=model, rollout__temperature=0.7)
    trainer.collect()
    found = trainer.update(trainer.store.experience)
    for name in ("rewards/desirable", "rewards/undesirable", "rewards/margins", "policy/kl"):
        assert found[name].compute() == 0.0
    assert found["rewards/accuracies"].compute() == 0.5
    assert found["loss/total"].compute() == pytest.approx(0.5, rel=1e-6)


@table("changes", POINTS.values())
def test_the_reference_is_asked_once_and_not_in_the_passes(changes: dict[str, Any], tmp_path: Path) -> None:
    trainer = tiny_trainer("kto", tmp_path, train__total_steps=6, **changes)
    trainer.models.build()
    seen, honest = [], trainer.reference.policy.forward
    trainer.reference.policy.forward = lambda sequences, **k: seen.append(len(sequences)) or honest(sequences, **k)
    trainer.learn()
    assert sum(seen) == (16 if changes else 2 * 16)
    assert trainer.progress.step == 6


def test_no_gradient_flows_through_the_reference_point(tmp_path: Path) -> None:
    trainer = collected(tmp_path)
    with torch.no_grad():
        batch = trainer.prepare_step(trainer.store.experience)
    assert not batch.kl.requires_grad
    assert batch.kl.unique().numel() == 1


# ------------------------------------------------------------------------------------------------------------- labels


def tiny(tmp_path: Path, samples: list[Any], **method: Any) -> Any:
    changes = {f"method__{key}": value for key, value in method.items()}
    return tiny_trainer("kto", tmp_path, arguments={"samples": samples, "rewards": None}, **changes)


@table("label", [True, False])
def test_labels_of_one_kind_are_refused_before_training(label: bool, tmp_path: Path) -> None:
    samples = [{**row, "label": label} for row in LABELLED]
    with pytest.raises(
        DataError, match=f"all 16 samples are labelled {label}, and the algorithm needs desirable samples"
    ):
        tiny(tmp_path, samples)


def test_held_out_samples_may_have_labels_of_one_kind(tmp_path: Path) -> None:
    trainer = tiny_trainer("kto", tmp_path)
    trainer.add_eval_samples([row for row in LABELLED if row["label"]])
    found = trainer.evaluate()
    assert found["eval/loss/total"] == pytest.approx(0.5)
    assert found["eval/policy/kl"] == 0.0
    assert "eval/rewards/desirable" in found
    assert "eval/rewards/undesirable" not in found, "there is none"


@table(
    "weights, advice",
    [
        # 4 desirable, 12 undesirable: λ_D from 12 / 4 to 4/3 · 12 / 4
        ({}, "method.desirable_weight between 3 and 4 for these numbers; given 1"),
        ({"desirable_weight": 3.0}, None),
        ({"desirable_weight": 4.0}, None),
        ({"undesirable_weight": 0.25}, None),
        # 9 · 4 / 12 = 3: λ_U from 3 · 3/4 to 3
        ({"desirable_weight": 9.0}, "method.undesirable_weight between 2.25 and 3 for these numbers; given 1"),
        ({"undesirable_weight": 2.0}, "method.desirable_weight between 6 and 8 for these numbers; given 1"),
    ],
)
def test_unbalanced_labels_are_answered_by_one_line_of_advice(
    weights: dict[str, float], advice: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "trainkit_kto"):
        tiny(tmp_path, LABELLED, **weights)
    said = [record.getMessage() for record in caplog.records if record.name.startswith("trainkit_kto")]
    assert len(said) == (advice is not None)
    if advice is not None:
        assert said[0].startswith("4 samples are desirable and 12 undesirable")
        assert advice in said[0]


def test_labels_may_be_given_as_rewards(tmp_path: Path) -> None:
    trainer = tiny_trainer("kto", tmp_path)
    trainer.add_samples(SAMPLES[:4], [True, 0, 1, False])
    assert [row["label"] for row in trainer.pipeline.rows] == [True, False, True, False]


def test_settings_out_of_bounds_are_refused(tmp_path: Path) -> None:
    for name in ("beta", "desirable_weight", "undesirable_weight"):
        with pytest.raises(ConfigError, match=rf"method\.{name}: should be greater than 0"):
            tiny(tmp_path, LABELLED, **{name: 0.0})
    with pytest.raises(ConfigError, match=r"method\.reference_point: should be 'mismatched' or 'zero'"):
        tiny(tmp_path, LABELLED, reference_point="own")


class Streamed:
    """The samples without a length, as a `datasets.IterableDataset` has none."""

    def __iter__(self) -> Any:
        return iter(LABELLED)


def test_a_stream_is_mismatched_as_it_is_read_and_resumes(tmp_path: Path) -> None:
    changes = {"rollout__num_rollouts": 8, "train__epochs": None, "train__batch_size": 8}
    runs = {}
    for name, stages in {"whole": [4], "parts": [2, 4]}.items():
        for steps in stages:
            given = {"samples": Streamed(), "rewards": None}
            resume = {"train__resume": "auto"} if steps != stages[0] else {}
            trainer = tiny_trainer(
                "kto", tmp_path / name, arguments=given, train__total_steps=steps, train__save_interval=1,
                **changes, **resume,
            )  # fmt: skip
            trainer.learn()
        runs[name] = trainer.unwrapped.state_dict()
    assert all(torch.equal(tensor, runs["whole"][name]) for name, tensor in runs["parts"].items())


# ----------------------------------------------------------------------------------------------------------- it learns


def test_it_raises_the_reward_of_a_bandit(tmp_path: Path) -> None:
    """The arms above the mean of their prompt are desirable: they get more than half of the rest."""
    bandit = Bandit()
    means = bandit.rewards.mean(1, keepdim=True)
    samples = [
        {"prompt": prompt, "completion": arm, "label": bool(good)}
        for prompt, row in zip(bandit.prompts, bandit.rewards > means, strict=True)
        for arm, good in zip(bandit.responses, row, strict=True)
    ]
    trainer = trainkit.train(
        bandit.arguments["model_path"],
        samples=samples,
        tokenizer=bandit.tokenizer,
        config={
            "method": "kto",
            "optimizer": {"lr": 6e-3},
            "train": {
                "batch_size": len(samples), "total_steps": 25, "epochs": None, "run_dir": str(tmp_path), "trackers": [],
            },
        },
    )  # fmt: skip

    def desirable(model: Any) -> float:
        share = bandit.logprobs(model).exp() * (bandit.rewards > means)
        return float(share.sum(1).mean())

    before, after = desirable(trainer.reference.policy.model), desirable(trainer.unwrapped.model)
    assert after > before + 0.5 * (1 - before)
