"""RLOO's own mathematics: golden numbers, levels of KL and ratio, and that it learns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import trainkit
from trainkit.data import Rollouts, Sequences
from trainkit.errors import ConfigError, DataError
from trainkit.functional import leave_one_out
from trainkit.testing.trainers import tiny_trainer
from trainkit_kit import Bandit
from trainkit_rloo import RLOOBatch, RLOORollouts, RLOORows


def test_advantages_equal_the_golden_numbers() -> None:
    """Golden 10.4, in groups of four: rewards 1, 2, 5, 8 have 1 − 5, 2 − 14/3, 5 − 11/3, 8 − 8/3."""
    rewards = torch.tensor([1.0, 2, 5, 8, 2, 3, 6, 9, 3, 4, 7, 10])
    expected = torch.tensor([-4, -8 / 3, 4 / 3, 16 / 3] * 3)
    torch.testing.assert_close(leave_one_out(rewards, 4), expected)


def test_advantages_of_a_prompt_sum_to_zero() -> None:
    groups = leave_one_out(torch.randn(12, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), 3)
    assert groups.view(4, 3).sum(1).abs().max() < 1e-12


def test_a_constant_reward_moves_nothing(tmp_path: Path) -> None:
    """Three times 0.9 in float32 has a mean next to 0.9, and Adam makes steps of any gradient."""
    trainer = tiny_trainer("rloo", tmp_path, method__rloo_k=3, method__kl_coef=0.0, rollout__num_rollouts=15)
    trainer.reward_fn = lambda outputs, **_: [0.9] * len(outputs)
    trainer.models.build()
    before = {name: tensor.clone() for name, tensor in trainer.unwrapped.state_dict().items()}
    trainer.learn()
    assert all(torch.equal(before[name], tensor) for name, tensor in trainer.unwrapped.state_dict().items())


def prepared(tmp_path: Path, **changes: Any) -> Any:
    """Two responses of 3 and 2 tokens to one prompt: k1 = (.1, .2, .3) and (.4, .5), scores 2 and 1."""
    trainer = tiny_trainer("rloo", tmp_path, method__rloo_k=2, method__kl_coef=1.0, **changes)
    k1 = torch.tensor([[0, 0.1, 0.2, 0.3], [0, 0.4, 0.5, 0]])
    scores = torch.tensor([[0, 0, 0, 2.0], [0, 0, 1.0, 0]])
    sequences = Sequences.from_lists([[1], [1]], [[1, 2, 3], [1, 2]])
    return trainer.prepare_experience(
        RLOORollouts(sequences, k1, torch.zeros(2, 4), torch.zeros(2, 4), scores, torch.ones(2, 4))
    )


def test_sequence_kl_is_paid_by_the_whole_response(tmp_path: Path) -> None:
    """R = (2 − .6, 1 − .9) = (1.4, .1), so A = ±1.3 for the response and all its tokens."""
    rows = prepared(tmp_path / "rows")
    assert isinstance(rows, RLOORows)
    torch.testing.assert_close(rows.advantages, torch.tensor([1.3, -1.3]))
    tokens = prepared(tmp_path / "tokens", method__ratio_level="token")
    assert type(tokens) is RLOOBatch
    torch.testing.assert_close(tokens.advantages, torch.tensor([[0, 1.3, 1.3, 1.3], [0, -1.3, -1.3, 0]]))


def test_token_kl_is_paid_from_the_token_on(tmp_path: Path) -> None:
    """G = (2 − .6, 2 − .5, 2 − .3) and (1 − .9, 1 − .5), less the other's R (.1 and 1.4)."""
    tokens = prepared(tmp_path, method__kl_level="token", method__ratio_level="token")
    expected = torch.tensor([[0, 1.3, 1.4, 1.6], [0, -1.3, -0.9, 0]])
    torch.testing.assert_close(tokens.advantages, expected)


def scored(tmp_path: Path, scores: torch.Tensor, **changes: Any) -> list[list[float]]:
    """The rewards per token of two responses of 3 and 2 tokens, of which the second was truncated."""
    trainer = tiny_trainer("rloo", tmp_path, **changes)
    sequences = Sequences.from_lists([[1], [1]], [[2, 3, 8], [2, 3]])
    ended = torch.tensor([True, False])
    given = Rollouts([{"prompt": "b"}] * 2, sequences, None, ended, ["b"] * 2, [""] * 2)
    rewards: list[list[float]] = trainer.experience(given, scores).scores.tolist()
    return rewards


def test_a_truncated_response_pays_a_penalty_or_has_a_fixed_score(tmp_path: Path) -> None:
    """The score of the second is 1: 1 − 0.5 with a penalty of 0.5, and −1 instead; its last token is the third."""
    scores, first = torch.tensor([3.0, 1.0]), [0, 0, 0, 3.0]
    assert scored(tmp_path / "a", scores) == [first, [0, 0, 1.0, 0]]
    assert scored(tmp_path / "b", scores, method__missing_eos_penalty=0.5) == [first, [0, 0, 0.5, 0]]
    assert scored(tmp_path / "c", scores, method__missing_eos_score=-1.0) == [first, [0, 0, -1.0, 0]]


def test_rewards_per_token_of_a_truncated_response_are_replaced_together(tmp_path: Path) -> None:
    dense = torch.tensor([[0, 1.0, 0, 2.0], [0, 4.0, 1.0, 0]])
    assert scored(tmp_path / "a", dense, method__missing_eos_score=-1.0) == [[0, 1.0, 0, 2.0], [0, 0, -1.0, 0]]
    assert scored(tmp_path / "b", dense, method__missing_eos_penalty=3.0) == [[0, 1.0, 0, 2.0], [0, 4.0, -2.0, 0]]


def test_two_rules_for_truncated_responses_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing_eos_penalty is 0\.5, and missing_eos_score -1\.0 .*give one"):
        tiny_trainer("rloo", tmp_path, method__missing_eos_penalty=0.5, method__missing_eos_score=-1.0)
    with pytest.raises(ConfigError, match=r"method\.missing_eos_penalty: should be greater than 0"):
        tiny_trainer("rloo", tmp_path, method__missing_eos_penalty=-1.0)


def test_levels_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ratio_level 'token'"):
        tiny_trainer("rloo", tmp_path, method__kl_level="token")


def test_one_response_per_prompt_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"method\.rloo_k: .*compared with each other.*give at least 2 \(given 1"):
        tiny_trainer("rloo", tmp_path, method__rloo_k=1)
    with pytest.raises(ConfigError, match="multiple of 5"):
        tiny_trainer("rloo", tmp_path, method__rloo_k=5)


def test_the_responses_of_a_prompt_stand_together_and_all_are_trained(tmp_path: Path) -> None:
    trainer = tiny_trainer("rloo", tmp_path, rollout__batch_size=6)  # chunks that cut through groups of four
    trainer.collect()
    queries = [q.tolist() for q in trainer.store.experience.sequences.queries]
    assert len(queries) == 16
    assert all(queries[i] == queries[i - i % 4] for i in range(16))
    assert len({tuple(q) for q in queries}) == 4


def test_the_gradient_on_policy_is_reinforce_with_the_advantage(tmp_path: Path) -> None:
    """At ratio 1 the surrogate's gradient is −mean A ∇ log π(response)."""
    trainer = tiny_trainer("rloo", tmp_path)
    trainer.collect()
    batch = trainer.store.experience
    loss, _ = trainer.loss(batch)
    logprobs = trainer.policy(batch.sequences).logprobs.sum(1)
    expected = -(batch.advantages * logprobs).mean()
    parameters = list(trainer.unwrapped.parameters())
    for a, b in zip(torch.autograd.grad(loss, parameters), torch.autograd.grad(expected, parameters), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_step_takes_whole_groups(tmp_path: Path) -> None:
    trainer = tiny_trainer("rloo", tmp_path)
    rollouts = trainer.generate(["a"] * 4)
    assert trainer.step(rollouts.queries, rollouts.responses, [1.0, 2.0, 3.0, 4.0])["reward/mean"] == 2.5
    with pytest.raises(DataError, match="4 responses of each prompt"):
        trainer.step(rollouts.queries[:3], rollouts.responses[:3], [1.0, 2.0, 3.0])
    with pytest.raises(DataError, match="4 responses of each prompt, one after the other; query 6 differs from query"):
        trainer.step(["b"] * 4 + ["b", "b", "c", "c"], rollouts.responses * 2, [float(i) for i in range(8)])
    assert trainer.progress.step == 1


def test_it_ends_at_the_optimum_of_a_bandit_with_a_price_of_divergence(tmp_path: Path) -> None:
    """π* ∝ π_ref · exp(reward / β), enumerated; `benchmarks/learning.py --bandit` asks for more."""
    bandit = Bandit()
    trainer = trainkit.train(
        config={
            "method": {"name": "rloo", "kl_coef": 0.25},
            "optimizer": {"lr": 6e-3},
            "scheduler": {"name": "linear"},
            "rollout": {"max_new_tokens": 1, "num_rollouts": 128, "batch_size": 128},
            "train": {"batch_size": 128, "total_steps": 50, "run_dir": str(tmp_path), "trackers": []},
        },
        **bandit.arguments,
    )
    reference = trainer.reference.policy.model
    assert bandit.divergences(reference, reference, 0.25)[0] > 0.2
    assert max(bandit.divergences(trainer.unwrapped.model, reference, 0.25)) < 0.02
