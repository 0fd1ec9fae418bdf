"""Charts of lines: their scale and ticks."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tables import table
from trainkit_report.lines import Axis, Line, line_chart, parts_of


def test_a_line_is_drawn_to_scale_which_is_logarithmic_for_values_far_apart() -> None:
    chart = line_chart([Line("a", [0, 10], [0.0, 1.0])], title="t")
    assert 'd="M60.0 200.0L460.0 26.0"' in chart  # from the lower left corner to the upper right one
    assert 'aria-label="t. a: 0 at 0, 1 at 10"' in chart
    far = line_chart([Line("a", [0, 1, 2], [1.0, 100.0, 10_000.0])], title="t")
    assert 'd="M60.0 200.0L260.0 113.0L460.0 26.0"' in far  # a straight line
    assert "logarithmic" in far
    near = line_chart([Line("a", [0, 1], [0.9999996, 1.0000006])], title="t")
    assert "1 + …" in near
    assert "+ …" not in chart + far


def ticks(values: list[float], **given: Any) -> list[str]:
    axis = Axis(values, 0, 100, **given)
    return [axis.name(tick) for tick in axis.ticks()]


@table(
    "values, given, says",
    [
        ([4.05, 9.085], {"rounded": True}, ["4", "6", "8", "10"]),
        ([1, 97], {"whole": True}, ["20", "40", "60", "80"]),
        ([1, 3], {"whole": True}, ["1", "2", "3"]),
        ([-2e-10, 0.09], {"rounded": True}, ["0", "0.02", "0.04", "0.06", "0.08", "0.1"]),
        ([0.99996, 1.00004], {"rounded": True}, ["0.99996", "0.99998", "1", "1.00002", "1.00004"]),
        ([0.9999996, 1.0000006], {"rounded": True}, ["-4e-07", "-2e-07", "0", "2e-07", "4e-07", "6e-07"]),
        ([0, 50_000], {"rounded": True}, ["0", "10k", "20k", "30k", "40k", "50k"]),
    ],
)
def test_the_ends_of_an_axis_are_named_and_ticks_differ(values: list[float], given: Any, says: list[str]) -> None:
    assert ticks(values, **given) == says


@given(st.lists(st.integers(), max_size=50), st.integers(1, 20))
def test_parts_are_all_values_in_order_and_nearly_equal(values: list[int], most: int) -> None:
    parts = parts_of(values, most)
    assert [value for part in parts for value in part] == values
    assert len(parts) == min(most, len(values))
    assert not parts or max(map(len, parts)) - min(map(len, parts)) <= 1
