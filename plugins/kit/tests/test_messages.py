"""What the kit says about a failure: the field, the row and the token, the probe, and what usually looks like it."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from researchers import dr_grpo, remax
from sound import vapo
from trainkit.metrics import Mean
from trainkit.testing import Declaration, Effect
from trainkit_kit import ConformanceError, check_trainer
from trainkit_kit.checks.tools import as_it_was, place_of, require_close
from trainkit_kit.conformance import all_checks
from trainkit_kit.failures import CheckError

Grpo: Any = dr_grpo.DrGRPOTrainer


def failure(check: str, name: str = "_test_dr_grpo") -> str:
    """The report of a check that fails."""
    with pytest.raises(ConformanceError) as caught:
        check_trainer(name, only=[check])
    return str(caught.value)


def test_every_check_of_an_algorithm_says_what_usually_looks_like_its_failure() -> None:
    assert [each.name for each in all_checks().values() if each.kind == "trainer" and not each.causes] == []


def test_where_tensors_differ_is_said_by_row_and_token() -> None:
    mask = torch.tensor([[False, True, True], [False, False, True]])
    one, other = torch.zeros(2, 3), torch.tensor([[0.0, 0.0, 0.5], [0.0, 0.0, -0.25]])
    said = r"values differ by up to 0\.5 in row 0 at response token 1 of 2 \(counted from 0\), and in 2 of 6 elements"
    with pytest.raises(CheckError, match=said):
        require_close(one, other, "values", tokens=mask)
    with pytest.raises(CheckError, match=r"up to inf in row 1, column 0, and in 1 of 6 elements"):
        require_close(one, one.index_put((torch.tensor(1), torch.tensor(0)), torch.tensor(math.nan)), "values")
    assert place_of(torch.tensor([0.0, 2.0, 1.0])) == " in row 1"
    assert place_of(torch.tensor(1.0)) == ""
    require_close(torch.tensor([math.nan, math.inf]), torch.tensor([math.nan, math.inf]), "values")


def test_the_field_is_named_that_leaks_from_under_the_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dr. GRPO with a factor where a mask should be."""

    def loss(self: Any, batch: Any) -> Any:
        mask = batch.sequences.response_mask
        ratio = (self.policy(batch.sequences).logprobs - batch.old_logprobs).exp()
        return -(batch.advantages.unsqueeze(1) * ratio * mask).sum() / len(batch), {}

    monkeypatch.setattr(Grpo, "loss", loss)
    said = failure("mask_law")
    assert "it leaks from the field old_logprobs" in said
    assert "usual causes: `x * mask` instead of `masked_fill`" in said


def test_the_row_the_token_and_the_parameter_are_named_where_something_else_is_learnt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def loss(self: Any, batch: Any) -> Any:
        return -(batch.advantages.unsqueeze(1) * self.policy(batch.sequences).logprobs).mean(), {}

    monkeypatch.setattr(Grpo, "loss", loss)
    said = failure("padding_amount")
    assert "gradients without and with five more columns of padding differ by up to" in said
    assert "parameters, most in model.transformer." in said
    assert "what is learnt from response token 0 of " in said


def test_the_probe_is_named_for_which_a_loss_is_not_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Grpo.loss

    def loss(self: Any, batch: Any) -> Any:
        found, metrics = honest(self, batch)
        return (found / 0 if self.config.train.microbatch_size == 3 else found), metrics

    monkeypatch.setattr(Grpo, "loss", loss)
    said = failure("micro_batches")
    assert "is not finite" in said or "is inf" in said or "is nan" in said
    assert "; the probe is a trainer with train.microbatch_size = 3, train.max_grad_norm = None" in said


def test_the_term_is_named_that_makes_the_effect_of_another_setting_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """The formula by which `cliprange` is declared here has no critic."""
    declared = Declaration(effects={"cliprange": Effect(relative_loss, equals={0.1: 1.0, 0.3: 1.0})})
    monkeypatch.setattr(vapo, "KIT", declared)
    said = failure("effects_as_declared", "_sound_vapo")
    assert (
        ". With method.vf_coef = 0 it is right: the fault is in the term of method.vf_coef. From 0.1 to 0.3; " in said
    )
    assert "; what is learnt from response token " in said


def test_the_field_the_row_and_the_token_are_named_in_which_a_setting_changes_something(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vapo, "KIT", Declaration(effects={"alpha": Effect("loss", equals={0.5: 0.0, 2.0: 0.0})}))
    said = failure("effects_as_declared", "_sound_vapo")
    assert re.search(
        r"From 0\.5 to 2\.0, the experience changes most in advantages in row \d+ at response token \d", said
    )


def test_all_faults_of_docstrings_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Grpo.loss, "__doc__", None)
    monkeypatch.setattr(Grpo, "__doc__", None)
    monkeypatch.setattr(dr_grpo.DrGRPOConfig.model_fields["k"], "description", None)
    assert (
        "the trainer DrGRPOTrainer has no docstring; loss of DrGRPOTrainer has no docstring; "
        "method.k has no docstring below it" in failure("docstrings")
    )


def test_an_algorithm_that_samples_more_than_it_trains_on_is_told_how_to_declare_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remax, "KIT", Declaration())
    said = failure("given_responses", "_test_remax")
    assert "(sequences.input_ids) have different shapes, (16, 10) and (32, 10)" in said
    assert "ReMaxTrainer overrides make_experience: if it samples more than what is trained on" in said
    assert 'KIT = Declaration(expected_failures={"given_responses": "why"})' in said
    declared = Declaration(expected_failures={"given_responses": "no greedy response is given", "learns": "it does"})
    monkeypatch.setattr(remax, "KIT", declared)
    report = check_trainer("_test_remax", only=["given_responses"])
    assert [(each.outcome, each.seen) for each in report.results] == [("expected", "no greedy response is given")]
    with pytest.raises(ConformanceError, match="learns: it passes now; remove it from expected_failures"):
        check_trainer("_test_remax", only=["learns"])


@torch.no_grad()
def relative_loss(trainer: Any) -> float:
    """Return 1 + the loss, less the surrogate and what is imitated, which a critic makes larger."""
    trainer.unwrapped.eval()
    batch, method = trainer.store.experience.to(trainer.accelerator.device), trainer.method
    mask, new = batch.sequences.response_mask, trainer.policy(batch.sequences)
    due = -batch.advantages - method.imitation * new.logprobs * batch.imitated
    return float(1 + trainer.loss(batch)[0] - due[mask].mean())


class Counted:
    """A trainer with a state that every loss changes."""

    def __init__(self) -> None:
        self.state = {"seen": [0]}

    def state_dict(self) -> dict[str, Any]:
        """The state itself, as many algorithms return it."""
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the state."""
        self.state = state


def test_a_measurement_leaves_the_state_of_an_algorithm_as_it_was() -> None:
    trainer = Counted()
    with as_it_was(trainer):
        trainer.state["seen"].append(1)
        trainer.state = {"seen": [2]}
    assert trainer.state == {"seen": [0]}


@pytest.mark.slow
def test_a_state_that_the_loss_changes_raises_no_false_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss is scaled by how many steps were prepared, which is saved: two measurements on one trainer differ."""

    def prepare(self: Any, batch: Any) -> Any:
        self.prepared += 1
        return replace(batch, advantages=batch.advantages / self.prepared)

    monkeypatch.setattr(Grpo, "remembers", {"prepared": int}, raising=False)
    monkeypatch.setattr(Grpo, "prepare_step", prepare)
    check_trainer("_test_dr_grpo", only=["mask_law", "padding_amount", "padding_side", "row_order", "micro_batches"])


def test_a_term_that_is_not_finite_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Grpo.loss

    def loss(self: Any, batch: Any) -> Any:
        found, metrics = honest(self, batch)
        mask = batch.sequences.response_mask
        term: Tensor = batch.advantages.std() / batch.advantages.abs().max()
        return found + term, {**metrics, "loss/term": Mean.of(term.expand(mask.shape), mask)}

    monkeypatch.setattr(Grpo, "loss", loss)
    assert "with equal scores the loss is nan; so are the metrics loss/term" in failure("finite_at_extremes")
