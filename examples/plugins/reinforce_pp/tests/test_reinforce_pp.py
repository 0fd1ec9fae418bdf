"""Tests of REINFORCE++: golden numbers, the KL penalty of a token, learning on a bandit, and trainkit's checks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import trainkit
from trainkit import Sequences
from trainkit.testing.trainers import tiny_trainer
from trainkit_kit import Bandit, check_trainer
from trainkit_reinforce_pp import ReinforcePPBatch


def test_reinforce_pp_conforms() -> None:
    check_trainer("reinforce_pp")


def test_advantages_equal_the_golden_numbers(tmp_path: Path) -> None:
    """Check the case G = (1.4, 1.5, 1.7) and (.1, .5); their mean is 1.04 and their variance 1.952 / 4."""
    trainer = tiny_trainer("reinforce_pp", tmp_path)
    sequences = Sequences.from_lists([[1], [1]], [[1, 2, 3], [1, 2]])
    rewards = torch.tensor([[0, -0.1, -0.2, 1.7], [0, -0.4, 0.5, float("nan")]])
    whitened = trainer.prepare_experience(ReinforcePPBatch(sequences, torch.zeros(2, 4), rewards)).advantages
    expected = torch.tensor([[0, 0.36, 0.46, 0.66], [0, -0.94, -0.54, 0]]) / 0.488**0.5
    torch.testing.assert_close(whitened, expected)


def test_a_token_pays_for_the_divergence_from_itself_on(tmp_path: Path) -> None:
    """Check that without other rewards, advantages are the whitened −β Σ k1 over the token and those after it."""
    trainer = tiny_trainer("reinforce_pp", tmp_path, method__kl_coef=0.5)
    trainer.reward_fn = lambda outputs, **_: [0.0] * len(outputs)
    trainer.models.build()  # the reference is made before the weights move
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in trainer.unwrapped.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    trainer.collect()
    batch = trainer.store.experience
    mask = batch.sequences.response_mask
    with torch.no_grad():
        k1 = (batch.old_logprobs - trainer.reference(batch.sequences).logprobs) * mask
    left = -0.5 * k1.flip(1).cumsum(1).flip(1)
    expected = (left - left[mask].mean()) / left[mask].std() * mask
    torch.testing.assert_close(batch.advantages, expected, rtol=1e-3, atol=1e-4)


def test_a_constant_reward_without_a_price_moves_nothing(tmp_path: Path) -> None:
    trainer = tiny_trainer("reinforce_pp", tmp_path, method__kl_coef=0.0)
    trainer.reward_fn = lambda outputs, **_: [0.9] * len(outputs)
    trainer.models.build()
    before = {name: tensor.clone() for name, tensor in trainer.unwrapped.state_dict().items()}
    trainer.learn()
    assert all(torch.equal(before[name], tensor) for name, tensor in trainer.unwrapped.state_dict().items())


def expected_reward(bandit: Bandit, model: Any) -> float:
    """Return the mean over prompts of Σ π · reward."""
    return float((bandit.logprobs(model).exp() * bandit.rewards).sum(1).mean())


def test_it_finds_the_rewards_of_a_bandit(tmp_path: Path) -> None:
    """Check that the policy covers 80 % of the distance from the reference's reward to that of the best arms."""
    bandit = Bandit()
    trainer = trainkit.train(
        config={
            "method": {"name": "reinforce_pp"},
            "optimizer": {"lr": 3e-3},
            "rollout": {"max_new_tokens": 1, "num_rollouts": 128, "batch_size": 128},
            "train": {"batch_size": 128, "total_steps": 100, "run_dir": str(tmp_path), "trackers": []},
        },
        **bandit.arguments,
    )
    best = float(bandit.rewards.max(1).values.mean())
    before = expected_reward(bandit, trainer.reference.policy.model)
    assert before < 0.75 * best
    assert expected_reward(bandit, trainer.unwrapped.model) > before + 0.8 * (best - before)
