"""GRPO's own mathematics: golden numbers of every variant, gradients, what is refused, and that it learns."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import create_model
from torch import Tensor

import trainkit
from tables import table
from trainkit import Sequences
from trainkit.errors import ConfigError, DataError, RewardError
from trainkit.models import TokenOutputs
from trainkit.plugins import registry
from trainkit.rollouts import Turn
from trainkit.testing.trainers import tiny_trainer
from trainkit_grpo import GRPOBatch, GRPORollouts, GRPORows, GRPOTrainer
from trainkit_kit import Bandit, check_trainer

VARIANTS: dict[str, dict[str, Any]] = {
    "grpo": {"average": "responses", "kl_coef": 0.04},
    "dr_grpo": {"scale": "none", "average": "constant"},
    "dapo": {"cliprange_high": 0.28, "dynamic_sampling": True},
    "gspo": {"average": "responses", "ratio_level": "sequence", "cliprange": 3e-4, "cliprange_high": 4e-4},
    "cispo": {"surrogate": "cispo", "cliprange": 1.0, "cliprange_high": 4.0},
    "batch": {"scale": "batch"},
}
"""Settings of the published algorithms, as in the README, and the scale that none of them has."""


def trainer_of(tmp_path: Path, **changes: Any) -> Any:
    """A tiny trainer; settings of the method by their names, others with their section."""
    arguments = changes.pop("arguments", {})
    named = {key if "__" in key else f"method__{key}": value for key, value in changes.items()}
    return tiny_trainer("grpo", tmp_path, arguments=arguments, **named)


# ------------------------------------------------------------------------------------------------------- advantages


def advantages_of(tmp_path: Path, scores: list[float], **changes: Any) -> Tensor:
    """The advantages of groups of three."""
    trainer = trainer_of(tmp_path, group_size=3, rollout__num_rollouts=15, **changes)
    sequences = Sequences.from_lists([[1]] * len(scores), [[2]] * len(scores))
    zeros = torch.zeros(len(scores), 2)
    found: Tensor = trainer.prepare_experience(
        GRPORollouts(sequences, zeros, zeros, torch.tensor(scores), zeros + 1)
    ).advantages
    return found


SCALES = {
    # 1, 2, 3 have mean 2 and std 1; 0, 0, 3 have mean 1 and std √3
    "group": [-1, 0, 1, -(3**-0.5), -(3**-0.5), 2 * 3**-0.5],
    "none": [-1, 0, 1, -1, -1, 2],
    # all six have mean 3/2 and squares of deviations .25 .25 2.25 2.25 2.25 2.25, so std = √(9.5/5)
    "batch": [x / 1.9**0.5 for x in (-1, 0, 1, -1, -1, 2)],
}


@table("scale, expected", SCALES.items())
def test_advantages_equal_the_golden_numbers(scale: str, expected: list[float], tmp_path: Path) -> None:
    found = advantages_of(tmp_path, [1.0, 2.0, 3.0, 0.0, 0.0, 3.0], scale=scale)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float32), atol=1e-5, rtol=0)


@table("scale", SCALES)
@table("score", [0.9, 0.0, -1e8])
def test_a_constant_group_has_advantages_of_exactly_zero(tmp_path: Path, score: float, scale: str) -> None:
    """In float32, the mean of three times 0.9 is not exactly 0.9."""
    assert advantages_of(tmp_path, [score] * 3, scale=scale).tolist() == [0.0] * 3


def test_several_rewards_are_scaled_one_by_one(tmp_path: Path) -> None:
    """The second reward has the advantages 0, 0, 0, 1/√3, −2/√3, 1/√3; the weighted sum has squares of 5.5 in all."""
    trainer = trainer_of(tmp_path, group_size=3, rollout__num_rollouts=6, reward_weights={"reward": 1.0, "b": 0.5})
    rollouts = trainer.sample([{"prompt": prompt} for prompt in "aaabbb"])
    scores, second = [1.0, 2.0, 3.0, 0.0, 0.0, 3.0], [7.0, 7.0, 7.0, 1.0, 0.0, 1.0]
    judged = [{"reward": one, "b": other} for one, other in zip(scores, second, strict=True)]
    given = replace(rollouts, judged=judged)
    made = trainer.experience(given, torch.tensor(scores))
    made = GRPORollouts(**{**made.parts(), "rewards": made.rewards.double()})
    made = replace(made, scores=made.scores.double())
    expected = [x / 1.1**0.5 for x in (-1, 0, 1, -0.5 / 3**0.5, -2 / 3**0.5, 2.5 / 3**0.5)]
    found = trainer.prepare_experience(made).advantages
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), atol=4e-6, rtol=0)
    same = replace(rollouts, judged=[{**each, "b": 2.0} for each in judged])
    assert trainer.keep(same, torch.zeros(6)).tolist() == [True] * 6, "the scores differ"
    equal = replace(rollouts, judged=[{"reward": 0.0, "b": float(row == 1)} for row in range(6)])
    assert trainer.keep(equal, torch.zeros(6)).tolist() == [True] * 3 + [False] * 3
    for wrong in (None, math.nan, "x"):
        with pytest.raises(
            RewardError, match=r"method.reward_weights has 'b', which is .* should return a finite number"
        ):
            trainer.experience(
                replace(rollouts, judged=[{**each, "b": wrong} for each in judged]), torch.tensor(scores)
            )


def test_a_run_learns_from_what_the_reward_function_returns_besides(tmp_path: Path) -> None:
    def score(outputs: list[str], **_: Any) -> dict[str, list[float]]:
        return {"score": [0.0] * len(outputs), "a": [float(output.count("a")) for output in outputs]}

    weights = {"reward_weights": {"a": 1.0}, "optimizer__lr": 1e-2, "train__total_steps": 20}
    trainer = trainer_of(tmp_path, arguments={"reward_fn": score}, **weights)
    before = sum(output.count("a") for output in trainer.generate(["b"] * 64).outputs)
    trainer.learn()
    assert sum(output.count("a") for output in trainer.generate(["b"] * 64).outputs) > 2 * before


@pytest.mark.daily(variant=("dr_grpo",))
@pytest.mark.parametrize("variant", ["dr_grpo", "gspo", "cispo", "batch"])
def test_a_constant_reward_moves_nothing(variant: str, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, **VARIANTS[variant])
    trainer.reward_fn = lambda outputs, **_: [0.9] * len(outputs)
    trainer.models.build()
    before = {name: tensor.clone() for name, tensor in trainer.unwrapped.state_dict().items()}
    trainer.learn()
    assert all(torch.equal(before[name], tensor) for name, tensor in trainer.unwrapped.state_dict().items())


def test_rewards_of_turns_are_summed(tmp_path: Path) -> None:
    """Two games, and two turns in each: rewards 1 + 2 and 0 + 1 are 3 and 1, so A = ±1/√2 (mean 2, std √2)."""

    class Game:
        def __init__(self, row: Any) -> None:
            self.turn = 0

        def step(self, output: str) -> Turn:
            self.turn += 1
            return Turn("h", float(self.turn), done=self.turn == 2)

    arguments = {"environment": Game, "reward_fn": None}
    trainer = trainer_of(tmp_path, arguments=arguments, group_size=2, scale="group")
    rollouts = trainer.play(["a", "a"])
    assert not bool((rollouts.sequences.response_mask.cumsum(1) == 2).all()), "rows have holes"
    dense = trainer.score(rollouts) - torch.tensor([[0.0], [1.0]]) * (trainer.score(rollouts) > 0)
    batch = trainer.prepare_experience(trainer.experience(rollouts, dense))
    torch.testing.assert_close(batch.advantages, torch.tensor([0.5**0.5, -(0.5**0.5)]), atol=1e-5, rtol=0)


# ----------------------------------------------------------------------------------------------------------- losses

R = (1.5, 0.5, 1.1, 0.9, 1.3)
"""The ratios of two responses of 3 and 2 tokens, whose advantages are 2 and −1; their old log π are −1 throughout."""
MASK = torch.tensor([[False, True, True, True], [False, True, True, False]])
CLIP = (-2.4, -1.0, -2.2, 0.9, 1.3)
"""−A·ρ, or −A·clip(ρ, .8, 1.2) if that is larger: −2·1.2 and −2·.5, −2·1.1; .9 and 1.3, as −A·clip = .9, 1.2."""
HIGH = (-2.8, -1.0, -2.2, 0.9, 1.3)
"""The same with ε_high = .4: −2·1.4 for the first."""
S = ((1.5 * 0.5 * 1.1) ** (1 / 3), (0.9 * 1.3) ** 0.5)
"""Geometric means of the ratios: ∛.825 = .937889 and √1.17 = 1.081665."""
LOG = tuple(math.log(ratio) - 1 for ratio in R)
W = (1.4, 0.8, 1.1, 0.9, 1.3)
"""The ratios clipped to [.8, 1.4]."""
K3 = tuple(1 / ratio - 1 + math.log(ratio) for ratio in R)
"""k3 with the old policy as the reference: exp(−log ρ) − 1 + log ρ."""
LOSSES: dict[str, tuple[dict[str, Any], float]] = {
    "tokens": ({}, sum(CLIP) / 5),
    "responses": ({"average": "responses"}, (sum(CLIP[:3]) / 3 + sum(CLIP[3:]) / 2) / 2),
    "constant": ({"average": "constant"}, (sum(CLIP[:3]) + sum(CLIP[3:])) / 2 / 6),  # max_new_tokens is 6
    "high": ({"cliprange_high": 0.4}, sum(HIGH) / 5),
    # clip(s, .95, 1.05): s_1 = .937889 is below it, but A > 0, and s_2 = 1.081665 is above it, but A < 0: unclipped
    "sequence": ({"average": "responses", "ratio_level": "sequence", "cliprange": 0.05}, (-2 * S[0] + S[1]) / 2),
    "cispo": (
        {"surrogate": "cispo", "cliprange_high": 0.4},
        (sum(-w * 2 * log for w, log in zip(W[:3], LOG[:3], strict=True)) + W[3] * LOG[3] + W[4] * LOG[4]) / 5,
    ),
    "kl": ({"kl_coef": 0.5}, (sum(CLIP) + 0.5 * sum(K3)) / 5),
    "kl of responses": (
        {"kl_coef": 0.5, "average": "responses"},
        ((sum(CLIP[:3]) + 0.5 * sum(K3[:3])) / 3 + (sum(CLIP[3:]) + 0.5 * sum(K3[3:])) / 2) / 2,
    ),
}


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Any, GRPOBatch, Tensor]]:
    """``given(path, **settings)``: a trainer whose policy returns the log-probabilities [B, T], a batch, and these."""

    def made(place: Path, advantages: tuple[float, ...] = (2.0, -1.0), **settings: Any) -> Any:
        trainer, double = trainer_of(place, **settings), torch.float64
        logprobs = torch.zeros(2, 4, dtype=double)
        logprobs[MASK] = torch.tensor(LOG, dtype=double)
        logprobs.requires_grad_()
        monkeypatch.setattr(
            GRPOTrainer, "policy", lambda self, _: TokenOutputs(torch.where(MASK, logprobs, 0.0)), raising=False
        )
        old = torch.full((2, 4), float("nan"), dtype=double).masked_fill(MASK, -1.0)  # what is masked does not matter
        sequences = Sequences.from_lists([[1], [1]], [[1, 2, 3], [1, 2]])
        kind = GRPOBatch if trainer.method.average == "tokens" else GRPORows
        ones = torch.ones(2, 4, dtype=double)
        return trainer, kind(sequences, old, old, torch.tensor(advantages, dtype=double), ones), logprobs

    return made


@table("case", LOSSES)
def test_losses_equal_the_golden_numbers(case: str, given: Any, tmp_path: Path) -> None:
    settings, expected = LOSSES[case]
    trainer, batch, _ = given(tmp_path, **settings)
    loss, found = trainer.loss(batch)
    assert loss.item() == pytest.approx(expected, abs=1e-12)
    assert float(batch.weight) == (5 if trainer.method.average == "tokens" else 2)
    if case == "kl":
        assert found["policy/kl_per_token"].compute() == pytest.approx(sum(K3) / 5)


def test_golden_numbers_are_those_written_out(given: Any, tmp_path: Path) -> None:
    """The sums above, on paper: (−5.6 + 2.2)/5; (−5.6/3 + 1.1)/2; −3.4/12; −3.8/5; (−2·.937889 + 1.081665)/2."""
    written = {"tokens": -0.68, "responses": -0.383333, "constant": -0.283333, "high": -0.76, "sequence": -0.397056}
    assert {case: round(LOSSES[case][1], 6) for case in written} == written


def test_the_ratio_of_a_response_is_clipped(given: Any, tmp_path: Path) -> None:
    """With A = −2, 1: s_1 = .938 is clipped to .99, and s_2 = 1.082 to 1.02; both have no gradient."""
    settings = {"average": "responses", "ratio_level": "sequence", "cliprange": 0.01, "cliprange_high": 0.02}
    trainer, batch, logprobs = given(tmp_path, (-2.0, 1.0), **settings)
    loss, found = trainer.loss(batch)
    assert loss.item() == pytest.approx((2 * 0.99 - 1.02) / 2)
    assert found["policy/clipfrac"].compute() == 1
    assert not torch.autograd.grad(loss, logprobs)[0].any()


def test_clipped_tokens_have_a_gradient_with_cispo_alone(given: Any, tmp_path: Path) -> None:
    """The first token has A > 0 and ρ = 1.5 > 1 + ε: no gradient, or that of −w A log π / 5, with w = 1.2 and A = 2."""
    slopes = {}
    for surrogate in ("clip", "cispo"):
        trainer, batch, logprobs = given(tmp_path / surrogate, surrogate=surrogate)
        loss, found = trainer.loss(batch)
        slopes[surrogate] = float(torch.autograd.grad(loss, logprobs)[0][0, 1])
        # clip: only the first token has no gradient; cispo: ratios 1.5, .5 and 1.3 are outside of [.8, 1.2]
        assert found["policy/clipfrac"].compute() == pytest.approx({"clip": 1 / 5, "cispo": 3 / 5}[surrogate])
    assert slopes == pytest.approx({"clip": 0.0, "cispo": -1.2 * 2 / 5})


@table("case", [case for case in LOSSES if case != "cispo"])
def test_gradients_agree_with_finite_differences(case: str, given: Any, tmp_path: Path) -> None:
    trainer, batch, logprobs = given(tmp_path, **LOSSES[case][0])
    (found,) = torch.autograd.grad(trainer.loss(batch)[0], logprobs)
    for row, column in MASK.nonzero().tolist():
        ends = []
        for step in (1e-6, -1e-6):
            with torch.no_grad():
                logprobs[row, column] += step
                ends.append(float(trainer.loss(batch)[0]))
                logprobs[row, column] -= step
        assert float(found[row, column]) == pytest.approx((ends[0] - ends[1]) / 2e-6, abs=1e-8)
    assert not found[~MASK].any()


def test_the_gradient_of_cispo_is_the_weight_times_that_of_log_pi(given: Any, tmp_path: Path) -> None:
    """Its weight is detached, so differences of the loss say something else: −w A / 5 at every token."""
    trainer, batch, logprobs = given(tmp_path, **LOSSES["cispo"][0])
    (found,) = torch.autograd.grad(trainer.loss(batch)[0], logprobs)
    expected = [-w * a / 5 for w, a in zip(W, (2, 2, 2, -1, -1), strict=True)]
    torch.testing.assert_close(found[MASK], torch.tensor(expected, dtype=torch.float64))


def test_a_cliprange_of_one_has_no_lower_limit(given: Any, tmp_path: Path) -> None:
    trainer, batch, _ = given(tmp_path, surrogate="cispo", cliprange=1.0, cliprange_high=4.0)
    assert trainer.loss(batch)[1]["policy/clipfrac"].compute() == 0


# ---------------------------------------------------------------------------------------------------- with a model


def moved(tmp_path: Path, **changes: Any) -> tuple[Any, GRPOBatch]:
    """A trainer whose policy differs from the reference, and experience of the current policy."""
    trainer = trainer_of(tmp_path, kl_coef=0.5, **changes)
    trainer.collect()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in trainer.unwrapped.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    trainer.store.clear()
    trainer.collect()
    return trainer, trainer.store.experience


def test_the_gradient_is_that_of_equation_21(tmp_path: Path) -> None:
    """On policy, the gradient of log π of a token has the weight A + β (π_ref / π − 1)."""
    trainer, batch = moved(tmp_path, average="responses")
    mask, logprobs = batch.sequences.response_mask, trainer.policy(batch.sequences).logprobs
    pull = torch.exp(batch.ref_logprobs - batch.old_logprobs) - 1
    assert pull[mask].abs().max() > 0.05
    coefficient = batch.advantages.unsqueeze(1) + 0.5 * pull
    expected = -((coefficient * logprobs * mask).sum(1) / mask.sum(1)).mean()
    parameters = list(trainer.unwrapped.parameters())
    loss, found = trainer.loss(batch)
    for a, b in zip(torch.autograd.grad(loss, parameters), torch.autograd.grad(expected, parameters), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-6)
    assert found["policy/kl_per_token"].compute() > 0


def test_a_response_weighs_the_same_whatever_its_length(tmp_path: Path) -> None:
    """With `average: responses`, the loss of two responses of different length is the mean of their losses."""
    trainer, batch = moved(tmp_path, average="responses")
    lengths = batch.sequences.response_mask.sum(1)
    assert lengths.min() < lengths.max()
    two = batch.select(torch.tensor([int(lengths.argmin()), int(lengths.argmax())]))
    alone = [trainer.loss(two.select(torch.tensor([i])))[0] for i in range(2)]
    torch.testing.assert_close(trainer.loss(two)[0], sum(alone) / 2)
    assert two.weight == 2


def test_a_penalty_of_zero_needs_no_reference(tmp_path: Path) -> None:
    assert not trainer_of(tmp_path / "a").needs_reference
    assert trainer_of(tmp_path / "b", kl_coef=0.1).needs_reference
    with pytest.raises(ConfigError, match="'grpo' with these settings compares with no reference; remove it"):
        trainer_of(tmp_path / "c", model__reference_path={"model_type": "gpt2"})


# ------------------------------------------------------------------------------------------------- dynamic sampling


def picky(outputs: list[str], **_: Any) -> list[float]:
    """A reward that is the same for all responses to many prompts."""
    return [float(output.count("a") > 1) for output in outputs]


def test_groups_of_equal_rewards_are_replaced_if_it_is_asked_for(tmp_path: Path) -> None:
    dead = {}
    for keeps in (False, True):
        arguments = {"reward_fn": picky}
        trainer = trainer_of(tmp_path / str(keeps), dynamic_sampling=keeps, scale="none", arguments=arguments)
        trainer.collect()
        groups = trainer.store.experience.advantages.view(-1, 4)
        dead[keeps] = int((groups == 0).all(1).sum())
        assert len(groups) == 4
        assert ("rollout/kept" in trainer.recorder.pending) is keeps
    assert dead[False] > 0 == dead[True]


def test_dynamic_sampling_without_any_difference_is_an_error_that_says_so(tmp_path: Path) -> None:
    arguments = {"reward_fn": lambda outputs, **_: [1.0] * len(outputs)}
    trainer = trainer_of(tmp_path, dynamic_sampling=True, arguments=arguments, rollout__max_refills=1)
    with pytest.raises(DataError, match=r"trains on 0 of 8 prompts sampled in 2 rounds.*may be equally good"):
        trainer.learn()


def test_max_refills_without_dynamic_sampling_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rollout.max_refills is 3, and 'grpo' trains on everything"):
        trainer_of(tmp_path, rollout__max_refills=3)


# -------------------------------------------------------------------------------------------------- what is refused

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a group of one": (
        {"group_size": 1},
        r"method\.group_size: .*compared with each other.*give at least 2 \(given 1",
    ),
    "a group that does not fit": ({"group_size": 5}, "multiple of 5"),
    "a negative KL": ({"kl_coef": -0.1}, r"method\.kl_coef: should be greater than or equal to 0"),
    "no range": ({"cliprange": 0.0}, r"method\.cliprange: should be greater than 0"),
    "no upper range": ({"cliprange_high": -1.0}, r"method\.cliprange_high: should be greater than 0"),
    "rewards that are not scaled": (
        {"reward_weights": {"a": 1.0}, "scale": "none"},
        r"reward_weights \(GDPO\) need scale 'group'; given 'none'",
    ),
    "a weight that is no number": ({"reward_weights": {"a": math.inf}}, r"reward_weights should be finite numbers"),
    "no weights": ({"reward_weights": {}}, r"method\.reward_weights"),
    "no pass": ({"grpo_epochs": 0}, r"method\.grpo_epochs: should be greater than or equal to 1"),
    "another scale": ({"scale": "std"}, r"method\.scale"),
    "sequence ratios in a mean over tokens": (
        {"ratio_level": "sequence"},
        r"ratio_level 'sequence' \(GSPO\) needs average 'responses' and surrogate 'clip'; given 'tokens' and 'clip'",
    ),
    "sequence ratios with cispo": (
        {"ratio_level": "sequence", "average": "responses", "surrogate": "cispo"},
        r"needs average 'responses' and surrogate 'clip'; given 'responses' and 'cispo'",
    ),
}


@table("settings, said", REFUSED.values())
def test_what_makes_no_sense_is_refused(settings: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        trainer_of(tmp_path, **settings)


# ------------------------------------------------------------------------------------------------- laws, by variant


@pytest.fixture
def registered(request: pytest.FixtureRequest) -> Iterator[str]:
    """The name of a trainer whose defaults are the settings of a variant; it is forgotten after the test."""
    base, name = GRPOTrainer.method_class, f"_test_variant_{request.param}"
    defaults = {key: (base.model_fields[key].annotation, value) for key, value in VARIANTS[request.param].items()}
    config = create_model("Variant", __base__=base, name=(str, name), **defaults)  # type: ignore[call-overload]
    trainer = type("VariantTrainer", (GRPOTrainer,), {})
    trainer.method_class = config
    trainkit.register_trainer(name)(trainer)
    yield name
    registry._TRAINERS.pop(name)


LAWS = [
    "first_update", "mask_law", "padding_amount", "micro_batches", "accumulation", "weight_counts", "metric_totals",
    "credit_of_scores", "finite_at_extremes", "resume_every_step", "episodes_keep_the_laws", "turn_rewards", "learns",
]  # fmt: skip
FURTHER = {"grpo": ["kl_pulls_back", "reported_kl", "reference_is_frozen"], "dapo": ["keep_chooses"]}


@pytest.mark.slow
@pytest.mark.parametrize("registered", VARIANTS, indirect=True)
def test_the_laws_hold_for_every_variant(registered: str) -> None:
    check_trainer(registered, only=LAWS + FURTHER.get(registered.removeprefix("_test_variant_"), []))


# --------------------------------------------------------------------------------------------------------- learning


def expected_reward(bandit: Bandit, model: Any) -> float:
    """The mean over prompts of Σ π · reward."""
    return float((bandit.logprobs(model).exp() * bandit.rewards).sum(1).mean())


@pytest.mark.daily(variant=("dapo",))
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_finds_the_rewards_of_a_bandit(variant: str, tmp_path: Path) -> None:
    """The policy covers 80 % of the distance from the first reward to that of the best arms.

    Without dynamic sampling: where all is learnt, it would find no group to train on.
    """
    bandit, before = Bandit(), list[float]()

    class Start:
        @trainkit.hookimpl
        def on_train_begin(self, trainer: Any) -> None:
            before.append(expected_reward(bandit, trainer.unwrapped.model))

    trainer = trainkit.train(
        config={
            "method": {"name": "grpo", "group_size": 16, **VARIANTS[variant], "dynamic_sampling": False},
            "optimizer": {"lr": 6e-3},
            "rollout": {"max_new_tokens": 1, "num_rollouts": 128, "batch_size": 128},
            "train": {"batch_size": 128, "total_steps": 20, "run_dir": str(tmp_path), "trackers": []},
        },
        callbacks=[Start()],
        **bandit.arguments,
    )
    best = float(bandit.rewards.max(1).values.mean())
    assert before[0] < 0.75 * best
    assert expected_reward(bandit, trainer.unwrapped.model) > before[0] + 0.8 * (best - before[0])
