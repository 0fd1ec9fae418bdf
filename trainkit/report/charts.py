"""Charts as SVG text. Names and labels are escaped; the colours are those of ``charts.css``, light and dark."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from markupsafe import Markup, escape

NAMESPACE = "http://www.w3.org/2000/svg"
WIDTH, HEIGHT = 480, 240
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 12, 36
COLOURS = 6
"""Series that look different: classes ``s0`` to ``s5`` of the style sheet."""
FEW = 120
"""Points of a chart up to which each is marked, so that it can be read by pointing at it."""
LARGEST = 1e300
"""The largest value that is drawn."""
WIDE = 1000.0
"""The ratio of the largest to the smallest of positive values from which an axis is logarithmic."""
STYLE = (Path(__file__).parent / "templates" / "charts.css").read_text(encoding="utf-8")
"""The style sheet of the charts."""


@dataclass(frozen=True)
class Line:
    """A series: ``y`` over ``x``, with gaps where it is not finite, and a band from ``low`` to ``high``."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()

    def finite(self) -> Iterator[float]:
        """Yield the finite values, those of the band included."""
        return (value for values in (self.y, self.low, self.high) for value in values if is_shown(value))


@dataclass(frozen=True)
class Bars:
    """Values of one series of a histogram or a bar chart."""

    name: str
    values: Sequence[float]


def is_shown(value: float) -> bool:
    """Return whether a value can be drawn: finite, and not so large that differences are not."""
    return abs(value) <= LARGEST  # false for NaN


class Axis:
    """A scale from values to pixels, linear or logarithmic, with its ticks.

    Args:
        values: the finite values to be shown.
        start: the pixel of the least one.
        end: the pixel of the largest one.
        log: whether the scale may be logarithmic, which it is if all values are positive and far apart.
    """

    def __init__(self, values: Iterable[float], start: float, end: float, *, log: bool = False) -> None:
        known = list(values)
        low, high = (min(known), max(known)) if known else (0.0, 1.0)
        self.start, self.end = start, end
        self.log = log and low > 0 and high / low >= WIDE
        if self.log:
            low, high = math.log10(low), math.log10(high)
        scale = max(abs(low), abs(high))
        if high - low <= max(scale * 1e-9, 1e-290):  # one value
            room = scale * 0.1 if scale > 1e-280 else 1.0
            low, high = low - room, high + room
        self.low, self.high = low, high

    def __call__(self, value: float) -> float:
        """Return the pixel of a value."""
        shown = math.log10(value) if self.log else value
        return self.start + (self.end - self.start) * (shown - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        """Return up to about six round values."""
        if self.log:
            every = max(1, math.ceil((self.high - self.low) / 6))
            return [10.0**power for power in range(math.ceil(self.low), math.floor(self.high) + 1, every)]
        rough = (self.high - self.low) / 5
        unit = 10.0 ** math.floor(math.log10(rough))
        step = unit * next(times for times in (1, 2, 5, 10) if times * unit >= rough * 0.999)
        return [
            float(f"{at * step:.12g}") for at in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)
        ]


def line_chart(
    lines: Sequence[Line], *, title: str, x_label: str = "step", standalone: bool = False, x_log: bool = False
) -> Markup:
    """Return a chart of lines.

    Args:
        lines: the series. Points of short series are marked, and show their values when they are pointed at.
        title: what the values are; told to screen readers, with the first and last value of every line.
        x_label: what ``x`` is.
        standalone: whether to return a file of its own, with the style sheet and a legend.
        x_log: whether ``x`` may be logarithmic.
    """
    x = Axis((at for line in lines for at in line.x if is_shown(at)), LEFT, WIDTH - RIGHT, log=x_log)
    y = Axis((value for line in lines for value in line.finite()), HEIGHT - BOTTOM, TOP, log=True)
    label = f"{x_label}{' (logarithmic)' * x.log}"
    marked = sum(len(line.x) for line in lines) <= FEW
    drawn = [_series(line, at % COLOURS, x, y, marked) for at, line in enumerate(lines)]
    legend = [_legend(lines)] if standalone and len(lines) > 1 else []
    note = [_text(LEFT, TOP - 2, "logarithmic", "label")] if y.log else []
    return _svg([*_axes(x, y, label), *drawn, *note, *legend], described(lines, title), standalone=standalone)


def described(lines: Sequence[Line], title: str) -> str:
    """Return a chart of lines in words: the first and last finite value of each."""
    told = []
    for line in lines:
        known = [(at, value) for at, value in zip(line.x, line.y, strict=True) if is_shown(value)]
        if known:
            (first, before), (last, after) = known[0], known[-1]
            told.append(f"{line.name}: {_short(before)} at {_short(first)}, {_short(after)} at {_short(last)}")
        else:
            told.append(f"{line.name}: no finite value")
    return f"{title}. {'; '.join(told)}" if told else f"{title}. No values"


def histogram(series: Sequence[Bars], *, title: str, bins: int = 20, x_label: str = "") -> Markup:
    """Return a histogram of one or several series over the same bins, each as a share of its own values."""
    finite = [Bars(each.name, [value for value in each.values if is_shown(value)]) for each in series]
    everything = [value for each in finite for value in each.values]
    low, high = (min(everything), max(everything)) if everything else (0.0, 1.0)
    bins = bins if high - low > 1e-290 else 1
    width = (high - low) / bins or 1.0
    shares = [_shares(each.values, low, width, bins) for each in finite]
    x = Axis((low, low + width * bins), LEFT, WIDTH - RIGHT)
    y = Axis((0.0, max((share for each in shares for share in each), default=1.0) or 1.0), HEIGHT - BOTTOM, TOP)
    drawn = [
        _column(finite[at].name, share, (low + index * width, low + (index + 1) * width), at % COLOURS, x, y)
        for at, each in enumerate(shares)
        for index, share in enumerate(each)
        if share
    ]
    told = "; ".join(_moments(each) for each in finite)
    return _svg([*_axes(x, y, x_label), *drawn], f"{title}. {told}" if told else title)


def _column(name: str, share: float, bounds: tuple[float, float], colour: int, x: Axis, y: Axis) -> Markup:
    """Return a bar of a histogram, which shows its share when it is pointed at."""
    left, right = map(x, bounds)
    tip = f"{name}: {share:.0%} from {_short(bounds[0])} to {_short(bounds[1])}"
    return _bar(left, y(share), right - left, HEIGHT - BOTTOM - y(share), colour, tip)


def horizontal_bars(bars: Bars, names: Sequence[str], *, title: str, unit: str = "") -> Markup:
    """Return a chart with a named bar for each value, from 0 on; negative values have none."""
    height, known = 26, [value for value in bars.values if is_shown(value)]
    x = Axis((0.0, max(known, default=1.0) or 1.0), 170, WIDTH - 90)
    drawn = []
    for at, (name, value) in enumerate(zip(names, bars.values, strict=True)):
        top, end = at * height + 4, x(max(value, 0.0)) if is_shown(value) else 170
        drawn.append(_text(162, top + 14, name if len(name) < 25 else f"…{name[-23:]}", "label end"))
        drawn.append(_bar(170, top, end - 170, height - 8, 0, f"{name}: {_short(value)}{unit}"))
        drawn.append(_text(end + 6, top + 14, f"{_short(value)}{unit}", "label"))
    told = "; ".join(f"{name}: {_short(value)}{unit}" for name, value in zip(names, bars.values, strict=True))
    return _svg(drawn, f"{title}. {told}", height=len(names) * height + 4)


def parts_of(values: Sequence[float], most: int) -> list[Sequence[float]]:
    """Return the values in at most ``most`` parts of nearly equal size."""
    count = min(len(values), most)
    if count == 0:
        return []
    return [values[start:end] for start, end in pairwise(at * len(values) // count for at in range(count + 1))]


def mean(values: Iterable[float]) -> float:
    """Return the mean of the finite values; NaN if there is none."""
    known = [value for value in values if is_shown(value)]
    return sum(known) / len(known) if known else math.nan


def text_chart(lines: Sequence[Line], marks: str, *, width: int = 64, height: int = 12) -> Iterator[str]:
    """Yield the rows of a chart for a terminal, with a letter of ``marks`` for each line and ``*`` where some meet."""
    x = Axis((at for line in lines for at in line.x if is_shown(at)), 0, width - 1)
    y = Axis((value for line in lines for value in line.y if is_shown(value)), height - 1, 0)
    rows = [[" "] * width for _ in range(height)]
    for line, mark in zip(lines, marks, strict=True):
        for at, value in zip(line.x, line.y, strict=True):
            if is_shown(at) and is_shown(value):
                row, column = rows[round(y(value))], round(x(at))
                row[column] = mark if row[column] in (" ", mark) else "*"
    ends = {0: _short(y.high), height - 1: _short(y.low)}
    for at, row in enumerate(rows):
        yield f"{ends.get(at, ''):>10} |{''.join(row).rstrip()}"
    yield f"{'':>10} +{'-' * width}"
    yield f"{'':>12}{_short(x.low)}{_short(x.high):>{width - len(_short(x.low))}}"


# ----------------------------------------------------------------------------------------------------------- pieces


def _svg(parts: Iterable[Markup], label: str, *, height: float = HEIGHT, standalone: bool = False) -> Markup:
    style = Markup("<style>{}</style>").format(Markup(STYLE)) if standalone else Markup()
    form = '<svg xmlns="{}" class="chart" viewBox="0 0 {} {}" role="img" aria-label="{}">{}{}</svg>'
    return Markup(form).format(NAMESPACE, WIDTH, height, label, style, Markup().join(parts))


def _text(x: float, y: float, text: str, kind: str) -> Markup:
    return Markup('<text class="{}" x="{:.4g}" y="{:.4g}">{}</text>').format(kind, x, y, text)


def _bar(x: float, y: float, width: float, height: float, colour: int, tip: str) -> Markup:
    form = '<rect class="bar s{}" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"><title>{}</title></rect>'
    return Markup(form).format(colour, x, y, max(width, 0.5), height, tip)


def _axes(x: Axis, y: Axis, x_label: str) -> Iterator[Markup]:
    bottom = HEIGHT - BOTTOM
    for tick in y.ticks():
        at = y(tick)
        yield Markup('<path class="grid" d="M{} {:.1f}H{}"/>').format(LEFT, at, WIDTH - RIGHT)
        yield _text(LEFT - 6, at + 4, _short(tick), "label end")
    for tick in x.ticks():
        yield Markup('<path class="axis" d="M{:.1f} {}v4"/>').format(x(tick), bottom)
        yield _text(x(tick), bottom + 17, _short(tick), "label middle")
    yield Markup('<path class="axis" d="M{} {}H{}"/>').format(LEFT, bottom, WIDTH - RIGHT)
    yield _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 4, x_label, "label middle")


def _series(line: Line, colour: int, x: Axis, y: Axis, marked: bool) -> Markup:
    parts = []
    if line.low:
        for start, end in _runs(line.x, line.low, line.high):
            there = [f"{x(line.x[at]):.1f} {y(line.high[at]):.1f}" for at in range(start, end)]
            back = [f"{x(line.x[at]):.1f} {y(line.low[at]):.1f}" for at in reversed(range(start, end))]
            parts.append(Markup('<path class="band s{}" d="M{}Z"/>').format(colour, "L".join([*there, *back])))
    kind = "line" if marked else "line dense"
    for start, end in _runs(line.x, line.y):
        points = "L".join(f"{x(line.x[at]):.1f} {y(line.y[at]):.1f}" for at in range(start, end))
        if end - start > 1:
            form = '<path class="{} s{}" d="M{}"><title>{}</title></path>'
            parts.append(Markup(form).format(kind, colour, points, line.name))
        if marked or end - start == 1:
            parts += [_point(line, at, colour, x, y) for at in range(start, end)]
    return Markup().join(parts)


def _point(line: Line, at: int, colour: int, x: Axis, y: Axis) -> Markup:
    form = '<circle class="point s{}" cx="{:.1f}" cy="{:.1f}" r="2.5"><title>{}, {}: {}</title></circle>'
    return Markup(form).format(colour, x(line.x[at]), y(line.y[at]), line.name, f"{line.x[at]:g}", f"{line.y[at]:.4g}")


def _runs(*series: Sequence[float]) -> Iterator[tuple[int, int]]:
    """Yield the ranges of indices at which all series are finite."""
    start = None
    for at, values in enumerate(zip(*series, strict=True)):
        known = all(map(is_shown, values))
        if known and start is None:
            start = at
        elif not known and start is not None:
            yield start, at
            start = None
    if start is not None:
        yield start, len(series[0])


def _legend(lines: Sequence[Line]) -> Markup:
    rows = [
        Markup('<path class="line s{}" d="M{} {}h18"/>{}').format(
            at % COLOURS, LEFT + 8, TOP + 10 + 16 * at, _text(LEFT + 32, TOP + 14 + 16 * at, line.name, "label")
        )
        for at, line in enumerate(lines)
    ]
    return Markup().join(rows)


def _shares(values: Sequence[float], low: float, width: float, bins: int) -> list[float]:
    counts = [0] * bins
    for value in values:
        counts[min(int((value - low) / width), bins - 1)] += 1
    return [count / len(values) if values else 0.0 for count in counts]


def _moments(bars: Bars) -> str:
    if not bars.values:
        return f"{bars.name}: no finite value"
    middle = sorted(bars.values)[len(bars.values) // 2]
    return f"{bars.name}: {len(bars.values)} values, median {_short(middle)}"


def _short(value: float) -> str:
    """Return a number in few characters: 12k, 3.4e-05."""
    if 10_000 <= abs(value) < 1e6 and value % 100 == 0:
        return f"{value / 1000:g}k"
    if 1e6 <= abs(value) < 1e9 and value % 1e5 == 0:
        return f"{value / 1e6:g}M"
    return f"{value:.4g}"


def legend(names: Sequence[str]) -> Markup:
    """Return the legend of charts on a page, as a list whose items have the colours of the series."""
    form = (
        '<li><svg class="key" viewBox="0 0 30 10" aria-hidden="true"><path class="line s{}" d="M0 5h30"/></svg>{}</li>'
    )
    items = [Markup(form).format(at % COLOURS, escape(name)) for at, name in enumerate(names)]
    return Markup('<ul class="legend">{}</ul>').format(Markup().join(items))
