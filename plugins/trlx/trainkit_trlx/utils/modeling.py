"""Statistics of tensors."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

import torch

from trainkit import functional as F
from trainkit import metrics

if TYPE_CHECKING:
    from torch import Tensor


class RunningMoments(metrics.RunningMoments):
    """Mean and standard deviation of all values so far."""

    def update(self, xs: Tensor, reduce: Any = lambda t: t) -> tuple[float, float]:  # type: ignore[override]
        """Add the values ``xs``, and return the mean and the unbiased standard deviation of these alone."""
        super().update(xs, reduce)
        alone = metrics.RunningMoments()
        alone.update(xs, reduce)
        return alone.mean, alone.std


def flatten_dict(d: Mapping[str, Any], parent_key: str = "", sep: str = "/") -> dict[str, Any]:
    """Return nested dictionaries as one, with the keys joined by ``sep``."""
    found: dict[str, Any] = {}
    for key, value in d.items():
        path = f"{parent_key}{sep}{key}" if parent_key else key
        found |= flatten_dict(value, path, sep) if isinstance(value, MutableMapping) else {path: value}
    return found


def get_tensor_stats(xs: Tensor, mask: Tensor, n: Any) -> dict[str, Tensor]:
    """Return mean, min, max and standard deviation of the ``n`` entries of ``mask``; 0 if there are none."""
    if xs.numel() == 0 or int(n) == 0:
        return dict.fromkeys(("mean", "min", "max", "std"), torch.zeros(()))
    keep = mask.bool()
    mean = F.zero_masked(xs, keep).sum() / n
    return {
        "mean": mean,
        "min": torch.where(keep, xs, torch.full_like(xs, torch.inf)).min(),
        "max": torch.where(keep, xs, torch.full_like(xs, -torch.inf)).max(),
        "std": (F.zero_masked((xs - mean) ** 2, keep).sum() / n).sqrt(),
    }


def whiten(xs: Tensor, shift_mean: bool = True, distributed: bool = True) -> Tensor:  # noqa: ARG001
    """Return ``xs`` with mean 0 and variance 1 over all its entries; ``shift_mean=False`` keeps the mean."""
    return F.whiten(xs, torch.ones_like(xs, dtype=torch.bool), shift_mean=shift_mean)


def logprobs_of_labels(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the log-probabilities of labels. [B, T, V], [B, T] -> [B, T]."""
    return F.token_logprobs(logits.flatten(0, 1), labels.flatten()).view_as(labels)
