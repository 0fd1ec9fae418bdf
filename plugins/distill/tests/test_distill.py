"""Distillation: golden numbers of each divergence, slopes, advantages, where it converges, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import trainkit
from tables import table
from trainkit.data import Sequences
from trainkit.errors import ConfigError, DataError
from trainkit.metrics import Mean
from trainkit.plugins import registry
from trainkit.testing import character_tokenizer, tiny_gpt2
from trainkit.testing.trainers import Letters, tiny_trainer
from trainkit_distill import DistillBatch, DistillConfig, DistillTrainer
from trainkit_kit import Bandit, check_trainer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

P, Q = (1 / 2, 1 / 4, 1 / 4), (1 / 8, 1 / 8, 3 / 4)
"""Probabilities of the policy and of the teacher, for the tokens a, EOS and padding, in every state."""
ALL = ("reverse", "forward", "jensen_shannon")


def constant(probabilities: Sequence[float]) -> PreTrainedModel:
    """A model with these probabilities in every state: its last hidden state is the first unit vector."""
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**tiny_gpt2(3)))
    with torch.no_grad():
        model.transformer.ln_f.weight.zero_()
        model.transformer.ln_f.bias.copy_(torch.eye(32)[0])
        model.transformer.wte.weight[:, 0] = torch.tensor(probabilities, dtype=torch.float64).log()
    return model


def distiller(tmp_path: Path, **changes: Any) -> Any:
    """A trainer whose policy has the probabilities P and whose teacher has Q."""
    given = {"model": constant(P), "reference": constant(Q), "tokenizer": character_tokenizer("a"), "prompts": ["a"]}
    logit_mask = {"logit_mask": changes.pop("logit_mask", None)}
    usual = {"model__model_path": None, "model__reference_path": None}
    return tiny_trainer("distill", tmp_path, arguments={**given, **logit_mask}, **usual, **changes)


def told(trainer: Any, advantages: Sequence[float] = (0.0, 0.0)) -> float:
    """The loss on two responses of 2 and 1 tokens, and on nothing of the prompts."""
    batch = DistillBatch(Sequences.from_lists([[0], [0, 0]], [[0, 1], [2]]), torch.tensor(advantages))
    with torch.no_grad():
        trainer.models.build()
        loss, metrics = trainer.loss(batch)
    assert isinstance(metrics["loss/divergence"], Mean)
    return float(loss)


# --------------------------------------------------------------------------------------------------- golden numbers


@table(
    "settings, expected",
    [
        # ½ log 4 + ¼ log 2 + ¼ log ⅓ = 5/4 log 2 − ¼ log 3
        ({"divergence": "reverse"}, 0.591780903),
        # ⅛ log ¼ + ⅛ log ½ + ¾ log 3 = ¾ log 3 − ⅜ log 2
        ({"divergence": "forward"}, 0.564029024),
        # m = (5, 3, 8)/16: ½ (⅛ log ⅖ + ⅛ log ⅔ + ¾ log 3⁄2) + ½ (½ log 8⁄5 + ¼ log 4⁄3 + ¼ log ½)
        ({"divergence": "jensen_shannon"}, 0.136257444),
        # m = ¼ q + ¾ p = (13, 7, 12)/32:
        # ¼ (⅛ log 4⁄13 + ⅛ log 4⁄7 + ¾ log 2) + ¾ (½ log 16⁄13 + ¼ log 8⁄7 + ¼ log ⅔)
        ({"divergence": "jensen_shannon", "beta": 0.25}, 0.102521324),
        # m = ¾ q + ¼ p = (7, 5, 20)/32:
        # ¾ (⅛ log 4⁄7 + ⅛ log ⅘ + ¾ log 6⁄5) + ¼ (½ log 16⁄7 + ¼ log 8⁄5 + ¼ log ⅖)
        ({"divergence": "jensen_shannon", "beta": 0.75}, 0.104614065),
    ],
)
def test_divergences_equal_the_golden_numbers(settings: dict[str, Any], expected: float, tmp_path: Path) -> None:
    """p = (4, 2, 2)/8 and q = (1, 1, 6)/8."""
    changes = {f"method__{name}": value for name, value in settings.items()}
    assert told(distiller(tmp_path, **changes)) == pytest.approx(expected, abs=1e-6)


def test_both_models_have_the_temperature_of_the_run(tmp_path: Path) -> None:
    """At ½, p is squared to (4, 1, 1)/6 and q to (1, 1, 36)/38: ⅔ log 76⁄3 + ⅙ log 19⁄3 + ⅙ log 19⁄108."""
    expected = 2 / 3 * math.log(76 / 3) + math.log(19 / 3) / 6 + math.log(19 / 108) / 6
    assert told(distiller(tmp_path, rollout__temperature=0.5)) == pytest.approx(expected, abs=1e-6)


def test_the_loss_is_a_mean_over_response_tokens(tmp_path: Path) -> None:
    """The mask forbids padding after a: there p = (2, 1)/3, q = (1, 1)/2, and KL(p‖q) = ⅔ log 4⁄3 + ⅓ log ⅔ = .0566330.

    Both tokens of the first response follow an a. That of the second follows EOS, after which nothing is forbidden.
    """
    after_a = torch.tensor([[True, True, False], [True] * 3, [True] * 3])
    trainer = distiller(tmp_path, logit_mask=after_a)
    batch = DistillBatch(Sequences.from_lists([[0], [0, 1]], [[0, 1], [2]]), torch.zeros(2))
    with torch.no_grad():
        trainer.models.build()
        assert float(trainer.loss(batch)[0]) == pytest.approx((2 * 0.0566330 + 0.591780903) / 3, abs=1e-6)


def test_rewards_add_reinforce(tmp_path: Path) -> None:
    """−A log π of the tokens a, EOS and padding, with A = 3, 3, −2: (3 log 2 + 3 log 4 − 2 log 4)/3 = 5 log 2 / 3."""
    trainer = distiller(tmp_path)
    gained = told(trainer, (3.0, -2.0)) - told(trainer)
    assert gained == pytest.approx(5 * math.log(2) / 3, abs=1e-6)


def test_advantages_equal_the_golden_numbers(tmp_path: Path) -> None:
    """Scores 1, 2 and 6 less the means of the others, 4, 3.5 and 1.5, times w = ½."""
    trainer = tiny_trainer("distill", tmp_path, method__reward_coef=0.5)
    rows = Sequences.from_lists([[1]] * 3, [[2]] * 3)
    found = trainer.prepare_experience(DistillBatch(rows, torch.tensor([1.0, 2.0, 6.0]))).advantages
    assert torch.equal(found, torch.tensor([-1.5, -0.75, 2.25]))
    same = trainer.prepare_experience(DistillBatch(rows, torch.full((3,), 0.9))).advantages
    assert torch.equal(same, torch.zeros(3)), "three times 0.9 in float32 has a mean next to 0.9"
    alone = trainer.prepare_experience(DistillBatch(rows.select(torch.tensor([0])), torch.ones(1))).advantages
    assert torch.equal(alone, torch.zeros(1)), "a single response has no others to compare with"


# ------------------------------------------------------------------------------------------------------------ slopes


def by_hand(logits: list[float], divergence: str, beta: float, advantage: float, token: int) -> float:
    """D − A log π(token) of softmax(logits) and Q, in float64."""
    total = sum(map(math.exp, logits))
    p = [math.exp(z) / total for z in logits]

    def kl(a: Sequence[float], b: Sequence[float]) -> float:
        return sum(x * math.log(x / y) for x, y in zip(a, b, strict=True))

    mixture = [beta * y + (1 - beta) * x for x, y in zip(p, Q, strict=True)]
    found = {
        "reverse": kl(p, Q),
        "forward": kl(Q, p),
        "jensen_shannon": beta * kl(Q, mixture) + (1 - beta) * kl(p, mixture),
    }
    return found[divergence] - advantage * math.log(p[token])


@table("divergence", ALL)
@table("advantage", [0.0, 1.5])
def test_gradients_equal_finite_differences(divergence: str, advantage: float, tmp_path: Path) -> None:
    """By the logits of a state, in float64."""
    mixed = {"method__beta": 0.3} if divergence == "jensen_shannon" else {}
    trainer = distiller(tmp_path, method__divergence=divergence, **mixed)
    trainer.models.build()
    loss, _ = trainer.loss(DistillBatch(Sequences.from_lists([[0]], [[1]]), torch.tensor([advantage])))
    (slopes,) = torch.autograd.grad(loss, trainer.unwrapped.model.transformer.wte.weight)
    logits, step = [math.log(x) for x in P], 1e-6
    for at in range(3):
        high, low = (
            by_hand([z + sign * step * (i == at) for i, z in enumerate(logits)], divergence, 0.3, advantage, 1)
            for sign in (1, -1)
        )
        assert float(slopes[at, 0]) == pytest.approx((high - low) / (2 * step), abs=1e-6)


# ------------------------------------------------------------------------------------------------ where it converges


def distilled(bandit: Bandit, tmp_path: Path, method: dict[str, Any], **data: Any) -> tuple[Any, Any]:
    """A run on the bandit, with a teacher that prefers other letters than the policy, and the teacher."""
    arguments = {**bandit.arguments, **data}
    arguments = {name: value for name, value in arguments.items() if value is not None}
    teacher = tiny_gpt2(len(bandit.tokenizer), initializer_range=0.3)
    trainer = trainkit.train(
        reference=teacher,
        config={
            "method": method,
            "optimizer": {"lr": 3e-3},
            "scheduler": {"name": "linear"},
            "rollout": {"max_new_tokens": 1, "num_rollouts": 128, "batch_size": 128},
            "train": {"batch_size": 128, "total_steps": 120, "run_dir": str(tmp_path), "trackers": []},
        },
        **arguments,
    )
    return trainer, trainer.reference.policy.model


@pytest.mark.slow
@pytest.mark.parametrize("divergence", ALL)
def test_the_policy_becomes_the_teacher(divergence: str, tmp_path: Path) -> None:
    bandit = Bandit()
    trainer, teacher = distilled(bandit, tmp_path, {"name": "distill", "divergence": divergence}, reward_fn=None)
    start = AutoModelForCausalLM.from_config(AutoConfig.for_model(**bandit.arguments["model_path"]))
    assert bandit.divergences(start, teacher, math.inf)[0] > 0.1
    assert max(bandit.divergences(trainer.unwrapped.model, teacher, math.inf)) < 0.002


@pytest.mark.slow
def test_with_rewards_it_ends_at_the_optimum_between_teacher_and_reward(tmp_path: Path) -> None:
    """The least of KL(π‖q) − w E R is at π* ∝ q exp(w R), enumerated."""
    bandit = Bandit()
    trainer, teacher = distilled(bandit, tmp_path, {"name": "distill", "reward_coef": 4.0})
    assert bandit.divergences(teacher, teacher, 0.25)[0] > 0.15
    assert max(bandit.divergences(trainer.unwrapped.model, teacher, 0.25)) < 0.02


def test_offline_it_becomes_the_teacher_on_the_samples(tmp_path: Path) -> None:
    bandit = Bandit()
    samples = [(prompt, response) for prompt in bandit.prompts for response in bandit.responses]
    nothing = dict.fromkeys(("reward_fn", "prompts", "logit_mask"))
    method = {"name": "distill_offline", "divergence": "forward"}
    trainer, teacher = distilled(bandit, tmp_path, method, samples=samples, **nothing)
    assert max(bandit.divergences(trainer.unwrapped.model, teacher, math.inf)) < 0.002


def test_the_loss_on_held_out_samples_is_measured(tmp_path: Path) -> None:
    trainer = tiny_trainer("distill_offline", tmp_path, optimizer__lr=1e-2, train__total_steps=20)
    trainer.add_eval_samples([("a", "bc"), ("bc", "d")])
    before = trainer.evaluate()["eval/loss/divergence"]
    trainer.learn()
    assert trainer.evaluate()["eval/loss/divergence"] < 0.7 * before


def test_an_environment_may_pay_the_rewards(tmp_path: Path) -> None:
    arguments = {"environment": Letters, "reward_fn": None}
    trainer = tiny_trainer(
        "distill", tmp_path, method__reward_coef=1.0, arguments=arguments, rollout__max_turns=2, train__total_steps=2
    )
    trainer.learn()
    assert trainer.progress.step == 2
    trainer.collect()
    assert trainer.store.experience.advantages.any()


class RewardedConfig(DistillConfig):
    """Settings of on-policy distillation with rewards."""

    name: str = "_test_rewarded"
    """The registered name."""
    reward_coef: float = 1.0
    """w."""


class Rewarded(DistillTrainer):
    """On-policy distillation with rewards by default, so that the kit checks where scores go."""

    inputs: ClassVar[tuple[str, ...]] = ("reward_fn", "prompts")


@pytest.mark.slow
def test_rewards_are_credited_as_by_other_algorithms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_TRAINERS", dict(registry._TRAINERS))
    monkeypatch.setattr(Rewarded, "method_class", RewardedConfig)
    trainkit.register_trainer("_test_rewarded")(Rewarded)
    checks = [
        "credit_of_scores", "credit_of_dense_rewards", "given_responses", "integer_scores", "kl_pulls_back",
        "finite_at_extremes", "micro_batches", "accumulation", "mask_law", "batch_mates", "resume_every_step",
    ]  # fmt: skip
    assert len(check_trainer("_test_rewarded", only=checks).results) == len(checks)


# ----------------------------------------------------------------------------------------------------- what is refused


@table("name", ["distill", "distill_offline"])
def test_a_run_without_a_teacher_is_refused_with_both_ways_to_give_one(name: str, tmp_path: Path) -> None:
    match = rf"'{name}' learns from a teacher, and none is given; set model\.reference_path .*, or pass reference= to"
    with pytest.raises(ConfigError, match=match):
        tiny_trainer(name, tmp_path, model__reference_path=None)


def train(**changes: Any) -> Callable[[], Any]:
    tokenizer = character_tokenizer("ab")
    model = tiny_gpt2(len(tokenizer))
    given: dict[str, Any] = {"reference": model, "tokenizer": tokenizer, "prompts": ["a"], **changes}
    return lambda: trainkit.train(model, **given)


def reward(outputs: list[str], **_: Any) -> list[float]:
    return [0.0] * len(outputs)


def test_rewards_and_their_weight_are_given_together() -> None:
    with pytest.raises(
        ConfigError, match=r"with these settings learns from prompts; given .*\. Remove reward_fn, change the settings"
    ):
        train(method="distill", reward_fn=reward)()
    weighted = {"method": {"name": "distill", "reward_coef": 0.5}}
    with pytest.raises(
        ConfigError, match=r"with these settings learns from reward_fn and prompts; .*\. Add reward_fn, change the"
    ):
        train(config=weighted)()
    trainer = tiny_trainer("distill", Path("unused"), method__reward_coef=0.5, arguments={"reward_fn": None})
    with pytest.raises(DataError, match="learns from reward_fn and prompts; give reward_fn"):
        trainer.learn()
    with pytest.raises(ConfigError, match="not from the rewards of an environment"):
        tiny_trainer("distill", Path("unused"), arguments={"environment": Letters})


def test_settings_out_of_bounds_are_refused(tmp_path: Path) -> None:
    for setting, value in (("beta", 0.0), ("beta", 1.0), ("reward_coef", -1.0), ("divergence", "backward")):
        with pytest.raises(ConfigError, match=rf"method\.{setting}"):
            tiny_trainer("distill", tmp_path, **{f"method__{setting}": value})


def test_gkd_learns_from_given_outputs_and_from_sampled_ones(tmp_path: Path) -> None:
    trainer, kinds = tiny_trainer("gkd", tmp_path, method__sampled=0.4), []
    given = {tuple(row.tolist()) for row in trainer.encode_samples(trainer.pipeline.rows).responses}
    for trainer.progress.collection in range(5):
        trainer.store.clear()
        trainer.recorder.pending.clear()
        trainer.collect()
        responses = {tuple(row.tolist()) for row in trainer.store.experience.sequences.responses}
        kinds.append(not responses <= given)
        assert trainer.recorder.pending["rollout/sampled"].compute() == kinds[-1]
    assert kinds == [True, False, True, False, False]
