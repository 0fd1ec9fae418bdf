"""Scored rollouts of all processes: errors of one are those of all, and scores that are not finite are dealt with."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainkit import metrics as m
from trainkit.data import Rollouts, Row
from trainkit.errors import RewardError
from trainkit.functional import per_response
from trainkit.rollouts import Record, name_of
from trainkit.rollouts.rewards import FURTHER

if TYPE_CHECKING:
    from trainkit.trainer.accelerate import AccelerateRLTrainer

    Trainer = AccelerateRLTrainer[Any]

Scored = tuple[Rollouts, Tensor]
"""Rollouts, and their scores [B] or [B, T]."""


def scored(trainer: Trainer, parts: list[list[Row]]) -> Iterator[Scored]:
    """Sample and score the rows of each part that has any. All processes have equally many parts.

    Raises:
        TrainkitError: that of a process whose reward function or environment has failed; raised on all processes.
    """
    trainer._begin_sampling([rows for rows in parts if rows])
    for rows in parts:
        trainer._stop_if_asked()
        found = trainer.parallel.sync_errors(lambda: _scored_here(trainer, rows))  # noqa: B023
        if found is not None:
            yield found
    _agree_on_names(trainer)


def _agree_on_names(trainer: Trainer) -> None:
    """Let every process record the same metrics of what the reward function returns besides scores.

    Which of it are numbers may differ between processes, and metrics are summed by their names.
    """
    if trainer.reward_fn is None or trainer.parallel.world == 1:
        return
    own = [name for name in trainer.recorder.recorded if name.startswith(FURTHER)]
    nothing = torch.zeros((), dtype=torch.float64)
    trainer.record({name: m.Mean(nothing, nothing) for name in {*trainer.gather(own)} - {*own}})


def _scored_here(trainer: Trainer, rows: list[Row]) -> Scored | None:
    """Sample and score rows, if there are any, unless the run is asked to end."""
    with trainer.run_state.stop.interruptible(trainer._samples_alone):
        return trainer.sample_and_score(rows) if rows else None


def usable(scores: Tensor, k: int) -> Tensor:
    """Return which responses can be trained on: those of groups of ``k`` with finite scores. [B, *] -> bool [B]."""
    finite = scores.isfinite().flatten(1).all(1) if scores.dim() > 1 else scores.isfinite()
    return finite.view(-1, k).all(1).repeat_interleave(k)


def count(trainer: Trainer, name: str, number: int) -> None:
    """Record a number of this process as a metric, which is the sum over all processes; once in a collection."""
    share = torch.tensor(1 / trainer.parallel.world, dtype=torch.float64)
    trainer.record({name: m.Mean(torch.tensor(float(number), dtype=torch.float64), share)})


def clipped(trainer: Trainer, parts: list[Scored]) -> list[Scored]:
    """Return rollouts with infinite scores set to the largest and the smallest finite score of all processes.

    Raises:
        RewardError: there is no finite score.
    """
    device = trainer.accelerator.device
    given = [s if s.dim() == 1 else s[rollouts.sequences.response_mask.to(s.device)] for rollouts, s in parts]
    values = torch.cat([torch.zeros(0, device=device), *given])
    finite = values[values.isfinite()]
    ends = torch.stack([finite.max(), -finite.min()]) if len(finite) else torch.full((2,), -math.inf, device=device)
    high, low = trainer.max(ends.double()).tolist()

    def check() -> None:
        if high == -math.inf:
            raise RewardError(
                f"{_source(trainer)}: no score of the collection after step {trainer.progress.step} is finite, so "
                "there is none that reward.on_nonfinite 'clip' could set infinite ones to; look at the reward function"
            )

    trainer.parallel.sync_errors(check)
    count(trainer, "reward/clipped", len(values) - len(finite))
    found = [(rollouts, scores.nan_to_num(posinf=high, neginf=-low)) for rollouts, scores in parts]
    own = trainer._sampling.scores
    own[len(own) - len(found) :] = [per_response(scores) for _, scores in found]
    return found


def _source(trainer: Trainer) -> str:
    return "the environment" if trainer.reward_fn is None else name_of(trainer.reward_fn)


def dealt_with(trainer: Trainer, records: list[Record]) -> list[Record]:
    """Return the records of an evaluation with every reward finite, or None if it is not and `drop_row` is set.

    Raises:
        RewardError: no reward is finite, and infinite ones are to be clipped.
    """
    policy = trainer.config.reward.on_nonfinite
    rewards = [record["reward"] for record in records if "reward" in record]
    finite = [reward for reward in rewards if math.isfinite(reward)]
    if len(finite) == len(rewards):
        return records
    if policy == "clip" and not finite:
        raise RewardError(
            f"{_source(trainer)}: no score of the evaluation after step {trainer.progress.step} is finite, so there is "
            "none that reward.on_nonfinite 'clip' could set infinite ones to; look at the reward function"
        )

    low, high = min(finite, default=0.0), max(finite, default=0.0)

    def settled(reward: float) -> float | None:
        if policy == "clip":
            return min(max(reward, low), high)
        return reward if math.isfinite(reward) else None

    return [{**record, "reward": settled(record["reward"])} for record in records]
