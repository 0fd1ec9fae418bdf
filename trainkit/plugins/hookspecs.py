"""The hooks. They observe a run and change nothing, except ``make_sampler``, which provides the sampler."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import pluggy

PROJECT = "trainkit"
"""The name of pluggy's project."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a function or method as an implementation of the hook of its name."""


class Trainer(Protocol):
    """The trainer of a run, as all hooks know it."""

    config: Any
    """The configuration, a `trainkit.TRLConfig`."""
    run_dir: Path | None
    """The directory of the run."""
    progress: Any
    """How far the run is: ``step``, ``seconds``, ``samples``, ``tokens``."""

    def stop(self, reason: str) -> None:
        """End the run after this step."""


class Batch(Protocol):
    """Experience: a `trainkit.Batch`."""

    def __len__(self) -> int:
        """Return the number of rows."""


class Rollouts(Protocol):
    """Prompts and responses: `trainkit.Rollouts`."""

    rows: list[dict[str, Any]]
    prompts: list[str]
    outputs: list[str]


class Sampler(Protocol):
    """Makes rollouts: a `trainkit.rollouts.Sampler`."""

    def __call__(self, rows: Any, **settings: Any) -> Any:
        """Return the rollouts of rows."""


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
