"""The plan of a run: how many rows, collections and steps it has, and whether they are used up."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import cached_property
from typing import Any

from trainkit.config import TRLConfig
from trainkit.data import Pipeline, Stream
from trainkit.runs.parallel import Parallel
from trainkit.runs.progress import Progress
from trainkit.trainer.base import BaseRLTrainer
from trainkit.trainer.settings import check_split

log = logging.getLogger(__name__)


class Plan:
    """How many rows, collections and steps a run has, over all processes, and whether they are used up.

    Args:
        algorithm: its configuration, `passes`, `samples_per_prompt` and `experience_rows` are read.
        parallel: the processes.
        progress: how far the run is.
        data: returns what the run learns from; None: it is not given yet.

    Raises:
        ConfigError: the processes cannot share the rows of a step or of a collection equally.
    """

    def __init__(
        self,
        algorithm: BaseRLTrainer[Any],
        parallel: Parallel,
        progress: Progress,
        data: Callable[[], Pipeline | Stream | None],
    ) -> None:
        self.algorithm, self.parallel, self.progress = algorithm, parallel, progress
        self._data = data
        check_split(algorithm.config, algorithm.samples_per_prompt, parallel.world)

    @property
    def config(self) -> TRLConfig[Any]:
        """The run's configuration."""
        return self.algorithm.config

    @cached_property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run, if `Verdict.STOP` does not shorten a collection; 0: not known."""
        train, collections, passes = self.config.train, self.collections, self.algorithm.passes
        if collections is None or passes is None:
            return train.total_steps or 0
        steps = collections * passes * math.ceil(self.algorithm.experience_rows / train.batch_size)
        return steps if train.total_steps is None else min(steps, train.total_steps)

    @property
    def epochs(self) -> int | None:
        """Passes over the dataset; None: as many as ``train.total_steps`` needs."""
        train = self.config.train
        return 1 if train.epochs is None and train.total_steps is None else train.epochs

    @property
    def collects_once(self) -> bool:
        """Whether there is one collection, of the whole dataset."""
        return not self.algorithm.online and isinstance(self._data(), Pipeline)

    @property
    def collections(self) -> int | None:
        """Number of collections in the run's epochs; None: as many as `total_steps` needs."""
        data, epochs = self._data(), self.epochs
        if not isinstance(data, Pipeline):
            return None
        if self.collects_once:
            return 1
        return None if epochs is None else math.ceil(epochs * len(data) / self.collection_rows)

    @property
    def rows_to_use(self) -> int | None:
        """Rows of the stream that the run's epochs have; None: as many as `total_steps` needs."""
        data, epochs = self._data(), self.epochs
        if not isinstance(data, Pipeline) or (epochs is None and not self.collects_once):
            return None
        return self.collection_rows if self.collects_once else (epochs or 1) * len(data)

    @property
    def collection_rows(self) -> int:
        """Rows of the dataset that one collection uses."""
        data = self._data()
        if not self.algorithm.online and isinstance(data, Pipeline):
            world = int(self.parallel.world)
            return math.ceil(len(data) / world) * world  # equally many for each; the first rows fill up
        return self.config.rollout.num_rollouts // self.algorithm.samples_per_prompt

    @property
    def done(self) -> bool:
        """Whether the run's steps are made, its epochs are used up, or `trainer.stop` has ended it.

        If `judge` has skipped the rest of a collection, epochs have fewer steps.
        """
        at, rows = self.progress, self.rows_to_use
        used_up = rows is not None and at.cursor + (at.taken if self.collection_used else 0) >= rows
        return used_up or at.step >= self.total_steps or bool(at.stop_reason)

    @property
    def collection_used(self) -> bool:
        """Whether all passes over the collection at hand are made, or `judge` has skipped the rest of them."""
        at, passes = self.progress, self.algorithm.passes
        return at.stopped or (passes is not None and at.epoch >= passes)

    def warn_of_repeated_rows(self) -> None:
        """Log how many rows the collection at hand uses beyond the epochs of the run."""
        at, rows, data = self.progress, self.rows_to_use, self._data()
        if not isinstance(data, Pipeline) or rows is None or not self.parallel.is_main:
            return
        if self.collects_once and at.taken > len(data):
            log.warning(
                "%d of %d rows of the dataset are used twice in every epoch: %d processes need equally many",
                at.taken - len(data),
                len(data),
                self.parallel.world,
            )
        elif at.cursor + at.taken > rows:
            log.warning(
                "%d of the %d prompts of the last collection are of a further epoch: collections of "
                "rollout.num_rollouts do not divide the %d prompts of train.epochs",
                at.cursor + at.taken - rows,
                at.taken,
                rows,
            )
