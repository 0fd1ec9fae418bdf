"""PPO's own mathematics: golden numbers, the controller, reward scaling, shaping, and that it learns."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import trainkit
from tables import table
from trainkit import Verdict
from trainkit.data import Rollouts, Sequences
from trainkit.errors import NonFiniteError
from trainkit.functional import gae, whiten
from trainkit.models import TokenOutputs
from trainkit.testing import tiny_gpt2
from trainkit.testing.trainers import tiny_trainer
from trainkit_kit import Bandit
from trainkit_ppo import KLController, PPOBatch

# ---------------------------------------------------------------------------------------- the loss, golden numbers

VALUES = torch.tensor([[0.5, 0.4, 0.3], [0.1, 0.2, 0.0]])
REWARDS = torch.tensor([[0.1, 0.0, 1.0], [-0.2, 0.5, 0.0]])
MASK = torch.tensor([[True, True, True], [True, True, False]])


def golden_batch() -> PPOBatch:
    """A one-token prompt before each of two responses of 3 and 2 tokens; tokens are at positions 1 to 3."""
    advantages, returns = gae(VALUES, REWARDS, MASK, gamma=1.0, lam=0.95)
    old = torch.tensor([[-1.1, -1.5, -0.5], [-1.4, -0.3, -2.0]])

    def aligned(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.zeros(2, 1), x], dim=1)

    return PPOBatch(
        Sequences.from_lists([[1], [1]], [[1, 2, 3], [1, 2]]),
        old_logprobs=aligned(old),
        old_values=aligned(VALUES),
        advantages=aligned(whiten(advantages, MASK)),
        returns=aligned(returns),
    )


def test_loss_equals_the_golden_numbers(tmp_path: Path) -> None:
    """policy .023511, value .132985, total .156496, value clipfrac .4, policy clipfrac 0, ratio .944342."""
    trainer = tiny_trainer("ppo", tmp_path)
    logprobs = torch.tensor([[0, -1.0, -2.0, -0.5], [0, -1.5, -0.2, -3.0]])
    moved = torch.cat([torch.zeros(2, 1), VALUES + torch.tensor([[0.3, -0.1, 0.5], [0.0, -0.4, 1.0]])], dim=1)
    trainer.models.use(lambda *_, **__: TokenOutputs(logprobs, moved))
    loss, found = trainer.loss(golden_batch())
    numbers = {name: metric.compute() for name, metric in found.items()}
    assert loss.item() == pytest.approx(0.156496, abs=1e-5)
    assert numbers["loss/policy"] == pytest.approx(0.023511, abs=1e-5)
    assert numbers["loss/value"] == pytest.approx(0.132985, abs=1e-5)
    assert numbers["values/clipfrac"] == pytest.approx(0.4)
    assert numbers["policy/clipfrac"] == 0.0
    assert numbers["policy/ratio"] == pytest.approx(0.944342, abs=1e-5)


# ------------------------------------------------------------------------------------------------- KL controller


@table("kl, coef", [(12, 0.201024), (6, 0.2), (3, 0.198976), (6.6, 0.200512)])
def test_adaptive_controller_equals_the_golden_numbers(kl: float, coef: float) -> None:
    """.2·(1 + clip(kl/6 − 1, ±.2)·256/10000), e.g. .2·(1 + .2·.0256) = .201024."""
    controller = KLController(0.2, target=6, horizon=10_000)
    controller.update(kl, 256)
    assert controller.coef == pytest.approx(coef, abs=1e-6)


def test_fixed_controller_stays() -> None:
    controller = KLController(0.2, target=None, horizon=1)
    controller.update(100.0, 256)
    assert controller.coef == 0.2


def test_controller_moves_once_per_collection(tmp_path: Path) -> None:
    """Not once per epoch, and by the number of episodes of the collection."""
    trainer = tiny_trainer("ppo", tmp_path, method__target=1e-6, method__horizon=160, train__total_steps=16)
    trainer.learn()  # 16 steps = 2 collections of 16 responses x 4 epochs x 2 batches
    # kl is 0 before the first update, so clip(0/target - 1) = -.2; afterwards it is far above or below: ±.2
    up_or_down = [0.05 * (1 - 0.2 * 16 / 160) * (1 + s * 0.2 * 16 / 160) for s in (1, -1)]
    assert min(abs(trainer.kl.coef - c) for c in up_or_down) < 1e-12


# --------------------------------------------------------------------------------------- rewards to advantages


def rollouts_of(responses: list[list[int]], terminated: list[bool] | None = None) -> Rollouts:
    """Responses to the prompt b, all of them terminated unless it is said."""
    count = len(responses)
    sequences, ended = Sequences.from_lists([[1]] * count, responses), torch.tensor(terminated or [True] * count)
    return Rollouts([{"prompt": "b"}] * count, sequences, None, ended, ["b"] * count, [""] * count)


def experience_of(trainer: Any, scores: torch.Tensor, responses: list[list[int]]) -> PPOBatch:
    return trainer.prepare_experience(trainer.experience(rollouts_of(responses), scores))


def test_score_lands_on_last_response_token(tmp_path: Path) -> None:
    """Rows of different length; with V = 0, γ = λ = 1 every return of a row is its score."""
    trainer = tiny_trainer("ppo", tmp_path, method__lam=1.0)
    batch = experience_of(trainer, torch.tensor([2.0, -1.0]), [[1, 2, 3, 8], [4, 8]])
    expected = torch.tensor([[0, 2, 2, 2, 2], [0, -1, -1, 0, 0]], dtype=torch.float32)
    torch.testing.assert_close(batch.returns, expected)


def test_dense_rewards_count_from_their_own_token_on(tmp_path: Path) -> None:
    trainer = tiny_trainer("ppo", tmp_path, method__lam=1.0)
    dense = torch.tensor([[0, 1.0, 0, 0.5, 0], [0, 0, -1.0, 0, 0]])
    batch = experience_of(trainer, dense, [[1, 2, 3, 8], [4, 8]])
    expected = torch.tensor([[0, 1.5, 0.5, 0.5, 0], [0, -1, -1, 0, 0]])
    torch.testing.assert_close(batch.returns, expected)


def test_dense_rewards_that_are_zero_but_for_the_last_equal_terminal_ones(tmp_path: Path) -> None:
    trainer = tiny_trainer("ppo", tmp_path)
    dense = torch.tensor([[0, 0, 0, 0, 2.0], [0, 0, -1.0, 0, 0]])
    responses = [[1, 2, 3, 8], [4, 8]]
    terminal = experience_of(trainer, torch.tensor([2.0, -1.0]), responses)
    torch.testing.assert_close(experience_of(trainer, dense, responses).advantages, terminal.advantages)


def rows(*scores: float) -> torch.Tensor:
    """Terminal scores as rewards per token [B, 2]."""
    return torch.stack([torch.zeros(len(scores)), torch.tensor(scores)], dim=1)


def scaled(trainer: Any, scores: torch.Tensor) -> torch.Tensor:
    """What becomes of rewards per token that are all of responses."""
    found: torch.Tensor = trainer.scaled(scores, torch.ones_like(scores, dtype=torch.bool))
    return found


def test_scores_are_scaled_then_clipped(tmp_path: Path) -> None:
    """Std of [2, 4, 6] is 2; 6/2 = 3 is clipped to 2.5, and 2.5 before scaling would have given 1.25."""
    trainer = tiny_trainer("ppo", tmp_path, method__scale_reward="running", method__cliprange_reward=2.5)
    assert scaled(trainer, rows(2.0, 4.0, 6.0)).sum(1).tolist() == [1.0, 2.0, 2.5]


def test_running_scale_follows_all_scores_and_ref_scale_the_first(tmp_path: Path) -> None:
    """Golden 10.7: after [1, 2, 3] and [10, 20] the running std is 7.981228; the first collection's is 1."""
    running = tiny_trainer("ppo", tmp_path / "a", method__scale_reward="running", method__cliprange_reward=None)
    ref = tiny_trainer("ppo", tmp_path / "b", method__scale_reward="ref", method__cliprange_reward=None)
    for trainer in (running, ref):
        assert scaled(trainer, rows(1.0, 2.0, 3.0)).sum(1).tolist() == [1.0, 2.0, 3.0]
    assert scaled(running, rows(10.0, 20.0)).sum(1).tolist() == pytest.approx([10 / 7.981228, 20 / 7.981228])
    assert scaled(ref, rows(10.0, 20.0)).sum(1).tolist() == [10.0, 20.0]


@table("scale", ["running", "ref"])
def test_one_score_is_not_scaled_by_an_undefined_deviation(scale: str, tmp_path: Path) -> None:
    """One value has no standard deviation; the next ones have."""
    trainer = tiny_trainer("ppo", tmp_path, method__scale_reward=scale)
    assert scaled(trainer, rows(3.0)).sum(1).tolist() == [3.0]
    assert scaled(trainer, rows(1.0, 2.0)).sum(1).tolist() == [1.0, 2.0]  # std of [3, 1, 2] is 1


@pytest.mark.daily(scale=("running",))
@pytest.mark.parametrize("scale", ["running", "ref"])
def test_rows_sampled_at_a_time_do_not_change_how_scores_are_scaled(scale: str, tmp_path: Path) -> None:
    """Statistics are the collection's, and `rollout.batch_size` is a matter of speed."""
    stds = []
    for size in (16, 3):
        trainer = tiny_trainer("ppo", tmp_path / str(size), method__scale_reward=scale, rollout__batch_size=size)
        scores = iter(range(100))
        trainer.score = lambda rollouts, scores=scores: torch.tensor([float(next(scores)) for _ in rollouts.rows])
        trainer.collect()
        stds.append(trainer.state_dict()["moments"])
    assert stds[0] == stds[1]


def test_what_was_scaled_so_far_is_part_of_a_resumed_run(tmp_path: Path) -> None:
    """The next collection is scaled as if the run had not stopped, to the bit."""
    later = {}
    for scale in ("running", "ref"):
        changes = {"method__scale_reward": scale, "train__save_interval": 8}
        straight = tiny_trainer("ppo", tmp_path / scale, **changes, train__total_steps=8)
        straight.learn()
        resumed = tiny_trainer("ppo", tmp_path / scale, **changes, train__total_steps=8, train__resume="auto")
        resumed.learn()
        later[scale] = [scaled(trainer, rows(1.0, 7.0)) for trainer in (straight, resumed)]
        assert torch.equal(*later[scale])
    assert not torch.equal(later["running"][0], later["ref"][0])


def test_a_cut_response_pays_the_penalty_before_scores_are_scaled(tmp_path: Path) -> None:
    """TRL's meaning: [3, 1] become [3, 0.5] where the second was cut, the std of which is 2.5/√2."""
    trainer = tiny_trainer("ppo", tmp_path, method__missing_eos_penalty=0.5, method__scale_reward="running")
    experience = rollouts_of([[1, 2], [3, 4]], terminated=[True, False])
    scores = trainer.experience(experience, torch.tensor([3.0, 1.0])).scores
    assert scores.tolist() == [[0, 0, 3.0], [0, 0, 0.5]]
    assert scaled(trainer, scores).sum(1).tolist() == pytest.approx([3 * 2**0.5 / 2.5, 0.5 * 2**0.5 / 2.5])


# --------------------------------------------------------------------------------------- what comes after a cut


def with_a_critic(trainer: Any) -> Any:
    """The trainer with a value head that says something."""
    torch.manual_seed(0)
    trainer.models.build()
    for parameter in trainer.unwrapped.value_head.parameters():
        torch.nn.init.normal_(parameter)
    return trainer


def test_a_cut_response_goes_on_with_the_value_of_the_state_it_ends_in(tmp_path: Path) -> None:
    """What that value is, longer responses tell: it is that of the state in which their next token is chosen."""
    trainer = with_a_critic(tiny_trainer("ppo", tmp_path, method__bootstrap_truncated=True))
    found = trainer.bootstrap(rollouts_of([[1, 2, 3], [4], [5, 6]], terminated=[False, False, True]))
    longer = trainer.behaviour(rollouts_of([[1, 2, 3, 7], [4, 8], [5, 6, 7]])).values
    torch.testing.assert_close(found, torch.stack([longer[0, 4], longer[1, 2], torch.tensor(0.0)]))


def test_a_response_that_fills_the_models_context_goes_on_too(tmp_path: Path) -> None:
    """There is no room for one more token, and none is needed."""
    trainer = with_a_critic(
        tiny_trainer("ppo", tmp_path, model=tiny_gpt2(10, n_positions=10), method__bootstrap_truncated=True)
    )
    full = rollouts_of([[1] * 9], terminated=[False])
    states = trainer.unwrapped.model.base_model(full.sequences.input_ids).last_hidden_state
    torch.testing.assert_close(trainer.bootstrap(full), trainer.unwrapped.value_head(states[:, -1]))


def test_one_token_and_a_cut_is_worth_its_reward_and_what_comes_after(tmp_path: Path) -> None:
    """Return = r + γ·V(after), and r where the response ended by itself, or nothing is bootstrapped."""
    for on in (True, False):
        trainer = with_a_critic(
            tiny_trainer("ppo", tmp_path / str(on), method__bootstrap_truncated=on, method__gamma=0.5)
        )
        rollouts = rollouts_of([[1], [2]], terminated=[False, True])
        batch = trainer.prepare_experience(trainer.experience(rollouts, torch.tensor([1.0, 2.0])))
        after = trainer.behaviour(rollouts_of([[1, 3], [2, 3]])).values[0, 2].item()
        assert batch.returns[:, 1].tolist() == pytest.approx([1.0 + 0.5 * after * on, 2.0])


# ----------------------------------------------------------------------------------------- when a step is skipped


@table(
    "kl, ratio, verdict",
    [
        (0.3, 1.0, Verdict.STEP),  # 1.5 · 0.2 is not above it
        (0.31, 1.0, Verdict.STOP),
        (0.0, 10.1, Verdict.SKIP),
        (float("inf"), float("inf"), Verdict.STOP),
        (float("nan"), float("nan"), Verdict.STEP),  # what is no number is refused, not passed over
    ],
)
def test_divergence_stops_a_collection_and_the_ratio_skips_a_step(
    kl: float, ratio: float, verdict: Verdict, tmp_path: Path
) -> None:
    trainer = tiny_trainer("ppo", tmp_path, method__target_kl=0.2)
    assert trainer.judge({"policy/approx_kl": kl, "policy/ratio": ratio}) is verdict


def with_an_infinite_ratio(batch: PPOBatch) -> PPOBatch:
    old = batch.old_logprobs.clone()
    old[0] = -1000.0
    return replace(batch, old_logprobs=old)


def test_an_infinite_ratio_leaves_the_weights_alone(tmp_path: Path) -> None:
    """Inf · 0 is NaN, so the step is not scaled down but not made."""
    trainer = tiny_trainer("ppo", tmp_path, optimizer__weight_decay=0.5, train__microbatch_size=3)
    trainer.collect()
    batch = trainer.store.experience
    trainer.update(batch)
    before = {k: v.clone() for k, v in trainer.unwrapped.state_dict().items()}
    found = trainer.update(with_an_infinite_ratio(batch))
    assert found["policy/ratio"].compute() == float("inf")
    assert found["train/skipped"].compute() == 1
    assert all(torch.equal(before[k], v) for k, v in trainer.unwrapped.state_dict().items())
    trainer.update(batch)
    assert all(v.isfinite().all() for v in trainer.unwrapped.state_dict().values())


def test_without_the_guard_an_infinite_loss_is_an_error(tmp_path: Path) -> None:
    trainer = tiny_trainer("ppo", tmp_path, method__ratio_threshold=None)
    trainer.collect()
    with pytest.raises(NonFiniteError, match="weights have not moved"):
        trainer.update(with_an_infinite_ratio(trainer.store.experience))


def test_large_steps_are_stopped_early_and_the_run_ends(tmp_path: Path) -> None:
    run = {"optimizer__lr": 0.03, "train__total_steps": 12, "train__save_interval": 0}
    trainer = tiny_trainer("ppo", tmp_path, method__target_kl=0.01, **run)
    trainer.learn()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    stopped = [line["policy/approx_kl"] > 0.015 for line in lines]
    assert [line["train/skipped"] for line in lines] == [float(s) for s in stopped]
    assert any(stopped)
    assert trainer.progress.step == 12
    assert trainer.progress.samples == 16 * (1 + sum(stopped[:-1])), "every stop is followed by a new collection"


# ------------------------------------------------------------------------------------------------------- whitening


def test_advantages_are_whitened_over_the_collection_not_the_minibatch(tmp_path: Path) -> None:
    trainer = tiny_trainer("ppo", tmp_path)
    trainer.collect()
    batch = trainer.store.experience
    kept = batch.advantages[batch.sequences.response_mask].double()
    assert float(kept.mean()) == pytest.approx(0, abs=1e-6)
    assert float(kept.std()) == pytest.approx(1, abs=1e-4)
    assert float(batch.advantages[~batch.sequences.response_mask].abs().sum()) == 0


def test_kl_penalty_is_paid_at_the_token_where_it_arises(tmp_path: Path) -> None:
    trainer = tiny_trainer("ppo", tmp_path, method__init_kl_coef=0.5, method__lam=1.0, method__gamma=1.0)
    honest = trainer.behaviour

    def apart(rollouts: Rollouts) -> TokenOutputs:
        said = honest(rollouts)
        return said._replace(logprobs=said.logprobs + torch.tensor([0, 0, 0.2, 0, 0]))  # 0.2 nats at token 2

    trainer.behaviour = apart
    batch = experience_of(trainer, torch.zeros(2), [[1, 2, 3, 8], [4, 5, 6, 8]])
    expected = np.array([[0, -0.1, -0.1, 0, 0]] * 2)  # returns before and at the token carry −β·0.2
    np.testing.assert_allclose(batch.returns.numpy(), expected, atol=1e-6)


# ------------------------------------------------------------------------------------------------------- learning


def test_it_ends_at_the_optimum_of_a_bandit_with_a_price_of_divergence(tmp_path: Path) -> None:
    """π* ∝ π_ref · exp(reward / β), enumerated; `benchmarks/learning.py --bandit` asks for more."""
    bandit = Bandit()
    trainer = trainkit.train(
        config={
            "method": {"name": "ppo", "init_kl_coef": 0.25, "lam": 1.0, "ppo_epochs": 2},
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


def test_step_by_hand_is_the_path_of_the_loop(tmp_path: Path) -> None:
    """The same rollouts and scores, given to step() or met by learn(), move the weights alike."""
    looped = tiny_trainer("ppo", tmp_path / "loop", train__total_steps=8, rollout__batch_size=16)
    looped.learn()
    by_hand = tiny_trainer("ppo", tmp_path / "hand", train__total_steps=8, rollout__batch_size=16)
    first = looped.collector.collection.rollouts[0]
    found = by_hand.step(first.queries, first.responses, looped.reward_fn(outputs=first.outputs))
    assert by_hand.progress.step == 8
    assert found["reward/mean"] == pytest.approx(np.mean(looped.reward_fn(outputs=first.outputs)))
    for (name, a), b in zip(
        looped.unwrapped.state_dict().items(), by_hand.unwrapped.state_dict().values(), strict=True
    ):
        assert torch.equal(a, b), name


def test_moments_and_beta_are_part_of_the_state(tmp_path: Path) -> None:
    trainer = tiny_trainer("ppo", tmp_path, method__scale_reward="ref", method__target=0.1)
    trainer.learn()
    other = tiny_trainer("ppo", tmp_path, method__scale_reward="ref", method__target=0.1)
    assert other.state_dict() != trainer.state_dict()
    other.load_state_dict(trainer.state_dict())
    assert other.state_dict() == trainer.state_dict()
