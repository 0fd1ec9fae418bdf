"""The preference losses: golden numbers and closed forms; experience, steps, references; and that they learn."""

from __future__ import annotations

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
from trainkit.models.adapters import switch_off, switch_on
from trainkit.testing import tiny_gpt2
from trainkit.testing.trainers import tiny_trainer
from trainkit_dpo import (
    ScoredResponses,
    best_and_worst,
    kto_pair_losses,
    robust_loss,
)
from trainkit_kit import Bandit

LOSSES = {
    "sigmoid": {},
    "smoothed": {"method__label_smoothing": 0.2},
    "hinge": {"method__loss_type": "hinge"},
    "ipo": {"method__loss_type": "ipo"},
    "ipo-sum": {"method__loss_type": "ipo", "method__ipo_length_normalize": False},
    "robust": {"method__loss_type": "robust", "method__label_smoothing": 0.2},
    "kto_pair": {"method__loss_type": "kto_pair"},
    "exo_pair": {"method__loss_type": "exo_pair", "method__label_smoothing": 0.2},
    **{
        name: {"method__loss_type": name}
        for name in ("sigmoid_norm", "nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down", "discopop", "aot")
    },
    "aot_unpaired": {"method__loss_type": "aot_unpaired", "method__label_smoothing": 0.2},
    "reference-free": {"method__reference_free": True},
}
every_loss = pytest.mark.parametrize("changes", LOSSES.values(), ids=LOSSES)
numbers = st.floats(-50, 50)
betas = st.floats(0.01, 2)


# --------------------------------------------------------------------------------------------------- golden numbers


def test_the_robust_loss_equals_the_golden_numbers() -> None:
    """Golden 10.5, β .1, ε .1: −log σ(.2) = .598139, −log σ(−.2) = .798139; (.9 · .598139 − .1 · .798139) / .8."""
    found = robust_loss(torch.tensor([2.0, -1.0, 0.0]), beta=0.1, label_smoothing=0.1)
    torch.testing.assert_close(found, torch.tensor([0.573139, 0.756897, 0.693147]), rtol=0, atol=1e-5)


def test_the_loss_of_sides_equals_the_golden_numbers() -> None:
    """Golden 10.5: both mean ratios are −.25, so z is 0, and the first is 1 − σ(.05)."""
    chosen, rejected = torch.tensor([-1.0, -4]) - torch.tensor([-1.5, -3]), torch.tensor([-1.0, 0.5])
    found = kto_pair_losses(chosen, rejected, chosen.mean(), rejected.mean(), beta=0.1)
    torch.testing.assert_close(
        torch.cat(found), torch.tensor([0.487503, 0.524979, 0.475021, 0.512497]), rtol=0, atol=1e-5
    )


# ------------------------------------------------------------------------------------------------- closed forms


def wide(*values: float) -> list[Tensor]:
    return [torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in values]


def value(x: Tensor) -> float:
    return float(x.detach())


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x)) if x > 0 else x - math.log1p(math.exp(x))


@given(numbers, betas, st.floats(0.01, 0.49))
def test_the_robust_loss_has_the_mean_of_the_loss_of_right_labels(x: float, beta: float, eps: float) -> None:
    """(1 − ε) f(x) + ε f(−x) = −log σ(βx)."""
    (margin,) = wide(x)
    mean = (1 - eps) * robust_loss(margin, beta=beta, label_smoothing=eps)
    mean = mean + eps * robust_loss(-margin, beta=beta, label_smoothing=eps)
    assert value(mean) == pytest.approx(-log_sigmoid(beta * x), rel=1e-9, abs=1e-9)


@given(numbers, numbers, numbers, numbers, betas)
def test_each_side_of_kto_pairs_is_held_against_the_others_divergence(
    chosen: float, rejected: float, chosen_kl: float, rejected_kl: float, beta: float
) -> None:
    c, r, zc, zr = wide(chosen, rejected, chosen_kl, rejected_kl)
    first, second = kto_pair_losses(c, r, zc, zr, beta=beta)
    (first + second).backward()
    assert value(first) == pytest.approx(math.exp(log_sigmoid(-beta * (chosen - max(rejected_kl, 0)))), abs=1e-12)
    assert value(second) == pytest.approx(math.exp(log_sigmoid(-beta * (max(chosen_kl, 0) - rejected))), abs=1e-12)
    assert [zc.grad, zr.grad] == [None, None], "no gradient flows into the divergences"
    assert float(c.grad) <= 0 <= float(r.grad)


# --------------------------------------------------------------------------------------- offline: pairs and reference


def collected(name: str, tmp_path: Path, moved: bool = True, **changes: Any) -> Any:
    """A trainer with one collection, whose policy is no longer the reference if ``moved``."""
    trainer = tiny_trainer(name, tmp_path, **{"train__max_grad_norm": None, **changes})
    trainer.collect()
    generator = torch.Generator().manual_seed(0)
    for parameter in trainer.unwrapped.parameters():
        if moved and parameter.requires_grad:
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    return trainer


def gradient(trainer: Any, batch: Any) -> Tensor:
    """The gradient of the loss's mean over a whole batch, flat."""
    trainer.optimizer.zero_grad()
    with torch.no_grad():
        batch = trainer.prepare_step(batch)
    trainer.loss(batch)[0].backward()
    flat = torch.cat([p.grad.flatten().clone() for p in trainer.unwrapped.parameters()])
    trainer.optimizer.zero_grad()
    return flat


@table(
    "name, changes", [*(("dpo", LOSSES[each]) for each in ("hinge", "ipo", "robust", "kto_pair")), ("online_dpo", {})]
)
def test_before_the_first_update_no_side_is_preferred(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """x = 0 exactly, also at another temperature and with dropout configured."""
    model = tiny_gpt2(10, resid_pdrop=0.5, attn_pdrop=0.5)
    trainer = collected(name, tmp_path, moved=False, model=model, rollout__temperature=0.7, **changes)
    found = trainer.update(trainer.store.experience)
    for metric in ("rewards/chosen", "rewards/rejected", "rewards/margins"):
        assert found[metric].compute() == 0.0
    assert found["rewards/accuracies"].compute() == 0.5
    loss, eps = trainer.method.loss_type, trainer.method.label_smoothing
    at_zero = {"hinge": 1.0, "ipo": 25.0, "kto_pair": 0.5}.get(loss, math.log(2))
    assert found["loss/total"].compute() == pytest.approx(at_zero, rel=1e-6), eps


@pytest.mark.slow
@every_loss
@pytest.mark.parametrize("size", [1, 3, 5])
def test_gradients_do_not_depend_on_micro_batches(changes: dict[str, Any], size: int, tmp_path: Path) -> None:
    """Law 3, for every loss: KTO's divergences are means over the step."""
    trainer = collected("dpo", tmp_path, train__microbatch_size=size, **changes)
    batch = trainer.store.experience
    batch = replace(batch, ref_chosen=1.5 * batch.ref_chosen, ref_rejected=1.5 * batch.ref_rejected)  # so z is large
    whole, seen = gradient(trainer, batch), []
    trainer.optimizer.optimizer.register_step_pre_hook(
        lambda *_: seen.append(torch.cat([p.grad.flatten().clone() for p in trainer.unwrapped.parameters()]))
    )
    trainer.update(batch)
    torch.testing.assert_close(seen[0], whole, rtol=1e-4, atol=1e-6 * float(whole.abs().max().clamp(min=1)))


@table("changes", LOSSES.values())
def test_a_step_follows_the_gradient_of_the_formula_in_float64(changes: dict[str, Any], tmp_path: Path) -> None:
    """The whole path against the equations, from two separate passes over chosen and rejected."""
    trainer = collected("dpo", tmp_path, **changes)
    batch, method, policy = trainer.store.experience, trainer.method, trainer.unwrapped
    sides = []
    for sequences in (batch.chosen, batch.rejected):
        mask = sequences.response_mask
        logits = policy.model(sequences.input_ids, attention_mask=sequences.attention_mask).logits[:, :-1].double()
        logprobs = logits.log_softmax(-1).gather(-1, sequences.input_ids[:, 1:, None]).squeeze(-1)
        ratio = logprobs - trainer.reference(sequences).logprobs[:, 1:] if trainer.needs_reference else logprobs
        total = (ratio * mask[:, 1:]).sum(1)
        normal = method.loss_type == "sigmoid_norm" or (method.loss_type == "ipo" and method.ipo_length_normalize)
        sides.append(total / mask.sum(1) if normal else total)
    c, r, b, e = *sides, method.beta, method.label_smoothing
    y = b * (c - r)
    ref = (batch.ref_chosen - batch.ref_rejected).double()
    moved = {"aot": lambda: (c - r + ref).sort().values - ref.sort().values}
    moved["aot_unpaired"] = lambda: c.sort().values - r.sort().values
    formula = {
        "sigmoid": lambda: -(1 - e) * torch.sigmoid(y).log() - e * torch.sigmoid(-y).log(),
        "hinge": lambda: (1 - y).clamp(min=0),
        "ipo": lambda: (c - r - 1 / (2 * b)) ** 2,
        "robust": lambda: (-(1 - e) * torch.sigmoid(y).log() + e * torch.sigmoid(-y).log()) / (1 - 2 * e),
        "kto_pair": lambda: (
            1
            - torch.sigmoid(b * (c - r.detach().mean().clamp(min=0))) / 2
            - torch.sigmoid(b * (c.detach().mean().clamp(min=0) - r)) / 2
        ),
        "sigmoid_norm": lambda: -torch.sigmoid(y).log(),
        "exo_pair": lambda: (
            torch.sigmoid(y) * (torch.sigmoid(y) / (1 - e)).log() + torch.sigmoid(-y) * (torch.sigmoid(-y) / e).log()
        ),
        "nca_pair": lambda: (
            -(torch.sigmoid(b * c).log() + torch.sigmoid(-b * c).log() / 2 + torch.sigmoid(-b * r).log() / 2)
        ),
        "bco_pair": lambda: -torch.sigmoid(b * c).log() - torch.sigmoid(-b * r).log(),
        "sppo_hard": lambda: (c - 0.5 / b) ** 2 + (r + 0.5 / b) ** 2,
        "apo_zero": lambda: 1 - torch.sigmoid(b * c) + torch.sigmoid(b * r),
        "apo_down": lambda: torch.sigmoid(b * c) + 1 - torch.sigmoid(y),
        "discopop": lambda: -torch.sigmoid(-20 * y) * torch.sigmoid(y).log() + torch.sigmoid(20 * y) * (-y).exp(),
        **{
            name: lambda moved=z: -(1 - e) * torch.sigmoid(b * moved()).log() - e * torch.sigmoid(-b * moved()).log()
            for name, z in moved.items()
        },
    }[method.loss_type]().mean()
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(formula, list(policy.parameters()))])
    torch.testing.assert_close(gradient(trainer, batch), expected, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(trainer.loss(trainer.prepare_step(batch))[0].double(), formula, rtol=1e-4, atol=1e-5)


def test_ipo_by_means_and_by_sums_differ_by_the_lengths(tmp_path: Path) -> None:
    """Both are golden numbers of their own x."""
    trainer = tiny_trainer("dpo", tmp_path / "mean", method__loss_type="ipo")
    summed = tiny_trainer("dpo", tmp_path / "sum", method__loss_type="ipo", method__ipo_length_normalize=False)
    logprobs, mask = (
        torch.tensor([[0.0, -1, -2, -3], [0, -4, -2, 9]]),
        torch.tensor([[0, 1, 1, 1], [0, 1, 1, 0]]).bool(),
    )
    torch.testing.assert_close(trainer.logps(logprobs, mask), torch.tensor([-2.0, -3.0]))
    torch.testing.assert_close(summed.logps(logprobs, mask), torch.tensor([-6.0, -6.0]))


def test_the_reference_is_asked_once_per_pair_and_not_in_the_passes(tmp_path: Path) -> None:
    trainer = tiny_trainer("dpo", tmp_path, train__total_steps=6)
    trainer.models.build()
    rows, honest = [], trainer.reference.policy.forward
    trainer.reference.policy.forward = lambda sequences, **k: rows.append(len(sequences)) or honest(sequences, **k)
    trainer.learn()
    assert sum(rows) == 2 * 16
    assert trainer.progress.step == 6


def test_chosen_and_rejected_go_through_the_model_together(tmp_path: Path) -> None:
    trainer = collected("dpo", tmp_path)
    rows, honest = [], trainer.unwrapped.forward
    trainer.unwrapped.forward = lambda sequences, **k: rows.append(len(sequences)) or honest(sequences, **k)
    trainer.loss(trainer.store.experience)
    assert rows == [2 * 16]


def test_without_a_reference_none_is_made_and_rewards_are_log_probabilities(tmp_path: Path) -> None:
    trainer = collected("dpo", tmp_path, method__reference_free=True, method__beta=0.5)
    _, found = trainer.loss(trainer.store.experience)
    assert found["rewards/chosen"].compute() == pytest.approx(0.5 * found["logps/chosen"].compute())
    assert trainer.models.reference is None
    with pytest.raises(AttributeError, match="keeps no reference"):
        _ = trainer.reference


def test_with_an_adapter_the_reference_is_the_model_without_it(tmp_path: Path) -> None:
    trainer = tiny_trainer("dpo", tmp_path, model__peft_config={"r": 4}, optimizer__lr=1e-2)
    trainer.models.build()
    whole = sum(p.numel() for p in trainer.unwrapped.parameters())
    own = {p.data_ptr() for p in trainer.unwrapped.parameters()}
    copied = [p for p in trainer.reference.policy.parameters() if p.data_ptr() not in own]
    assert sum(p.numel() for p in copied) < 0.2 * whole
    trainer.learn()
    both = trainer.make_experience(trainer.pipeline.rows).both
    switch_off(trainer.unwrapped.model)
    expected = trainer.unwrapped(both).logprobs
    switch_on(trainer.unwrapped.model)
    assert torch.equal(trainer.reference(both).logprobs, expected)
    assert not torch.equal(trainer.unwrapped(both).logprobs, expected)


@table(
    "changes, message",
    [
        ({"method__loss_type": "hinge", "method__label_smoothing": 0.1}, "label_smoothing is for loss_type 'sigmoid'"),
        ({"method__loss_type": "exo_pair"}, "'exo_pair' needs label_smoothing above 0"),
        ({"method__loss_type": "nca_pair", "method__reference_free": True}, "set reference_free to false"),
        ({"method__loss_type": "robust"}, "'robust' without label_smoothing is 'sigmoid'"),
        ({"method__ipo_length_normalize": False}, "ipo_length_normalize is for loss_type 'ipo', not 'sigmoid'"),
        ({"method__loss_type": "kto_pair", "method__reference_free": True}, "set reference_free to false"),
        ({"method__label_smoothing": 0.5}, "label_smoothing: should be less than 0.5"),
        ({"method__loss_type": "dpo"}, "loss_type: should be 'sigmoid', 'hinge', 'ipo', 'robust', 'kto_pair', "),
    ],
)
def test_settings_that_do_not_fit_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny_trainer("dpo", tmp_path, **changes)


# ------------------------------------------------------------------------------------------- online: best and worst


def scored(scores: list[float], responses: list[list[int]] | None = None) -> ScoredResponses:
    responses = responses or [[index % 8] for index in range(len(scores))]
    sequences = Sequences.from_lists([[1]] * len(scores), responses)
    return ScoredResponses(sequences, torch.tensor(scores), torch.zeros(len(scores)))


def test_the_first_best_and_the_first_worst_make_the_pair() -> None:
    """A3.02: three groups of four, with ties for the best, for the worst, and for all."""
    best, worst, decided = best_and_worst(scored([1, 3, 3, 2, 5, 0, 5, 0, 7, 7, 7, 7]), 4)
    assert best.tolist() == [1, 4, 8]
    assert worst.tolist() == [0, 5, 8]
    assert decided.tolist() == [True, True, False]


def test_one_response_with_two_scores_is_no_pair() -> None:
    """A reward with noise; the same ids behind the mask or not."""
    x = scored([1, 2, 1, 2], [[3, 4], [3, 4], [3, 4], [3, 5]])
    assert best_and_worst(x, 2)[2].tolist() == [False, True]
    ids = torch.where(x.sequences.attention_mask, x.sequences.input_ids, 7)
    assert best_and_worst(replace(x, sequences=replace(x.sequences, input_ids=ids)), 2)[2].tolist() == [False, True]


def test_a_response_and_its_beginning_are_two() -> None:
    """What the one has more is the token 0, as which what is masked counts too."""
    assert best_and_worst(scored([1, 2, 1, 2], [[5], [5, 0], [5, 0], [5]]), 2)[2].tolist() == [True, True]


@table("name", ["online_dpo", "best_of_k"])
def test_pairs_are_the_sampled_ids_of_the_best_and_the_worst(name: str, tmp_path: Path) -> None:
    """Chunks that cut through the groups of four."""
    trainer = tiny_trainer(name, tmp_path, method__k=4, rollout__num_rollouts=16, rollout__batch_size=6)
    trainer.reward_fn = lambda outputs, **_: [float(len(output) + output.count("a") / 10) for output in outputs]
    trainer.collect()
    sampled = [row for rollouts in trainer.collector.collection.rollouts for row in rollouts.responses]
    texts = [text for rollouts in trainer.collector.collection.rollouts for text in rollouts.outputs]
    scores = torch.tensor(trainer.reward_fn(texts)).view(4, 4)
    experience = trainer.store.experience
    sides = {"online_dpo": ("chosen", "rejected"), "best_of_k": ("sequences",)}[name]
    for side, at in zip(sides, (scores.argmax(1), scores.argmin(1)), strict=False):
        for group, row in enumerate(getattr(experience, side).responses):
            assert torch.equal(row, sampled[4 * group + int(at[group])])
    assert len(experience) == 4


@table("name", ["online_dpo", "best_of_k"])
def test_ties_have_no_part_in_the_gradient(name: str, tmp_path: Path) -> None:
    trainer = collected(name, tmp_path, method__k=2)
    batch = trainer.store.experience
    decided = torch.arange(len(batch)) % 3 > 0
    marked, alone = (
        replace(batch, decided=decided),
        replace(batch, decided=torch.ones_like(decided)).select(decided.nonzero()[:, 0]),
    )
    assert float(marked.weight) == float(alone.weight) == float(decided.sum())
    torch.testing.assert_close(gradient(trainer, marked), gradient(trainer, alone), rtol=1e-4, atol=1e-7)


@pytest.mark.daily(name=("best_of_k",))
@pytest.mark.parametrize("name", ["online_dpo", "best_of_k"])
def test_a_step_without_a_preference_is_left_out(name: str, tmp_path: Path) -> None:
    """It counts, the schedule goes on, and neither weights nor weight decay move anything."""
    trainer = tiny_trainer(name, tmp_path, optimizer__weight_decay=0.5, train__total_steps=4)
    trainer.reward_fn = lambda outputs, **_: [0.9] * len(outputs)
    trainer.models.build()
    before = {key: tensor.clone() for key, tensor in trainer.unwrapped.state_dict().items()}
    trainer.collect()
    assert trainer.update(trainer.store.experience)["train/skipped"].compute() == 1
    assert trainer.recorder.pending["rollout/ties"].compute() == 1
    trainer.learn()
    assert trainer.progress.step == 4
    assert all(torch.equal(before[key], tensor) for key, tensor in trainer.unwrapped.state_dict().items())


@pytest.mark.daily(name=("online_dpo",))
@pytest.mark.parametrize("name", ["online_dpo", "best_of_k"])
def test_steps_are_counted_in_pairs(name: str, tmp_path: Path) -> None:
    """Eight prompts, twice, four responses each: 4 collections of 16 responses make 4 pairs, in batches of 4."""
    trainer = tiny_trainer(
        name,
        tmp_path,
        method__k=4,
        rollout__num_rollouts=16,
        train__batch_size=4,
        train__epochs=2,
        train__total_steps=None,
    )
    assert trainer.total_steps == 4
    trainer.learn()
    assert (trainer.progress.step, trainer.progress.collection, trainer.progress.samples) == (4, 3, 16)


@table("name", ["online_dpo", "best_of_k"])
def test_step_takes_whole_groups(name: str, tmp_path: Path) -> None:
    trainer = tiny_trainer(name, tmp_path, method__k=2)
    rollouts = trainer.generate(["a"] * 4)
    found = trainer.step(rollouts.queries, rollouts.responses, [1.0, 2.0, 4.0, 3.0])
    assert found["reward/best"] == 3.0
    with pytest.raises(DataError, match="2 responses of each prompt"):
        trainer.step(rollouts.queries[:3], rollouts.responses[:3], [1.0, 2.0, 3.0])
    with pytest.raises(DataError, match="2 responses of each prompt, one after the other; query 3 differs from query"):
        trainer.step(["a", "a", "a", "b"], rollouts.responses, [1.0, 2.0, 4.0, 3.0])


def test_the_loss_of_best_of_k_is_the_likelihood_of_whole_responses(tmp_path: Path) -> None:
    """A3.06: sums over tokens, a mean over responses."""
    trainer = collected("best_of_k", tmp_path)
    batch = trainer.store.experience
    logprobs = trainer.unwrapped(batch.sequences).logprobs
    loss, found = trainer.loss(replace(batch, decided=torch.ones(len(batch), dtype=torch.bool)))
    assert value(loss) == pytest.approx(-value(logprobs.sum(1).mean()), rel=1e-5)
    assert found["logps/best"].compute() == pytest.approx(-value(loss), rel=1e-5)


# ----------------------------------------------------------------------------------------------------- it learns


@pytest.mark.slow
def test_it_ends_where_dpo_says_on_a_bandit_whose_preferences_follow_bradley_and_terry(tmp_path: Path) -> None:
    """With pairs drawn at P(y ≻ y') = σ(r(y) − r(y')) the optimum is π* ∝ π_ref · exp(r / β)."""
    bandit = Bandit()
    letters, rewards = bandit.responses, 4 * bandit.rewards
    beta, generator = 1.0, torch.Generator().manual_seed(0)
    pairs = []
    for p, prompt in enumerate(bandit.prompts):
        for a, b in torch.combinations(torch.arange(len(letters))).tolist():
            share = torch.sigmoid(rewards[p, a] - rewards[p, b])
            for u in torch.rand(20, generator=generator).tolist():
                chosen, rejected = (a, b) if u < share else (b, a)
                pairs.append({"prompt": prompt, "chosen": letters[chosen], "rejected": letters[rejected]})
    trainer = trainkit.train(
        bandit.arguments["model_path"],
        samples=pairs,
        tokenizer=bandit.tokenizer,
        config={
            "method": {"name": "dpo", "beta": beta},
            "optimizer": {"lr": 3e-3},
            "scheduler": {"name": "linear"},
            "train": {"batch_size": 560, "epochs": 40, "run_dir": str(tmp_path), "trackers": []},
        },
    )
    policy, reference = bandit.logprobs(trainer.unwrapped.model), bandit.logprobs(trainer.reference.policy.model)
    optimum = (reference + rewards / beta).log_softmax(-1)

    def off(found: Tensor) -> float:
        return float((optimum.exp() * (optimum - found.log_softmax(-1))).sum(-1).mean())

    assert off(reference) > 0.2
    assert off(policy) < 0.05
