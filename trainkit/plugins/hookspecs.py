"""The hooks. They observe a run and change nothing, except ``make_sampler``, which provides the sampler."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from trainkit.data import Batch, Rollouts
    from trainkit.rollouts import Sampler
    from trainkit.trainer.loop import AcceleratedLoop

    Trainer = AcceleratedLoop[Any]

PROJECT = "trainkit"
"""The name of pluggy's project."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a function or method as an implementation of the hook of its name."""


@hookspec
def on_train_begin(trainer: Trainer) -> None:
    """Observe the beginning of training; model, tokenizer and run directory are ready."""


@hookspec
def on_train_end(trainer: Trainer) -> None:
    """Observe the end of training, also after an error."""


@hookspec
def on_experience(trainer: Trainer, experience: Batch, rollouts: list[Rollouts]) -> None:
    """Observe a collection of experience, or the part of one that is made for a step.

    ``rollouts`` is empty for offline algorithms.
    """


@hookspec
def on_step(trainer: Trainer, step: int) -> None:
    """Observe an optimizer step; ``step`` counts from 1."""


@hookspec
def on_evaluate(trainer: Trainer, step: int, metrics: dict[str, float], samples: list[dict[str, Any]]) -> None:
    """Observe an evaluation; ``samples`` holds one dict per response: prompt, output, reward, metrics.

    ``samples`` is empty if the evaluation only measured held-out samples.
    """


@hookspec
def on_save(trainer: Trainer, step: int, path: Path) -> None:
    """Observe a checkpoint that has been written completely to ``path``."""


@hookspec
def log_metrics(trainer: Trainer, step: int, metrics: dict[str, float]) -> None:
    """Receive metrics as floats, already reduced over processes. Called on the main process only."""


@hookspec(firstresult=True)
def make_sampler(trainer: Trainer) -> Sampler | None:
    """Return the sampler to use instead of trainkit's own, or None to leave the choice to other plugins."""
