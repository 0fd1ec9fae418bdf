"""Checks of what the methods of an algorithm return, made where they return it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from trainkit.data import Batch, Sequences, TokenBatch
from trainkit.errors import PluginError, describe
from trainkit.metrics import Metric, Metrics
from trainkit.trainer.base import BaseRLTrainer, Verdict

Trainer = BaseRLTrainer[Any]
Tensors = list[tuple[str, Tensor]]
"""Tensors by dotted name."""


def checked_loss(trainer: Trainer, given: Any) -> tuple[Tensor, Metrics]:
    """Return what `loss` returned.

    Raises:
        PluginError: it is not a scalar tensor with metrics, or the tensor has no gradient although one is computed.
    """
    if not isinstance(given, tuple) or len(given) != 2:
        _refuse(trainer, "loss", _shown(given), "a tuple of the loss [] and a dict of metrics")
    loss, metrics = given
    if not isinstance(loss, Tensor) or loss.dim():
        expected = "a loss of shape (), the mean over the units that batch.weight counts"
        _refuse(trainer, "loss", f"{_shown(loss)} as the loss", expected)
    if torch.is_grad_enabled() and not loss.requires_grad:
        expected = "one that is computed from self.policy(...), without detach(), item() and torch.no_grad()"
        _refuse(trainer, "loss", "a loss without gradient", expected)
    return loss, checked_metrics(trainer, "loss", metrics)


def checked_metrics(trainer: Trainer, method: str, given: Any) -> Metrics:
    """Return the metrics that ``method`` returned, or `record` was called with.

    Raises:
        PluginError: they are no dict of `Mean` and `Std` by name, or these do not consist of scalar tensors.
    """
    expected = 'a dict of metrics by name, such as {"policy/ratio": Mean.of(ratio, mask)}'
    if not isinstance(given, Mapping):
        _refuse(trainer, method, f"{_shown(given)} as the metrics", expected)
    for name, metric in given.items():
        if not isinstance(name, str) or not isinstance(metric, Metric):
            _refuse(trainer, method, f"{_shown(metric)} as the metric {name!r}", expected)
        for part in metric.tensors():
            if not isinstance(part, Tensor) or part.dim():
                kind = type(metric).__name__
                _refuse(trainer, method, f"a {kind} with {_shown(part)} as the metric {name!r}", f"{kind}.of(values)")
    return dict(given)


def checked_verdict(trainer: Trainer, given: Any) -> Verdict:
    """Return what `judge` returned.

    Raises:
        PluginError: it is not a `Verdict`.
    """
    if not isinstance(given, Verdict):
        _refuse(trainer, "judge", _shown(given), "Verdict.STEP, Verdict.SKIP or Verdict.STOP")
    return given


def checked_batch(trainer: Trainer, method: str, given: Any) -> Batch:
    """Return the batch that ``method`` returned.

    Raises:
        PluginError: it is no `Batch`, its fields have different numbers of rows, or one has other columns than the
            sequences that it belongs to.
    """
    if not isinstance(given, Batch):
        _refuse(trainer, method, _shown(given), "a Batch, such as a dataclass derived from TokenBatch")

    def refuse(field: str, value: Any, expected: str) -> NoReturn:
        found = f"a {type(given).__name__} whose field {field!r} is {_shown(value)}"
        _refuse(trainer, method, found, expected)

    _check_fields(given, refuse)
    return given


def _check_fields(batch: Batch, refuse: Callable[[str, Any, str], NoReturn], prefix: str = "") -> Tensors:
    """Check that the fields have the same first dimension, and return all tensors, also of batches within the batch.

    A class that overrides `take` selects its rows itself, so its fields may have any; the same holds for `trim` and
    columns.
    """
    cls, first, rows = type(batch), "", 0
    tensors: Tensors = []
    for name, part in batch.parts().items():
        field = prefix + name
        if isinstance(part, Batch):
            tensors += _check_fields(part, refuse, f"{field}.")
            own = len(part)
        elif isinstance(part, Tensor) and part.dim():
            tensors.append((field, part))
            own = part.size(0)
        else:
            refuse(field, part, "a tensor [B, ...] or a batch")
        if not first:
            first, rows = field, own
        elif own != rows and cls.take is Batch.take:
            refuse(field, part, f"{rows} rows, the first dimension of {first!r}")
    if cls.trim is TokenBatch.trim or cls.trim is Sequences.trim:
        _check_columns(batch, tensors, refuse)
    return tensors


def _check_columns(batch: Any, tensors: Tensors, refuse: Callable[[str, Any, str], NoReturn]) -> None:
    """Check that tensors with two or more dimensions are [B, T, ...] like the sequences."""
    alone = isinstance(batch, Sequences)
    sequences = batch if alone else batch.sequences
    if not isinstance(sequences, Sequences):
        refuse("sequences", sequences, "Sequences")
    ids = sequences.input_ids
    for field, tensor in tensors:
        if (tensor.size(1) != ids.size(-1)) if tensor.dim() > 1 else alone:
            expected = f"[B, T, ...] like its sequences, {tuple(ids.shape)}: column t belongs to token t"
            refuse(field, tensor, f"{expected}, and nothing is shifted by one")


def _refuse(trainer: Trainer, method: str, given: str, expected: str) -> NoReturn:
    verb = "was called with" if method == "record" else "returned"
    raise PluginError(f"{trainer.config.method.name!r}: {method} {verb} {given}; expected {expected}")


def _shown(value: object) -> str:
    """Return how messages name ``value``: tensors and batches by their shape."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, Batch):
        return f"a {type(value).__name__} of {len(value)} rows"
    if isinstance(value, tuple) and value:
        return f"a tuple of {' and '.join(_shown(part) for part in value)}"
    return describe(value)
