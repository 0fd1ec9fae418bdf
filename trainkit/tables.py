"""Tables of HTML, such as notebooks show. What is in their cells is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from markupsafe import Markup

LONGEST = 2000
"""Characters of a cell at most."""


def number(value: float) -> str:
    """Return a number with four digits, or without a fraction and with separators of thousands if it is large."""
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e12 else f"{value:.4g}"


def table(rows: Iterable[Sequence[object]], columns: Sequence[str] = (), *, caption: str = "") -> Markup:
    """Return a table of HTML, with the line breaks of its texts.

    Args:
        rows: the cells, row by row; floats are shown by `number`.
        columns: the names of the columns. Without any, the first cell of each row is its name.
        caption: what is said above the table.
    """
    parts = [Markup('<table style="text-align:left">')]
    if caption:
        parts.append(Markup('<caption style="text-align:left">{}</caption>').format(caption))
    if columns:
        parts.append(Markup("<tr>{}</tr>").format(Markup().join(map(_name, columns))))
    for first, *others in rows:
        head = _cell(first) if columns else _name(first)
        parts.append(Markup("<tr>{}{}</tr>").format(head, Markup().join(map(_cell, others))))
    return Markup().join([*parts, Markup("</table>")])


def _name(value: object) -> Markup:
    return Markup('<th style="text-align:left">{}</th>').format(value)


def _cell(value: object) -> Markup:
    text = "" if value is None else number(value) if isinstance(value, float) else str(value)
    shown = text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"
    return Markup('<td style="text-align:left;vertical-align:top;white-space:pre-wrap">{}</td>').format(shown)
