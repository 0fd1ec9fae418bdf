"""Evaluation: one image per evaluation prompt, sampled from the same noise each time, scored and measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from trainkit import AcceleratedLoop, Row
from trainkit.rollouts import Record, means, measure
from trainkit.seeding import placed, response_seeds
from trainkit_ddpo.images import ImageRollouts, as_ids
from trainkit_ddpo.scoring import RewardCaller

Draw = Callable[[list[Row], Sequence[int]], ImageRollouts]
"""Samples one image for each row and seed."""


def evaluate(
    trainer: AcceleratedLoop[Any], draw: Draw, caller: RewardCaller | None
) -> tuple[dict[str, float], list[Record]]:
    """Return means over all evaluation prompts as ``eval/...``, and a record of each image.

    Args:
        trainer: provides the evaluation prompts, the metric function and the processes.
        draw: samples the images.
        caller: calls the reward function; None if there is none.
    """
    started, accelerator, rows = time.perf_counter(), trainer.accelerator, trainer.eval_rows
    seeds = response_seeds(trainer.config.train.seed, "generate", placed(rows), as_ids(rows))
    shard = slice(accelerator.process_index, None, accelerator.num_processes)
    rows, seeds, size = rows[shard], seeds[shard], trainer.config.rollout.batch_size
    parts: list[tuple[ImageRollouts, Callable[[], Tensor] | None]] = []
    for start in range(0, len(rows), size):
        rollouts = draw(rows[start : start + size], seeds[start : start + size])
        parts.append((rollouts, None if caller is None else caller.submit(rollouts)))
    records: list[Record] = []
    wholes: list[tuple[int, dict[str, float]]] = []
    for rollouts, promised in parts:
        if promised is not None:
            rollouts = replace(rollouts, scores=promised())
        whole, each = _measure(trainer, rollouts)
        records += each
        wholes.append((len(rollouts), whole))
    records, wholes = trainer.gather(records), trainer.gather(wholes)
    found = {**means(records, wholes), "time": time.perf_counter() - started}
    return {f"eval/{name}": value for name, value in found.items()}, records


def _measure(trainer: AcceleratedLoop[Any], rollouts: ImageRollouts) -> tuple[dict[str, float], list[Record]]:
    """Return metrics of the images together, and a record of each."""
    known: dict[str, Sequence[Any]] = {"prompt": rollouts.prompts, "output": rollouts.outputs}
    known["image"] = list(rollouts.images.cpu())
    if rollouts.scores is not None:
        known["reward"] = rollouts.scores.tolist()
    return measure(trainer.metric_fn, rollouts, known)
