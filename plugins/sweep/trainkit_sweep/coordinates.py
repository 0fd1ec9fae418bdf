"""Parallel coordinates as SVG: a vertical axis for each dimension, and a line across them for each point."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from trainkit_report.lines import NAMESPACE

WIDTH, HEIGHT = 960, 320
SIDE, TOP, BOTTOM = 80, 34, 26
STEPS = 5
"""Shades of lines, from the worst to the best points."""


@dataclass(frozen=True)
class Coordinate:
    """An axis: its name, the value of each point as text, and its place from 0, at the bottom, to 1."""

    name: str
    places: Sequence[float]
    texts: Sequence[str]


def parallel_coordinates(axes: Sequence[Coordinate], *, names: Sequence[str], title: str) -> Markup:
    """Return a chart of points with several coordinates.

    Args:
        axes: the coordinates; the lines are shaded by the last one, the points with the largest place in full.
        names: what the points are called, shown when their lines are pointed at.
        title: what they are; told to screen readers.
    """
    span = (WIDTH - 2 * SIDE) / max(len(axes) - 1, 1)
    x = [SIDE + at * span for at in range(len(axes))]
    rank = sorted(range(len(names)), key=lambda point: axes[-1].places[point])
    lines = [_line(axes, x, point, names[point]) for point in rank]
    label = f"{title}. {len(names)} lines; axes: {', '.join(axis.name for axis in axes)}"
    form = '<svg xmlns="{}" class="chart" viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>'
    drawn = [*lines, *(_axis(axis, at) for axis, at in zip(axes, x, strict=True))]
    return Markup(form).format(NAMESPACE, WIDTH, HEIGHT, label, Markup().join(drawn))


def _y(place: float) -> float:
    return HEIGHT - BOTTOM - place * (HEIGHT - TOP - BOTTOM)


def _line(axes: Sequence[Coordinate], x: Sequence[float], point: int, name: str) -> Markup:
    path = "L".join(f"{at:.1f} {_y(axis.places[point]):.1f}" for axis, at in zip(axes, x, strict=True))
    told = ", ".join(f"{axis.name} {axis.texts[point]}" for axis in axes)
    shade = (1 + math.floor(axes[-1].places[point] * (STEPS - 1) + 0.5)) / STEPS
    colour = "s1" if shade == 1 else "s0"
    form = '<path class="line dense {}" opacity="{:.2f}" d="M{}"><title>{}: {}</title></path>'
    return Markup(form).format(colour, shade, path, name, told)


def _axis(axis: Coordinate, x: float) -> Markup:
    marks = dict(sorted(zip(axis.places, axis.texts, strict=True)))
    shown = _apart(list(marks.items()))
    parts = [Markup('<path class="axis" d="M{:.1f} {}V{}"/>').format(x, TOP, HEIGHT - BOTTOM)]
    parts.append(_text(x, 14, axis.name if len(axis.name) < 25 else f"…{axis.name[-23:]}", "middle"))
    parts += [_text(x + 5, _y(place) + 4, text if len(text) < 16 else f"{text[:14]}…", "") for place, text in shown]
    return Markup().join(parts)


def _apart(marks: list[tuple[float, str]]) -> list[tuple[float, str]]:
    """Return the marks that have room above the one before."""
    found: list[tuple[float, str]] = []
    for place, text in marks:
        if not found or place - found[-1][0] >= 0.06:
            found.append((place, text))
    return found


def _text(x: float, y: float, text: str, kind: str) -> Markup:
    halo = "paint-order:stroke;stroke:var(--paper);stroke-width:3px"  # lines pass below
    form = '<text class="label {}" style="{}" x="{:.1f}" y="{:.1f}">{}</text>'
    return Markup(form).format(kind, halo, x, y, text)
