"""The hooks. Observers are told what happened and change nothing; ``make_sampler`` is the one provider."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from trainkit.data import Batch, Rollouts
    from trainkit.rollouts import Sampler
    from trainkit.trainer.loop import AcceleratedLoop

    Trainer = AcceleratedLoop[Any]

GROUP = "trainkit"
"""The entry-point group, and pluggy's project name."""

hookspec = pluggy.HookspecMarker(GROUP)
hookimpl = pluggy.HookimplMarker(GROUP)
"""Marks a function or method as an implementation of the hook of its name."""


@hookspec
def on_train_begin(trainer: Trainer) -> None:
    """Called when training begins; model, tokenizer and run directory are ready."""


@hookspec
def on_train_end(trainer: Trainer) -> None:
    """Called when training has ended, also by an error."""


@hookspec
def on_experience(trainer: Trainer, experience: Batch, rollouts: list[Rollouts]) -> None:
    """A collection of experience is complete; ``rollouts`` is empty for offline algorithms."""


@hookspec
def on_step(trainer: Trainer, step: int) -> None:
    """One optimizer step was made; ``step`` counts from 1."""


@hookspec
def on_evaluate(trainer: Trainer, step: int, metrics: dict[str, float], samples: list[dict[str, Any]]) -> None:
    """An evaluation is done; ``samples`` holds one dict per response: prompt, output, reward, metrics.

    It is empty where held-out samples alone were measured.
    """


@hookspec
def on_save(trainer: Trainer, step: int, path: Path) -> None:
    """A checkpoint was written, whole, at ``path``."""


@hookspec
def log_metrics(trainer: Trainer, step: int, metrics: dict[str, float]) -> None:
    """Metrics as floats, already reduced over processes. Called on the main process only."""


@hookspec(firstresult=True)
def make_sampler(trainer: Trainer) -> Sampler | None:
    """Return the sampler to use instead of the core's, or None to leave the choice to others."""
