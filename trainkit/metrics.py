"""Metrics that merge exactly over micro-batches and processes; converted to floats only for the trackers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainkit.functional import masked_sum, to_float64

Rewards = NDArray[np.float64]
"""Rewards or advantages [B]."""


@dataclass(frozen=True)
class Mean:
    """A mean, stored as a total and a count, scalars [] in float64; ``a + b`` merges two."""

    total: Tensor
    count: Tensor

    @classmethod
    def of(cls, x: Tensor, mask: Tensor | None = None) -> Mean:
        """Return the mean of ``x`` [*] over ``mask`` [*], or over all of ``x`` without a mask; detached."""
        x = to_float64(x.detach())
        if mask is None:
            return cls(x.sum(), torch.tensor(x.numel(), dtype=x.dtype, device=x.device))
        return cls(masked_sum(x, mask), to_float64(mask.sum()))

    def __add__(self, other: Mean) -> Mean:
        if not isinstance(other, Mean):
            return NotImplemented
        return type(self)(self.total + other.total, self.count + other.count)

    def tensors(self) -> list[Tensor]:
        """Return the scalars that are summed over processes."""
        return [self.total, self.count]

    def compute(self) -> float:
        """Return the mean as a float; NaN if nothing was counted."""
        return float(self.total / self.count) if self.count > 0 else float("nan")


@dataclass(frozen=True)
class Std:
    """An unbiased standard deviation, stored as mean, squared deviations and count; ``a + b`` merges two.

    All three are scalars [] in float64. Squared deviations from the mean stay accurate where values are large and close
    together; sums of squares do not. Source: Chan et al. 1979, pairwise update.
    """

    mean: Tensor
    deviations: Tensor
    """Σ (x − mean)²."""
    count: Tensor

    @classmethod
    def of(cls, x: Tensor, mask: Tensor | None = None) -> Std:
        """Return the standard deviation of ``x`` [*] over ``mask`` [*], or of all of ``x`` without a mask; detached."""
        x = to_float64(x.detach())
        first = Mean.of(x, mask)
        count = first.count.clamp(min=1)
        rough = first.total / count
        mean = rough + Mean.of(x - rough, mask).total / count  # rounded once, so equal values have no deviation
        return cls(mean, Mean.of((x - mean) ** 2, mask).total, first.count)

    def __add__(self, other: Std) -> Std:
        if not isinstance(other, Std):
            return NotImplemented
        count = self.count + other.count
        mean = self.mean + (other.mean - self.mean) * other.count / count.clamp(min=1)
        return type(self)(mean, self.about(mean) + other.about(mean), count)

    def about(self, mean: Tensor) -> Tensor:
        """Return the sum of squared deviations from ``mean`` [] instead of the stored mean. -> []."""
        return self.deviations + self.count * (self.mean - mean) ** 2

    def tensors(self) -> list[Tensor]:
        """Return the scalars that it is stored as."""
        return [self.mean, self.deviations, self.count]

    def compute(self) -> float:
        """Return the standard deviation as a float; 0 with fewer than two values."""
        return float((self.deviations / (self.count - 1)).sqrt()) if self.count >= 2 else 0.0


Metric = Mean | Std
"""A statistic that can be summed over micro-batches and processes."""
Metrics = dict[str, Metric]
"""Metrics by name, ``group/name``."""


def merge(*parts: Mapping[str, Metric]) -> Metrics:
    """Merge several dicts of metrics into one; metrics of the same name are added."""
    merged: Metrics = {}
    for part in parts:
        for name, metric in part.items():
            merged[name] = merged[name] + metric if name in merged else metric  # type: ignore[operator]
    return merged


def compute(metrics: Mapping[str, Metric], reduce: Callable[[Tensor], Tensor]) -> dict[str, float]:
    """Return the metrics over all processes as floats, without those of which nothing was counted.

    Every process must have the same names.

    One collective sums totals and counts; if there is a `Std`, another one sums deviations from the common means.
    """
    if not metrics:
        return {}
    names = sorted(metrics)
    sums = dict(zip(names, _summed([_total(metrics[name]) for name in names], reduce), strict=True))
    stds = {name: metric for name in names if isinstance(metric := metrics[name], Std)}
    means = {name: _mean(std, *sums[name].unbind()) for name, std in stds.items()}
    parts = [std.about(means[name].to(std.mean)) for name, std in stds.items()]
    deviations = dict(zip(stds, _summed(parts, reduce) if parts else (), strict=True))
    found = {name: total / count for name, each in sums.items() for total, count in [each.tolist()] if count > 0}
    return found | {name: Std(means[name], deviations[name], sums[name][1]).compute() for name in stds if name in found}


def _total(metric: Metric) -> Tensor:
    """Return total and count. -> [2]."""
    total = metric.total if isinstance(metric, Mean) else metric.mean * metric.count
    return torch.stack([total, metric.count])


def _mean(std: Std, total: Tensor, count: Tensor) -> Tensor:
    """Return the mean over all processes; where one has counted everything its own, which is rounded once. -> []."""
    return std.mean.to(total) if count == std.count.to(count) else total / count.clamp(min=1)


def _summed(parts: Sequence[Tensor], reduce: Callable[[Tensor], Tensor]) -> Sequence[Tensor]:
    """Return tensors of one shape, each summed over all processes; one collective, in float64, on the CPU."""
    of_device: dict[torch.device, list[int]] = {}
    for index, part in enumerate(parts):
        of_device.setdefault(part.device, []).append(index)
    order = torch.tensor([index for indices in of_device.values() for index in indices]).argsort()
    stacked = (torch.stack([to_float64(parts[index]) for index in indices]) for indices in of_device.values())
    moved = torch.cat([each.cpu().to(torch.float64) for each in stacked])  # once from each device, which waits
    return reduce(moved[order]).unbind()


class RunningMoments:
    """Mean and variance of all values so far, in float64 (Chan et al. 1979, pairwise update)."""

    def __init__(self) -> None:
        self.count, self.mean, self.m2 = 0.0, 0.0, 0.0

    def update(self, x: Tensor, reduce: Callable[[Tensor], Tensor] = lambda t: t) -> None:
        """Add the values ``x`` [B] of every process."""
        x = to_float64(x.detach())
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
        """Unbiased standard deviation; NaN with fewer than two values."""
        return float((self.m2 / (self.count - 1)) ** 0.5) if self.count >= 2 else float("nan")

    def state_dict(self) -> dict[str, float]:
        """Return the state: count, mean and sum of squared deviations."""
        return {"count": self.count, "mean": self.mean, "m2": self.m2}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Load the state that `state_dict` returned."""
        self.count, self.mean, self.m2 = state["count"], state["mean"], state["m2"]


class PerPromptStatTracker:
    """(r − μ) / (σ + 1e-6) with mean and deviation of the latest rewards of the same prompt (golden 10.7).

    Prompts are identified by their text. The current rewards are included. For a prompt with fewer than ``min_count``
    rewards, μ and σ are those of all current rewards. Source: Black et al. 2023, appendix D.1.

    Args:
        buffer_size: number of rewards stored per prompt.
        min_count: number of rewards needed to use a prompt's own mean and deviation.
    """

    def __init__(self, buffer_size: int, min_count: int) -> None:
        self.buffer_size, self.min_count = buffer_size, min_count
        self.rewards: dict[str, deque[float]] = {}

    def update(self, prompts: Sequence[str], rewards: Sequence[float]) -> Rewards:
        """Add the rewards, and return their advantages in float64, also for integer rewards. [B], [B] -> [B]."""
        array = np.asarray(rewards, dtype=np.float64)
        for prompt, reward in zip(prompts, array.tolist(), strict=True):
            self.rewards.setdefault(prompt, deque(maxlen=self.buffer_size)).append(reward)
        by_prompt = {prompt: np.array(self.rewards[prompt]) for prompt in set(prompts)}
        usable = {prompt: stored if len(stored) >= self.min_count else array for prompt, stored in by_prompt.items()}
        mean = np.array([usable[prompt].mean() for prompt in prompts])
        std = np.array([usable[prompt].std() for prompt in prompts])
        standard: Rewards = (array - mean) / (std + 1e-6)
        return standard

    def get_stats(self) -> dict[str, dict[str, float]]:
        """Return mean, standard deviation and count of the stored rewards, by prompt."""
        by_prompt = {prompt: np.array(rewards) for prompt, rewards in self.rewards.items()}
        return {p: {"mean": float(r.mean()), "std": float(r.std()), "count": len(r)} for p, r in by_prompt.items()}

    def state_dict(self) -> dict[str, list[float]]:
        """Return the stored rewards, oldest first, by prompt."""
        return {prompt: list(rewards) for prompt, rewards in self.rewards.items()}

    def load_state_dict(self, state: Mapping[str, Sequence[float]]) -> None:
        """Restore the rewards that `state_dict` returned."""
        self.rewards = {prompt: deque(rewards, maxlen=self.buffer_size) for prompt, rewards in state.items()}
