"""The output of frozen lower layers in an offline collection: whether it is kept with the rows, which use it again."""

from __future__ import annotations

import logging
from typing import Any, TypeVar

import psutil

from trainkit.data import Batch, RolloutStore, Sequences
from trainkit.runs.progress import Progress
from trainkit.runs.resuming import Resumption
from trainkit.trainer.models import Models

B = TypeVar("B", bound=Batch)

log = logging.getLogger(__name__)

SHARE = 0.5
"""The largest part of the available memory that the output may take, counted twice, because joining rows copies it."""


class TrunkCache:
    """Decides whether the output of frozen lower layers is kept with the rows of an offline collection.

    Args:
        algorithm: its `passes` are read, and whether its reference is the model's start.
        models: the policy.
        resumption: what a run that is being resumed has decided.
        store: the rows of the collection.
        progress: keeps the decision.
    """

    def __init__(
        self,
        algorithm: Any,
        models: Models,
        resumption: Resumption,
        store: RolloutStore[Any],
        progress: Progress,
    ) -> None:
        self.algorithm, self.models, self.resumption = algorithm, models, resumption
        self.store, self.progress = store, progress
        self.rows = 0
        """The rows of the collection at hand in this process, while experience is made of samples; or else 0."""
        self._checks_memory = True

    def begin(self, rows: int) -> None:
        """Begin a collection of ``rows`` rows in this process: decide whether their output would be used again.

        It is by a second pass, or by the reference, if that is the model's start. A run that resumes does what it did.
        """
        algorithm, policy = self.algorithm, self.models.unwrapped
        again = algorithm.passes != 1 or (algorithm.needs_reference and algorithm.chosen_reference is None)
        keeps_sharded = self.models.parallel.sharding.keeps_sharded
        keeps = bool(rows) and again and getattr(policy, "has_trunk", False) and not keeps_sharded
        recorded = self.resumption.recorded_trunk
        self.progress.keeps_trunk = keeps if recorded is None else recorded
        self.rows, self.resumption.recorded_trunk = rows, None
        self._checks_memory = recorded is None

    def add_to(self, batch: B) -> B:
        """Return a batch of the collection at hand with the output of the frozen layers, if that is kept."""
        if not self.rows:
            return batch
        if self.progress.keeps_trunk and self._checks_memory:
            self._check(batch)
        return _each(batch, self.models.unwrapped.through_trunk) if self.progress.keeps_trunk else without_trunk(batch)

    def _check(self, batch: Batch) -> None:
        """Give up keeping the output, for the whole collection, if it does not fit into memory; log it."""
        policy = self.models.unwrapped
        width = policy.model.config.get_text_config().hidden_size
        tokens = sum(part.input_ids.size(1) for part in _sequences(batch)) * self.rows
        needed, free = 2 * tokens * width * next(policy.parameters()).element_size(), psutil.virtual_memory().available
        if needed <= SHARE * free:
            return
        self.progress.keeps_trunk = False
        self.store.change(without_trunk)
        log.warning(
            "the output of the frozen layers for all %d rows would take about %.1f GB, and %.1f GB are available; it "
            "is not kept, and they are run in every pass",
            self.rows,
            needed / 1e9,
            free / 1e9,
        )


def _each(batch: B, change: Any) -> B:
    """Return the batch with ``change`` applied to all its sequences."""
    if isinstance(batch, Sequences):
        return change(batch)  # type: ignore[no-any-return]
    parts = batch.parts()
    return type(batch)(**{k: _each(v, change) if isinstance(v, Batch) else v for k, v in parts.items()})


def without_trunk(batch: B) -> B:
    """Return a batch whose sequences do not have the output of the frozen layers."""
    return _each(batch, _without)


def _without(sequences: Sequences) -> Sequences:
    parts: dict[str, Any] = {name: value for name, value in sequences.parts().items() if name != "trunk"}
    return sequences if sequences.trunk is None else type(sequences)(**parts)


def _sequences(batch: Batch) -> list[Sequences]:
    """Return the sequences in a batch."""
    if isinstance(batch, Sequences):
        return [batch]
    return [each for part in batch.parts().values() if isinstance(part, Batch) for each in _sequences(part)]
