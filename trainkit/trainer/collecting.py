"""Collections: what is sampled and scored for each, and how old the weights are that it is sampled with."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainkit import metrics as m
from trainkit.data import Rollouts
from trainkit.errors import CheckpointError, describe
from trainkit.functional import per_response
from trainkit.models.backend import use_fast_exact_matmul
from trainkit.rollouts import Weights
from trainkit.runs.checkpoint import is_plain
from trainkit.runs.resharding import own_items
from trainkit.seeding import PLACE, Place, Seen
from trainkit.trainer import dynamic
from trainkit.trainer.scoring import clipped, scored

if TYPE_CHECKING:
    from trainkit.trainer.accelerate import AccelerateRLTrainer

    Trainer = AccelerateRLTrainer[Any]

log = logging.getLogger(__name__)


@dataclass
class Collection:
    """What is known about one collection, in this process."""

    number: int = 0
    """Collections before it."""
    after: int = 0
    """Collections that the weights it is sampled with were trained on."""
    cursor: int = 0
    """Rows of the dataset that the collections before it use, over all processes."""
    taken: int = 0
    """Rows that it uses, over all processes."""
    prompts: int = 0
    """Prompts, or samples, in this process."""
    ordered: bool = False
    """Whether its rows are numbered in the order of the first pass."""
    weights: Weights | None = None
    """The weights it is sampled with; None: those of the model when it is sampled."""
    parts: list[tuple[Rollouts, Tensor]] = field(default_factory=list)
    """Scored rollouts, if it is sampled before its turn."""
    rollouts: list[Any] = field(default_factory=list)
    """What was sampled, for the hooks."""
    scores: list[Tensor] = field(default_factory=list)
    """The scores of the responses [B] of each part."""
    seen: Seen = field(default_factory=Counter)
    """Counts of its responses by the position of their row."""
    seconds: list[float] = field(default_factory=list)
    """How long each call of the reward function took in this process."""
    told: dict[str, list[Any]] = field(default_factory=dict)
    """What the last call of the reward function returned besides scores, by name."""
    playing: float = 0.0
    """How long its environments took in this process."""
    dropped: int = 0
    """Its responses in this process without a usable score."""
    records: m.Metrics = field(default_factory=dict)
    """Metrics that were recorded while it was sampled before its turn."""

    @property
    def staleness(self) -> int:
        """How many collections the policy is trained on between the weights and the turn of the collection."""
        return self.number - self.after

    def state(self) -> dict[str, Any]:
        """Return the collection as plain data and tensors."""
        return {
            **{name: getattr(self, name) for name in ("number", "after", "cursor", "taken", "prompts")},
            "parts": [[_plain(rollouts), scores] for rollouts, scores in self.parts],
            "scores": self.scores,
            "records": {name: [type(metric).__name__, metric.tensors()] for name, metric in self.records.items()},
        }

    @classmethod
    def restored(cls, state: Mapping[str, Any], device: torch.device) -> Collection:
        """Return the collection whose state is given, with its rollouts on ``device``."""
        parts = [(_rollouts(fields).to(device), scores.to(device)) for fields, scores in state["parts"]]
        return cls(
            **{name: state[name] for name in ("number", "after", "cursor", "taken", "prompts")},
            parts=parts,
            rollouts=[rollouts for rollouts, _ in parts],
            scores=[scores.to(device) for scores in state["scores"]],
            records={name: getattr(m, kind)(*tensors) for name, (kind, tensors) in state["records"].items()},
        )


def sampled(trainer: Trainer, collection: Collection) -> Iterator[tuple[Rollouts, Tensor]]:
    """Sample and score a collection; yield its rollouts with their scores [B] or [B, T], in parts."""
    if trainer.keeps or trainer.config.reward.on_nonfinite == "drop_row":
        yield from dynamic.sampled(trainer, collection)
        return
    assert trainer.pipeline is not None
    rank, world = trainer.parallel.rank, trainer.parallel.world
    taken = trainer.pipeline.take(collection.cursor, trainer.collection_rows, rank=rank, world=world)
    collection.taken, collection.prompts = trainer.collection_rows, len(taken)
    rows = [row for row in taken for _ in range(trainer.samples_per_prompt)]
    size = trainer.config.rollout.batch_size
    parts = [rows[start : start + size] for start in range(0, len(rows), size)]
    found = scored(trainer, parts)
    yield from clipped(trainer, list(found)) if trainer.config.reward.on_nonfinite == "clip" else found


class AsyncCollector:
    """The collections that are sampled before their turn, with `rollout.staleness` s > 0.

    Collection c is sampled with the weights after collection max(−1, c − 1 − s), where −1 is the start of the run. So
    when the turn of collection c begins, collection c + s is sampled with the weights of this moment; at the start all
    collections up to s are. An engine that has a copy of the weights samples in another thread, while the policy is
    trained; otherwise sampling and training take turns. Both give the same collections.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        use_fast_exact_matmul(
            trainer.accelerator.device, one_library=True
        )  # also without a thread: the bits are the same
        self.waiting: deque[Future[Collection]] = deque()
        """Collections from the one whose turn is next, finished or being sampled."""
        self._thread = ThreadPoolExecutor(1, "trainkit-sampling") if trainer.engine_class.own_copy else None
        self.group: Any = None
        """The group in which the sampling threads of several processes communicate, beside those that train."""
        if self._thread is not None and trainer.parallel.world > 1:
            limit = timedelta(seconds=trainer.config.train.timeout)
            self.group = torch.distributed.new_group(backend="gloo", timeout=limit)

    def turn(self) -> Collection:
        """Return the collection whose turn it is; sample, or begin to sample, those for the weights of this moment."""
        at = self.trainer.progress
        first = at.collection + len(self.waiting)
        last = at.collection + self.trainer.config.rollout.staleness
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
        found = self.waiting[0].result()  # one that failed remains, so that no checkpoint is saved without it
        self.waiting.popleft()
        return found

    def _is_needed(self, number: int) -> bool:
        """Return whether the run may make steps on a collection; False only if it certainly makes none."""
        trainer = self.trainer
        steps = 1  # if a collection can be cut short, or has fewer rows than it might have
        if not (trainer.updater.judges or trainer.rows_vary or trainer.keeps):
            steps = (trainer.passes or 1) * math.ceil(trainer.experience_rows / trainer.config.train.batch_size)
        if trainer.config.reward.on_nonfinite == "drop_row":
            steps = 0  # if no response has a usable score
        ahead = number - trainer.progress.collection
        if trainer.total_steps and trainer.progress.step + ahead * steps >= trainer.total_steps:
            return False
        rows = trainer.rows_to_use  # with `keep`, a collection uses this many rows or more
        return rows is None or trainer.progress.cursor + ahead * trainer.collection_rows < rows

    def _begin(self, number: int) -> None:
        trainer, before = self.trainer, self.waiting[-1] if self.waiting else None
        collection = Collection(number, trainer.progress.collection, trainer.progress.cursor)
        if self._thread is None:
            done: Future[Collection] = Future()
            done.set_result(self._sample(collection, before))
            self.waiting.append(done)
            return
        trainer.sampler  # noqa: B018  (engines are started in the main thread)
        now = trainer.sampling.weights
        copies = [(name, tensor.detach().to("cpu", copy=True)) for name, tensor in now.tensors()]
        collection.weights = replace(now, tensors=lambda: copies)
        self.waiting.append(self._thread.submit(self._sample, collection, before))

    def _sample(self, collection: Collection, before: Future[Collection] | None) -> Collection:
        """Sample and score a collection; ``before`` is the one before it."""
        trainer, started = self.trainer, time.perf_counter()
        if before is not None:
            earlier = before.result()
            collection.cursor = earlier.cursor + earlier.taken
        within = trainer.parallel.within(self.group)
        with within, trainer.recorder.into(collection), torch.no_grad(), trainer.accelerator.autocast():
            for rollouts, scores in sampled(trainer, collection):
                collection.parts.append((replace(rollouts, hidden=None), scores))  # values are those of later weights
            seconds = torch.tensor(time.perf_counter() - started, dtype=torch.float64)
            trainer.record({"time/sample": m.Mean.of(seconds)})
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
        device = self.trainer.accelerator.device
        for parts in zip(*states, strict=True):
            restored = [Collection.restored(state, device) for state in parts]
            done: Future[Collection] = Future()
            done.set_result(reshard_collection(self.trainer, restored) if anew else restored[0])
            self.waiting.append(done)


def reshard_collection(trainer: Trainer, parts: list[Collection]) -> Collection:
    """Return this process's part of a collection, whose ``parts`` are those of another number of processes."""
    rank, world, k = trainer.parallel.rank, trainer.parallel.world, trainer.samples_per_prompt
    mine = own_items([dynamic.groups_of(part.parts, k) for part in parts], rank, world)
    per_part = max(trainer.config.rollout.batch_size // k, 1)
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


def _plain(rollouts: Rollouts) -> dict[str, Any]:
    """Return the fields of rollouts as plain data and tensors.

    Raises:
        CheckpointError: a column of a row is something else; names the column.
    """
    for row in rollouts.rows:
        for name, value in row.items():
            if not is_plain(value):
                raise CheckpointError(
                    f"the column {name!r} of a prompt is {describe(value)}, which no checkpoint can hold, and with "
                    "rollout.staleness > 0 checkpoints hold what is sampled ahead; give plain data, or set "
                    "train.save_interval to 0"
                )
    judged = rollouts.judged and [{k: v for k, v in each.items() if is_plain(v)} for each in rollouts.judged]
    return {**{each.name: getattr(rollouts, each.name) for each in fields(Rollouts)}, "judged": judged}


def _rollouts(fields: Mapping[str, Any]) -> Rollouts:
    rows = [{**row, **({PLACE: Place(*row[PLACE])} if PLACE in row else {})} for row in fields["rows"]]
    return Rollouts(**{**fields, "rows": rows})
