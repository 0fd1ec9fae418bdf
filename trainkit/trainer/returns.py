"""Checks of what the methods of an algorithm return, made where they return it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from trainkit.data import Batch, Sequences, TokenBatch
from trainkit.errors import PluginError, describe
from trainkit.metrics import Mean, Metrics, Std
from trainkit.trainer.base import BaseRLTrainer, Verdict

Trainer = BaseRLTrainer[Any]


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
        if not isinstance(name, str) or not isinstance(metric, Mean | Std):
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
    if fault := _fault(given):
        _refuse(trainer, method, f"a {type(given).__name__} {fault[0]}", fault[1])
    return given


def _fault(batch: Batch) -> tuple[str, str] | None:
    """Return what is wrong with the fields of ``batch``, and what they should be; None if nothing is wrong."""
    return _wrong_rows(batch) or _wrong_columns(batch)


def _wrong_rows(batch: Batch) -> tuple[str, str] | None:
    """Check the first dimensions; a class that overrides `take` selects its rows itself, whatever its fields are."""
    parts = batch.parts()
    for name, part in parts.items():
        if not isinstance(part, Batch) and not (isinstance(part, Tensor) and part.dim()):
            return f"whose field {name!r} is {_shown(part)}", "fields that are tensors [B, ...] or batches"
        if isinstance(part, Batch) and (fault := _fault(part)):
            return f"in whose field {name!r} is a {type(part).__name__} {fault[0]}", fault[1]
    if not parts:
        return "without fields", "at least one field"
    first, rows = next(iter(parts)), len(batch)
    if type(batch).take is Batch.take:
        for name, part in parts.items():
            if len(part) != rows:
                counts = f"of {rows} rows whose field {name!r} is {_shown(part)}"
                return counts, f"fields with the same first dimension, that of {first!r}"
    return None


def _wrong_columns(batch: Batch) -> tuple[str, str] | None:
    """Check the second dimensions; a class that overrides `trim` removes its columns itself."""
    if isinstance(batch, TokenBatch) and type(batch).trim is TokenBatch.trim:
        sequences, least = batch.sequences, 2
    elif isinstance(batch, Sequences) and type(batch).trim is Sequences.trim:
        sequences, least = batch, 1
    else:
        return None
    if not isinstance(sequences, Sequences):
        return f"whose field 'sequences' is {_shown(sequences)}", "Sequences"
    width = sequences.input_ids.shape[1:2]
    for name, tensor in _tensors(batch):
        if tensor.dim() >= least and (not width or tensor.shape[1:2] != width):
            return (
                f"whose field {name!r} is {_shown(tensor)}",
                f"[B, T, ...] like its sequences, {tuple(sequences.input_ids.shape)}: column t belongs to token t, and "
                "nothing is shifted by one",
            )
    return None


def _tensors(batch: Batch, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors of a batch and the batches in it, by dotted name."""
    for name, part in batch.parts().items():
        if isinstance(part, Batch):
            yield from _tensors(part, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", part


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
