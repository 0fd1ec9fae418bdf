"""The formulas of TRL's PPO that trainkit has as methods to override, and the parts of a step, by golden numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import kl_div
from transformers import AutoModelForCausalLM, GPT2Config

from tables import table
from trainkit.data import Sequences
from trainkit.models import TokenOutputs
from trainkit.testing import character_tokenizer
from trainkit_trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer, create_reference_model, set_seed

pytestmark = pytest.mark.filterwarnings("ignore:there is no dataset")
QUERIES = [torch.tensor([1, 2]), torch.tensor([3])]
RESPONSES = [torch.tensor([4, 5, 6]), torch.tensor([6, 1])]
SEQUENCES = Sequences.from_lists([query.tolist() for query in QUERIES], [each.tolist() for each in RESPONSES])


@pytest.fixture
def trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that makes a trainer with settings; its reference differs from its model."""
    monkeypatch.chdir(tmp_path)
    set_seed(0)
    tokenizer = character_tokenizer("abcdefgh")
    config = GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=len(tokenizer), n_positions=32)
    model = AutoModelForCausalLMWithValueHead.from_pretrained(AutoModelForCausalLM.from_config(config).eval())
    reference = create_reference_model(model)
    for parameter in model.pretrained_model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.05)

    def made(**changes: Any) -> PPOTrainer:
        usual = {"batch_size": 2, "mini_batch_size": 2, "learning_rate": 1e-3}
        return PPOTrainer(PPOConfig(**{**usual, **changes}), model, reference, tokenizer)

    return made


LOGPROBS = torch.tensor([[-1.0, -0.5, -3.0]], dtype=torch.float64)
REFERENCE = torch.tensor([[-1.5, -0.25, -1.0]], dtype=torch.float64)


@table("kind, expected", [("kl", [0.5, -0.25, -2.0]), ("abs", [0.5, 0.25, 2.0]), ("mse", [0.125, 0.03125, 2.0])])
def test_penalties_of_log_probabilities(kind: str, expected: list[float], trainer: Any) -> None:
    """TRL: the difference, its absolute value, or half its square."""
    made = trainer(kl_penalty=kind)
    found = made.trainer.penalty(SEQUENCES, TokenOutputs(LOGPROBS), TokenOutputs(REFERENCE))
    assert found.tolist() == [expected]
    rewards, without, kls = made.compute_rewards([torch.tensor(1.0)], LOGPROBS, REFERENCE, torch.ones(1, 3))
    assert kls.tolist() == [expected]
    torch.testing.assert_close(without, -0.2 * kls)
    torch.testing.assert_close(rewards, without + torch.tensor([[0.0, 0.0, 1.0]], dtype=torch.float64))


def test_the_full_penalty_is_the_divergence_of_whole_distributions(trainer: Any) -> None:
    """TRL: Σ_v kl_div(log π_ref, log π), which is KL(π‖π_ref)."""
    made = trainer(kl_penalty="full")
    inputs = made.prepare_model_inputs(QUERIES, RESPONSES)
    with torch.no_grad():
        mine, theirs = (model(**inputs)[0].log_softmax(-1) for model in (made.model, made.ref_model))
    by_hand = kl_div(theirs, mine, log_target=True, reduction="none").sum(-1)[:, :-1]
    own, other = made.trainer.unwrapped(SEQUENCES), made.trainer.reference(SEQUENCES)
    found = made.trainer.penalty(SEQUENCES, own, other)
    mask = SEQUENCES.response_mask[:, 1:]
    torch.testing.assert_close(found[:, 1:][mask], by_hand[mask])
    assert (found[:, 1:][mask] > 0).all()
    assert not found.requires_grad
    kls = made.compute_rewards([torch.tensor(0.0)] * 2, mine[:, :-1], theirs[:, :-1], mask)[2]
    torch.testing.assert_close(kls, by_hand * mask)


def test_whitened_rewards_keep_their_mean(trainer: Any) -> None:
    """(r − .45735) / std + .45735 over the five tokens of two responses."""
    values = torch.tensor([[0.53675, 0.565, 0.7], [0.185, 0.3, 9.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True, True], [True, True, False]])
    made = trainer(whiten_rewards=True, init_kl_coef=0.0)
    zeros = torch.zeros_like(values)
    experience = type("", (), {"logprobs": zeros, "ref_logprobs": zeros, "penalty": zeros})
    experience.sequences = type("", (), {"response_mask": mask})  # type: ignore[attr-defined]
    expected = torch.tensor([[0.836192, 0.970981, 1.615108], [-0.842115, -0.293415, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(made.trainer.rewards(experience, values * mask), expected, atol=1e-5, rtol=0)
    plain = trainer(whiten_rewards=False, init_kl_coef=0.0)
    torch.testing.assert_close(plain.trainer.rewards(experience, values * mask), values * mask)


def test_normalised_scores_have_the_running_mean_subtracted(trainer: Any) -> None:
    """[1, 2, 6] has mean 3 and deviation √7; then [5] among four: mean 3.5, deviation √(17/3)."""
    mask = torch.tensor([[True, True], [True, True], [True, False]])
    scores = torch.tensor([[0.0, 1.0], [0.0, 2.0], [6.0, 0.0]], dtype=torch.float64)
    made = trainer(use_score_scaling=True, use_score_norm=True, score_clip=1.0)
    expected = [[0.0, -2 / 7**0.5], [0.0, -1 / 7**0.5], [1.0, 0.0]]  # 3/√7 = 1.134 is clipped
    torch.testing.assert_close(made.trainer.scaled(scores, mask), torch.tensor(expected, dtype=torch.float64))
    later = made.trainer.scaled(torch.tensor([[0.0, 5.0]], dtype=torch.float64), mask[:1])
    torch.testing.assert_close(later, torch.tensor([[0.0, 1.5 / (17 / 3) ** 0.5]], dtype=torch.float64))
    only_scaled = trainer(use_score_scaling=True).trainer.scaled(scores, mask)
    torch.testing.assert_close(only_scaled, scores / 7**0.5)


def test_normalisation_without_scaling_is_said_to_have_no_effect(trainer: Any, caplog: Any) -> None:
    trainer(use_score_norm=True)
    assert "use_score_norm has no effect without use_score_scaling" in caplog.text


@table("changes", [{"kl_penalty": "full"}, {"use_score_scaling": True, "use_score_norm": True}])
def test_a_step_is_made_with_each_formula(changes: dict[str, Any], trainer: Any) -> None:
    made = trainer(**changes)
    stats = made.step(QUERIES, RESPONSES, [torch.tensor(1.0), torch.tensor(-1.0)])
    assert all(torch.as_tensor(value).isfinite().all() for value in stats.values())


def test_the_parts_of_a_step_give_the_golden_numbers(trainer: Any) -> None:
    """A = [.378842, .513631, 1.157758; −1.299465, −.750765]; policy .023511, value .132985 with vf_coef 1."""
    values = torch.tensor([[0.5, 0.4, 0.3], [0.1, 0.2, 0.0]])
    rewards = torch.tensor([[0.1, 0.0, 1.0], [-0.2, 0.5, 0.0]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    made = trainer(vf_coef=1.0)
    _, advantages, returns = made.compute_advantages(values, rewards, mask)
    expected = torch.tensor([[0.378842, 0.513631, 1.157758], [-1.299465, -0.750765, 0.0]])
    torch.testing.assert_close(advantages, expected, atol=1e-5, rtol=0)
    old = torch.tensor([[-1.1, -1.5, -0.5], [-1.4, -0.3, -2.0]])
    new = torch.tensor([[-1.0, -2.0, -0.5], [-1.5, -0.2, -3.0]])
    moved = values + torch.tensor([[0.3, -0.1, 0.5], [0.0, -0.4, 1.0]])
    policy, value, stats = made.loss(old, values, torch.randn(2, 3, 5), moved, new, mask, advantages, returns)
    assert policy.item() == pytest.approx(0.023511, abs=1e-5)
    assert value.item() == pytest.approx(0.132985, abs=1e-5)
    assert stats["loss/total"].item() == pytest.approx(0.156496, abs=1e-5)
    assert stats["val/clipfrac"].item() == pytest.approx(0.4)
    assert stats["returns/var"].item() == pytest.approx(returns[mask.bool()].var().item(), abs=1e-6)
    with pytest.warns(UserWarning, match=r"mean ratio of a batch is 20.09, above ratio_threshold \(10\)"):
        far, none, _ = made.loss(old, values, torch.randn(2, 3, 5), moved, old + 3, mask, advantages, returns)
    assert (far.item(), none.item()) == (0.0, 0.0)  # the mean ratio is e³


def test_a_forward_pass_is_aligned_with_the_tokens_that_follow(trainer: Any) -> None:
    made = trainer()
    inputs = made.prepare_model_inputs(QUERIES, RESPONSES)
    logprobs, logits, values, mask = made.batched_forward_pass(
        made.model, QUERIES, RESPONSES, inputs, return_logits=True
    )
    assert logprobs.shape == values.shape == mask.shape == (2, 4)
    assert mask.sum(1).tolist() == [3, 2]
    assert logits is not None
    assert logits.shape == (2, 4, 10)
    own, mask = made.trainer.unwrapped(SEQUENCES), mask.bool()
    torch.testing.assert_close(logprobs[mask], own.logprobs[:, 1:][mask])
    torch.testing.assert_close(values[mask], own.values[:, 1:][mask])
    masks = [torch.tensor([1, 0, 1]), torch.tensor([0, 1])]
    *_, fewer = made.batched_forward_pass(made.model, QUERIES, RESPONSES, inputs, response_masks=masks)
    assert fewer.sum(1).tolist() == [2, 1]


def test_a_loop_over_the_parts_trains(trainer: Any, tmp_path: Path) -> None:
    made = trainer()
    inputs = made.prepare_model_inputs(QUERIES, RESPONSES)
    with torch.no_grad():
        old, _, values, mask = made.batched_forward_pass(made.model, QUERIES, RESPONSES, inputs)
        theirs, *_ = made.batched_forward_pass(made.ref_model, QUERIES, RESPONSES, inputs)
    rewards, without, _ = made.compute_rewards([torch.tensor(1.0), torch.tensor(0.0)], old, theirs, mask)
    values, advantages, returns = made.compute_advantages(values, rewards, mask)
    new, logits, predicted, _ = made.batched_forward_pass(made.model, QUERIES, RESPONSES, inputs, return_logits=True)
    before = made.model.v_head.summary.bias.clone()
    stats = made.train_minibatch(old, values, new, logits, predicted, mask, advantages, returns)
    assert not torch.equal(before, made.model.v_head.summary.bias)
    assert made.gather_stats(stats)["loss/total"] == stats["loss/total"]
    told = made.record_step_stats(
        0.2,
        masks=mask,
        logprobs=old,
        ref_logprobs=theirs,
        non_score_reward=without,
        scores=[1.0, 0.0],
        train_stats=stats,
    )
    assert told["ppo/mean_scores"] == 0.5
    assert told["objective/kl"].item() == pytest.approx((((old - theirs) * mask).sum(1)).mean().item())
    made.create_model_card(tmp_path / "card", model_name="mine")
    assert "# mine" in (tmp_path / "card" / "README.md").read_text(encoding="utf-8")


def test_the_reference_responds_too(trainer: Any) -> None:
    """Greedily it continues as the reference model's own `generate`."""
    made = trainer()
    own, theirs = made.generate(QUERIES, generate_ref_response=True, do_sample=False, max_new_tokens=4)
    for query, response in zip(QUERIES, theirs, strict=True):
        by_hand = made.ref_model.generate(query[None], do_sample=False, max_new_tokens=4, pad_token_id=9)
        assert response.tolist() == by_hand[0, : len(response)].tolist()
    assert len(own) == len(theirs) == 2
    one, other = made.generate(QUERIES[0], generate_ref_response=True, return_prompt=False, max_new_tokens=3)
    assert one.shape[0] == other.shape[0] == 1
