"""Minibatches over several processes: which rows make one up depends on the seed, not on the number of processes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from trainkit.data import Batch, RolloutStore, shuffled
from trainkit.errors import PluginError
from trainkit.runs.parallel import Parallel
from trainkit.runs.progress import Progress
from trainkit.seeding import generator
from trainkit.trainer.base import BaseRLTrainer
from trainkit.trainer.collection import Collection
from trainkit.trainer.plan import Plan
from trainkit.trainer.update import Updater

B = TypeVar("B", bound=Batch)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Layout:
    """Which process holds which rows of a collection.

    The prompts of a collection are numbered over all processes: process r of W holds prompts r, r + W, r + 2W, … Rows
    are numbered in the order of their prompts, ``each`` rows per prompt.
    """

    each: int
    world: int
    rank: int

    def owners(self, rows: Tensor) -> Tensor:
        """Return the process that holds each row. [N] -> [N]."""
        return rows // self.each % self.world

    def places(self, rows: Tensor) -> Tensor:
        """Return the index of each row among the rows of the process that holds it. [N] -> [N]."""
        return rows // (self.each * self.world) * self.each + rows % self.each


def share(rows: Tensor, owners: Tensor, world: int) -> list[Tensor]:
    """Divide the rows of a minibatch equally: to each process its own, and if it has too few, rows of others.

    [N], [N] -> ``world`` tensors [N / world].
    """
    quota = len(rows) // world
    by_rank = [rows[owners == rank] for rank in range(world)]
    spare = torch.cat([mine[quota:] for mine in by_rank])
    parts = []
    for mine in by_rank:
        needed = max(quota - len(mine), 0)
        parts.append(torch.cat([mine[:quota], spare[:needed]]))
        spare = spare[needed:]
    return parts


def minibatches(
    store: RolloutStore[B], steps: Sequence[Tensor], layout: Layout, gather: Callable[[Sequence[Any]], list[Any]]
) -> Iterator[B]:
    """Yield this process's part of every minibatch.

    Args:
        store: the rows that this process holds.
        steps: the rows of each minibatch, as numbers over all processes; the same on every process.
        layout: which process holds which rows.
        gather: as `trainkit.runs.parallel.Parallel.gather`; called, on all processes, if rows have to be sent.
    """
    for rows in steps:
        store.made(layout.places(rows))  # not only this process's share, because all processes make a part together
        yield part_of(store, share(rows, layout.owners(rows), layout.world), layout, gather)


def part_of(
    store: RolloutStore[B], parts: Sequence[Tensor], layout: Layout, gather: Callable[[Sequence[Any]], list[Any]]
) -> B:
    """Return this process's part of some rows; ``parts`` has their numbers [N / world] for each process."""
    mine = parts[layout.rank]
    moved = torch.cat([part[layout.owners(part) != rank] for rank, part in enumerate(parts)])
    if not len(moved):
        return store.select(layout.places(mine))
    kept, sent = (each[layout.owners(each) == layout.rank] for each in (mine, moved))
    held = [(each, store.select(layout.places(each))) if len(each) else None for each in (kept, sent)]
    held_here = [each for each in (held[0], *gather(held[1:])) if each is not None]
    numbers = torch.cat([numbers for numbers, _ in held_here])
    pool: B = type(held_here[0][1]).cat([batch for _, batch in held_here])
    return pool.select((numbers == mine.unsqueeze(1)).int().argmax(1))


class LastStep:
    """The state after the last finished step, to which a run returns after an error.

    Args:
        progress: what is remembered, and restored.
        store: it is emptied if the error has interrupted a collection.
        updater: knows whether the weights are being changed.
    """

    def __init__(self, progress: Progress, store: RolloutStore[Any], updater: Updater) -> None:
        self._progress, self._store, self._updater = progress, store, updater
        self.before: Progress | None = None
        """The progress before the minibatch or collection at hand; None if none is."""
        self._was_empty = False

    def mark(self) -> None:
        """Remember the state at hand, before a minibatch or a collection."""
        self.before, self._was_empty = replace(self._progress), not len(self._store)

    def finish(self) -> None:
        """Forget what was remembered: the minibatch or collection is complete."""
        self.before = None

    def forget(self) -> None:
        """Begin anew with the state at hand, after an earlier run that may have ended with an error."""
        self.before, self._updater.changing = None, False

    def restore(self) -> bool:
        """Restore the progress before what an error has interrupted, a collection or a minibatch, to make it again.

        Returns:
            Whether the state is now that after the last finished step; not if the error has interrupted a change of the
            weights, or `prepare_experience`.
        """
        if self.before is not None and not self._updater.changing:
            self._progress.become(self.before)
            if self._was_empty:
                self._store.clear()
            self.before = None
        return not self._updater.changing


class Minibatches:
    """The minibatches of the passes over a collection: which rows make up each.

    Args:
        algorithm: its configuration, `group`, `rows_vary` and `experience_rows` are read.
        plan: how many rows a collection has.
        store: the collection's rows in this process.
        parallel: the processes.
        progress: counts passes, minibatches and samples.
        last_step: remembers the state before each minibatch.
    """

    def __init__(
        self,
        algorithm: BaseRLTrainer[Any],
        plan: Plan,
        store: RolloutStore[Any],
        parallel: Parallel,
        progress: Progress,
        last_step: LastStep,
    ) -> None:
        self.algorithm, self.plan, self.store = algorithm, plan, store
        self.parallel, self.progress, self.last_step = parallel, progress, last_step
        self._warned = False

    def of_pass(self, collection: Collection, *, counted: bool = False) -> Iterator[Batch]:
        """Yield the remaining minibatches of a pass; `progress` counts a minibatch as made when it is yielded.

        Args:
            collection: the collection in the store.
            counted: whether the rows of the first pass count as samples here, because they are made in it.
        """
        at, train = self.progress, self.algorithm.config.train
        layout = self._layout()
        rows = len(self.store) * layout.world
        order = self.order(at.epoch, rows, layout.each if self.algorithm.group else 1)
        if collection.ordered:
            order = self.order(0, rows).argsort()[order]
        steps = order.split(train.batch_size)
        for batch in minibatches(self.store, steps[at.position :], layout, self.parallel.gather):
            if at.stopped:
                return
            size = len(steps[at.position])
            self._warn_of_short_step(size, len(order), collection)
            self.last_step.mark()
            at.samples += size if counted and not at.epoch else 0
            at.position += 1
            if at.position == len(steps):
                at.epoch, at.position = at.epoch + 1, 0
            yield batch

    def order(self, epoch: int, rows: int, together: int = 1) -> Tensor:
        """Return the order of the ``rows`` of the collection, over all processes, in one pass. [N]."""
        draws = generator(self.algorithm.config.train.seed, "order", self.progress.collection, epoch)
        return shuffled(rows, draws, together=together)

    def replay(self, experience: B, earlier: list[B], *, collections: int, prompts: int) -> B:
        """Return experience with that of prompts of earlier collections; see `AcceleratedLoop.replay`."""
        each, world = self.rows_of_a_prompt(len(experience)), self.parallel.world
        store: RolloutStore[B] = RolloutStore()
        for batch in earlier:
            store.push(batch)
        earlier.append(experience.to("cpu"))
        del earlier[: max(len(earlier) - collections, 0)]
        count = min(prompts // world, len(store) // each) * world
        if not count:
            return experience
        draws = generator(self.algorithm.config.train.seed, "replay", self.progress.collection)
        numbers = torch.randperm(len(store) // each * world, generator=draws)[:count]
        rows = numbers.unsqueeze(1) * each + torch.arange(each)  # [N, each]
        layout = Layout(each, world, self.parallel.rank)
        drawn = part_of(store, [rows[rank::world].flatten() for rank in range(world)], layout, self.parallel.gather)
        self.progress.prompts += count // world
        return type(experience).cat([experience.to("cpu"), drawn])

    def rows_of_a_prompt(self, rows: int) -> int:
        """Return how many adjacent rows belong to a prompt, of ``rows`` that this process holds; 1 if that varies."""
        prompts = self.progress.prompts
        regular = not self.algorithm.rows_vary and prompts and rows % prompts == 0
        return rows // prompts if regular else 1

    def _layout(self) -> Layout:
        """Return which process holds which rows of the current collection.

        Raises:
            PluginError: processes have made different numbers of rows.
        """
        rows, world = len(self.store), self.parallel.world
        counts = self.parallel.gather([rows])
        if len(set(counts)) > 1:
            raise PluginError(
                f"{self.algorithm.method.name!r} made {' and '.join(map(str, counts))} rows of experience on {world} "
                "processes; prepare_experience must return equally many on each, as for trainer.gather"
            )
        return Layout(self.rows_of_a_prompt(rows), world, self.parallel.rank)

    def _warn_of_short_step(self, rows: int, total: int, collection: Collection) -> None:
        """Log, once, that a step has fewer rows than `train.batch_size`; ``total`` rows are in the collection."""
        size = self.algorithm.config.train.batch_size
        if rows >= size or self._warned or not self.parallel.is_main:
            return
        self._warned = True
        some = self.algorithm.rows_vary or collection.dropped or total < self.algorithm.experience_rows
        name = "a collection, as many as can be trained on" if some else "a collection (rollout.num_rollouts)"
        log.warning(
            "step %d is made with %d rows: train.batch_size, %d, does not divide the %d rows of %s",
            self.progress.step + 1,
            rows,
            size,
            total,
            "the dataset" if self.plan.collects_once else name,
        )
