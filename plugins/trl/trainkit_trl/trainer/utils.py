"""Controllers of the KL penalty, and running moments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainkit import metrics
from trainkit.migrating import refusing

if TYPE_CHECKING:
    from torch import Tensor


class AdaptiveKLController:
    """β, adapted to a target KL. Ziegler et al. 2019, section 2.2.

    Args:
        init_kl_coef: the first β.
        target: the KL to reach.
        horizon: the time scale in responses.
    """

    def __init__(self, init_kl_coef: float, target: float, horizon: float) -> None:
        self.value = init_kl_coef
        self.target = target
        self.horizon = horizon

    def update(self, current: float, n_steps: int) -> None:
        """Update β ← β·(1 + clip(current/target − 1, ±0.2)·n_steps/horizon)."""
        error = min(max(current / self.target - 1, -0.2), 0.2)
        self.value *= 1 + error * n_steps / self.horizon


class FixedKLController:
    """β, which stays as it is."""

    def __init__(self, kl_coef: float) -> None:
        self.value = kl_coef

    def update(self, current: float, n_steps: int) -> None:
        """Do nothing."""


class RunningMoments(metrics.RunningMoments):
    """Mean and standard deviation of all values so far.

    Args:
        accelerator: sums over the processes.
    """

    def __init__(self, accelerator: Any = None) -> None:
        super().__init__()
        self.accelerator = accelerator

    def update(self, xs: Tensor, reduce: Any = None) -> tuple[float, float]:  # type: ignore[override]
        """Add the values ``xs``, and return the mean and the unbiased standard deviation of these alone."""
        if reduce is None:
            reduce = (lambda t: t) if self.accelerator is None else self.accelerator.reduce
        super().update(xs, reduce)
        alone = metrics.RunningMoments()
        alone.update(xs, reduce)
        return alone.mean, alone.std


__getattr__ = refusing(__name__)
