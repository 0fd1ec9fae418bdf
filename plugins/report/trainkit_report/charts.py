"""Histograms, bars and charts for terminals; those as SVG text have the style sheet ``charts.css``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from trainkit_report.lines import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Axis,
    Line,
    axes,
    is_shown,
    short,
    style_of,
    svg,
    text_at,
)


@dataclass(frozen=True)
class Bars:
    """Values of one series of a histogram or a bar chart."""

    name: str
    values: Sequence[float]


def histogram(series: Sequence[Bars], *, title: str, bins: int = 20, x_label: str = "") -> Markup:
    """Return a histogram of one or several series over the same bins, each as a share of its own values.

    The first series is filled, the others are outlines. Bins of whole numbers hold equally many of them.
    """
    finite = [Bars(each.name, [value for value in each.values if is_shown(value)]) for each in series]
    everything = [value for each in finite for value in each.values]
    whole = all(value == int(value) for value in everything) and max(map(abs, everything), default=0) < 2**40
    low, width, bins = _bins(everything, bins, whole)
    shares = [_shares(each.values, low, width, bins) for each in finite]
    x = Axis((low, low + width * bins), LEFT, WIDTH - RIGHT, whole=whole)
    highest = max((share for each in shares for share in each), default=1.0)
    y = Axis((0.0, highest or 1.0), HEIGHT - BOTTOM, TOP, rounded=True)
    drawn = [
        _column(finite[at].name, share, (low + index * width, low + (index + 1) * width), style_of(at), x, y, whole)
        for at, each in enumerate(shares)
        for index, share in enumerate(each)
        if share
    ]
    told = "; ".join(_moments(each) for each in finite)
    return svg([*axes(x, y, x_label, "share of samples"), *drawn], f"{title}. {told}" if told else title)


def _bins(values: Sequence[float], bins: int, whole: bool) -> tuple[float, float, int]:
    """Return where the first bin begins, how wide bins are, and how many there are: at most ``bins``."""
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    if whole:
        width = math.ceil((high - low + 1) / bins)
        return low - 0.5, width, math.ceil((high - low + 1) / width)
    if high - low <= 1e-290:
        return low - 0.5, 1.0, 1
    return low, (high - low) / bins, bins


def _column(name: str, share: float, bounds: tuple[float, float], style: str, x: Axis, y: Axis, whole: bool) -> Markup:
    """Return a bar of a histogram, which shows its share when it is pointed at."""
    left, right = map(x, bounds)
    first, last = (bounds[0] + 0.5, bounds[1] - 0.5) if whole else bounds
    where = f"at {short(first)}" if first == last else f"from {short(first)} to {short(last)}"
    tip = f"{name}: {share:.0%} {where}"
    return _bar(left, y(share), right - left, HEIGHT - BOTTOM - y(share), style, tip)


def horizontal_bars(bars: Bars, names: Sequence[str], *, title: str, texts: Sequence[str] = ()) -> Markup:
    """Return a chart with a named bar for each value, from 0 on; negative values have none.

    Args:
        bars: the values.
        names: the name of each.
        title: what the values are; told to screen readers, with all of them.
        texts: what is said of each value; by default the value.
    """
    height, known = 28, [value for value in bars.values if is_shown(value)]
    x = Axis((0.0, max(known, default=1.0) or 1.0), 170, WIDTH - 110)
    texts = texts or list(map(short, bars.values))
    drawn = []
    for at, (name, value, text) in enumerate(zip(names, bars.values, texts, strict=True)):
        top, end = at * height + 4, x(max(value, 0.0)) if is_shown(value) else 170
        drawn.append(text_at(162, top + 15, name if len(name) < 23 else f"…{name[-21:]}", "label end"))
        drawn.append(_bar(170, top, end - 170, height - 8, style_of(0), f"{name}: {text}"))
        drawn.append(text_at(end + 6, top + 15, text, "label"))
    told = "; ".join(f"{name}: {text}" for name, text in zip(names, texts, strict=True))
    return svg(drawn, f"{title}. {told}", height=len(names) * height + 4)


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
    ends = {0: short(y.high), height - 1: short(y.low)}
    for at, row in enumerate(rows):
        yield f"{ends.get(at, ''):>10} |{''.join(row).rstrip()}"
    yield f"{'':>10} +{'-' * width}"
    yield f"{'':>12}{short(x.low)}{short(x.high):>{width - len(short(x.low))}}"


def legend(names: Sequence[str], *, bars: bool = False) -> Markup:
    """Return the legend of charts on a page, as a list whose items have the colours of the series."""
    drawn = (
        '<rect class="bar {}" x="1" y="1" width="28" height="8"/>' if bars else '<path class="line {}" d="M0 5h30"/>'
    )
    form = '<li><svg class="key" viewBox="0 0 30 10" aria-hidden="true">' + drawn + "</svg>{}</li>"
    items = [Markup(form).format(style_of(at), escape(name)) for at, name in enumerate(names)]
    return Markup('<ul class="legend">{}</ul>').format(Markup().join(items))


def _bar(x: float, y: float, width: float, height: float, style: str, tip: str) -> Markup:
    form = '<rect class="bar {}" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"><title>{}</title></rect>'
    return Markup(form).format(style, x, y, max(width, 0.5), height, tip)


def _shares(values: Sequence[float], low: float, width: float, bins: int) -> list[float]:
    counts = [0] * bins
    for value in values:
        counts[min(int((value - low) / width), bins - 1)] += 1
    return [count / len(values) if values else 0.0 for count in counts]


def _moments(bars: Bars) -> str:
    if not bars.values:
        return f"{bars.name}: no finite value"
    middle = sorted(bars.values)[len(bars.values) // 2]
    return f"{bars.name}: {len(bars.values)} values, median {short(middle)}"
