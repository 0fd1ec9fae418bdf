"""Labelled samples without pairs: checks of their labels, and mismatched samples."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from trainkit import Row
from trainkit.data import check_both_labels

log = logging.getLogger(__name__)


def check_labels(rows: Sequence[Row], weights: Mapping[str, float], *, ratio: tuple[float, float]) -> None:
    """Check that there are labels of both kinds; log advice if one kind has more than twice the weight of the other.

    Args:
        rows: labelled samples.
        weights: the method's settings for the weights of samples labelled true and false, in this order.
        ratio: the recommended range of the weight of all samples labelled true, divided by that of the others.

    Raises:
        DataError: all labels are the same.
    """
    good = sum(bool(row["label"]) for row in rows)
    bad = len(rows) - good
    check_both_labels(good, bad)
    (name, given), (other, given_other) = weights.items()
    found, (least, most) = given * good / (given_other * bad), ratio
    factors = (least / found, most / found) if found < 1 else (found / most, found / least)
    if found > 1:
        name, given = other, given_other
    if not 1 / 2 <= found <= 2:
        log.warning(
            "%d samples are desirable and %d undesirable; recommended is method.%s between %.3g and %.3g for these "
            "numbers; given %g",
            good, bad, name, given * factors[0], given * factors[1], given,
        )  # fmt: skip


def mismatched(rows: Sequence[Row]) -> list[Row]:
    """Return the prompt of each row with the output of another row; every output is used once.

    The log-ratios of such rows estimate how far a policy is from its reference on outputs that do not answer the
    prompt. Rows are ordered by prompt, and outputs are shifted by the number of rows of the most frequent prompt. Then
    no output keeps its prompt, unless a prompt has more than half of the rows. If every prompt occurs once, each prompt
    gets the output of the row before.
    """
    starts = [row["outputs"].index(True) for row in rows]
    same: dict[tuple[str | int, ...], list[int]] = {}
    for index, (row, start) in enumerate(zip(rows, starts, strict=True)):
        same.setdefault((*row["turns"][:start], *map(id, row.get("images", ()))), []).append(index)
    order = [index for group in same.values() for index in group]
    shift = max(map(len, same.values())) % len(rows) or 1
    others = {index: order[at - shift] for at, index in enumerate(order)}

    def joined(index: int, key: str) -> list[str | bool]:
        other = others[index]
        return [*rows[index][key][: starts[index]], *rows[other][key][starts[other] :]]

    images = [{"images": row["images"]} if "images" in row else {} for row in rows]
    return [{key: joined(index, key) for key in ("turns", "outputs")} | images[index] for index in range(len(rows))]
