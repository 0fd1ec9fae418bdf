"""new_plugin: draws from all tokens at first, and from the likeliest alone as training goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from trainkit import AccelerateRLTrainer, Rollouts, Row, SamplingConfig, hookimpl

LAST, STEPS = 0.8, 1000
"""The ``top_p`` that it ends at, and the steps in which it falls there from 1."""


@hookimpl
def make_sampler(trainer: AccelerateRLTrainer[Any]) -> Callable[..., Rollouts]:
    """trainkit's own sampler with a ``top_p`` that falls; one that is set in the configuration is left alone."""
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
    return max(LAST, 1 - (1 - LAST) * step / STEPS)
