"""ILQL's own mathematics: golden numbers, targets, steering, the forms of samples, and that it learns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import trainkit
from tables import table
from trainkit import Verdict
from trainkit.errors import ConfigError, DataError
from trainkit.functional import masked_mean, token_logprobs
from trainkit.models import policy as policy_module
from trainkit.testing import character_tokenizer, tiny_bart, tiny_gpt2, tiny_t5
from trainkit.testing.trainers import PROMPTS, tiny_trainer
from trainkit_ilql import ILQLHeads, QHead, awac_weights, expectile_loss, ilql_losses, next_values

finite = st.floats(-5, 5, width=32)


def settled(trainer: Any, seed: int = 0) -> Any:
    """The trainer with heads of random weights, whose first answers would be 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        trainer.models.build()
        for tensor in trainer.unwrapped.head.state_dict().values():
            tensor.copy_(torch.randn(tensor.shape, generator=generator) / 2)
    return trainer


# ------------------------------------------------------------------------------------------------- the mathematics


def test_the_loss_equals_the_golden_numbers() -> None:
    """Golden 10.8: tau .7, gamma .99, cql .1, awac 1, beta .5, two Q, targets half of them."""
    tokens = torch.tensor([[0, 1, 3], [1, 3, 0]])
    mask = torch.tensor([[True, True, True], [True, True, False]])
    rewards = torch.tensor([[0, 0, 1], [0, -1, 0]], dtype=torch.float64)
    steps = torch.arange(24, dtype=torch.float64).reshape(2, 3, 4)
    values = (torch.arange(8, dtype=torch.float64) / 8).reshape(2, 4)[:, :3]
    logits = (torch.arange(32, dtype=torch.float64) / 10).reshape(2, 4, 4)[:, :3]
    heads = (steps.sin(), steps.cos())
    qs = [q.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) for q in heads]
    target = torch.minimum(*qs) / 2
    q_loss, v_loss = ilql_losses(qs, target, values, rewards, mask, tau=0.7, gamma=0.99)
    cql = torch.stack([-token_logprobs(q, tokens) for q in heads]).sum(0)
    awac = -awac_weights(target - values, beta=0.5, limit=20.0) * token_logprobs(logits, tokens)
    parts = [masked_mean(part, mask) for part in (q_loss, v_loss, cql, awac)]
    assert [part.item() for part in parts] == pytest.approx([2.526194, 0.078869, 2.831347, 1.130888], abs=1e-6)
    assert (parts[0] + parts[1] + 0.1 * parts[2] + parts[3]).item() == pytest.approx(4.019085, abs=1e-6)


rows = st.lists(st.lists(st.tuples(st.booleans(), finite, finite, finite, finite), min_size=1, max_size=6), min_size=1)


@given(rows, st.floats(0.05, 0.95), st.floats(0, 1))
def test_losses_equal_their_closed_forms_whatever_stands_off_the_mask(
    rows: list[list[tuple[bool, float, float, float, float]]], tau: float, gamma: float
) -> None:
    """In plain numbers; the successor of a token is the next one that the policy chose, in whichever turn."""
    width = max(map(len, rows))
    mask = torch.tensor([[cell[0] for cell in row] + [False] * (width - len(row)) for row in rows])
    q, target, values, rewards = (
        torch.tensor(
            [[cell[i] if cell[0] else math.nan for cell in row] + [math.nan] * (width - len(row)) for row in rows],
            dtype=torch.float64,
        )
        for i in (1, 2, 3, 4)
    )
    q_loss, v_loss = ilql_losses([q, 2 * q], target, values, rewards, mask, tau=tau, gamma=gamma)
    for at, row in enumerate(rows):
        chosen = [index for index, cell in enumerate(row) if cell[0]]
        for index, after in zip_longest(chosen, chosen[1:]):
            _, q_, target_, value, reward = row[index]
            goal = reward + gamma * (row[after][3] if after is not None else 0.0)
            assert q_loss[at, index].item() == pytest.approx((q_ - goal) ** 2 + (2 * q_ - goal) ** 2, abs=1e-9)
            weight = tau if target_ >= value else 1 - tau
            assert v_loss[at, index].item() == pytest.approx(weight * (target_ - value) ** 2, abs=1e-9)


def test_gradients_reach_q_by_its_own_loss_and_v_by_its_own() -> None:
    q, target, values = (torch.randn(2, 3, requires_grad=True) for _ in range(3))
    mask = torch.ones(2, 3, dtype=torch.bool)
    q_loss, v_loss = ilql_losses([q], target, values, torch.ones(2, 3), mask, tau=0.7, gamma=0.9)
    reached = [torch.autograd.grad(loss.sum(), (q, target, values), allow_unused=True) for loss in (q_loss, v_loss)]
    assert [[grad is not None for grad in grads] for grads in reached] == [[True, False, False], [False, False, True]]


@given(st.lists(finite, min_size=1, max_size=8), st.floats(0.05, 0.95))
def test_the_expectile_loss_is_least_where_the_expectile_is(points: list[float], tau: float) -> None:
    """At τ = ½ it is half the squared error, so the mean; its slope in V is 0 where τ·Σ(u)₊ = (1 − τ)·Σ(u)₋."""
    x = torch.tensor(points, dtype=torch.float64)
    torch.testing.assert_close(expectile_loss(x, 0.5), x**2 / 2)
    low, high = x.min().item(), x.max().item()
    for _ in range(100):
        middle = (low + high) / 2
        above, below = (x - middle).clamp(min=0).sum(), (middle - x).clamp(min=0).sum()
        low, high = (middle, high) if tau * above > (1 - tau) * below else (low, middle)
    least = expectile_loss(x - low, tau).sum()
    for near in (low - 1e-2, low + 1e-2):
        assert expectile_loss(x - near, tau).sum() >= least


def test_a_large_advantage_weighs_no_more_than_the_limit() -> None:
    """exp(1000) is infinite; weights below the limit are exp(β·A)."""
    weights = awac_weights(torch.tensor([0.0, 1.0, 1000.0, -1000.0]), beta=2.0, limit=20.0)
    torch.testing.assert_close(weights, torch.tensor([1.0, math.exp(2), 20.0, 0.0]))


def test_a_next_state_of_one_turn_is_the_first_of_the_next() -> None:
    """Outputs bc and e in a·bc·d·e: V after b is that of c, after c that of e, after e nothing."""
    values = torch.tensor([[9.0, 1.0, 2.0, 9.0, 3.0], [9.0, 9.0, 9.0, 4.0, 5.0]])
    mask = torch.tensor([[False, True, True, False, True], [False, False, False, True, True]])
    expected = torch.tensor([[0.0, 2.0, 3.0, 0.0, 0.0], [0.0, 0.0, 0.0, 5.0, 0.0]])
    assert torch.equal(next_values(values, mask), expected)


# ------------------------------------------------------------------------------------------------------- the heads


def test_the_heads_answers_are_not_rounded_by_autocast() -> None:
    heads, states, tokens = random_heads(), torch.randn(5, 6).bfloat16(), torch.arange(5)
    full, advantages = heads(states, tokens), heads.advantages(states)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = heads(states, tokens)
        assert torch.equal(heads.advantages(states), advantages)
    assert all(torch.equal(found[name], answer) for name, answer in full.items())
    assert not any(torch.equal(answer.bfloat16().float(), answer) for answer in full.values())


def random_heads(**sizes: Any) -> ILQLHeads:
    heads = ILQLHeads(**{"width": 6, "vocabulary": 11, "two_qs": True, **sizes})
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in heads.state_dict().values():
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return heads


@table("two_qs", [True, False])
def test_what_the_heads_say_of_chosen_tokens_is_what_they_say_of_all(two_qs: bool) -> None:
    """The target is the lower of the target heads."""
    heads, states, tokens = random_heads(two_qs=two_qs), torch.randn(5, 6), torch.tensor([0, 10, 3, 3, 7])
    said = heads(states, tokens)
    qs, targets = ([q(states) for q in group] for group in (heads.q, heads.target_q))
    assert len(qs) == len(targets) == 1 + two_qs
    at = torch.arange(5)
    for index, q in enumerate(qs):
        torch.testing.assert_close(said[f"q{index}"], q[at, tokens])
    lower = torch.stack(targets).amin(0)
    torch.testing.assert_close(said["target_q"], lower[at, tokens])
    conservative = [torch.nn.functional.cross_entropy(q, tokens, reduction="none") for q in qs]
    torch.testing.assert_close(said["cql"], torch.stack(conservative).sum(0))
    torch.testing.assert_close(heads.advantages(states), lower - heads.v(states).unsqueeze(-1))
    assert not said["target_q"].requires_grad


def test_in_chunks_the_heads_say_the_same_and_have_the_same_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    def read() -> list[Tensor]:
        head = QHead(6, 11)
        head.load_state_dict(random_heads().q[0].state_dict())
        states = torch.linspace(-1, 1, 42).reshape(7, 6)
        said = head.chosen(states, torch.arange(7))
        (said[0] * said[1]).sum().backward()
        return [*said, *(parameter.grad for parameter in head.parameters() if parameter.grad is not None)]

    whole = read()
    monkeypatch.setattr(policy_module, "CHUNK", 33)  # three states at a time
    for one, other in zip(whole, read(), strict=True):
        torch.testing.assert_close(one, other)


@given(st.floats(0.001, 1))
def test_the_target_goes_as_far_towards_q_as_it_is_told(alpha: float) -> None:
    """α·Q + (1 − α)·Q̂; with α = 1 it is a copy, bit for bit."""
    heads = random_heads()
    before = [tensor.clone() for tensor in heads.target_q.buffers()]
    heads.sync(alpha)
    for old, new, q in zip(before, heads.target_q.buffers(), heads.q.parameters(), strict=True):
        torch.testing.assert_close(new, alpha * q + (1 - alpha) * old, rtol=1e-4, atol=1e-6)
    heads.sync(1.0)
    pairs = zip(heads.target_q.buffers(), heads.q.parameters(), strict=True)
    assert all(torch.equal(target, q) for target, q in pairs)


def test_targets_follow_after_every_kth_optimizer_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In 25 steps, k = 5, they do 5 times; passes of two batches have nothing to do with it."""
    steps: list[int] = []
    trainer = tiny_trainer("ilql", tmp_path, method__steps_for_target_q_sync=5, train__total_steps=25)
    monkeypatch.setattr(ILQLHeads, "sync", lambda self, alpha: steps.append(trainer.progress.step))
    trainer.learn()
    assert steps == list(range(5, 26, 5))


def test_targets_do_not_follow_a_step_that_was_left_out(tmp_path: Path) -> None:
    trainer = settled(tiny_trainer("ilql", tmp_path, method__alpha=1.0))
    trainer.judge = lambda metrics: Verdict.SKIP  # type: ignore[method-assign]
    before = [tensor.clone() for tensor in trainer.unwrapped.head.target_q.buffers()]
    trainer.learn()
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.unwrapped.head.target_q.buffers(), strict=True))


def test_targets_are_in_checkpoints_and_exports_and_no_optimizer_moves_them(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    trainer = tiny_trainer("ilql", tmp_path, train__save_interval=6, optimizer__weight_decay=0.5)
    trainer.learn()
    targets = {k: v for k, v in trainer.unwrapped.state_dict().items() if k.startswith("head.target_q")}
    saved = load_file(tmp_path / "checkpoints/step_00000006/model.safetensors")
    exported = load_file(tmp_path / "model/heads.safetensors")
    assert len(targets) == 8
    assert any(tensor.any() for tensor in targets.values()), "they have moved"
    for key, tensor in targets.items():
        assert torch.equal(saved[key], tensor)
        assert torch.equal(exported[key], tensor)
    assert not {k for k, _ in trainer.unwrapped.named_parameters() if "target" in k}


# -------------------------------------------------------------------------------------------------------- steering


@table("temperature", [0.5, 1.0, 2.0])
def test_tokens_are_drawn_from_the_policy_at_its_temperature_times_the_exponential_of_advantage(
    temperature: float, tmp_path: Path
) -> None:
    """The temperature is the policy's alone, and what is known of a rollout is the policy's too."""
    trainer = settled(tiny_trainer("ilql", tmp_path))
    sampler, seen = trainer.sampling.engine.sampler, []  # type: ignore[attr-defined]
    honest = sampler.steer

    def steer(logits: Tensor, states: Tensor, settings: Any) -> Tensor:
        seen.append((logits, states, honest(logits, states, settings)))
        return seen[-1][2]

    sampler.steer = steer
    rollouts = trainer.generate(["ab", "c"], beta=3.0, temperature=temperature, max_new_tokens=1)
    logits, states, steered = seen[0]
    model = trainer.unwrapped.model
    for row, prompt in enumerate(([0, 1], [2])):
        plain = model(torch.tensor([prompt])).logits[0, -1]
        advantages = trainer.unwrapped.head.advantages(states[row : row + 1])[0]
        expected = (plain / temperature).softmax(-1) * (3.0 * advantages).exp()
        torch.testing.assert_close(steered[row].softmax(-1), expected / expected.sum(), rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(logits[row], plain / temperature, rtol=1e-4, atol=1e-5)
        token = int(rollouts.responses[row])
        assert rollouts.logprobs is not None
        known = rollouts.logprobs[row][rollouts.sequences.response_mask[row]]
        torch.testing.assert_close(known[0], (plain / temperature).log_softmax(-1)[token], rtol=1e-4, atol=1e-5)
    assert rollouts.hidden is None, "states are read, not kept"


def test_without_beta_greedy_sampling_is_that_of_transformers(tmp_path: Path) -> None:
    trainer = settled(tiny_trainer("ilql", tmp_path))
    mine = trainer.generate(["ab", "cde"], beta=0, temperature=0, top_k=0).responses
    model, eos = trainer.unwrapped.model, trainer.tokenizer.eos_token_id
    for prompt, response in zip(([0, 1], [2, 3, 4]), mine, strict=True):
        ids = torch.tensor([prompt])
        theirs = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=6,
            eos_token_id=eos,
            pad_token_id=9,
        )
        assert response.tolist() == theirs[0, len(prompt) :].tolist()


def test_a_large_beta_takes_the_token_of_the_largest_advantage_that_is_allowed(tmp_path: Path) -> None:
    """Greedily: log π(a|s) + β(Q − V), of which β = 1e6 leaves the second; at β = 1 both count."""
    trainer = settled(tiny_trainer("ilql", tmp_path))
    sequences = trainer.generate(["abc"], beta=1e6, temperature=0, max_new_tokens=4).sequences
    hidden = trainer.unwrapped.model.base_model(sequences.input_ids).last_hidden_state[0, 2:-1]
    best = trainer.unwrapped.head.advantages(hidden).argmax(-1)
    assert sequences.input_ids[0, 3:].tolist() == best.tolist()
    outputs = {b: trainer.generate(["abc"], beta=b, temperature=0).outputs[0] for b in (0, 1, 1e6)}
    assert outputs[0] != outputs[1e6]


@table("prompts, top_k", [(["a"], 0), (["a"], 1), (["a", "b"], 0), (["a", "b"], 20)])
def test_no_transition_that_the_mask_forbids_is_taken(prompts: list[str], top_k: int, tmp_path: Path) -> None:
    """Also for a single prompt, and without top_k. Letters go round, a after h, and nothing else."""
    mask = torch.zeros(10, 10, dtype=torch.bool)
    mask[torch.arange(10), (torch.arange(10) + 1) % 8] = True
    trainer = settled(tiny_trainer("ilql", tmp_path, arguments={"logit_mask": mask}))
    outputs = trainer.generate(prompts, beta=100.0, top_k=top_k, max_new_tokens=9).outputs
    assert outputs == [("bcdefghab", "cdefghabc")[i] for i in range(len(prompts))]


def test_a_mask_for_all_states_holds_too(tmp_path: Path) -> None:
    trainer = settled(tiny_trainer("ilql", tmp_path, arguments={"logit_mask": torch.arange(10) < 2}))
    assert set("".join(trainer.generate(list(PROMPTS), beta=100.0).outputs)) <= {"a", "b"}


def test_a_model_that_runs_by_its_own_generate_is_steered_alike(tmp_path: Path) -> None:
    trainer = settled(tiny_trainer("ilql", tmp_path))
    by_steps = trainer.generate(["ab", "c", "def"], beta=5.0, temperature=0).outputs
    trainer.sampling.engine.sampler.fault = "as if"  # type: ignore[attr-defined]
    assert trainer.generate(["ab", "c", "def"], beta=5.0, temperature=0).outputs == by_steps
    assert trainer.generate(["ab", "c", "def"], beta=0.0, temperature=0).outputs != by_steps


def test_evaluations_sweep_beta(tmp_path: Path) -> None:
    trainer = settled(
        tiny_trainer("ilql", tmp_path, rollout__eval_kwargs={"beta": [0, 1, 100], "temperature": 0}, train__seed=3)
    )
    found = trainer.evaluate()
    assert {name for name in found if "length" in name} == {f"eval/length@beta={beta}" for beta in (0, 1, 100)}
    by_beta = [trainer.generate(list(PROMPTS), beta=beta, temperature=0).outputs for beta in (0, 100)]
    assert by_beta[0] != by_beta[1]


@table(
    "method, settings, said",
    [
        ("ilql", {"betta": 1}, r"rollout.eval_kwargs.betta: unknown field; did you mean 'beta'"),
        ("ilql", {"beta": [1, -1]}, r"rollout.eval_kwargs.beta: should be greater than or equal to 0 \(given -1"),
        ("sft", {"beta": 1}, r"rollout.eval_kwargs.beta: unknown field"),
    ],
)
def test_settings_of_evaluation_are_those_of_the_method(method: str, settings: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        tiny_trainer(method, tmp_path, rollout__eval_kwargs=settings)


def test_settings_of_generate_are_those_of_the_method(tmp_path: Path) -> None:
    trainer = tiny_trainer("ilql", tmp_path / "ilql")
    assert trainer.settings().beta == 1.0  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"beta: .*greater than or equal to 0 \(given -2.*Known: .*beta"):
        trainer.generate(["a"], beta=-2)
    with pytest.raises(ConfigError, match=r"beta: Extra inputs.*Known: max_new_tokens"):
        tiny_trainer("sft", tmp_path / "sft").generate(["a"], beta=1)


# --------------------------------------------------------------------------------------------------------- samples


def test_the_reward_stands_on_the_last_output_token_of_a_dialogue(tmp_path: Path) -> None:
    """Rewards 1 and 3 are ∓1/√2; a·bc·d·e and its EOS; the outputs are b, c, e and EOS."""
    trainer = tiny_trainer("ilql", tmp_path)
    batch = trainer.make_experience([["a", "bc", "d", "e"], ("a", "b")], [1.0, 3.0])
    eos = trainer.tokenizer.eos_token_id
    assert batch.sequences.input_ids[0].tolist() == [0, 1, 2, 3, 4, eos]
    assert batch.sequences.response_mask.long().tolist() == [[0, 1, 1, 0, 1, 1], [0, 1, 1, 0, 0, 0]]
    expected = torch.zeros(2, 6)
    expected[0, 5], expected[1, 2] = -(0.5**0.5), 0.5**0.5
    torch.testing.assert_close(batch.rewards, expected)
    assert batch.weight == 6


def test_experience_made_of_samples_is_what_is_learnt_from(tmp_path: Path) -> None:
    """As in trlX: samples, rewards and the most tokens of one."""
    trainer = tiny_trainer("ilql", tmp_path, train__total_steps=None, train__epochs=3, train__batch_size=2)
    batch = trainer.make_experience([("a", "bcdefgh"), ("a", "b"), "abc"], [1, 2, 3], max_length=4)
    assert batch.sequences.lengths.tolist() == [4, 3, 4]
    assert batch.rewards.ne(0).sum() == 2, "the middle reward is the mean"
    trainer.learn()
    assert trainer.progress.step == 3 * 2
    with pytest.raises(DataError, match=r"do not fit into 4 tokens"):
        trainer.generate(["abcd"], max_new_tokens=1)


@table("rewards", [[5.0], [0.9, 0.9, 0.9]])
def test_rewards_that_do_not_differ_are_zero_and_it_is_told(
    rewards: list[float], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The standard deviation of one number is no number."""
    trainer = tiny_trainer("ilql", tmp_path)
    caplog.clear()
    batch = trainer.make_experience([("a", "b")] * len(rewards), rewards)
    assert batch.rewards.abs().max() < 1e-6
    told = [f"all 3 samples have the reward {rewards[0]:g}, so the rewards say nothing about which is better"]
    assert caplog.messages == (told if len(rewards) > 1 else [])


def test_held_out_rewards_are_normalised_like_those_of_training(tmp_path: Path) -> None:
    trainer = tiny_trainer("ilql", tmp_path)
    trainer.add_samples([("a", "b"), ("a", "c")], [1.0, 3.0])
    trainer.add_eval_samples([("a", "d")], [3.0])
    assert trainer.make_experience(trainer.eval_samples).rewards.max().item() == pytest.approx(0.5**0.5)


@table(
    "rewards, said",
    [
        ([1.0], "2 samples and 1 rewards; give one reward per sample"),
        ([1.0, math.nan], "reward 1 should be a finite number"),
        ([1.0, "good"], "reward 1 should be a finite number; given 'good'"),
        (None, "sample 0 has no reward; give rewards, one per sample"),
    ],
)
def test_rewards_that_do_not_fit_are_refused_at_the_door(rewards: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=said):
        tiny_trainer("ilql", tmp_path).add_samples([("a", "b"), ("a", "c")], rewards)


def test_a_stream_is_refused_because_its_rewards_have_no_mean(tmp_path: Path) -> None:
    class Rows:
        def __iter__(self) -> Any:
            return iter([{"prompt": "a", "completion": "b", "label": True}] * 4)

    trainer = tiny_trainer("ilql", tmp_path)
    with pytest.raises(ConfigError, match=r"a stream does not provide; give list\(samples\)"):
        trainer.add_samples(Rows())
    trainer.add_samples(list(Rows()))
    assert [row["reward"] for row in trainer.pipeline.rows] == [1.0] * 4


# ------------------------------------------------------------------------------------------------ encoder-decoders


@pytest.mark.daily(make=(tiny_t5,))
@pytest.mark.parametrize("make", [tiny_t5, tiny_bart])
def test_an_encoder_decoder_reads_values_where_its_decoder_chooses(make: Any, tmp_path: Path) -> None:
    """The decoder reads its start and the output but for its last token; the first one is an action too."""
    trainer = settled(tiny_trainer("ilql", tmp_path, model=make(10)))
    batch = trainer.make_experience([("ab", "cde"), ("f", "gh")], [1.0, 0.0])
    said = trainer.unwrapped(batch.sequences).head
    model, heads, eos = trainer.unwrapped.model, trainer.unwrapped.head, trainer.tokenizer.eos_token_id
    start = model.config.decoder_start_token_id
    for row, (prompt, output) in enumerate((([0, 1], [2, 3, 4, eos]), ([5], [6, 7, eos]))):
        outputs = model(
            input_ids=torch.tensor([prompt]),
            decoder_input_ids=torch.tensor([[start, *output[:-1]]]),
            output_hidden_states=True,
        )
        expected = heads(outputs.decoder_hidden_states[-1][0], torch.tensor(output))
        mask = batch.sequences.response_mask[row]
        assert mask.sum() == len(output)
        for name, values in expected.items():
            torch.testing.assert_close(said[name][row][mask], values, rtol=1e-4, atol=1e-4)


@pytest.mark.daily(make=(tiny_t5,))
@pytest.mark.parametrize("make", [tiny_t5, tiny_bart])
def test_an_encoder_decoder_is_steered_by_its_decoders_states(make: Any, tmp_path: Path) -> None:
    """The budget is that of new tokens, whatever the prompt's; the mask holds; a run by generate is alike."""
    mask = torch.arange(10) < 8
    trainer = settled(tiny_trainer("ilql", tmp_path, model=make(10), arguments={"logit_mask": mask}))
    rollouts = trainer.generate(["ab", "cdefgh"], beta=1e6, temperature=0, max_new_tokens=5)
    model, heads = trainer.unwrapped.model, trainer.unwrapped.head
    for query, response in zip(rollouts.queries, rollouts.responses, strict=True):
        assert len(response) == 5
        ids = torch.tensor([[model.config.decoder_start_token_id, *response[:-1]]])
        states = model(input_ids=query.unsqueeze(0), decoder_input_ids=ids, output_hidden_states=True)
        best = heads.advantages(states.decoder_hidden_states[-1][0])[:, :8].argmax(-1)
        assert response.tolist() == best.tolist()
    trainer.sampling.engine.sampler.fault = "as if"  # type: ignore[attr-defined]
    assert trainer.generate(["ab", "cdefgh"], beta=1e6, temperature=0, max_new_tokens=5).outputs == rollouts.outputs


def test_heads_read_states_that_are_narrower_than_the_layers(tmp_path: Path) -> None:
    """OPT-350m projects its states before the head of words, which reads what the heads read."""
    opt = {"model_type": "opt", "vocab_size": 10, "hidden_size": 32, "word_embed_proj_dim": 16, "ffn_dim": 32,
           "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 64}  # fmt: skip
    trainer = settled(tiny_trainer("ilql", tmp_path, model=opt, train__total_steps=1))
    model, heads = trainer.unwrapped.model, trainer.unwrapped.head
    rollouts = trainer.generate(["ab"], beta=1e6, temperature=0)
    [query], [response] = rollouts.queries, rollouts.responses
    ids = torch.tensor([[*query.tolist(), *response[:-1]]])
    states = model.base_model(input_ids=ids).last_hidden_state[0, len(query) - 1 :]
    assert states.shape[1] == 16
    assert response.tolist() == heads.advantages(states).argmax(-1).tolist()
    trainer.learn()
    assert trainer.progress.step == 1


# --------------------------------------------------------------------------------------------- learning and exports


def taught(samples: Sequence[Any], rewards: Sequence[float], run_dir: Path, **changes: Any) -> Any:
    trainer = tiny_trainer(
        "ilql", run_dir, **{"train__total_steps": 150, "optimizer__lr": 3e-3, "method__alpha": 0.1, **changes}
    )
    trainer.make_experience(samples, rewards)
    trainer.learn()
    return trainer


def test_it_imitates_the_data_and_finds_the_better_by_value(tmp_path: Path) -> None:
    """Outputs b and c are as frequent; b is rewarded. Q of both becomes the (normalised) reward, discounted by EOS."""
    changes = {"scheduler__name": "linear", "optimizer__lr": 1e-2, "train__total_steps": 40}
    trainer = taught([("a", "b"), ("a", "c")] * 8, [1.0, 0.0] * 8, tmp_path, **changes)
    shares = {beta: trainer.generate(["a"] * 200, beta=beta).outputs.count("b") / 200 for beta in (0.0, 4.0)}
    assert 0.35 < shares[0.0] < 0.65
    assert shares[4.0] > 0.95
    batch = trainer.make_experience([("a", "b"), ("a", "c")] * 8, [1.0, 0.0] * 8)
    q = trainer.unwrapped(batch.sequences).head["q0"]
    torch.testing.assert_close(q[:2, 2], torch.tensor([1.0, -1.0]), rtol=0, atol=0.1)


@pytest.mark.slow
def test_weighting_by_advantage_makes_the_language_model_prefer_the_better(tmp_path: Path) -> None:
    trainer = taught([("a", "b"), ("a", "c")] * 8, [1.0, 0.0] * 8, tmp_path, method__beta_awac=3.0)
    assert trainer.generate(["a"] * 200, beta=0).outputs.count("b") > 160


def test_an_export_goes_on_with_its_heads_and_steers_alike(tmp_path: Path) -> None:
    trainer = taught([("a", "b"), ("a", "c")] * 8, [1.0, 0.0] * 8, tmp_path / "first", train__total_steps=10)
    path = str(trainer.save_pretrained(tmp_path / "export"))
    again = trainkit.train(
        path,
        samples=[("a", "b"), ("a", "c")],
        rewards=[1.0, 0.0],
        config={"method": "ilql", "train": {"total_steps": 0, "run_dir": str(tmp_path / "again"), "trackers": []}},
    )
    for beta in (0.0, 2.0):
        assert again.generate(list(PROMPTS), beta=beta, temperature=0, max_new_tokens=6).outputs == (
            trainer.generate(list(PROMPTS), beta=beta, temperature=0, max_new_tokens=6).outputs
        )
    states = torch.ones(1, 32)
    assert torch.equal(again.unwrapped.head.advantages(states), trainer.unwrapped.head.advantages(states))


def test_an_export_with_other_heads_is_refused(tmp_path: Path) -> None:
    tiny_trainer("ilql", tmp_path / "two", train__total_steps=1).learn()
    path = str(tmp_path / "two" / "model")
    with pytest.raises(ConfigError, match=r"another head than this policy has: head\.q\.1.*settings of the run"):
        tiny_trainer("ilql", tmp_path / "one", model__model_path=path, method__two_qs=False).learn()


def test_a_live_model_starts_with_heads_of_its_own(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = character_tokenizer("ab")
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**tiny_gpt2(len(tokenizer))))
    trainer = trainkit.train(
        model,
        samples=[("a", "b"), ("b", "a")],
        rewards=[1, 0],
        tokenizer=tokenizer,
        config={"train": {"total_steps": 2, "run_dir": str(tmp_path), "trackers": []}},
    )
    assert trainer.config.method.name == "ilql"
    assert trainer.unwrapped.model is model
    assert trainer.unwrapped.head.q[0].out.weight.any()
