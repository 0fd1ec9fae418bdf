"""The mathematics, against closed forms and loops in NumPy, known numbers, and the laws of masks."""

from __future__ import annotations

import math

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from tables import table
from trainkit.functional import (
    at_last,
    clipped_surrogate,
    clipped_value_loss,
    entropy_from_logits,
    explained_variance,
    gae,
    hinge_loss,
    ipo_loss,
    jensen_shannon,
    kl_exact,
    kl_forward,
    kl_k1,
    kl_k2,
    kl_k3,
    kl_shaped_rewards,
    last_token,
    leave_one_out,
    masked_mean,
    masked_sum,
    nll,
    penalise_repetition,
    penalise_truncated,
    per_response,
    place_scores,
    preference_accuracy,
    repetition,
    sigmoid_loss,
    token_logprobs,
    truncate_logits,
    whiten,
    zero_masked,
)

EXACT = {"rtol": 1e-10, "atol": 1e-10}  # both sides in float64
FLOAT32 = {"rtol": 0.0, "atol": 1e-5}  # golden numbers are given to six digits

NUMBERS = st.floats(-5, 5, allow_subnormal=False)
GARBAGE = st.sampled_from([math.nan, math.inf, -math.inf, 1e30])


def close(actual, expected, **tolerance):
    expected = torch.as_tensor(np.asarray(expected)).to(actual.dtype)
    torch.testing.assert_close(actual, expected, **(tolerance or EXACT))


def exactly(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@st.composite
def masked(draw, columns=1, dims=2):
    """A ragged mask, ``columns`` arrays of its shape, and the same arrays as tensors with garbage off the mask."""
    shape = draw(hnp.array_shapes(min_dims=dims, max_dims=dims, max_side=6))
    mask = draw(hnp.arrays(bool, shape))
    clean = [draw(hnp.arrays(np.float64, shape, elements=NUMBERS)) for _ in range(columns)]
    dirty = [torch.from_numpy(np.where(mask, x, draw(GARBAGE))) for x in clean]
    return mask, clean, dirty


@st.composite
def logits_of(draw, count=1):
    """``count`` float64 arrays [N, V] of logits."""
    shape = draw(hnp.array_shapes(min_dims=2, max_dims=2, max_side=6))
    return [draw(hnp.arrays(np.float64, shape, elements=NUMBERS)) for _ in range(count)]


def log_softmax(z):
    """[N, V] -> [N, V], row by row, in plain Python."""
    return np.array([[v - math.log(sum(math.exp(w) for w in row)) for v in row] for row in z.tolist()])


# --------------------------------------------------------------------------------------------- masked statistics


@given(masked())
def test_zero_masked_keeps_the_selected_and_is_exactly_zero_elsewhere(case):
    mask, (x,), (dirty,) = case
    exactly(zero_masked(dirty, torch.from_numpy(mask)), torch.from_numpy(np.where(mask, x, 0.0)))


def test_no_gradient_reaches_a_masked_entry_even_if_it_is_nan():
    x = torch.tensor([1.0, math.nan, 3.0, math.inf], requires_grad=True)
    masked_mean(x**2, torch.tensor([True, False, True, False])).backward()
    exactly(x.grad[[0, 2]], torch.tensor([1.0, 3.0]))  # d/dx of (x0² + x2²) / 2


@given(masked())
def test_masked_sum_and_mean_see_only_what_is_selected(case):
    mask, (x,), (dirty,) = case
    chosen = x[mask].tolist()
    close(masked_sum(dirty, torch.from_numpy(mask)), math.fsum(chosen))
    close(masked_mean(dirty, torch.from_numpy(mask)), math.fsum(chosen) / max(len(chosen), 1))


@given(masked(), st.integers(0, 1))
def test_masked_sum_over_one_dimension_is_the_sum_of_each_line(case, dim):
    mask, (x,), (dirty,) = case
    lines = zip(x, mask, strict=True) if dim == 1 else zip(x.T, mask.T, strict=True)
    close(masked_sum(dirty, torch.from_numpy(mask), dim), [math.fsum(line[keep]) for line, keep in lines])


# Values, rewards and mask of the golden numbers, and the advantages they give at γ = 1, λ = .95.
VALUES = torch.tensor([[0.5, 0.4, 0.3], [0.1, 0.2, 0.0]])
REWARDS = torch.tensor([[0.1, 0.0, 1.0], [-0.2, 0.5, 0.0]])
MASK = torch.tensor([[True, True, True], [True, True, False]])
ADVANTAGES = torch.tensor([[0.53675, 0.565, 0.7], [0.185, 0.3, 0.0]])
WHITENED = torch.tensor([[0.378842, 0.513631, 1.157758], [-1.299465, -0.750765, 0.0]])


def test_whitening_gives_the_known_numbers():
    """With padding, with the mean kept, and without padding."""
    close(whiten(ADVANTAGES, MASK), WHITENED, **FLOAT32)
    kept = [[0.836192, 0.970981, 1.615108], [-0.842115, -0.293415, 0.0]]
    close(whiten(ADVANTAGES, MASK, shift_mean=False), kept, **FLOAT32)
    everything = torch.ones(2, 3, dtype=torch.bool)
    close(
        whiten(ADVANTAGES, everything), [[0.588196, 0.694969, 1.205212], [-0.741269, -0.306618, -1.440490]], **FLOAT32
    )


@given(masked(), st.booleans())
def test_whitening_is_the_unbiased_formula_on_the_selected_and_zero_elsewhere(case, shift_mean):
    mask, (x,), (dirty,) = case
    chosen = x[mask]
    assume(len(chosen) >= 2)
    mean = math.fsum(chosen) / len(chosen)
    var = math.fsum((v - mean) ** 2 for v in chosen) / (len(chosen) - 1)
    expected = np.zeros_like(x)
    expected[mask] = [(v - mean) / math.sqrt(var + 1e-8) + (0 if shift_mean else mean) for v in chosen]
    # The mean is rounded differently here; where all values are equal, 1e-15 is divided by the floor √1e-8.
    close(whiten(dirty, torch.from_numpy(mask), shift_mean=shift_mean), expected, rtol=1e-9, atol=1e-9)


@given(masked())
def test_whitening_ignores_padding_and_its_place(case):
    mask, (x,), (dirty,) = case
    alone = whiten(torch.from_numpy(x[mask]), torch.ones(int(mask.sum()), dtype=torch.bool))
    close(whiten(dirty, torch.from_numpy(mask))[torch.from_numpy(mask)], alone, rtol=1e-9, atol=1e-9)


@given(masked(), st.integers(0, 1))
def test_fewer_than_two_selected_values_are_left_as_they_are(case, count):
    mask, (x,), (dirty,) = case
    few = np.zeros_like(mask)
    few.flat[np.flatnonzero(mask)[:count]] = True
    exactly(whiten(dirty, torch.from_numpy(few)), torch.from_numpy(np.where(few, x, 0.0)))


@given(masked(), masked(), st.booleans())
def test_two_processes_whiten_as_one_would_the_concatenation(in_lockstep, first, second, shift_mean):
    shards = [(dirty.flatten(), torch.from_numpy(mask).flatten()) for mask, _, (dirty,) in (first, second)]
    apart = in_lockstep(lambda shard, reduce: whiten(*shard, shift_mean=shift_mean, reduce=reduce), shards)
    x, mask = (torch.cat(parts) for parts in zip(*shards, strict=True))
    close(torch.cat(apart), whiten(x, mask, shift_mean=shift_mean), rtol=1e-9, atol=1e-9)


def test_a_process_with_nothing_selected_takes_part_in_whitening(in_lockstep):
    none, both = torch.zeros(2, dtype=torch.bool), torch.ones(2, dtype=torch.bool)
    shards = [(torch.tensor([math.nan, 1.0]), none), (torch.tensor([1.0, 3.0]), both)]
    idle, busy = in_lockstep(lambda shard, reduce: whiten(*shard, reduce=reduce), shards)
    exactly(idle, torch.zeros(2))
    close(busy, [-1 / math.sqrt(2), 1 / math.sqrt(2)], **FLOAT32)  # mean 2, unbiased variance 2


def test_whitening_keeps_the_type_of_floats_and_does_not_truncate_integers():
    mask = torch.ones(3, dtype=torch.bool)
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        assert whiten(torch.tensor([1.0, 2.0, 4.0], dtype=dtype), mask).dtype == dtype
    exactly(whiten(torch.tensor([1, 2, 4]), mask), whiten(torch.tensor([1.0, 2.0, 4.0]), mask))


def test_whitening_survives_a_mean_far_from_zero():
    # In float32 at 1e6 one unit in the last place is 1/16: the mean of [0, 1, 2] + 1e6 needs float64 to be exact.
    close(whiten(torch.tensor([0.0, 1.0, 2.0]) + 1e6, torch.ones(3, dtype=torch.bool)), [-1.0, 0.0, 1.0], **FLOAT32)


# -------------------------------------------------------------------------------------- log-probabilities and KL


@given(logits_of(), st.data())
def test_token_logprobs_are_the_log_softmax_of_the_chosen_token(case, data):
    (z,) = case
    tokens = data.draw(hnp.arrays(np.int64, len(z), elements=st.integers(0, z.shape[1] - 1)))
    close(token_logprobs(torch.from_numpy(z), torch.from_numpy(tokens)), log_softmax(z)[np.arange(len(z)), tokens])


def test_token_logprobs_stay_finite_for_large_logits():
    logits = torch.tensor([[1e4, 1e4, -1e4]]).expand(2, 3)
    # In float32 neighbours of 1e4 are 2⁻¹⁰ apart, of 2e4 2⁻⁹: half of that is how exact the difference can be.
    close(token_logprobs(logits, torch.tensor([0, 2])), [-math.log(2), -2e4 - math.log(2)], rtol=0, atol=2**-10)


@given(logits_of())
def test_entropy_is_minus_the_sum_of_p_log_p(case):
    (z,) = case
    logp = log_softmax(z)
    close(entropy_from_logits(torch.from_numpy(z)), [-math.fsum(np.exp(row) * row) for row in logp])


def test_entropy_of_a_uniform_choice_is_log_v_and_of_a_certain_one_zero():
    close(entropy_from_logits(torch.zeros(1, 7, dtype=torch.float64)), [math.log(7)])
    close(entropy_from_logits(torch.tensor([[0.0, 2e4]])), [0.0], rtol=0, atol=0)


def test_forbidden_tokens_add_neither_to_entropy_nor_to_its_gradient():
    logits = torch.tensor([[1.0, -0.5, -math.inf, 2.0]], dtype=torch.float64, requires_grad=True)
    allowed = logits.detach()[:, [0, 1, 3]].requires_grad_()
    entropy_from_logits(logits).sum().backward()
    entropy_from_logits(allowed).sum().backward()
    close(entropy_from_logits(logits).detach(), entropy_from_logits(allowed).detach())
    close(logits.grad[:, [0, 1, 3]], allowed.grad)
    exactly(logits.grad[0, 2], torch.tensor(0.0, dtype=torch.float64))


POLICY = torch.tensor([[0.7, 0.2, 0.1]], dtype=torch.float64)
REFERENCE = torch.tensor([[0.4, 0.4, 0.2]], dtype=torch.float64)
# KL(π‖π_ref) = .7 ln(7/4) + .2 ln(1/2) + .1 ln(1/2)
KL = 0.7 * math.log(7 / 4) - 0.3 * math.log(2)


def test_estimators_have_the_known_expectations_under_the_policy():
    for estimator in (kl_k1, kl_k3):
        close((POLICY * estimator(POLICY.log(), REFERENCE.log())).sum(), 0.183787, rtol=0, atol=1e-6)
    close((POLICY * kl_k2(POLICY.log(), REFERENCE.log())).sum(), 0.181677, rtol=0, atol=1e-6)
    # exp(k1) − 1 − k1 has the expectation χ² − KL = Σ p²/q − 1 − KL = .191213 under the policy.
    backwards = (POLICY * kl_k3(REFERENCE.log(), POLICY.log())).sum()
    close(backwards, 0.191213, rtol=0, atol=1e-6)


@given(logits_of(count=2))
def test_expectation_of_k1_and_k3_is_the_exact_kl_whatever_the_distributions(case):
    p, q = (torch.from_numpy(log_softmax(z)) for z in case)
    exact = kl_exact(p, q)
    close((p.exp() * kl_k1(p, q)).sum(-1), exact)
    close((p.exp() * kl_k3(p, q)).sum(-1), exact)


@given(logits_of(count=2))
def test_exact_kl_is_the_sum_over_the_vocabulary(case):
    p, q = log_softmax(case[0]), log_softmax(case[1])
    expected = [
        math.fsum(math.exp(a) * (a - b) for a, b in zip(x, y, strict=True))
        for x, y in zip(p.tolist(), q.tolist(), strict=True)
    ]
    close(kl_exact(torch.from_numpy(case[0]), torch.from_numpy(case[1])), expected)


@given(logits_of(count=2))
def test_forward_kl_is_the_sum_over_the_vocabulary_with_the_distributions_exchanged(case):
    p, q = log_softmax(case[0]), log_softmax(case[1])
    expected = [
        math.fsum(math.exp(b) * (b - a) for a, b in zip(x, y, strict=True))
        for x, y in zip(p.tolist(), q.tolist(), strict=True)
    ]
    close(kl_forward(torch.from_numpy(case[0]), torch.from_numpy(case[1])), expected)


# KL(π_ref‖π) = .4 ln(4/7) + .4 ln 2 + .2 ln 2
FORWARD = 0.4 * math.log(4 / 7) + 0.6 * math.log(2)
# m = (π + π_ref) / 2 = (.55, .3, .15)
JS = 0.5 * (0.7 * math.log(0.7 / 0.55) + 0.2 * math.log(0.2 / 0.3) + 0.1 * math.log(0.1 / 0.15)) + 0.5 * (
    0.4 * math.log(0.4 / 0.55) + 0.4 * math.log(0.4 / 0.3) + 0.2 * math.log(0.2 / 0.15)
)
# m = .25 π_ref + .75 π = (.625, .25, .125), weighted .25 KL(π_ref‖m) + .75 KL(π‖m)
JS_QUARTER = 0.75 * (0.7 * math.log(0.7 / 0.625) + 0.2 * math.log(0.2 / 0.25) + 0.1 * math.log(0.1 / 0.125)) + 0.25 * (
    0.4 * math.log(0.4 / 0.625) + 0.4 * math.log(0.4 / 0.25) + 0.2 * math.log(0.2 / 0.125)
)
DIVERGENCES = [
    (kl_exact, KL),
    (kl_forward, FORWARD),
    (jensen_shannon, JS),
    (lambda p, q: jensen_shannon(p, q, beta=0.25), JS_QUARTER),
]


@table("fn, known", DIVERGENCES)
def test_divergences_are_the_known_ones_and_ignore_tokens_that_neither_may_choose(fn, known):
    """So do their gradients."""
    close(fn(POLICY.log(), REFERENCE.log()), [known])
    forbidden = torch.full((1, 2), -math.inf, dtype=torch.float64)
    policy = torch.cat([POLICY.log(), forbidden], -1).requires_grad_()
    found = fn(policy, torch.cat([REFERENCE.log(), forbidden], -1))
    close(found.detach(), [known])
    found.sum().backward()
    alone = POLICY.log().requires_grad_()
    fn(alone, REFERENCE.log()).sum().backward()
    close(policy.grad[:, :3], alone.grad)
    exactly(policy.grad[:, 3:], torch.zeros(1, 2, dtype=torch.float64))


def test_jensen_shannon_is_finite_where_only_one_of_the_two_may_choose():
    """Of disjoint distributions it is the entropy of the weights; both Kullback-Leibler divergences are infinite."""
    ours = torch.tensor([[0.0, -math.inf]], dtype=torch.float64, requires_grad=True)
    theirs = torch.tensor([[-math.inf, 0.0]], dtype=torch.float64)
    for beta in (0.5, 0.1):
        found = jensen_shannon(ours, theirs, beta=beta)
        close(found.detach(), [-beta * math.log(beta) - (1 - beta) * math.log(1 - beta)])
        ours.grad = None
        found.sum().backward()
        assert ours.grad.isfinite().all()
    assert kl_exact(ours, theirs).item() == kl_forward(ours, theirs).item() == math.inf


@given(logits_of(count=2), st.floats(0.01, 0.99))
def test_jensen_shannon_is_bounded_and_symmetric_in_distributions_and_weights(case, beta):
    p, q = (torch.from_numpy(z) for z in case)
    found = jensen_shannon(p, q, beta=beta)
    assert (found > -1e-12).all()
    assert (found < -beta * math.log(beta) - (1 - beta) * math.log(1 - beta) + 1e-12).all()
    close(found, jensen_shannon(q, p, beta=1 - beta))


@given(logits_of(count=2))
def test_jensen_shannon_per_weight_approaches_forward_and_reverse_kl(case):
    p, q = (torch.from_numpy(z) for z in case)
    tiny = 1e-7
    close(jensen_shannon(p, q, beta=tiny) / tiny, kl_forward(p, q), rtol=0, atol=1e-2)
    close(jensen_shannon(p, q, beta=1 - tiny) / tiny, kl_exact(p, q), rtol=0, atol=1e-2)


@table("beta", [0.0, 1.0, -0.5, math.nan])
def test_a_weight_of_jensen_shannon_outside_of_zero_and_one_is_refused(beta):
    with pytest.raises(ValueError, match=r"beta is .*give a weight between 0 and 1, or use kl_forward or kl_exact"):
        jensen_shannon(POLICY, REFERENCE, beta=beta)


@given(logits_of())
def test_every_kl_of_a_policy_with_itself_is_exactly_zero(case):
    logits = torch.from_numpy(case[0])
    zero = torch.zeros(len(logits), dtype=torch.float64)
    exactly(kl_exact(logits, logits), zero)
    exactly(kl_forward(logits, logits), zero)
    close(jensen_shannon(logits, logits), zero)  # the logarithm of the mixture is rounded
    for estimator in (kl_k1, kl_k2, kl_k3):
        exactly(estimator(logits, logits), torch.zeros_like(logits))


@given(masked(columns=2))
def test_per_token_kl_estimators_are_their_formulas(case):
    _, (lp, ref), _ = case
    tensors, k1 = (torch.from_numpy(lp), torch.from_numpy(ref)), lp - ref
    exactly(kl_k1(*tensors), torch.from_numpy(k1))
    close(kl_k2(*tensors), k1**2 / 2)
    close(kl_k3(*tensors), np.exp(-k1) - 1 + k1, rtol=1e-10, atol=1e-9)


@given(st.floats(-20, 20, width=32), st.floats(-20, 20, width=32))
def test_k2_and_k3_are_never_negative(lp, ref):
    lp, ref = torch.tensor([lp]), torch.tensor([ref])
    assert kl_k2(lp, ref) >= 0
    assert kl_k3(lp, ref) >= 0


def test_k3_of_nearly_equal_policies_keeps_its_leading_term():
    # k1 = 2⁻¹²: exp(−k1) − 1 + k1 = k1²/2 − … = 2⁻²⁵. Below 1, float32 goes in steps of 2⁻²⁴: exp(−k1) − 1 loses it.
    close(kl_k3(torch.tensor(2.0**-12), torch.tensor(0.0)), 2.0**-25, rtol=1e-3, atol=0)


# ------------------------------------------------------------------------------------------- rewards and returns


@given(masked())
def test_last_token_is_the_last_selected_position_of_each_row(case):
    mask, _, _ = case
    expected = np.zeros_like(mask)
    for row in range(len(mask)):
        at = [t for t in range(mask.shape[1]) if mask[row, t]]
        if at:
            expected[row, at[-1]] = True
    exactly(last_token(torch.from_numpy(mask)), torch.from_numpy(expected))


def test_what_is_said_at_the_last_token_of_each_row_is_picked():
    # Row 0 ends at token 1, before a padding of NaN; row 1 at token 2, after padding; row 2 has no token.
    mask = torch.tensor([[1, 1, 0], [0, 0, 1], [0, 0, 0]])
    numbers = torch.tensor([[1.0, 2.0, math.nan], [math.inf, 4.0, 5.0], [6.0, 7.0, 8.0]])
    exactly(at_last(numbers, mask), torch.tensor([2.0, 5.0, 0.0]))
    exactly(at_last(torch.stack([numbers, 2 * numbers], -1), mask), torch.tensor([[2.0, 4.0], [5.0, 10.0], [0.0, 0.0]]))


def test_score_lands_on_last_response_token():
    # Row 0 ends at token 2, row 1 at token 3 with a tool's token at 2, row 2 has no response at all.
    mask = torch.tensor([[0, 1, 1, 0], [0, 1, 0, 1], [0, 0, 0, 0]]).bool()
    expected = torch.tensor([[0.0, 0.0, 5.0, 0.0], [0.0, 0.0, 0.0, 7.0], [0.0, 0.0, 0.0, 0.0]])
    exactly(place_scores(torch.tensor([5.0, 7.0, math.nan]), mask), expected)
    # Scores per token stay where they are, and vanish off the mask.
    mask = torch.tensor([[False, True, True, False]])
    scores = torch.tensor([[9.0, 1.0, -2.0, math.nan]])
    exactly(place_scores(scores, mask), torch.tensor([[0.0, 1.0, -2.0, 0.0]]))


@given(masked(columns=2), st.floats(0, 2), st.data())
def test_rewards_of_a_row_sum_to_its_score_minus_the_kl_of_its_response(case, kl_coef, data):
    mask, (lp, ref), (dirty_lp, dirty_ref) = case
    scores = data.draw(hnp.arrays(np.float64, len(mask), elements=NUMBERS))
    m = torch.from_numpy(mask)
    rewards = kl_shaped_rewards(torch.from_numpy(scores), dirty_lp, dirty_ref, m, kl_coef)
    expected = np.zeros_like(lp)
    for b in range(len(mask)):
        at = [t for t in range(mask.shape[1]) if mask[b, t]]
        for t in at:
            expected[b, t] = -kl_coef * (lp[b, t] - ref[b, t]) + (scores[b] if t == at[-1] else 0.0)
    close(rewards, expected)
    exactly(rewards[~m], torch.zeros(int((~mask).sum()), dtype=torch.float64))
    close(rewards.sum(1), scores * mask.any(1) - kl_coef * np.where(mask, lp - ref, 0).sum(1))


def test_dense_rewards_carry_the_penalty_token_by_token():
    mask = torch.tensor([[False, True, True]])
    scores, lp, ref = torch.tensor([[math.inf, 1.0, 2.0]]), torch.tensor([[0.0, -1.0, -2.0]]), torch.zeros(1, 3)
    # r = score − ½·(lp − 0)
    exactly(kl_shaped_rewards(scores, lp, ref, mask, 0.5), torch.tensor([[0.0, 1.5, 3.0]]))


def test_gae_gives_the_known_numbers():
    advantages, returns = gae(VALUES, REWARDS, MASK, gamma=1.0, lam=0.95)
    close(advantages, ADVANTAGES, rtol=0, atol=1e-6)
    close(returns, [[1.03675, 0.965, 1.0], [0.285, 0.5, 0.0]], rtol=0, atol=1e-6)
    advantages, _ = gae(VALUES, REWARDS, MASK, gamma=0.99, lam=0.9)
    close(advantages, [[0.459944, 0.5207, 0.7], [0.1653, 0.3, 0.0]], rtol=0, atol=1e-6)


def test_gae_goes_on_with_the_value_of_the_state_that_a_cut_response_ends_in():
    """Γ = .9, λ = .5: δ = .5 + .9·.4 − .5 = .36 and 1 + .9·2 − .4 = 2.4, so A = .36 + .45·2.4 = 1.44 and 2.4.

    The second row ended by itself: δ = 1 − .4 = .6 at its last token, A = .36 + .45·.6 = .63 and .6.
    """
    values, rewards = torch.tensor([[0.5, 0.4], [0.5, 0.4]]), torch.tensor([[0.5, 1.0], [0.5, 1.0]])
    mask = torch.ones(2, 2, dtype=torch.bool)
    advantages, returns = gae(values, rewards, mask, gamma=0.9, lam=0.5, bootstrap=torch.tensor([2.0, 0.0]))
    close(advantages, [[1.44, 2.4], [0.63, 0.6]], rtol=0, atol=1e-6)
    close(returns, [[1.94, 2.8], [1.13, 1.0]], rtol=0, atol=1e-6)


def test_gae_may_have_a_lambda_for_each_row():
    """Γ = 1: δ = .5 + .4 − .5 = .4 and 1 − .4 = .6; λ of 1 − 1/(½·2) = 0 and of .5 give A = .4 and .4 + .3."""
    values, rewards = torch.tensor([[0.5, 0.4], [0.5, 0.4]]), torch.tensor([[0.5, 1.0], [0.5, 1.0]])
    mask = torch.ones(2, 2, dtype=torch.bool)
    advantages, _ = gae(values, rewards, mask, gamma=1.0, lam=torch.tensor([0.0, 0.5]))
    close(advantages, [[0.4, 0.6], [0.7, 0.6]], rtol=0, atol=1e-6)


def test_the_penalty_for_a_cut_response_is_at_its_last_token():
    rewards, mask = (
        torch.tensor([[0.0, 1.0, 2.0], [0.0, 3.0, 9.0]]),
        torch.tensor([[False, True, True], [True, True, False]]),
    )
    close(penalise_truncated(rewards, torch.tensor([True, False]), mask, 0.5), [[0.0, 1.0, 2.0], [0.0, 2.5, 9.0]])


def gae_of_row(values, rewards, gamma, lam):
    """The sum of the definition, A_t = Σ_l (γλ)^l δ_{t+l}, rather than its recursion."""
    values = [*values, 0.0]
    deltas = [r + gamma * after - v for r, v, after in zip(rewards, values, values[1:], strict=False)]
    return [
        math.fsum((gamma * lam) ** (i - t) * delta for i, delta in enumerate(deltas) if i >= t)
        for t in range(len(deltas))
    ]


@given(masked(columns=2), st.floats(0, 1), st.floats(0, 1))
def test_gae_is_the_sum_of_discounted_errors_over_the_tokens_of_the_response(case, gamma, lam):
    mask, (values, rewards), (dirty_values, dirty_rewards) = case
    advantages, returns = gae(dirty_values, dirty_rewards, torch.from_numpy(mask), gamma=gamma, lam=lam)
    expected = np.zeros_like(values)
    for b, keep in enumerate(mask):
        expected[b, keep] = gae_of_row(values[b, keep], rewards[b, keep], gamma, lam)
    close(advantages, expected)
    close(returns, np.where(mask, expected + values, 0.0))


@given(masked(columns=2), st.floats(0, 1), st.floats(0, 1))
def test_gae_across_tool_tokens_equals_gae_of_the_row_without_them(case, gamma, lam):
    mask, _, dirty = case
    for b in np.flatnonzero(mask.any(1)):
        keep = torch.from_numpy(mask[b])
        row = [x[b : b + 1] for x in dirty]
        compact = [x[:, keep] for x in row]
        with_tool = gae(*row, keep[None], gamma=gamma, lam=lam)
        without = gae(*compact, torch.ones(1, int(keep.sum()), dtype=torch.bool), gamma=gamma, lam=lam)
        for wide, narrow in zip(with_tool, without, strict=True):
            exactly(wide[:, keep], narrow)


@given(masked(columns=2), st.floats(0, 1))
def test_returns_at_lambda_one_are_the_discounted_rewards_to_go(case, gamma):
    mask, (_, rewards), dirty = case
    _, returns = gae(*dirty, torch.from_numpy(mask), gamma=gamma, lam=1.0)
    expected = np.zeros_like(rewards)
    for b, keep in enumerate(mask):
        r = rewards[b, keep]
        expected[b, keep] = [math.fsum(gamma**i * x for i, x in enumerate(r[t:])) for t in range(len(r))]
    close(returns, expected)


# ------------------------------------------------------------------------------------------------------- losses

# The golden PPO step: advantages are the whitened ones above, clip ranges .2.
LOGPROBS = torch.tensor([[-1.0, -2.0, -0.5], [-1.5, -0.2, -3.0]])
OLD_LOGPROBS = torch.tensor([[-1.1, -1.5, -0.5], [-1.4, -0.3, -2.0]])
NEW_VALUES = VALUES + torch.tensor([[0.3, -0.1, 0.5], [0.0, -0.4, 1.0]])
RETURNS = torch.tensor([[1.03675, 0.965, 1.0], [0.285, 0.5, 0.0]])


def test_policy_loss_is_the_known_number():
    ratio = (LOGPROBS - OLD_LOGPROBS).exp()
    loss = clipped_surrogate(ratio, WHITENED, cliprange=0.2)
    close(masked_mean(loss, MASK), 0.023511, **FLOAT32)
    close(masked_mean(ratio, MASK), 0.944342, **FLOAT32)
    # Only exp(−.5) leaves [.8, 1.2], and there A > 0: the pessimistic of the two is the unclipped one.
    exactly(masked_mean((loss > -WHITENED * ratio).float(), MASK), torch.tensor(0.0))


def test_value_loss_is_the_known_number():
    loss = clipped_value_loss(NEW_VALUES, VALUES, RETURNS, cliprange=0.2)
    close(masked_mean(loss, MASK), 0.132985, **FLOAT32)
    # Clipping decides where V moved towards R by more than .2: tokens 0 (+.3) and 2 (+.5) of row 0, 2 of 5 tokens.
    exactly(masked_mean((loss > 0.5 * (NEW_VALUES - RETURNS) ** 2).float(), MASK), torch.tensor(0.4))


@given(st.floats(0, 3), NUMBERS, st.floats(0.01, 0.9))
def test_surrogate_is_the_negated_minimum_of_the_clipped_and_the_unclipped_objective(ratio, advantage, cliprange):
    loss = clipped_surrogate(
        torch.tensor(ratio, dtype=torch.float64), torch.tensor(advantage, dtype=torch.float64), cliprange=cliprange
    )
    clipped = min(max(ratio, 1 - cliprange), 1 + cliprange)
    close(loss, -min(ratio * advantage, clipped * advantage))


def test_the_upper_clipping_range_may_be_another_one():
    # ρ = 1.5, .5 with A = 1 and −1, clipped to [.8, 1.3]: −1.3, −.5 and 1.5, .8
    ratio, advantages = torch.tensor([1.5, 0.5, 1.5, 0.5]), torch.tensor([1.0, 1.0, -1.0, -1.0])
    close(clipped_surrogate(ratio, advantages, cliprange=0.2, cliprange_high=0.3), [-1.3, -0.5, 1.5, 0.8], **FLOAT32)


@given(st.floats(-3, 3), st.floats(-3, 3), st.floats(-3, 3), st.floats(0.01, 1))
def test_value_loss_is_half_the_larger_squared_error(value, old, target, cliprange):
    tensors = (torch.tensor(x, dtype=torch.float64) for x in (value, old, target))
    clipped = min(max(value, old - cliprange), old + cliprange)
    expected = 0.5 * max((value - target) ** 2, (clipped - target) ** 2)
    close(clipped_value_loss(*tensors, cliprange=cliprange), expected)


def test_surrogate_pushes_only_where_the_ratio_may_still_move():
    # A > 0 pushes up until 1.2, A < 0 pushes down until .8; on the other side of the range the way back is open.
    ratio = torch.tensor([1.3, 1.3, 0.7, 0.7, 1.0, 1.0], requires_grad=True)
    advantages = torch.tensor([2.0, -2.0, 2.0, -2.0, 2.0, -2.0])
    clipped_surrogate(ratio, advantages, cliprange=0.2).sum().backward()
    exactly(ratio.grad, torch.tensor([0.0, 2.0, -2.0, 0.0, -2.0, 2.0]))


def test_value_loss_inside_the_range_has_the_gradient_of_the_plain_squared_error():
    values = torch.tensor([0.1, 0.5], requires_grad=True)  # V_old = 0, ε = .2, R = 1: .5 is clipped to .2 on the way
    clipped_value_loss(values, torch.zeros(2), torch.ones(2), cliprange=0.2).sum().backward()
    close(values.grad, [-0.9, 0.0], rtol=0, atol=1e-6)


@given(masked())
def test_nll_is_minus_the_mean_over_the_selected_tokens(case):
    mask, (lp,), (dirty,) = case
    close(nll(dirty, torch.from_numpy(mask)), -math.fsum(lp[mask]) / max(int(mask.sum()), 1))


def test_losses_of_pairs_are_the_known_numbers():
    """Golden 10.5, β .1: σ(.2) = .549834, and −log of it is .598139; (2 − 5)² = 9."""
    margins = torch.tensor([2.0, -1.0, 0.0])
    close(sigmoid_loss(margins, beta=0.1), [0.598139, 0.744397, 0.693147], **FLOAT32)
    close(sigmoid_loss(margins, beta=0.1, label_smoothing=0.1), [0.618139, 0.734397, 0.693147], **FLOAT32)
    close(hinge_loss(margins, beta=0.1), [0.8, 1.1, 1.0], **FLOAT32)
    close(ipo_loss(margins, beta=0.1), [9.0, 36.0, 25.0], **FLOAT32)


def slope(loss, x):
    """The value of a loss at x, and its derivative."""
    at = torch.tensor(x, dtype=torch.float64, requires_grad=True)
    found = loss(at)
    found.backward()
    return found.item(), at.grad.item()


@given(st.floats(-50, 50), st.floats(0.01, 2), st.floats(0, 0.49))
def test_the_sigmoid_loss_is_least_where_the_preference_has_the_probability_of_the_label(x, beta, eps):
    """d/dx = β(σ(βx) − (1 − ε))."""
    value, rise = slope(lambda at: sigmoid_loss(at, beta=beta, label_smoothing=eps), x)
    log_sigmoid = -float(np.logaddexp(0, -beta * x)), -float(np.logaddexp(0, beta * x))
    assert value == pytest.approx(-(1 - eps) * log_sigmoid[0] - eps * log_sigmoid[1], abs=1e-12)
    assert rise == pytest.approx(beta * (math.exp(log_sigmoid[0]) - (1 - eps)), abs=1e-12)


@given(st.floats(-50, 50), st.floats(0.01, 2))
def test_the_hinge_is_flat_behind_its_margin_and_ipo_least_at_it(x, beta):
    value, rise = slope(lambda at: hinge_loss(at, beta=beta), x)
    assert value == pytest.approx(max(0.0, 1 - beta * x), abs=1e-12)
    assert rise == (-beta if beta * x < 1 else 0)
    value, rise = slope(lambda at: ipo_loss(at, beta=beta), x)
    assert value == pytest.approx((x - 0.5 / beta) ** 2, rel=1e-12)
    assert rise == pytest.approx(2 * (x - 0.5 / beta), rel=1e-12)


def double(*rows):
    return torch.tensor(rows, dtype=torch.float64, requires_grad=True)


LOGITS = ([0.3, -1.2, 2.0, 0.7], [1.5, 0.1, -0.4, -2.0])
OTHERS = ([1.1, 0.2, -0.7, 0.4], [-0.3, 0.9, 1.6, 0.0])
# Ratios below, inside and above [.8, 1.2], none on an edge; both signs of the advantage for each.
RATIOS, SIGNED = double(0.5, 0.5, 0.9, 1.1, 1.6, 1.6), double(1.3, -0.7, 2.0, -1.1, 0.4, -0.9)
# V within ε of V_old, and on both far sides, with R away from every tie of the two squared errors.
NEAR, OLD, TARGET = double(0.1, 0.9, -0.8, 0.9), double(0.0, 0.0, 0.0, 0.0), double(1.0, 2.0, 0.5, -1.0)


@table(
    "fn, inputs",
    [
        (lambda z: token_logprobs(z, torch.tensor([2, 0])), (double(*LOGITS),)),
        (entropy_from_logits, (double(*LOGITS),)),
        (kl_k3, (double(*LOGITS), double(*OTHERS))),
        (kl_exact, (double(*LOGITS), double(*OTHERS))),
        (kl_forward, (double(*LOGITS), double(*OTHERS))),
        (jensen_shannon, (double(*LOGITS), double(*OTHERS))),
        (lambda r, a: clipped_surrogate(r, a, cliprange=0.2), (RATIOS, SIGNED)),
        (lambda *v: clipped_value_loss(*v, cliprange=0.2), (NEAR, OLD, TARGET)),
    ],
)
def test_gradients_agree_with_finite_differences(fn, inputs):
    assert torch.autograd.gradcheck(fn, inputs)


# ------------------------------------------------------------------------------------- what sampling truncates


def kept_by_hand(row, top_k, top_p):
    """The indices that survive, one token at a time, likeliest first; values are all different."""
    order = sorted(range(len(row)), key=lambda v: -row[v])[: top_k or None]
    total = math.fsum(math.exp(row[v]) for v in order)
    kept, mass = [], 0.0
    for v in order:
        if kept and mass >= top_p:
            break
        kept.append(v)
        mass += math.exp(row[v]) / total
        assume(abs(mass - top_p) > 1e-9)  # on the edge, rounding decides
    return kept


@given(
    hnp.arrays(np.float64, hnp.array_shapes(min_dims=2, max_dims=2, max_side=6), elements=NUMBERS),
    st.integers(0, 7),
    st.floats(0.05, 1),
)
def test_truncation_keeps_the_k_likeliest_and_of_them_the_smallest_nucleus(z, top_k, top_p):
    z += np.arange(z.shape[1]) * 1e-3  # breaks most ties; the rest are left out
    assume(all(len(set(row)) == len(row) for row in z.tolist()))
    expected = np.full_like(z, -np.inf)
    for b, row in enumerate(z.tolist()):
        kept = kept_by_hand(row, top_k, 2.0 if top_p == 1 else top_p)
        expected[b, kept] = z[b, kept]
    exactly(truncate_logits(torch.from_numpy(z), top_k=top_k, top_p=top_p), torch.from_numpy(expected))


def test_nucleus_is_the_smallest_set_that_reaches_the_mass():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]], dtype=torch.float64).log()
    for top_p, size in ((0.4, 1), (0.6, 2), (0.9, 3), (0.96, 4)):
        assert truncate_logits(logits, top_p=top_p).isfinite().sum() == size


@given(logits_of())
def test_truncation_is_off_by_default(case):
    logits = torch.from_numpy(case[0])
    exactly(truncate_logits(logits), logits)


@given(logits_of(), st.floats(1e-6, 1e-3))
def test_likeliest_token_survives_the_smallest_nucleus(case, top_p):
    logits = torch.from_numpy(case[0])
    exactly(truncate_logits(logits, top_p=top_p).max(-1).values, logits.max(-1).values)


def test_truncation_leaves_forbidden_tokens_forbidden():
    logits = torch.tensor([[1.0, -math.inf, 0.5]])
    exactly(truncate_logits(logits, top_k=2, top_p=0.99, min_p=0.1), logits)


def test_min_p_keeps_what_has_that_share_of_the_likeliest():
    from transformers import MinPLogitsWarper

    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]], dtype=torch.float64).log()
    for min_p, size in ((0.09, 4), (0.11, 3), (0.29, 3), (0.31, 2), (0.59, 2), (0.61, 1), (1.0, 1)):
        assert truncate_logits(logits, min_p=min_p).isfinite().sum() == size
        warper = MinPLogitsWarper(min_p)
        exactly(truncate_logits(logits, min_p=min_p), warper(torch.zeros(1, 1, dtype=torch.long), logits))


def test_penalised_logits_shrink_if_positive_and_grow_if_negative_where_they_were_seen():
    from transformers import RepetitionPenaltyLogitsProcessor

    logits = torch.tensor([[2.0, -2.0, 2.0, -2.0, -math.inf, 0.0]])
    seen = torch.tensor([[True, True, False, False, True, True]])
    expected = torch.tensor([[1.0, -4.0, 2.0, -2.0, -math.inf, 0.0]])
    exactly(penalise_repetition(logits, seen, 2.0), expected)
    processor = RepetitionPenaltyLogitsProcessor(2.0)
    exactly(penalise_repetition(logits, seen, 2.0), processor(torch.tensor([[0, 1, 4, 5, 0]]), logits))
    exactly(penalise_repetition(logits, seen, 1.0), logits)


def test_rewards_per_token_count_with_their_sum() -> None:
    assert per_response(torch.tensor([1.0, 2.0])).tolist() == [1.0, 2.0]
    assert per_response(torch.tensor([[1.0, 2.0, 0.0], [0.5, 0.0, 0.25]])).tolist() == [3.0, 0.75]


def test_of_a_pair_with_equal_rewards_half_is_right() -> None:
    """1 > 0 is right, 0 > 1 is not, 2 and 2 are neither."""
    exactly(preference_accuracy(torch.tensor([1.0, 0, 2]), torch.tensor([0.0, 1, 2])), torch.tensor([1.0, 0.0, 0.5]))


def test_leave_one_out_of_groups_of_one_is_refused() -> None:
    with pytest.raises(ValueError, match="2 or more"):
        leave_one_out(torch.tensor([1.0, 2.0]), 1)


# ------------------------------------------------------------------------------------------------ what is monitored


@given(st.lists(st.tuples(NUMBERS, NUMBERS, st.booleans()), min_size=2, max_size=8))
def test_explained_variance_is_one_minus_the_share_of_the_variance_that_is_left(rows):
    values, returns, counts = (np.array(column, dtype=float) for column in zip(*rows, strict=True))
    mask = counts.astype(bool)
    assume(mask.sum() > 1 and np.ptp(returns[mask]) > 1e-3)
    explained, total = explained_variance(torch.tensor(values), torch.tensor(returns), torch.tensor(mask))
    close(explained / total, 1 - np.var((returns - values)[mask]) / np.var(returns[mask]), rtol=1e-8, atol=1e-8)


def test_explained_variance_of_perfect_constant_and_opposite_values():
    returns, mask = torch.tensor([1.0, 2.0, 4.0, 9e9]), torch.tensor([True, True, True, False])
    for values, share in ((returns, 1.0), (torch.full((4,), 7.0), 0.0), (-returns, -3.0)):
        explained, total = explained_variance(values, returns, mask)
        close(explained / total, share)


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=4), st.integers(1, 4))
def test_repetition_is_the_largest_share_of_tokens_that_equal_an_earlier_one(rows, periods):
    longest = max(map(len, rows))
    tokens = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    mask = torch.arange(longest) < torch.tensor([[len(row)] for row in rows])
    shares = [
        max(
            (
                np.mean([row[t] == row[t - p] for t in range(p, len(row))])
                for p in range(1, min(periods, len(row) - 1) + 1)
            ),
            default=0.0,
        )
        for row in rows
    ]
    close(repetition(tokens, mask, periods=periods), shares, **FLOAT32)


def test_a_row_that_repeats_a_part_has_repetition_one_and_one_without_equal_tokens_zero():
    tokens = torch.tensor([[5, 6, 7] * 4, list(range(12))])
    exactly(repetition(tokens, torch.ones_like(tokens).bool()), torch.tensor([1.0, 0.0]))
