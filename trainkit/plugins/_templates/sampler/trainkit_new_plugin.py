"""new_plugin: a sampler whose ``top_p`` falls during training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from trainkit import AccelerateRLTrainer, Rollouts, Row, SamplingConfig, hookimpl
from trainkit.rollouts import Purpose

LAST, STEPS = 0.8, 1000
"""The final ``top_p``, and the number of steps over which it falls from 1 to this value."""


@hookimpl
def make_sampler(trainer: AccelerateRLTrainer[Any]) -> Callable[..., Rollouts]:
    """Return trainkit's own sampler with a falling ``top_p``; a ``top_p`` set in the configuration is kept."""
    core = trainer.core_sampler()

    def sampler(
        rows: list[Row], queries: list[list[int]], settings: SamplingConfig, seeds: Sequence[int], purpose: Purpose
    ) -> Rollouts:
        """Sample a response to each of ``queries``, token ids; the randomness of each follows from its seed."""
        if settings.top_p == 1:
            settings = settings.model_copy(update={"top_p": top_p(trainer.progress.step)})
        return core(rows, queries, settings, seeds, purpose)

    return sampler


def top_p(step: int) -> float:
    """Return ``top_p`` at a step. It depends on the step alone, so a resumed run continues with it."""
    return max(LAST, 1 - (1 - LAST) * step / STEPS)
