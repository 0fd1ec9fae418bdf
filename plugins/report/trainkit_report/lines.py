"""Charts of lines as SVG text. Names are escaped; the colours are those of ``charts.css``, light and dark."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from markupsafe import Markup

NAMESPACE = "http://www.w3.org/2000/svg"
WIDTH, HEIGHT = 480, 240
LEFT, RIGHT, TOP, BOTTOM = 60, 20, 26, 40
COLOURS = 6
"""Colours of series: classes ``s0`` to ``s5`` of the style sheet. Further series have them again, with other dashes."""
FEW = 120
"""Points of a chart up to which each is marked, so that it can be read by pointing at it."""
SLACK = 0.02
"""Part of the distance of two ticks by which values may be beyond the last one."""
LARGEST = 1e300
"""The largest value that is drawn."""
WIDE = 1000.0
"""The ratio of the largest to the smallest of positive values from which an axis is logarithmic."""
STYLE = (Path(__file__).parent / "charts.css").read_text(encoding="utf-8")
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
        rounded: whether a linear scale begins and ends at a tick, so that its ends are named.
        whole: whether ticks are whole numbers, as steps are.
    """

    def __init__(
        self,
        values: Iterable[float],
        start: float,
        end: float,
        *,
        log: bool = False,
        rounded: bool = False,
        whole: bool = False,
    ) -> None:
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
        self.step = _round_step((high - low) / 5)
        if whole:
            self.step = max(self.step, 1.0)
        if rounded and not self.log:
            low = math.floor(low / self.step + SLACK) * self.step
            high = math.ceil(high / self.step - SLACK) * self.step
        self.low, self.high = low, high

    def __call__(self, value: float) -> float:
        """Return the pixel of a value."""
        shown = math.log10(value) if self.log else value
        return self.start + (self.end - self.start) * (shown - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        """Return up to about seven round values."""
        if self.log:
            every = max(1, math.ceil((self.high - self.low) / 6))
            return [10.0**power for power in range(math.ceil(self.low), math.floor(self.high) + 1, every)]
        first, last = math.ceil(self.low / self.step - 1e-9), math.floor(self.high / self.step + 1e-9)
        return [float(f"{at * self.step:.12g}") for at in range(first, last + 1)]

    @property
    def base(self) -> float:
        """What the names of ticks leave out where they were longer than their place: the roundest tick, or 0."""
        names = {} if self.log else {self._name(tick): tick for tick in self.ticks()}
        return names[min(names, key=len)] if any(len(name) > 8 for name in names) else 0.0

    def name(self, tick: float) -> str:
        """Return a tick as text, with as many digits as tell it from the next one, less `base`."""
        return self._name(float(f"{(tick - self.base) / self.step:.6g}") * self.step if self.base else tick)

    def _name(self, tick: float) -> str:
        if self.log or not tick:
            return short(tick)
        return short(tick, max(4, 1 + math.floor(math.log10(abs(tick)) + 1e-9) - math.floor(math.log10(self.step))))


def _round_step(rough: float) -> float:
    """Return the least of 1, 2, 5 and 10 times a power of ten that is not below ``rough``."""
    unit = 10.0 ** math.floor(math.log10(rough))
    return unit * next(times for times in (1, 2, 5, 10) if times * unit >= rough * 0.999)


def line_chart(
    lines: Sequence[Line],
    *,
    title: str,
    x_label: str = "step",
    standalone: bool = False,
    x_log: bool = False,
    span: Sequence[float] = (),
) -> Markup:
    """Return a chart of lines.

    Args:
        lines: the series. Points of short series are marked, and show their values when they are pointed at.
        title: what the values are; told to screen readers, with the first and last value of every line.
        x_label: what ``x`` is.
        standalone: whether to return a file of its own, with the style sheet and a legend.
        x_log: whether ``x`` may be logarithmic.
        span: values of ``x`` that the axis has to have room for, beside those of the lines.
    """
    at = [*span, *(at for line in lines for at in line.x if is_shown(at))]
    x = Axis(at, LEFT, WIDTH - RIGHT, log=x_log, whole=all(value == int(value) for value in at))
    y = Axis((value for line in lines for value in line.finite()), HEIGHT - BOTTOM, TOP, log=True, rounded=True)
    label = f"{x_label}{' (logarithmic)' * x.log}"
    marked = sum(len(line.x) for line in lines) <= FEW
    drawn = [_series(line, style_of(index), x, y, marked) for index, line in enumerate(lines)]
    legend = [_legend(lines)] if standalone and len(lines) > 1 else []
    notes = ["logarithmic"] * y.log + ([f"{y.base:.12g} + …"] if y.base else [])
    said = ", ".join([title] * standalone + notes)
    return svg([*axes(x, y, label, said), *drawn, *legend], described(lines, title), standalone=standalone)


def described(lines: Sequence[Line], title: str) -> str:
    """Return a chart of lines in words: the first and last finite value of each."""
    told = []
    for line in lines:
        known = [(at, value) for at, value in zip(line.x, line.y, strict=True) if is_shown(value)]
        if known:
            (first, before), (last, after) = known[0], known[-1]
            told.append(f"{line.name}: {short(before)} at {first:g}, {short(after)} at {last:g}")
        else:
            told.append(f"{line.name}: no finite value")
    return f"{title}. {'; '.join(told)}" if told else f"{title}. No values"


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


def line_over_steps(name: str, series: Sequence[Mapping[int, float]], most: int) -> Line:
    """Return series over the steps as one line of at most ``most`` points.

    Of several series it is the mean of those that have a value, in a band from the least to the largest. Each point is
    the mean of several steps if there are more; the values of these are the band of a single series.
    """
    steps = sorted({step for each in series for step in each})
    columns = [parts_of([each.get(step, math.nan) for step in steps], most) for each in series]
    x = list(map(mean, parts_of(steps, most)))
    rows = [list(map(mean, row)) for row in zip(*columns, strict=True)]
    y = list(map(mean, rows))
    if len(series) == 1 and len(steps) <= most:
        return Line(name, x, y)
    ranges = columns[0] if len(series) == 1 else rows
    return Line(name, x, y, *([_bound(part, bound) for part in ranges] for bound in (min, max)))


def _bound(values: Iterable[float], bound: Callable[..., float]) -> float:
    """Return the least or the largest finite value; NaN if there is none."""
    return bound(filter(math.isfinite, values), default=math.nan)


# ----------------------------------------------------------------------------------------------------------- pieces


def svg(parts: Iterable[Markup], label: str, *, height: float = HEIGHT, standalone: bool = False) -> Markup:
    """Return a picture of its parts, which ``label`` tells to screen readers."""
    paper = '<rect width="100%" height="100%" fill="var(--paper)"/>'  # the colours follow the system, a page need not
    style = Markup("<style>{}</style>{}").format(Markup(STYLE), Markup(paper)) if standalone else Markup()
    form = '<svg xmlns="{}" class="chart" viewBox="0 0 {} {}" role="img" aria-label="{}">{}{}</svg>'
    return Markup(form).format(NAMESPACE, WIDTH, height, label, style, Markup().join(parts))


def style_of(at: int) -> str:
    """Return the classes of the style sheet for a series, by its number."""
    return f"s{at % COLOURS}{' again' * (at >= COLOURS)}"


def text_at(x: float, y: float, text: str, kind: str) -> Markup:
    """Return a text at a place; ``kind`` are classes of the style sheet."""
    return Markup('<text class="{}" x="{:.4g}" y="{:.4g}">{}</text>').format(kind, x, y, text)


def axes(x: Axis, y: Axis, x_label: str, note: str = "") -> Iterator[Markup]:
    """Yield both axes with their ticks, what ``x`` is, and a note above the chart."""
    bottom = HEIGHT - BOTTOM
    for tick in y.ticks():
        at = y(tick)
        yield Markup('<path class="grid" d="M{} {:.1f}H{}"/>').format(LEFT, at, WIDTH - RIGHT)
        yield text_at(LEFT - 6, at + 4, y.name(tick), "label end")
    for tick in x.ticks():
        yield Markup('<path class="axis" d="M{:.1f} {}v4"/>').format(x(tick), bottom)
        yield text_at(x(tick), bottom + 18, x.name(tick), "label middle")
    yield Markup('<path class="axis" d="M{} {}H{}"/>').format(LEFT, bottom, WIDTH - RIGHT)
    yield text_at((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 5, x_label, "label middle")
    if note:
        yield text_at(4, 12, note, "label")


def _series(line: Line, style: str, x: Axis, y: Axis, marked: bool) -> Markup:
    parts = []
    if line.low:
        for start, end in _runs(line.x, line.low, line.high):
            there = [f"{x(line.x[at]):.1f} {y(line.high[at]):.1f}" for at in range(start, end)]
            back = [f"{x(line.x[at]):.1f} {y(line.low[at]):.1f}" for at in reversed(range(start, end))]
            parts.append(Markup('<path class="band {}" d="M{}Z"/>').format(style, "L".join([*there, *back])))
    kind = "line" if marked else "line dense"
    for start, end in _runs(line.x, line.y):
        points = "L".join(f"{x(line.x[at]):.1f} {y(line.y[at]):.1f}" for at in range(start, end))
        if end - start > 1:
            form = '<path class="{} {}" d="M{}"><title>{}</title></path>'
            parts.append(Markup(form).format(kind, style, points, line.name))
        if marked or end - start == 1:
            parts += [_point(line, at, style, x, y) for at in range(start, end)]
    return Markup().join(parts)


def _point(line: Line, at: int, style: str, x: Axis, y: Axis) -> Markup:
    form = '<circle class="point {}" cx="{:.1f}" cy="{:.1f}" r="2.5"><title>{}, {}: {}</title></circle>'
    return Markup(form).format(style, x(line.x[at]), y(line.y[at]), line.name, f"{line.x[at]:g}", short(line.y[at]))


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
        Markup('<path class="line {}" d="M{} {}h18"/>{}').format(
            style_of(at), LEFT + 8, TOP + 10 + 16 * at, text_at(LEFT + 32, TOP + 14 + 16 * at, line.name, "label")
        )
        for at, line in enumerate(lines)
    ]
    return Markup().join(rows)


def short(value: float, digits: int = 4) -> str:
    """Return a number in few characters: 12k, 3.4e-05."""
    for least, size, unit in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if least <= abs(value) < 1e13:
            return f"{value / size:.{digits}g}{unit}"
    return f"{value:.{digits}g}"
