"""The data of a run, and the numbers of rows, collections and steps that follow from it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, TypeVar

from trainkit.config import MethodConfig
from trainkit.data import Batch, Pipeline, Prompts, Row, Stream, is_stream, prompt_rows
from trainkit.data.columns import without
from trainkit.data.pipeline import EqualSidesError
from trainkit.errors import ConfigError, DataError
from trainkit.runs.fingerprints import Fingerprints, of_rows
from trainkit.trainer.setup import PreparedTrainer

M = TypeVar("M", bound=MethodConfig)
B = TypeVar("B", bound=Batch)
T = TypeVar("T")


class TrainerInputs(PreparedTrainer[M]):
    """The data for training and evaluation, prompts and samples, checked when they are given."""

    def add_prompt_pipeline(self, prompts: Pipeline | Prompts) -> None:
        """Set the prompts to train on: a pipeline, or what `trainkit.train` takes. All are checked now."""
        if not isinstance(prompts, Pipeline):
            prompts = Pipeline(self.read_prompts(prompts), seed=self.config.train.seed)
        self.pipeline = prompts

    def add_samples(self, samples: Iterable[Any], rewards: Iterable[Any] | None = None) -> None:
        """Set the samples to train on offline. All are checked now; samples of a stream are checked as they are read.

        Raises:
            DataError: one of them cannot be used.
            ConfigError: ``samples`` is a stream, and the settings or other arguments need its length.
        """
        if is_stream(samples):
            self._add_stream(samples, rewards)
        else:
            self.pipeline = Pipeline(self.arrange(self.read_samples(samples, rewards)), seed=self.config.train.seed)

    def _add_stream(self, samples: Iterable[Any], rewards: Any) -> None:
        train = self.config.train
        if rewards is not None or train.total_steps is None or train.epochs is not None:
            raise ConfigError(
                "samples is a stream, whose length is not known: set train.total_steps, omit train.epochs, and give "
                "rewards within its rows, as the label of unpaired preference. If it is small enough to be read "
                "before training, give list(samples)"
            )

        def read(rows: list[Any], first: int) -> list[Row]:
            with suppress(EqualSidesError):  # it is told; others follow
                return self.arrange(self.read_samples(rows, first=first))
            return []

        plain = getattr(self.arrange, "__func__", None) is TrainerInputs.arrange and "pairs" not in self.inputs
        stream = Stream(samples, read, one_to_one=plain)
        stream.check()
        self.pipeline = stream

    def add_eval_pipeline(self, prompts: Prompts) -> None:
        """Set the prompts of evaluations."""
        self.eval_rows = self.read_prompts(prompts)

    def add_eval_samples(self, samples: Iterable[Any], rewards: Iterable[Any] | None = None) -> None:
        """Set held-out samples, on which evaluations measure the loss and the algorithm's other metrics."""
        if self.online:
            raise ConfigError(
                f"eval_samples are measured by the loss, and {self.config.method.name!r} learns from what it samples "
                "itself; give eval_prompts"
            )
        rows, world = self.read_samples(samples, rewards), self.parallel.world
        if len(rows) < world:
            raise DataError(f"there are {len(rows)} eval_samples for {world} processes; give at least one for each")
        self.eval_samples, self.held_out = rows, None

    def read_prompts(self, prompts: Prompts) -> list[Row]:
        """Return checked rows of ``prompts``."""
        return self.fit_prompts(prompt_rows(without(prompts, self.config.data.ignore_columns)))

    def fit_prompts(self, rows: list[Row]) -> list[Row]:
        """Return the rows of prompts that can be used, after checking all of them."""
        return rows

    def arrange(self, rows: list[Row]) -> list[Row]:
        """Return samples as the rows that are shuffled and trained on: unchanged, or several samples in one row."""
        return rows

    def read_samples(
        self, samples: Iterable[Any], rewards: Iterable[Any] | None = None, *, first: int = 0
    ) -> list[Row]:
        """Return checked rows of the samples to learn from; errors number the samples from ``first``."""
        raise NotImplementedError(f"{type(self).__name__} learns from {' and '.join(self.inputs)}, not from samples")

    @classmethod
    def check_samples(cls, rows: Sequence[Row], *, first: int = 0) -> None:
        """Raise a `DataError` if the algorithm cannot learn from rows that `read_samples` has read.

        Override it to check more than the format, such as columns that the algorithm reads. It is called for the rows
        of a stream as they are read, and by ``trainkit data check``.

        Args:
            rows: samples, or pairs.
            first: the index of the first row, for error messages.
        """

    def default_prompts(self) -> list[Any]:
        """Return the prompts to train on if none are given.

        Raises:
            DataError: the trainer has no default prompts.
        """
        raise DataError(f"{self.config.method.name!r} needs prompts; give prompts")

    @property
    def fingerprints(self) -> Fingerprints:
        """Fingerprints of the data, by column; none of a stream, which is read as it is trained on."""
        if not isinstance(self.pipeline, Pipeline):
            return {}
        if self._data_seen is None or self._data_seen[0] is not self.pipeline:
            self._data_seen = self.pipeline, of_rows(self.pipeline.rows)
        return self._data_seen[1]

    # ------------------------------------------------------------------------------------------------- how much that is

    @cached_property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run, if `Verdict.STOP` does not shorten a collection."""
        train, collections = self.config.train, self.collections
        if collections is None or self.passes is None:
            return train.total_steps or 0
        steps = collections * self.passes * math.ceil(self.experience_rows / train.batch_size)
        return steps if train.total_steps is None else min(steps, train.total_steps)

    @property
    def passes(self) -> int | None:
        """How many times one collection of experience is iterated over; None: until the run ends."""
        return 1 if isinstance(self.pipeline, Stream) else super().passes

    @property
    def collects_once(self) -> bool:
        """Whether there is one collection, of the whole dataset."""
        return not self.online and isinstance(self.pipeline, Pipeline)

    @property
    def collections(self) -> int | None:
        """Number of collections in the run's epochs; None: as many as `total_steps` needs."""
        if not isinstance(self.pipeline, Pipeline):
            return None
        if self.collects_once:
            return 1
        return None if self.epochs is None else math.ceil(self.epochs * len(self.pipeline) / self.collection_rows)

    @property
    def rows_to_use(self) -> int | None:
        """Rows of the stream that the run's epochs have; None: as many as `total_steps` needs."""
        if not isinstance(self.pipeline, Pipeline) or (self.epochs is None and not self.collects_once):
            return None
        return self.collection_rows if self.collects_once else (self.epochs or 1) * len(self.pipeline)

    @property
    def collection_rows(self) -> int:
        """Rows of the dataset that one collection uses, over all processes."""
        if not self.collects_once:
            return self.config.rollout.num_rollouts // self.samples_per_prompt
        assert isinstance(self.pipeline, Pipeline)
        world = int(self.parallel.world)
        return math.ceil(len(self.pipeline) / world) * world  # equally many for each; the first rows fill up

    @property
    def experience_rows(self) -> int:
        """Rows of experience that one collection makes, at most, over all processes."""
        return self.collection_rows * self.samples_per_prompt
