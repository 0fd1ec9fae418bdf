"""ORPO, CPO and SimPO: golden numbers and closed forms, whole steps in float64, and that they learn."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import trainkit
from tables import table
from trainkit.errors import ConfigError
from trainkit.testing.trainers import tiny_trainer
from trainkit_orpo import log_odds, odds_ratio_loss, simpo_loss

SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "orpo": ("orpo", {"method__beta": 0.5}),
    "sigmoid": ("cpo", {}),
    "smoothed": ("cpo", {"method__label_smoothing": 0.2, "method__cpo_alpha": 0.5}),
    "hinge": ("cpo", {"method__loss_type": "hinge"}),
    "ipo": ("cpo", {"method__loss_type": "ipo"}),
    "simpo": ("cpo", {"method__loss_type": "simpo", "method__beta": 2.0, "method__simpo_gamma": 1.0}),
    "cpo-simpo": ("cpo", {"method__loss_type": "simpo", "method__beta": 2.0, "method__cpo_alpha": 1.0}),
    "simpo-smoothed": ("cpo", {"method__loss_type": "simpo", "method__label_smoothing": 0.1}),
}


def wide(*values: float) -> list[Tensor]:
    return [torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in values]


def loss_of(chosen: Tensor, rejected: Tensor) -> Tensor:
    return odds_ratio_loss(log_odds(chosen) - log_odds(rejected))


# ------------------------------------------------------------------------------------------- golden, closed forms


def test_the_odds_ratio_loss_equals_the_golden_numbers() -> None:
    """p .5 and .25: odds 1 and 1/3, −log(3/4). TRL 0.8.6's formula, by hand: −1 and −2: odds .581977 and .156518."""
    chosen, rejected = torch.tensor([0.5, 0.25]).log(), torch.tensor([0.25, 0.5]).log()
    torch.testing.assert_close(loss_of(chosen, rejected), torch.tensor([0.287682, 1.386294]), rtol=0, atol=1e-6)
    losses = loss_of(torch.tensor([-1.0, -2.0, -1.0]), torch.tensor([-2.0, -1.0, -1.0]))
    torch.testing.assert_close(losses, torch.tensor([0.238183, 1.551445, 0.693147]), rtol=0, atol=1e-6)


def test_the_loss_of_simpo_equals_the_golden_numbers() -> None:
    """β 2, γ 1: −log σ(3), −log σ(−3), −log σ(−1); with ε .1 in the first −.9 log σ(3) − .1 log σ(−3)."""
    margins = torch.tensor([2.0, -1.0, 0.0])
    found = simpo_loss(margins, beta=2.0, gamma=1.0)
    torch.testing.assert_close(found, torch.tensor([0.048587, 3.048587, 1.313262]), rtol=0, atol=1e-6)
    smoothed = simpo_loss(margins[:1], beta=2.0, gamma=1.0, label_smoothing=0.1)
    torch.testing.assert_close(smoothed, torch.tensor([0.348587]), rtol=0, atol=1e-6)


@given(st.floats(-60, -1e-9))
def test_log_odds_are_the_closed_form_in_float64(x: float) -> None:
    """log p − log(1 − p) = −log(e^−x − 1), and its slope is 1 / (1 − p)."""
    (logp,) = wide(x)
    found = log_odds(logp)
    found.backward()
    assert found.item() == pytest.approx(-math.log(math.expm1(-x)), rel=1e-12, abs=1e-12)
    assert logp.grad.item() == pytest.approx(1 / -math.expm1(x), rel=1e-9)


@given(st.floats(-20, -1e-4), st.floats(-20, -1e-4))
def test_the_odds_ratio_loss_is_the_closed_form_in_float64(c: float, r: float) -> None:
    """−log σ(log a) = log(1 + 1/a), a the odds ratio; d/d log p_c = −(1 / (1 + a)) / (1 − p_c)."""
    chosen, rejected = wide(c, r)
    loss = loss_of(chosen, rejected)
    loss.backward()
    inverse = math.expm1(-c) / math.expm1(-r)
    assert loss.item() == pytest.approx(math.log1p(inverse), rel=1e-9, abs=1e-12)
    share = inverse / (1 + inverse)
    assert chosen.grad.item() == pytest.approx(share / math.expm1(c), rel=1e-9)
    assert rejected.grad.item() == pytest.approx(-share / math.expm1(r), rel=1e-9)


@table("dtype", [torch.float32, torch.float64])
def test_probabilities_near_0_and_1_keep_their_digits(dtype: torch.dtype) -> None:
    """log p of −1e-6, whose odds are 1e6; of −200, whose probability float32 does not have; and of 0."""
    x = torch.tensor([-1e-6, -200.0, 0.0], dtype=dtype, requires_grad=True)
    found = log_odds(x)
    assert found[0].item() == pytest.approx(13.815510, rel=1e-5)
    assert found[1].item() == pytest.approx(-200.0, rel=1e-6)
    found.sum().backward()
    assert found.isfinite().all()
    assert x.grad.isfinite().all()
    assert x.grad[2] == 0


def test_a_pair_that_is_learnt_has_a_finite_gradient() -> None:
    """Of outputs with the probability 1 and 0; the formula of TRL has NaN there."""
    for chosen, rejected in ((0.0, -90.0), (-90.0, 0.0), (0.0, 0.0)):
        x = torch.tensor([chosen, rejected], requires_grad=True)
        loss = loss_of(x[0], x[1])
        loss.backward()
        assert loss.isfinite()
        assert x.grad.isfinite().all()


# ------------------------------------------------------------------------------------------------------ whole steps


def collected(name: str, tmp_path: Path, **changes: Any) -> Any:
    """A trainer with one collection, and outputs of several lengths."""
    rows = [{"prompt": p, "chosen": c, "rejected": r} for p, c, r in [("a", "bc", "d"), ("bb", "a", "cde"), ("c", "dd",
            "e"), ("da", "abcd", "ba")]]  # fmt: skip
    trainer = tiny_trainer(name, tmp_path, arguments={"samples": rows}, train__max_grad_norm=None, **changes)
    trainer.collect()
    return trainer


@table("name, changes", SETTINGS.values())
def test_a_step_follows_the_gradient_of_the_formula_in_float64(
    name: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    """The whole path against the equations, from two separate passes over chosen and rejected."""
    trainer = collected(name, tmp_path, **changes)
    batch, method, policy = trainer.store.experience, trainer.method, trainer.unwrapped
    sums, means = [], []
    for sequences in (batch.chosen, batch.rejected):
        logits = policy.model(sequences.input_ids, attention_mask=sequences.attention_mask).logits[:, :-1].double()
        logprobs = logits.log_softmax(-1).gather(-1, sequences.input_ids[:, 1:, None]).squeeze(-1)
        mask = sequences.response_mask[:, 1:]
        sums.append((logprobs * mask).sum(1))
        means.append(sums[-1] / mask.sum(1))
    b, (c, r) = method.beta, means
    if name == "orpo":
        odds = [p.exp() / (1 - p.exp()) for p in means]
        pairs = -c - b * torch.sigmoid((odds[0] / odds[1]).log()).log()
    else:
        e, x, y = method.label_smoothing, b * (sums[0] - sums[1]), b * (c - r) - method.simpo_gamma
        smooth = lambda z: -(1 - e) * torch.sigmoid(z).log() - e * torch.sigmoid(-z).log()  # noqa: E731
        pairs = {
            "sigmoid": lambda: smooth(x),
            "hinge": lambda: (1 - x).clamp(min=0),
            "ipo": lambda: (c - r - 1 / (2 * b)) ** 2,
            "simpo": lambda: smooth(y),
        }[method.loss_type]()
        alpha = {None: 0 if method.loss_type == "simpo" else 1}.get(method.cpo_alpha, method.cpo_alpha)
        pairs = pairs - alpha * c
    formula = pairs.mean()
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(formula, list(policy.parameters()))])
    loss, found = trainer.loss(batch)
    loss.backward()
    flat = torch.cat([p.grad.flatten() for p in policy.parameters()])
    torch.testing.assert_close(loss.double(), formula, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(flat, expected.float(), rtol=1e-3, atol=1e-5)
    assert found["loss/nll"].compute() == pytest.approx(-c.mean().item(), rel=1e-4)
    side = sums if name == "cpo" and method.loss_type in ("sigmoid", "hinge") else means
    assert found["logps/chosen"].compute() == pytest.approx(side[0].mean().item(), rel=1e-4)
    assert found["rewards/margins"].compute() == pytest.approx(b * (side[0] - side[1]).mean().item(), abs=1e-5)


def test_a_long_output_has_the_weight_of_a_short_one(tmp_path: Path) -> None:
    """TRL averages the NLL over the tokens of a batch; here its mean over two pairs is that of both losses."""
    trainer = collected("orpo", tmp_path)
    batch = trainer.store.experience
    lengths = batch.chosen.response_mask.sum(1)
    assert len({*lengths.tolist()}) > 1
    single = [trainer.loss(batch.select(torch.tensor([row])))[1]["loss/nll"].compute() for row in range(len(batch))]
    assert trainer.loss(batch)[1]["loss/nll"].compute() == pytest.approx(sum(single) / len(single), rel=1e-5)
    assert batch.weight == len(batch)


def test_there_is_no_reference(tmp_path: Path) -> None:
    trainer = collected("orpo", tmp_path)
    assert trainer.models.reference is None
    with pytest.raises(AttributeError, match="keeps no reference"):
        _ = trainer.reference


def test_the_weight_of_the_likelihood_is_that_of_the_papers() -> None:
    for loss_type, weight in (("sigmoid", 1.0), ("hinge", 1.0), ("ipo", 1.0), ("simpo", 0.0)):
        config = trainkit.default_config("cpo").evolve(method={"loss_type": loss_type})
        assert config.method.nll_weight == weight
        assert config.evolve(method={"cpo_alpha": 0.25}).method.nll_weight == 0.25


@table(
    "changes, message",
    [
        (
            {"method__loss_type": "hinge", "method__label_smoothing": 0.1},
            "label_smoothing is for loss_type 'sigmoid'",
        ),
        ({"method__loss_type": "ipo", "method__label_smoothing": 0.1}, "'simpo', not 'ipo'"),
        ({"method__simpo_gamma": 1.0}, "simpo_gamma is for loss_type 'simpo', not 'sigmoid'; remove it"),
        ({"method__label_smoothing": 0.5}, "label_smoothing: should be less than 0.5"),
        ({"method__loss_type": "kto_pair"}, "loss_type: should be 'sigmoid', 'hinge', 'ipo' or 'simpo'"),
    ],
)
def test_settings_that_do_not_fit_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny_trainer("cpo", tmp_path, **changes)


# ----------------------------------------------------------------------------------------------------- it learns
