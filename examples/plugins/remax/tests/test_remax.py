"""Tests of ReMax: golden numbers, the greedy baseline, learning on a bandit, and trainkit's checks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import trainkit
from trainkit import Sequences
from trainkit.testing.trainers import tiny_trainer
from trainkit_kit import Bandit, check_trainer
from trainkit_remax import ReMaxBatch, remax_advantages


def test_remax_conforms() -> None:
    check_trainer("remax", expected_failures={"given_responses": "step() gets no scores of greedy responses"})


def test_advantages_equal_the_golden_numbers() -> None:
    """Check gains 2 and −1, β = 2, k1 = (.1, .2, .3) and (.4, −.5), with sums from t on (.6, .5, .3), (−.1, −.5)."""
    nan = float("nan")
    k1 = torch.tensor([[nan, 0.1, 0.2, 0.3], [nan, 0.4, -0.5, nan]], dtype=torch.float64)
    mask = torch.tensor([[0, 1, 1, 1], [0, 1, 1, 0]]).bool()
    found = remax_advantages(torch.tensor([2.0, -1.0], dtype=torch.float64), k1, mask, kl_coef=2.0)
    expected = torch.tensor([[0, 0.8, 1.0, 1.4], [0, -0.8, 0.0, 0]], dtype=torch.float64)
    torch.testing.assert_close(found, expected)


class Fixed:
    """A policy that answers with given log-probabilities [B, T]."""

    def __init__(self, logprobs: torch.Tensor) -> None:
        self.logprobs = logprobs

    def __call__(self, sequences: Sequences) -> Any:
        return self


def test_loss_and_gradient_equal_the_golden_numbers(tmp_path: Path, monkeypatch: Any) -> None:
    """Check A = (1, 2) and (−3), log π = (−1, −.5) and (−2): the loss is (1 · 1 + 2 · .5 − 3 · 2) / 2 = −2."""
    trainer = tiny_trainer("remax", tmp_path)
    logprobs = torch.tensor([[0, -1, -0.5], [0, -2, 0]], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([[0.0, 1, 2], [0, -3, 0]], dtype=torch.float64)
    monkeypatch.setattr(type(trainer), "policy", Fixed(logprobs))
    loss, _ = trainer.loss(ReMaxBatch(Sequences.from_lists([[1], [1]], [[2, 3], [2]]), logprobs.detach(), advantages))
    loss.backward()
    assert float(loss.detach()) == -2.0
    torch.testing.assert_close(logprobs.grad, -advantages / 2)


def test_the_baseline_is_the_score_of_the_greedy_response(tmp_path: Path) -> None:
    """Check that without a KL penalty, all tokens have the score of their response less that of the greedy one."""
    trainer = tiny_trainer("remax", tmp_path, method__kl_coef=0.0)
    scored: list[list[str]] = []

    def reward(outputs: list[str], **_: Any) -> list[float]:
        scored.append(outputs)
        return [len(output) + output.count("a") / 7 for output in outputs]

    trainer.reward_fn = reward
    rows = trainer.pipeline.take(0, 8)
    batch = trainer.make_experience(rows)
    sampled, greedy = scored
    assert greedy == trainer.generate([row["prompt"] for row in rows], temperature=0).outputs != sampled
    gains = torch.tensor([a - b for a, b in zip(reward(sampled), reward(greedy), strict=True)])
    torch.testing.assert_close(batch.advantages, torch.where(batch.sequences.response_mask, gains.unsqueeze(1), 0.0))


def test_a_constant_reward_without_a_penalty_changes_nothing(tmp_path: Path) -> None:
    trainer = tiny_trainer("remax", tmp_path, method__kl_coef=0.0)
    trainer.reward_fn = lambda outputs, **_: [0.9] * len(outputs)
    trainer.models.build()
    before = {name: tensor.clone() for name, tensor in trainer.unwrapped.state_dict().items()}
    trainer.learn()
    assert all(torch.equal(before[name], tensor) for name, tensor in trainer.unwrapped.state_dict().items())


def test_it_finds_the_rewards_of_a_bandit(tmp_path: Path) -> None:
    """Check that the policy covers 80 % of the distance from the reference's reward to that of the best arms."""
    bandit = Bandit()
    trainer = trainkit.train(
        config={
            "method": {"name": "remax", "kl_coef": 0.01},
            "optimizer": {"lr": 3e-3},
            "rollout": {"max_new_tokens": 1, "num_rollouts": 128, "batch_size": 128},
            "train": {"batch_size": 128, "total_steps": 100, "run_dir": str(tmp_path), "trackers": []},
        },
        **bandit.arguments,
    )

    def expected(model: Any) -> float:
        return float((bandit.logprobs(model).exp() * bandit.rewards).sum(1).mean())

    best, before = float(bandit.rewards.max(1).values.mean()), expected(trainer.reference.policy.model)
    assert before < 0.75 * best
    assert expected(trainer.unwrapped.model) > before + 0.8 * (best - before)
