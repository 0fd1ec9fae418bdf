"""Metrics as (total, count): exact under micro-batches and processes, floats only where a tracker reads them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from trainkit.functional import exact, masked_sum


@dataclass(frozen=True)
class Mean:
    """A mean kept as its total and count, scalars [] in float64; ``a + b`` merges."""

    total: Tensor
    count: Tensor

    @classmethod
    def of(cls, x: Tensor, mask: Tensor | None = None) -> Mean:
        """Mean of ``x`` [*] over ``mask`` [*] (everything without one); a detached record, no gradient."""
        x = exact(x.detach())
        if mask is None:
            return cls(x.sum(), torch.tensor(x.numel(), dtype=x.dtype, device=x.device))
        return cls(masked_sum(x, mask), exact(mask.sum()))

    def __add__(self, other: Mean) -> Mean:
        if not isinstance(other, Mean):
            return NotImplemented
        return type(self)(self.total + other.total, self.count + other.count)

    def tensors(self) -> list[Tensor]:
        """The scalars that are summed over processes."""
        return [self.total, self.count]

    def compute(self) -> float:
        """The mean as a float; NaN if nothing was counted."""
        return float(self.total / self.count) if self.count > 0 else float("nan")


@dataclass(frozen=True)
class Std:
    """An unbiased standard deviation kept as count, total and total of squares, in float64; ``a + b`` merges."""

    total: Tensor
    squares: Tensor
    count: Tensor

    @classmethod
    def of(cls, x: Tensor, mask: Tensor | None = None) -> Std:
        """Standard deviation of ``x`` [*] over ``mask`` [*]."""
        mean, square = Mean.of(x, mask), Mean.of(exact(x.detach()) ** 2, mask)
        return cls(mean.total, square.total, mean.count)

    def __add__(self, other: Std) -> Std:
        if not isinstance(other, Std):
            return NotImplemented
        return type(self)(self.total + other.total, self.squares + other.squares, self.count + other.count)

    def tensors(self) -> list[Tensor]:
        """The scalars that are summed over processes."""
        return [self.total, self.squares, self.count]

    def compute(self) -> float:
        """The standard deviation as a float; 0 with fewer than two values."""
        if self.count < 2:
            return 0.0
        return float(((self.squares - self.total**2 / self.count).clamp(min=0) / (self.count - 1)).sqrt())


Metric = Mean | Std
"""A number about many things that can be added up over micro-batches and processes."""
Metrics = dict[str, Metric]
"""Metrics by name, ``group/name``."""


def merge(*parts: Mapping[str, Metric]) -> Metrics:
    """One record from several: metrics of the same name are added."""
    merged: Metrics = {}
    for part in parts:
        for name, metric in part.items():
            merged[name] = merged[name] + metric if name in merged else metric  # type: ignore[operator]
    return merged


def compute(metrics: Mapping[str, Metric], reduce: Callable[[Tensor], Tensor]) -> dict[str, float]:
    """Floats over all processes, by one collective: every process must hold the same names."""
    if not metrics:
        return {}
    names = sorted(metrics)
    parts = [metrics[name].tensors() for name in names]
    flat = reduce(torch.stack([x.cpu().to(torch.float64) for part in parts for x in part]))
    values = iter(flat.split([len(part) for part in parts]))
    return {name: type(metrics[name])(*next(values).unbind()).compute() for name in names}


class RunningMoments:
    """Mean and variance of everything seen so far, in float64 (Chan et al. 1979, pairwise update; S-16)."""

    def __init__(self) -> None:
        self.count, self.mean, self.m2 = 0.0, 0.0, 0.0

    def update(self, x: Tensor, reduce: Callable[[Tensor], Tensor] = lambda t: t) -> None:
        """Take in ``x`` [B] of every process."""
        x = exact(x.detach())
        count, total = reduce(torch.stack([x.new_tensor(x.numel()), x.sum()])).tolist()
        if count == 0:
            return
        mean = total / count
        m2 = float(reduce(((x - mean) ** 2).sum()))
        delta, both = mean - self.mean, self.count + count
        self.m2 += m2 + delta**2 * self.count * count / both
        self.mean += delta * count / both
        self.count = both

    @property
    def std(self) -> float:
        """Unbiased standard deviation; NaN while fewer than two values were seen."""
        return float((self.m2 / (self.count - 1)) ** 0.5) if self.count >= 2 else float("nan")

    def state_dict(self) -> dict[str, float]:
        """The three numbers that are the whole state."""
        return {"count": self.count, "mean": self.mean, "m2": self.m2}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Take over the state of another instance."""
        self.count, self.mean, self.m2 = state["count"], state["mean"], state["m2"]
