"""Tests of GRPO: golden numbers, the gradient of the paper, learning on a bandit, and trainkit's checks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import trainkit
from trainkit import Sequences
from trainkit.errors import ConfigError
from trainkit.testing import check_trainer
from trainkit.testing.bandit import Bandit
from trainkit.testing.trainers import tiny_trainer
from trainkit_grpo import GRPOBatch


def test_grpo_conforms() -> None:
    check_trainer("grpo")


def prepared(tmp_path: Path, scores: list[float]) -> Tensor:
    """Return the advantages of groups of three."""
    trainer = tiny_trainer("grpo", tmp_path, method__group_size=3, rollout__num_rollouts=15)
    sequences = Sequences.from_lists([[1]] * len(scores), [[2]] * len(scores))
    zeros = torch.zeros(len(scores), 2)
    advantages: Tensor = trainer.prepare_experience(GRPOBatch(sequences, zeros, zeros, torch.tensor(scores))).advantages
    return advantages


def test_advantages_equal_the_golden_numbers(tmp_path: Path) -> None:
    """Check that 1, 2, 3 have mean 2 and std 1, and that 0, 0, 3 have mean 1 and std √3."""
    expected = torch.tensor([-1, 0, 1, -(3**-0.5), -(3**-0.5), 2 * 3**-0.5])
    torch.testing.assert_close(prepared(tmp_path, [1.0, 2.0, 3.0, 0.0, 0.0, 3.0]), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("score", [0.9, 0.0, -1e8])
def test_a_constant_group_has_advantages_of_exactly_zero(tmp_path: Path, score: float) -> None:
    """Check that rounding has no effect: in float32, the mean of three times 0.9 is not exactly 0.9."""
    assert prepared(tmp_path, [score] * 3).tolist() == [0.0] * 3


def moved(tmp_path: Path, **changes: Any) -> tuple[Any, GRPOBatch]:
    """Return a trainer whose policy differs from the reference, and experience of the current policy."""
    trainer = tiny_trainer("grpo", tmp_path, method__kl_coef=0.5, **changes)
    trainer.collect()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in trainer.unwrapped.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    trainer.store.clear()
    trainer.collect()
    return trainer, trainer.store.experience


def test_the_gradient_is_that_of_equation_21(tmp_path: Path) -> None:
    """Check that on policy, the gradient of log π of a token has the weight A + β (π_ref / π − 1)."""
    trainer, batch = moved(tmp_path)
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
    """Check that the loss of two responses of different length is the mean of their losses."""
    trainer, batch = moved(tmp_path)
    lengths = batch.sequences.response_mask.sum(1)
    assert lengths.min() < lengths.max()
    two = batch.select(torch.tensor([int(lengths.argmin()), int(lengths.argmax())]))
    alone = [trainer.loss(two.select(torch.tensor([i])))[0] for i in range(2)]
    torch.testing.assert_close(trainer.loss(two)[0], sum(alone) / 2)
    assert two.weight == 2


def test_one_response_per_prompt_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"method\.group_size: should be greater than or equal to 2"):
        tiny_trainer("grpo", tmp_path, method__group_size=1)
    with pytest.raises(ConfigError, match="multiple of 5"):
        tiny_trainer("grpo", tmp_path, method__group_size=5)


def expected_reward(bandit: Bandit, model: Any) -> float:
    """Return the mean over prompts of Σ π · reward."""
    return float((bandit.logprobs(model).exp() * bandit.rewards).sum(1).mean())


def test_it_finds_the_rewards_of_a_bandit(tmp_path: Path) -> None:
    """Check that the policy covers 90 % of the distance from the reference's reward to that of the best arms."""
    bandit = Bandit()
    trainer = trainkit.train(
        config={
            "method": {"name": "grpo", "group_size": 16},
            "optimizer": {"lr": 3e-3},
            "rollout": {"max_new_tokens": 1, "num_rollouts": 128, "batch_size": 128},
            "train": {"batch_size": 128, "total_steps": 60, "run_dir": str(tmp_path), "trackers": []},
        },
        **bandit.arguments,
    )
    best = float(bandit.rewards.max(1).values.mean())
    before = expected_reward(bandit, trainer.reference.policy.model)
    assert before < 0.75 * best
    assert expected_reward(bandit, trainer.unwrapped.model) > before + 0.9 * (best - before)
