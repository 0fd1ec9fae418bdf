"""Checks of what the methods of an algorithm return, made where they return it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from trainkit.data import Batch
from trainkit.data.batches import check_fields, shown
from trainkit.errors import PluginError
from trainkit.metrics import Metric, Metrics
from trainkit.trainer.base import BaseRLTrainer, Verdict

Trainer = BaseRLTrainer[Any]


def checked_loss(trainer: Trainer, given: Any) -> tuple[Tensor, Metrics]:
    """Return what `loss` returned.

    Raises:
        PluginError: it is not a scalar tensor with metrics, or the tensor has no gradient although one is computed.
    """
    if not isinstance(given, tuple) or len(given) != 2:
        _refuse(trainer, "loss", shown(given), "a tuple of the loss [] and a dict of metrics")
    loss, metrics = given
    if not isinstance(loss, Tensor) or loss.dim():
        expected = "a loss of shape (), the mean over the units that batch.weight counts"
        _refuse(trainer, "loss", f"{shown(loss)} as the loss", expected)
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
        _refuse(trainer, method, f"{shown(given)} as the metrics", expected)
    for name, metric in given.items():
        if not isinstance(name, str) or not isinstance(metric, Metric):
            _refuse(trainer, method, f"{shown(metric)} as the metric {name!r}", expected)
        for part in metric.tensors():
            if not isinstance(part, Tensor) or part.dim():
                kind = type(metric).__name__
                _refuse(trainer, method, f"a {kind} with {shown(part)} as the metric {name!r}", f"{kind}.of(values)")
    return dict(given)


def checked_verdict(trainer: Trainer, given: Any) -> Verdict:
    """Return what `judge` returned.

    Raises:
        PluginError: it is not a `Verdict`.
    """
    if not isinstance(given, Verdict):
        _refuse(trainer, "judge", shown(given), "Verdict.STEP, Verdict.SKIP or Verdict.STOP")
    return given


def checked_batch(trainer: Trainer, method: str, given: Any) -> Batch:
    """Return the batch that ``method`` returned.

    Raises:
        PluginError: it is no `Batch`, its fields have different numbers of rows, or one has other columns than the
            sequences that it belongs to.
    """
    if not isinstance(given, Batch):
        _refuse(trainer, method, shown(given), "a Batch, such as a dataclass derived from TokenBatch")

    def refuse(field: str, value: Any, expected: str) -> NoReturn:
        found = f"a {type(given).__name__} whose field {field!r} is {shown(value)}"
        _refuse(trainer, method, found, expected)

    check_fields(given, refuse)
    return given


def _refuse(trainer: Trainer, method: str, given: str, expected: str) -> NoReturn:
    verb = "was called with" if method == "record" else "returned"
    raise PluginError(f"{trainer.config.method.name!r}: {method} {verb} {given}; expected {expected}")
