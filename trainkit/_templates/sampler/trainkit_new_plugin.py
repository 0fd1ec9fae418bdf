"""new_plugin: draws from the likeliest tokens at first, and from more of them as training goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from trainkit import AccelerateRLTrainer, Rollouts, Row, SamplingConfig, hookimpl

FIRST, STEPS = 0.8, 50
"""The ``top_p`` before the first step, and the steps after which it has risen to 1."""


@hookimpl
def make_sampler(trainer: AccelerateRLTrainer[Any]) -> Callable[..., Rollouts]:
    """trainkit's own sampler with a ``top_p`` that rises; one that is set in the configuration is left alone."""
    core = trainer.core_sampler()

    def sampler(
        rows: list[Row], queries: list[list[int]], settings: SamplingConfig, generator: torch.Generator
    ) -> Rollouts:
        """Responses to ``queries``, token ids; what is random comes from ``generator`` or a row's ``seed`` alone."""
        if settings.top_p == 1:
            settings = settings.model_copy(update={"top_p": top_p(trainer.progress.step)})
        return core(rows, queries, settings, generator)

    return sampler


def top_p(step: int) -> float:
    """The share of the probability that is drawn from; it follows from the step, so that resuming keeps it."""
    return min(1.0, FIRST + (1 - FIRST) * step / STEPS)
