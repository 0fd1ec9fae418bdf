"""Labelled samples: their batches, checks of labels, and mismatched samples, with the output of another prompt."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from trainkit import Batch, Row, TokenBatch
from trainkit.errors import DataError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outputs(TokenBatch):
    """Sequences [B, T] with log π_ref of their outputs [B]."""

    ref_logps: Tensor


@dataclass(frozen=True)
class KTOBatch(Batch):
    """Samples with their labels, bool [B]. The loss is a mean over samples."""

    unit: ClassVar[str] = "samples"
    own: Outputs
    desirable: Tensor
    mismatched: Outputs | None = None
    """The prompt of each sample with the output of another; None if `reference_point` is ``"zero"``."""
    kl: Tensor | None = None
    """Mean of log π − log π_ref over the mismatched outputs of the whole step, repeated [B]."""

    @property
    def lengths(self) -> Tensor:
        """Real tokens per sample [B], of the longer of its two sequences; the two are not run together."""
        return self.own.lengths if self.mismatched is None else torch.maximum(self.own.lengths, self.mismatched.lengths)


def check_labels(rows: list[Row], desirable_weight: float, undesirable_weight: float) -> None:
    """Check that there are labels of both kinds; log advice if one kind has more than twice the weight of the other.

    The advice is the range that Ethayarajh et al. 2024, equation 8, recommend: λ_D n_D / (λ_U n_U) from 1 to 4/3.

    Raises:
        DataError: all labels are the same.
    """
    desirable = sum(row["label"] for row in rows)
    undesirable = len(rows) - desirable
    if not desirable or not undesirable:
        raise DataError(
            f"all {len(rows)} samples are labelled {bool(desirable)}, and KTO needs desirable samples (label True) and "
            "undesirable ones (False). Add samples with the other label, or train on the desirable ones with method "
            "'sft'"
        )
    weights = desirable_weight * desirable, undesirable_weight * undesirable
    if max(weights) > 2 * min(weights):
        name, given = "undesirable_weight", undesirable_weight
        least, most = given * 0.75 * weights[0] / weights[1], given * weights[0] / weights[1]
        if weights[0] < weights[1]:
            name, given = "desirable_weight", desirable_weight
            least, most = given * weights[1] / weights[0], given * 4 / 3 * weights[1] / weights[0]
        log.warning(
            "%d samples are desirable and %d undesirable; the authors of KTO recommend method.%s between %.3g and %.3g "
            "for these numbers; given %g",
            desirable, undesirable, name, least, most, given,
        )  # fmt: skip


def mismatched(rows: list[Row]) -> list[Row]:
    """Return the prompt of each row with the output of another row; every output is used once.

    Rows are ordered by prompt, and outputs are shifted by the number of rows of the most frequent prompt. Then no
    output keeps its prompt, unless a prompt has more than half of the rows. If every prompt occurs once, each prompt
    gets the output of the row before.
    """
    starts = [row["outputs"].index(True) for row in rows]
    same: dict[tuple[str, ...], list[int]] = {}
    for index, (row, start) in enumerate(zip(rows, starts, strict=True)):
        same.setdefault(tuple(row["turns"][:start]), []).append(index)
    order = [index for group in same.values() for index in group]
    shift = max(map(len, same.values())) % len(rows) or 1
    others = {index: order[at - shift] for at, index in enumerate(order)}

    def joined(index: int, key: str) -> list[str | bool]:
        other = others[index]
        return [*rows[index][key][: starts[index]], *rows[other][key][starts[other] :]]

    return [{key: joined(index, key) for key in ("turns", "outputs")} for index in range(len(rows))]
