"""Collections that are sampled before their turn, with older weights (`rollout.staleness`)."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from trainkit import metrics as m
from trainkit.functional import per_response
from trainkit.models.backend import use_fast_exact_matmul
from trainkit.runs.resharding import own_items
from trainkit.trainer import dynamic
from trainkit.trainer.collection import Collection

if TYPE_CHECKING:
    from trainkit.trainer.collect import RolloutCollector

log = logging.getLogger(__name__)


class AsyncCollector:
    """The collections that are sampled before their turn, with `rollout.staleness` s > 0.

    Collection c is sampled with the weights after collection max(−1, c − 1 − s), where −1 is the start of the run. So
    when the turn of collection c begins, collection c + s is sampled with the weights of this moment; at the start all
    collections up to s are. An engine that has a copy of the weights samples in another thread, while the policy is
    trained; otherwise sampling and training take turns. Both give the same collections.
    """

    def __init__(self, collector: RolloutCollector) -> None:
        self.collector, self.config, self.plan = collector, collector.config, collector.plan
        self.parallel, self.progress, self.sampling = collector.parallel, collector.progress, collector.sampling
        use_fast_exact_matmul(self.parallel.device, one_library=True)  # also without a thread: the bits are the same
        self.waiting: deque[Future[Collection]] = deque()
        """Collections from the one whose turn is next, finished or being sampled."""
        self._thread = ThreadPoolExecutor(1, "trainkit-sampling") if self.sampling.engine_class.own_copy else None
        self.group: Any = None
        """The group in which the sampling threads of several processes communicate, beside those that train."""
        if self._thread is not None and self.parallel.world > 1:
            limit = timedelta(seconds=self.config.train.timeout)
            self.group = torch.distributed.new_group(backend="gloo", timeout=limit)

    def turn(self) -> Collection:
        """Return the collection whose turn it is; sample, or begin to sample, those for the weights of this moment."""
        at = self.progress
        first = at.collection + len(self.waiting)
        last = at.collection + self.config.rollout.staleness
        if at.collection > 0 and first < last:
            log.warning(
                "collections %d to %d are sampled with the weights of step %d, because the run was to end before them",
                first,
                last - 1,
                at.step,
            )
        for number in range(first, last + 1):
            if number > at.collection and not self._is_needed(number):
                break
            self._begin(number)
        collection = self.waiting[0].result()  # one that failed remains, so that no checkpoint is saved without it
        self.waiting.popleft()
        return collection

    def _is_needed(self, number: int) -> bool:
        """Return whether the run may make steps on a collection; False only if it certainly makes none."""
        algorithm, plan, train = self.collector.algorithm, self.plan, self.config.train
        steps = 1  # if a collection can be cut short, or has fewer rows than it might have
        if not (self.collector.updater.judges or algorithm.rows_vary or algorithm.keeps):
            steps = (algorithm.passes or 1) * math.ceil(algorithm.experience_rows / train.batch_size)
        if self.config.reward.on_nonfinite == "drop_row":
            steps = 0  # if no response has a usable score
        ahead = number - self.progress.collection
        if plan.total_steps and self.progress.step + ahead * steps >= plan.total_steps:
            return False
        rows = plan.rows_to_use  # with `keep`, a collection uses this many rows or more
        return rows is None or self.progress.cursor + ahead * plan.collection_rows < rows

    def _begin(self, number: int) -> None:
        before = self.waiting[-1] if self.waiting else None
        collection = Collection(number, self.progress.collection, self.progress.cursor)
        if self._thread is None:
            done: Future[Collection] = Future()
            done.set_result(self._sample(collection, before))
            self.waiting.append(done)
            return
        self.sampling.sampler  # noqa: B018  (engines are started in the main thread)
        now = self.sampling.own(self.sampling.weights)
        copies = [(name, tensor.detach().to("cpu", copy=True)) for name, tensor in now.tensors()]
        collection.weights = replace(now, tensors=lambda: copies)
        self.waiting.append(self._thread.submit(self._sample, collection, before))

    def _sample(self, collection: Collection, before: Future[Collection] | None) -> Collection:
        """Sample and score a collection; ``before`` is the one before it."""
        started, recorder = time.perf_counter(), self.collector.recorder
        if before is not None:
            earlier = before.result()
            collection.cursor = earlier.cursor + earlier.taken
        autocast = self.parallel.accelerator.autocast
        with self.parallel.within(self.group), recorder.into(collection), torch.no_grad(), autocast():
            for rollouts, scores in self.collector.sampled(collection):
                collection.parts.append((replace(rollouts, hidden=None), scores))  # values are those of later weights
            seconds = torch.tensor(time.perf_counter() - started, dtype=torch.float64)
            recorder.record({"time/sample": m.Mean.of(seconds)})
        collection.weights = None
        return collection

    def wait(self) -> None:
        """Wait until all collections that were begun are sampled.

        Raises:
            Exception: that of a collection that could not be sampled.
        """
        for collection in self.waiting:
            collection.result()

    def cancel(self) -> None:
        """Sample no further collection, because the run has failed."""
        for collection in self.waiting:
            collection.cancel()
        self.waiting.clear()

    def state(self) -> list[dict[str, Any]]:
        """Return the collections, all of them sampled."""
        return [collection.result().state() for collection in self.waiting]

    def load(self, states: list[list[dict[str, Any]]], *, anew: bool) -> None:
        """Restore the collections.

        Args:
            states: those of this process; or those of each process of the checkpoint.
            anew: whether these were another number of processes, so that the collections are divided anew.
        """
        self.wait()
        self.waiting.clear()
        device = self.parallel.device
        for parts in zip(*states, strict=True):
            restored = [Collection.restored(state, device) for state in parts]
            done: Future[Collection] = Future()
            done.set_result(self._resharded(restored) if anew else restored[0])
            self.waiting.append(done)

    def _resharded(self, parts: list[Collection]) -> Collection:
        """Return this process's part of a collection, whose ``parts`` are those of another number of processes."""
        rank, world, k = self.parallel.rank, self.parallel.world, self.collector.algorithm.samples_per_prompt
        mine = own_items([dynamic.groups_of(part.parts, k) for part in parts], rank, world)
        per_part = max(self.config.rollout.batch_size // k, 1)
        joined = [dynamic.joined(mine[start : start + per_part]) for start in range(0, len(mine), per_part)]
        records = m.merge(*(part.records for part in parts))
        if rank > 0:  # the first process has them; those of the others count nothing
            records = {name: type(each)(*map(torch.zeros_like, each.tensors())) for name, each in records.items()}
        return replace(
            parts[0],
            prompts=len(mine),
            parts=joined,
            rollouts=[rollouts for rollouts, _ in joined],
            scores=[per_response(scores) for _, scores in joined],
            records=records,
        )
