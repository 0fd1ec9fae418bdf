"""Metrics as totals and counts: any way of cutting the data gives the numbers of the whole."""

from __future__ import annotations

import math

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from tables import table
from trainkit.metrics import Mean, RunningMoments, Std, compute, merge

NUMBERS = st.floats(-100, 100, allow_subnormal=False)
GARBAGE = st.sampled_from([math.nan, math.inf, -math.inf, 1e30])
VECTORS = hnp.arrays(np.float64, st.integers(0, 6), elements=NUMBERS)
PARTS = st.lists(VECTORS, min_size=1, max_size=5)


def identity(x):
    return x


def approx(x):
    return pytest.approx(x, rel=1e-9, abs=1e-9, nan_ok=True)


def approx_std(x):
    """For `Std`, whose deviations of at most 100 are rounded by 1e-14."""
    return pytest.approx(x, rel=1e-9, abs=1e-9)


def record(metric):
    """The totals and the count that a metric consists of."""
    return [float(part) for part in metric.tensors()]


def whole_std(x):
    """The unbiased standard deviation by torch, and the defined value where torch has none."""
    return float(torch.from_numpy(x).std()) if len(x) >= 2 else 0.0


# ------------------------------------------------------------------------------------------------ Mean and Std


@given(PARTS)
def test_merged_parts_have_mean_and_deviation_of_the_concatenation(parts):
    whole = np.concatenate(parts)
    mean = sum((Mean.of(torch.from_numpy(x)) for x in parts[1:]), Mean.of(torch.from_numpy(parts[0])))
    std = sum((Std.of(torch.from_numpy(x)) for x in parts[1:]), Std.of(torch.from_numpy(parts[0])))
    assert mean.compute() == approx(float(torch.from_numpy(whole).mean()))
    assert std.compute() == approx_std(whole_std(whole))


@given(VECTORS, VECTORS, VECTORS)
def test_merging_is_associative_and_commutative(a, b, c):
    for metric in (Mean, Std):
        one, two, three = (metric.of(torch.from_numpy(x)) for x in (a, b, c))
        assert record((one + two) + three) == approx(record(one + (two + three)))
        assert record(one + two) == approx(record(two + one))


@given(hnp.arrays(np.float64, (3, 4), elements=NUMBERS), hnp.arrays(bool, (3, 4)), GARBAGE)
def test_masked_metric_is_the_metric_of_what_is_selected(x, mask, garbage):
    dirty, chosen = torch.from_numpy(np.where(mask, x, garbage)), torch.from_numpy(x[mask])
    for metric in (Mean, Std):
        assert record(metric.of(dirty, torch.from_numpy(mask))) == approx(record(metric.of(chosen)))


def test_mean_of_unequal_parts_is_not_the_mean_of_their_means():
    # (1 + 2 + 3 + 10) / 4 = 4, whereas (2 + 10) / 2 = 6
    assert (Mean.of(torch.tensor([1.0, 2.0, 3.0])) + Mean.of(torch.tensor([10.0]))).compute() == 4.0


def test_mean_of_nothing_is_nan_and_deviation_of_less_than_two_is_zero():
    assert math.isnan(Mean.of(torch.zeros(0)).compute())
    assert Std.of(torch.zeros(0)).compute() == 0.0
    assert Std.of(torch.tensor([7.0])).compute() == 0.0


def test_deviation_of_equal_values_is_never_the_root_of_a_negative_number():
    # In float64, Σx² − (Σx)²/n of three times .1 is −3.5e-18, and Σx/n is not .1.
    equal = Std.of(torch.full((3,), 0.1, dtype=torch.float64))
    assert equal.compute() == (equal + equal + equal).compute() == 0.0
    assert compute({"reward/std": equal + equal}, identity) == {"reward/std": 0.0}


def test_deviation_keeps_its_digits_far_from_zero():
    # 1, 2, 3 deviate by 1, which sums of squares around 1e16 cannot show.
    parts = [Std.of(torch.tensor([1e8 + x], dtype=torch.float64)) for x in (1, 2, 3)]
    assert sum(parts[1:], parts[0]).compute() == approx(1.0)
    assert Std.of(torch.tensor([1e8 + 1, 1e8 + 2, 1e8 + 3], dtype=torch.float64)).compute() == approx(1.0)


def test_totals_are_kept_in_float64():
    # 2²⁴ + 1 is no float32: a total in float32 would lose the second part.
    total = Mean.of(torch.tensor([2.0**24])) + Mean.of(torch.tensor([1.0]))
    assert total.compute() == (2**24 + 1) / 2


@table("metric", [Mean, Std])
def test_integers_and_booleans_are_counted_like_floats(metric):
    expected = metric.of(torch.tensor([1.0, 0.0, 1.0, 1.0])).compute()
    assert metric.of(torch.tensor([1, 0, 1, 1])).compute() == expected
    assert metric.of(torch.tensor([True, False, True, True])).compute() == expected


@table("metric", [Mean, Std])
def test_metrics_hold_no_gradient(metric):
    x = torch.ones(3, requires_grad=True)
    assert not any(part.requires_grad for part in metric.of(x * 2, torch.ones(3, dtype=torch.bool)).tensors())


# --------------------------------------------------------------------------------------------- merge and compute


def test_merge_adds_metrics_of_one_name_and_keeps_the_others():
    first = {"loss/policy": Mean.of(torch.tensor([1.0, 2.0])), "reward/std": Std.of(torch.tensor([1.0, 2.0]))}
    second = {"loss/policy": Mean.of(torch.tensor([6.0])), "loss/value": Mean.of(torch.tensor([5.0]))}
    floats = compute(merge(first, second), identity)
    assert floats == {"loss/policy": 3.0, "loss/value": 5.0, "reward/std": approx(math.sqrt(0.5))}


def test_merge_leaves_its_parts_as_they_were():
    part = {"a": Mean.of(torch.tensor([1.0]))}
    merge(part, {"a": Mean.of(torch.tensor([3.0]))}, part)
    assert compute(part, identity) == {"a": 1.0}


@table("first, second", [(Mean, Std), (Std, Mean)])
def test_a_mean_and_a_deviation_of_one_name_cannot_be_merged(first, second):
    x = torch.ones(2)
    with pytest.raises(TypeError, match="unsupported operand"):
        merge({"reward": first.of(x)}, {"reward": second.of(x)})


def test_compute_of_no_metrics_needs_no_collective():
    def refuse(x):
        raise AssertionError("no process may wait for others here")

    assert compute({}, refuse) == {}


def test_compute_reduces_once_and_once_more_for_deviations_whatever_the_number_of_metrics():
    calls = []

    def count(x):
        calls.append(x.shape)
        return x

    x = torch.arange(4.0)
    floats = compute({"b": Mean.of(x), "a": Std.of(x), "c": Mean.of(x + 1)}, count)
    assert calls == [(3, 2), (1,)]  # totals and counts; then deviations from the means of all
    assert floats == {"a": approx(math.sqrt(5 / 3)), "b": 1.5, "c": 2.5}


@given(VECTORS, VECTORS)
def test_compute_over_two_processes_gives_both_the_numbers_of_the_whole(in_lockstep, a, b):
    # The second process names its metrics in another order; the collective goes by sorted names.
    shards = [{"m": Mean.of(torch.from_numpy(a)), "s": Std.of(torch.from_numpy(a))}]
    shards += [{"s": Std.of(torch.from_numpy(b)), "m": Mean.of(torch.from_numpy(b))}]
    whole = torch.from_numpy(np.concatenate([a, b]))
    expected = {"m": approx(float(whole.mean())), "s": approx_std(whole_std(whole.numpy()))} if len(whole) else {}
    assert in_lockstep(compute, shards) == [expected, expected]


# ------------------------------------------------------------------------------------------------ RunningMoments


def moments(*batches):
    running = RunningMoments()
    for batch in batches:
        running.update(torch.as_tensor(batch, dtype=torch.float64))
    return running


def test_running_moments_are_the_known_numbers():
    first = moments([1, 2, 3])
    assert (first.mean, first.std) == (2.0, 1.0)
    both = moments([1, 2, 3], [10, 20])
    assert both.mean == pytest.approx(7.2, abs=1e-12)
    assert both.std == pytest.approx(7.981228, abs=1e-6)


@given(PARTS)
def test_running_moments_are_those_of_everything_seen_however_it_was_cut(parts):
    whole = np.concatenate(parts)
    running = moments(*parts)
    assert running.count == len(whole)
    assert running.mean == approx(float(np.mean(whole)) if len(whole) else 0.0)
    assert running.std == approx(float(torch.from_numpy(whole).std()) if len(whole) >= 2 else math.nan)


@given(VECTORS, VECTORS, VECTORS)
def test_grouping_batches_differently_changes_no_moment(a, b, c):
    left, right = moments(np.concatenate([a, b]), c), moments(a, np.concatenate([b, c]))
    assert left.state_dict() == {key: approx(value) for key, value in right.state_dict().items()}


def test_one_value_has_a_mean_and_no_deviation_yet():
    one = moments([5.0])
    assert (one.count, one.mean) == (1, 5.0)
    assert math.isnan(one.std)
    one.update(torch.tensor([7.0]))
    assert one.std == pytest.approx(math.sqrt(2))  # two values 2 apart: 2 / √2


def test_an_empty_batch_changes_nothing():
    before = moments([1, 2])
    after = moments([1, 2], [])
    assert after.state_dict() == before.state_dict()
    assert moments([]).state_dict() == {"count": 0.0, "mean": 0.0, "m2": 0.0}


def test_moments_far_from_zero_keep_their_deviation():
    # Σx² − (Σx)²/n would be lost in rounding here: x² is 1e18, its last digit in float64 is 128.
    assert moments([1e9, 1e9 + 1], [1e9 + 2]).std == pytest.approx(1.0, rel=1e-9)


@given(VECTORS, VECTORS, VECTORS)
def test_processes_with_unequal_shares_hold_the_same_global_moments(in_lockstep, a, b, later):
    def run(shard, reduce):
        running = RunningMoments()
        for batch in shard:
            running.update(torch.from_numpy(batch), reduce)
        return running.state_dict()

    ranks = in_lockstep(run, [(a, later), (b, later)])
    assert ranks[0] == ranks[1]
    expected = moments(np.concatenate([a, b]), np.concatenate([later, later])).state_dict()
    assert ranks[0] == {key: approx(value) for key, value in expected.items()}


@given(VECTORS, VECTORS)
def test_restored_moments_go_on_as_if_never_stopped(first, second):
    running = moments(first)
    restored = RunningMoments()
    restored.load_state_dict(running.state_dict())
    for each in (running, restored):
        each.update(torch.from_numpy(second))
    assert restored.state_dict() == running.state_dict()


class Copies(TorchFunctionMode):
    """Counts the copies to the CPU."""

    count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.Tensor.cpu
        return func(*args, **(kwargs or {}))


def test_however_many_metrics_there_are_they_are_copied_from_a_device_once():
    means = {f"mean/{number}": Mean.of(torch.tensor([number, 4.0])) for number in range(9)}
    with Copies() as copies:
        found = compute(means, identity)
    assert copies.count == 1
    assert found == {f"mean/{number}": (number + 4) / 2 for number in range(9)}
