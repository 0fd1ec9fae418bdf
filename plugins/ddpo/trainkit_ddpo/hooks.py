"""Hooks that write a PNG of each collection and of each evaluation of a DDPO run."""

from __future__ import annotations

from typing import Any

from trainkit import hookimpl
from trainkit_ddpo.images import FEW, ImageRollouts, save_grid


@hookimpl
def on_experience(trainer: Any, rollouts: list[Any]) -> None:
    """Write the first images of a collection to ``images/`` in the run directory."""
    made = [part for part in rollouts if isinstance(part, ImageRollouts)]
    _write(trainer, "rollout", [image for part in made for image in part.images[:FEW]])


@hookimpl
def on_evaluate(trainer: Any, samples: list[dict[str, Any]]) -> None:
    """Write the first images of an evaluation to ``images/`` in the run directory."""
    _write(trainer, "evaluation", [sample["image"] for sample in samples if "image" in sample])


def _write(trainer: Any, kind: str, images: list[Any]) -> None:
    if images and trainer.run_dir is not None and trainer.accelerator.is_main_process:
        save_grid(images[:FEW], trainer.run_dir / "images" / f"{kind}_{trainer.progress.step:08d}.png")
