"""Metrics between two log lines: those that are recorded, by the thread that trains and by one that samples ahead."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from trainkit import metrics as m


class Recorder:
    """The metrics that are logged with the next step."""

    def __init__(self) -> None:
        self.pending: m.Metrics = {}
        """Those that the thread which trains has recorded, and that are not logged yet."""
        self._thread = threading.local()

    @property
    def collection(self) -> Any:
        """The collection that this thread samples ahead of its turn; None: this is the thread that trains."""
        return getattr(self._thread, "collection", None)

    @property
    def recorded(self) -> m.Metrics:
        """The metrics that this thread has recorded, and that are not logged yet."""
        return self.pending if self.collection is None else self.collection.records

    def record(self, metrics: m.Metrics) -> None:
        """Add metrics to those that this thread has recorded."""
        merged = m.merge(self.recorded, metrics)
        if self.collection is None:
            self.pending = merged
        else:
            self.collection.records = merged

    def record_seconds(self, name: str, started: float) -> None:
        """Record the seconds since ``started``; those of several calls for one step are added up."""
        spent = m.Mean.of(torch.tensor(time.perf_counter() - started))
        self.record({name: replace(spent, count=spent.count * (name not in self.recorded))})

    def take(self) -> m.Metrics:
        """Return the metrics that are pending, and forget them."""
        taken, self.pending = self.pending, {}
        return taken

    @contextmanager
    def discarding(self) -> Iterator[None]:
        """Forget the metrics that are recorded inside the block, which do not belong to a step of training."""
        pending = self.pending
        try:
            yield
        finally:
            self.pending = pending

    @contextmanager
    def into(self, collection: Any) -> Iterator[None]:
        """Record in ``collection.records`` inside the block and in this thread: it is sampled ahead of its turn."""
        self._thread.collection = collection
        try:
            yield
        finally:
            self._thread.collection = None
