"""Dynamic sampling: a collection is filled with the groups that the algorithm keeps (DAPO, Yu et al. 2025).

Groups with a score that is not finite are not kept either, with `reward.on_nonfinite: drop_row`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trainkit import metrics as m
from trainkit.data import Rollouts
from trainkit.errors import DataError, PluginError, describe
from trainkit.functional import place_scores
from trainkit.seeding import PLACE
from trainkit.trainer.base import BaseRLTrainer
from trainkit.trainer.collection import Collection

if TYPE_CHECKING:
    from trainkit.trainer.collect import RolloutCollector

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Group:
    """The responses to one prompt, and their scores [k] or [k, T]."""

    position: int
    rollouts: Rollouts
    scores: Tensor


def sampled(collector: RolloutCollector, collection: Collection) -> Iterator[tuple[Rollouts, Tensor]]:
    """Sample until the collection is full of kept groups; yield this process's rollouts with their scores, in parts.

    Every round samples as many prompts as groups are missing, in the order of the stream. Therefore the groups of a
    collection do not depend on the number of processes. Without a `keep` of the algorithm, there is one round. Nothing
    is yielded if no score was usable.

    Raises:
        DataError: no group was kept in any round, and some had usable scores.
        PluginError: `keep` returned something else than a bool per response, or cut a group.
    """
    algorithm, config, parallel = collector.algorithm, collector.config, collector.parallel
    need, total, groups = collector.plan.collection_rows, 0, list[Group]()
    for _ in range(config.rollout.max_refills + 1 if algorithm.keeps else 1):
        missing = need - total
        groups += _kept_of(collector, collection, missing)
        collection.taken += missing
        total = sum(parallel.gather([len(groups)]))
        if total == need:
            break
    dropped = collector.scoring.drop_unusable(collection) // algorithm.samples_per_prompt
    mine = _dealt(collector, groups, collection.taken, dropped)
    collection.prompts = len(mine)
    if algorithm.keeps and total < need and parallel.is_main:
        log.warning(
            "step %d: %s trains on %d of %d prompts sampled within rollout.max_refills %d, and %d were wanted; it goes "
            "on with %d",
            collector.progress.step,
            config.method.name,
            total,
            collection.taken,
            config.rollout.max_refills,
            need,
            total - total % parallel.world,
        )
    collection.rollouts.clear()  # of the groups that are not kept
    per_part = max(config.rollout.batch_size // algorithm.samples_per_prompt, 1)
    for start in range(0, len(mine), per_part):
        rollouts, scores = joined(mine[start : start + per_part])
        collection.rollouts.append(replace(rollouts, hidden=None, moments=None))
        yield rollouts, scores


def _kept_of(collector: RolloutCollector, collection: Collection, count: int) -> list[Group]:
    """Sample and score responses to ``count`` prompts of the stream, and return this process's groups that are kept."""
    pipeline, parallel, k = collector.view.pipeline, collector.parallel, collector.algorithm.samples_per_prompt
    assert pipeline is not None
    taken = pipeline.take(collection.cursor + collection.taken, count, rank=parallel.rank, world=parallel.world)
    per_part = max(collector.config.rollout.batch_size // k, 1)
    count = math.ceil(math.ceil(count / parallel.world) / per_part)  # equally many on all processes
    parts = [[row for row in taken[part * per_part : (part + 1) * per_part] for _ in range(k)] for part in range(count)]
    return [group for scored in collector.scored(parts) for group in _kept(collector, collection, *scored)]


def _kept(collector: RolloutCollector, collection: Collection, rollouts: Rollouts, scores: Tensor) -> list[Group]:
    """Return the groups with usable scores that the algorithm keeps."""
    algorithm, k, kept = collector.algorithm, collector.algorithm.samples_per_prompt, collector.scoring.usable(scores)
    collection.dropped += len(kept) - int(kept.sum())
    if algorithm.keeps:
        rows = kept.nonzero().flatten()
        some = (rollouts, scores) if len(rows) == len(kept) else (rollouts.select(rows.tolist()), scores[rows])
        if len(rows):
            kept[rows] = _checked(algorithm, algorithm.keep(*some), len(rows)).to(kept.device)
        collector.recorder.record({"rollout/kept": m.Mean.of(kept)})
    starts = [start for start in range(0, len(rollouts), k) if kept[start]]
    return [
        Group(rollouts.rows[start][PLACE].position, rollouts.select(range(start, start + k)), scores[start : start + k])
        for start in starts
    ]


def _checked(algorithm: BaseRLTrainer[Any], kept: Any, count: int) -> Tensor:
    name, k = type(algorithm).__qualname__, algorithm.samples_per_prompt
    if not isinstance(kept, Tensor) or kept.dtype != torch.bool or kept.shape != (count,):
        given = f"a {kept.dtype} tensor of shape {tuple(kept.shape)}" if isinstance(kept, Tensor) else describe(kept)
        raise PluginError(f"{name}.keep returned {given}; return a bool tensor of shape ({count},), one per response")
    groups = kept.view(-1, k)
    if bool((groups.any(1) != groups.all(1)).any()):
        raise PluginError(
            f"{name}.keep kept some of the {k} responses to a prompt and not the others; keep a group whole or not at "
            "all"
        )
    return kept


def _dealt(collector: RolloutCollector, groups: list[Group], taken: int, dropped: int) -> list[Group]:
    """Distribute the groups so that process r of W has groups r, r + W, ... in the order of the stream.

    If their number is not a multiple of W, the last ones are dropped. ``dropped`` of ``taken`` groups had no usable
    score; if that leaves too few, there is none.
    """
    parallel, world, rank = collector.parallel, collector.parallel.world, collector.parallel.rank
    order = sorted(parallel.gather([group.position for group in groups]))
    if len(order) < world and (dropped == taken or not collector.algorithm.keeps):
        return []
    if len(order) < world:
        raise DataError(
            f"{collector.config.method.name!r} trains on {len(order)} of {taken} prompts sampled in "
            f"{collector.config.rollout.max_refills + 1} rounds, which leaves nothing to train on"
            f"{'' if world == 1 else f' for {world} processes'}; raise "
            "rollout.max_refills, or look at the rewards: all responses to a prompt may be equally good"
        )
    owner = {position: index % world for index, position in enumerate(order[: len(order) - len(order) % world])}
    moved = [group for group in groups if owner.get(group.position, rank) != rank]
    arrived = [group for group in parallel.gather(moved) if owner[group.position] == rank] if world > 1 else []
    device = parallel.device
    arrived = [Group(g.position, g.rollouts.to(device), g.scores.to(device)) for g in arrived]
    mine = [group for group in groups if owner.get(group.position) == rank]
    return sorted([*mine, *arrived], key=lambda group: group.position)


def groups_of(parts: Iterable[tuple[Rollouts, Tensor]], k: int) -> list[Group]:
    """Return the groups of ``k`` adjacent responses in rollouts with their scores."""
    return [
        Group(0, rollouts.select(range(start, start + k)), scores[start : start + k])
        for rollouts, scores in parts
        for start in range(0, len(rollouts), k)
    ]


def joined(groups: list[Group]) -> tuple[Rollouts, Tensor]:
    """Return the rollouts of the groups, with their scores [B], or [B, T] if some are per token."""
    rollouts = Rollouts.cat([group.rollouts for group in groups])
    if all(group.scores.dim() == 1 for group in groups):
        return rollouts, torch.cat([group.scores for group in groups])
    width = rollouts.sequences.response_mask.size(1)
    dense = [place_scores(group.scores, group.rollouts.sequences.response_mask) for group in groups]
    return rollouts, torch.cat([F.pad(scores, (0, width - scores.size(1))) for scores in dense])
