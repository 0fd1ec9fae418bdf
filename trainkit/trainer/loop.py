"""The training loop on accelerate: one implementation for every algorithm and every kind of model."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from torch import Tensor

from trainkit import metrics as m
from trainkit.config import MethodConfig
from trainkit.data import Batch, Pipeline, RolloutStore, Row, shuffled
from trainkit.errors import (
    ConfigError,
    DataError,
    PluginError,
    RewardError,
)
from trainkit.rollouts import name_of
from trainkit.runs import hub, run, saving
from trainkit.runs.stopping import Interrupted
from trainkit.seeding import generator
from trainkit.trainer import offloading
from trainkit.trainer.base import BaseRLTrainer
from trainkit.trainer.collecting import Collection
from trainkit.trainer.evaluation import evaluate, evaluate_if
from trainkit.trainer.inputs import TrainerInputs
from trainkit.trainer.minibatches import Layout, minibatches
from trainkit.trainer.returns import checked_batch

M = TypeVar("M", bound=MethodConfig)
B = TypeVar("B", bound=Batch)
T = TypeVar("T")
R = TypeVar("R")

log = logging.getLogger(__name__)

MAX_EMPTY_COLLECTIONS = 3
"""Collections in a row without a usable score, with which a run ends."""


class AcceleratedLoop(TrainerInputs[M]):
    """The parts of training that depend neither on the algorithm nor on the kind of model.

    `AccelerateRLTrainer` adds what language models need. A trainer of other models derives from this class and
    implements `get_arch`, `make_experience`, `evaluation` and `write_model`, and those of `fit_prompts`,
    `read_samples` and `default_prompts` that it needs.

    Construction is cheap: the model and the optimizer are made on first use, after the data have been checked.

    Args:
        config: the run's configuration.
        model: a live model, instead of ``config.model.model_path``; it is trained in place.
        callbacks: objects with ``@hookimpl`` methods.
        allow_drift: resume even if settings that affect training differ from those of the checkpoint.
        **kwargs: those of `BaseRLTrainer`.

    Raises:
        ConfigError, PluginError: raised at construction, before a model is loaded.
    """

    @property
    def done(self) -> bool:
        """Whether the run's steps are made, its epochs are used up, or `stop` has ended it.

        If `judge` has skipped the rest of a collection, epochs have fewer steps.
        """
        at, rows = self.progress, self.rows_to_use
        used_up = rows is not None and at.cursor + (at.taken if self._collection_used else 0) >= rows
        return used_up or at.step >= self.total_steps or bool(at.stop_reason)

    @property
    def _collection_used(self) -> bool:
        return self.progress.stopped or (self.passes is not None and self.progress.epoch >= self.passes)

    def learn(self) -> None:
        """Train until `done` or until `stop` is called, resuming from a checkpoint if the config says so.

        Raises:
            DataError: there is nothing to learn from.
            NonFiniteError: a loss or gradient is not finite; the weights have not moved.
            RewardError: the reward function failed.
            CheckpointError: a checkpoint cannot be written, or cannot be resumed from with this config.
            SystemExit: 143, 130 or 129, after SIGTERM, SIGINT or SIGHUP and a checkpoint.
        """
        missing = [] if self.pipeline is not None else ["prompts" if self.online else "samples"]
        missing += self.missing_rewards
        if missing:
            raise DataError(
                f"{type(self).__name__} learns from {' and '.join(self.inputs)}; give {' and '.join(missing)}"
            )
        if self.config.train.save_best and not (self.eval_rows or self.eval_samples) and self.parallel.is_main:
            log.warning("train.save_best has no effect without evaluations; give eval_prompts or eval_samples")
        with run.running(self):
            try:
                self._learn()
            except Interrupted:
                self.back_to_last_step()
                run.stop(self, run.requests(self)[0])
        hub.push_at_end(self)

    def _learn(self) -> None:
        """Train and export, unless the run is finished."""
        if run.finished(self):
            return
        if self.progress.step == 0 and not self.total_steps and self.parallel.is_main:
            log.warning("train.total_steps is 0: nothing is trained, and the model is exported as it is")
        evaluate_if(self, self._evaluation_missing)
        for batch in self._minibatches():
            self._train_on(batch)
            evaluate_if(self, self._evaluation_due)
            if run.ends_early(self):
                evaluate_if(self, self.progress.evaluated != self.progress.step)
            signum, saves = run.requests(self)
            saving.save_if_due(self, self.done, asked=saves)
            if self.done:
                break
            if signum:
                run.stop(self, signum)
        else:
            if self.progress.unusable:  # the last collections had no step, at whose end this would be done
                evaluate_if(self, self._evaluation_missing)
                saving.save_if_due(self, self.done)
        run.export(self)

    @property
    def _evaluation_due(self) -> bool:
        return self.done or _due(self.progress.step, self.config.train.eval_interval)

    @property
    def _evaluation_missing(self) -> bool:
        """Whether the evaluation of the last step was not made: before the first one, or because of an error."""
        at = self.progress
        return self.total_steps > 0 if at.step == 0 else self._evaluation_due and at.evaluated != at.step

    @property
    def missing_rewards(self) -> list[str]:
        """What is missing for rewards, among reward_fn and environment."""
        return ["reward_fn"] if self.rewarded and self.reward_fn is None else []

    def begin(self) -> None:
        """Make the run directory or resume from a checkpoint, as `learn` does first; later calls have no effect."""
        run.begin(self)

    def _minibatches(self) -> Iterator[Batch]:
        """Yield the remaining minibatches of the run; `progress` counts a minibatch as made when it is yielded."""
        at = self.progress
        while not self.done:
            if not len(self.store):
                self.collect()
            while len(self.store) and not self._collection_used:
                yield from self._one_pass()
            at.cursor += at.taken
            self._next_collection()

    def _next_collection(self) -> None:
        at = self.progress
        self.store.clear()
        at.collection, at.epoch, at.position, at.stopped = at.collection + 1, 0, 0, False

    def _one_pass(self) -> Iterator[Batch]:
        at, train = self.progress, self.config.train
        layout = self._layout()
        rows, together = len(self.store) * layout.world, layout.each if self.group else 1
        order = self._order(at.epoch, rows, together)
        if self._collection.ordered:
            order = self._order(0, rows).argsort()[order]
        steps = order.split(train.batch_size)
        for batch in minibatches(self.store, steps[at.position :], layout, self.gather):
            if at.stopped:
                return
            self._warn_of_short_step(len(steps[at.position]), len(order))
            self._mark()
            at.samples += len(steps[at.position]) if self._in_steps and not at.epoch else 0
            at.position += 1
            if at.position == len(steps):
                at.epoch, at.position = at.epoch + 1, 0
            yield batch

    def _order(self, epoch: int, rows: int, together: int = 1) -> Tensor:
        """Return the order of the ``rows`` of the collection, over all processes, in one pass. [N]."""
        draws = generator(self.config.train.seed, "order", self.progress.collection, epoch)
        return shuffled(rows, draws, together=together)

    def _warn_of_short_step(self, rows: int, total: int) -> None:
        """Log, once, that a step has fewer rows than `train.batch_size`; ``total`` rows are in the collection."""
        size = self.config.train.batch_size
        if rows >= size or self._warned_of_short_step or not self.parallel.is_main:
            return
        self._warned_of_short_step = True
        some = self.rows_vary or self._collection.dropped or total < self.experience_rows
        collection = "a collection, as many as can be trained on" if some else "a collection (rollout.num_rollouts)"
        log.warning(
            "step %d is made with %d rows: train.batch_size, %d, does not divide the %d rows of %s",
            self.progress.step + 1,
            rows,
            size,
            total,
            "the dataset" if self.collects_once else collection,
        )

    def _warn_of_repeated_rows(self) -> None:
        """Log how many rows a collection uses beyond the epochs of the run."""
        at, rows = self.progress, self.rows_to_use
        if not isinstance(self.pipeline, Pipeline) or rows is None or not self.parallel.is_main:
            return
        if self.collects_once and at.taken > len(self.pipeline):
            log.warning(
                "%d of %d rows of the dataset are used twice in every epoch: %d processes need equally many",
                at.taken - len(self.pipeline),
                len(self.pipeline),
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

    def _layout(self) -> Layout:
        """Return which process holds which rows of the current collection.

        Raises:
            PluginError: processes have made different numbers of rows.
        """
        rows, world = len(self.store), self.parallel.world
        counts = self.gather([rows])
        if len(set(counts)) > 1:
            raise PluginError(
                f"{self.config.method.name!r} made {' and '.join(map(str, counts))} rows of experience on {world} "
                "processes; prepare_experience must return equally many on each, as for trainer.gather"
            )
        return Layout(self.rows_of_a_prompt(rows), world, self.parallel.rank)

    def rows_of_a_prompt(self, rows: int) -> int:
        """Return how many adjacent rows belong to a prompt, of ``rows`` that this process holds; 1 if that varies."""
        prompts = self.progress.prompts
        regular = not self.rows_vary and prompts and rows % prompts == 0
        return rows // prompts if regular else 1

    def _mark(self) -> None:
        """Remember the state after the last finished step, for `back_to_last_step`."""
        self._before = replace(self.progress), not len(self.store)

    def back_to_last_step(self) -> bool:
        """Restore the progress before what an error has interrupted, a collection or a minibatch, to make it again.

        Returns:
            Whether the state is now that after the last finished step; not if the error has interrupted a change of the
            weights, or `prepare_experience`.
        """
        if self._before is not None and not self.updater.changing:
            before, was_empty = self._before
            self.progress.become(before)
            if was_empty:
                self.store.clear()
            self._before = None
        return not self.updater.changing

    def collect(self) -> None:
        """Fill the store with one collection of experience, and call the hook `on_experience` if there is any.

        Experience that is made step by step is only promised here, and observed when it is made.
        """
        started = time.perf_counter()
        self._mark()
        with self.run_state.stop.interruptible(self._runs_alone):
            self.fill_store()
        self._warn_of_repeated_rows()
        self._before = None
        if self._in_steps:
            return
        self.recorder.record_seconds("time/collect", started)
        if len(self.store):
            self.hooks.hook.on_experience(trainer=self, experience=self.store.experience, rollouts=self._rollouts)

    def fill_store(self) -> None:
        """Fill the store with one collection of experience."""
        at = self.progress
        self._collection = Collection(at.collection, at.collection, at.cursor)
        self.models.build()  # all processes together, also one that samples nothing
        with self.inference():
            self.collect_experience()
            at.taken, at.prompts = self._collection.taken, self._collection.prompts
            if self._in_steps:
                return
            drops = self.config.reward.on_nonfinite == "drop_row"
            if len(self.store) or not drops:
                self.updater.changing = True
                with self.run_state.stop.interruptible(False):
                    self._prepare_store()
                self.updater.changing = False
        if drops:
            self._count_unusable()
        self.progress.samples += len(self.store) * self.parallel.world

    def _count_unusable(self) -> None:
        """Count collections in a row that leave nothing to train on.

        Raises:
            RewardError: it is the third one, so the run learns nothing.
        """
        at = self.progress
        if len(self.store):
            at.unusable = 0
            return
        if at.unusable + 1 == MAX_EMPTY_COLLECTIONS:
            source = "" if self.reward_fn is None else f"{name_of(self.reward_fn)}: "
            error = RewardError(
                f"after step {at.step}: {source}{MAX_EMPTY_COLLECTIONS} collections in a row have no response with a "
                f"usable score; of the last one, {at.taken * self.samples_per_prompt} responses are dropped "
                "(reward.on_nonfinite 'drop_row'). Look at what the reward function returns"
            )
            error.everywhere = True
            raise error
        at.unusable += 1

    def collect_experience(self) -> None:
        """Push the experience of one collection to the store."""
        assert self.pipeline is not None
        rank, world = self.parallel.rank, self.parallel.world
        taken = self.pipeline.take(self.progress.cursor, self.collection_rows, rank=rank, world=world)
        self._collection.taken, self._collection.prompts = self.collection_rows, len(taken)
        rows = [row for row in taken for _ in range(self.samples_per_prompt)]
        self.begin_experience(rows)
        if self.collects_once and not self.group:
            self._promise_experience()
            if not self._in_steps:
                self.store.experience  # noqa: B018  (all of it is made now)
            return
        for start in range(0, len(rows), size := self.config.rollout.batch_size):
            self._stop_if_asked()
            self.store.push(self._made(rows[start : start + size]))

    def _made(self, rows: list[Row]) -> Batch:
        """Return what `make_experience` makes of rows of a collection, checked."""
        return self.through_trunk(checked_batch(self, "make_experience", self.make_experience(rows)))

    @property
    def _in_steps(self) -> bool:
        """Whether the experience of a dataset is made when its rows are first read, and not before the first step."""
        whole = getattr(self.prepare_experience, "__func__", None) is not BaseRLTrainer.prepare_experience
        return self._collection.ordered and self.reference_makes_experience and not whole

    def _promise_experience(self) -> None:
        """Promise the experience of a dataset, in parts that are the rows of a step of the first pass.

        Which rows are made together then does not depend on the length of the run, or on where it is resumed.
        """
        self._collection.ordered = True
        rank, world = self.parallel.rank, self.parallel.world
        steps = offloading.steps_at_a_time(self)
        parts = self._order(0, self.collection_rows).split(steps * self.config.train.batch_size)
        for number, rows in enumerate(parts):
            self.store.promise(len(rows) // world, partial(self._made_for, number * steps, rows[rank::world].tolist()))

    def _made_for(self, step: int, positions: list[int]) -> Batch:
        """Make the experience of the rows at ``positions`` of the dataset, those from a step of the first pass on."""
        assert self.pipeline is not None
        if not self._in_steps:
            self._stop_if_asked()
        started, at = time.perf_counter(), self.progress
        again = at.epoch > 0 or at.position > step  # a run that was resumed
        rows = [row for position in positions for row in self.pipeline.take(position, 1)]
        with self.run_state.stop.interruptible(self._runs_alone), self.inference():
            self.collected_rows = len(self.store)
            with self.recorder.discarding() if again else nullcontext():
                size = self.config.rollout.batch_size
                parts = [self._made(rows[start : start + size]).to("cpu") for start in range(0, len(rows), size)]
            self.collected_rows = 0
            offloading.offload_reference(self)
        made = type(parts[0]).cat(parts)
        if self._in_steps:
            self.recorder.record_seconds("time/collect", started)
            if not again:
                self.hooks.hook.on_experience(trainer=self, experience=made, rollouts=[])
        return made

    def through_trunk(self, batch: B) -> B:
        """Return a batch of an offline collection with what frozen layers make of it, if that is kept."""
        return batch

    def begin_experience(self, rows: list[Row]) -> None:
        """Prepare for making experience of ``rows``, those of a collection in this process."""

    def _stop_if_asked(self) -> None:
        """End the process if it is asked to, within a collection, which is sampled again when the run is resumed."""
        beside_training = self._sampling.weights is not None  # the loop then stops between two steps
        if beside_training:
            return
        signum, saves = run.requests(self)
        if saves:
            self._save_before_collection()
        if signum:
            self.store.clear()
            run.stop(self, signum)

    def _save_before_collection(self) -> None:
        """Save the state before the collection that is being made; it is made again if the run resumes from there."""
        if self._before is None:  # the collection is made because a run resumes
            self.run_state.stop.saves = True
            return
        progress, store = replace(self.progress), self.store
        self.progress.become(self._before[0])
        self.store = RolloutStore()
        try:
            with saving.unless_it_goes_on(self):
                saving.save(self)
        finally:
            self.progress.become(progress)
            self.store = store

    @property
    def _runs_alone(self) -> bool:
        """Whether what this process makes now can be ended at any time, because no other one takes part in it."""
        return self.parallel.world == 1 and self.ahead is None

    @property
    def _samples_alone(self) -> bool:
        """Whether sampling and scoring can be ended at any time: no other process takes part in it."""
        return self.ahead is None and not self.keeps_sharded

    def _prepare_store(self) -> None:
        rows, prepared = len(self.store), self.prepare_experience(self.store.experience)
        self.store.experience = checked_batch(self, "prepare_experience", prepared)
        self._collection.ordered &= len(self.store) == rows

    def learn_from(self, samples: Iterable[Any], rewards: Iterable[Any] | None = None) -> dict[str, float]:
        """Learn from further samples in a loop of your own: one collection, and one pass over it.

        The run has `train.total_steps` steps, by which the learning rate is scheduled. Each process gives samples of
        its own, equally many.

        Args:
            samples: as for `trainkit.train`.
            rewards: one number per sample, for algorithms that learn from them.

        Returns:
            The metrics of this call, averaged over its optimizer steps.

        Raises:
            DataError: samples cannot be used.
            ConfigError: the algorithm learns from what it samples itself; call `step`.
        """
        if self.online:
            raise ConfigError(
                f"learn_from() takes samples, and {self.config.method.name!r} learns from responses to prompts; call "
                "step(queries, responses, scores)"
            )
        rows = self.arrange(self.read_samples(samples, rewards))
        run.begin(self)
        self.store.clear()
        self._begin_own_collection()
        size = self.config.rollout.batch_size
        with self.inference():
            for start in range(0, len(rows), size):
                made = self.make_experience(rows[start : start + size])
                self.store.push(checked_batch(self, "make_experience", made))
            self._prepare_store()
        return self._learn_from_store(passes=1)

    def _begin_own_collection(self, **fields: Any) -> None:
        """Begin a collection that the caller of `step` or `learn_from` gives."""
        self._collection = Collection(**fields)
        self.progress.epoch, self.progress.position, self.progress.stopped = 0, 0, False

    def _learn_from_store(self, passes: int) -> dict[str, float]:
        """Make the steps of ``passes`` over the collection in the store, and return their metrics."""
        self.progress.samples += len(self.store) * self.parallel.world
        self.hooks.hook.on_experience(trainer=self, experience=self.store.experience, rollouts=self._rollouts)
        for _ in range(passes):
            for batch in self._one_pass():
                self.record(self.update(batch))
                self.hooks.hook.on_step(trainer=self, step=self.progress.step)
        self._next_collection()
        return self._log()

    def _train_on(self, batch: Batch) -> None:
        started = time.perf_counter()
        self.record(self.update(batch))
        self._before = None
        self.recorder.record_seconds("time/update", started)
        self._log()
        self.hooks.hook.on_step(trainer=self, step=self.progress.step)

    def update(self, batch: Batch) -> m.Metrics:
        """Make one optimizer step on ``batch``, and return its metrics; see `Updater.update`."""
        self._warn_past_the_end()
        return self.updater.update(batch)

    def _warn_past_the_end(self) -> None:
        """Log a warning, once, when a loop of the caller's own goes on after the schedule has ended."""
        end, name = self.total_steps, self.config.scheduler.name
        if end and self.progress.step >= end and name != "constant" and not self._warned_past_the_end:
            self._warned_past_the_end = True
            log.warning(
                "step %d is past the last step of the run, %d: the schedule %r has ended, and the learning rate is %g. "
                "Raise train.total_steps, or set scheduler.name to 'constant'",
                self.progress.step + 1,
                end,
                name,
                self.models.learning_rate,
            )

    def micro_batches(self, batch: B) -> list[B]:
        """Split a batch into the parts that go through the model one at a time."""
        return self.updater.micro_batches(batch)

    def in_micro_batches(self, batch: B, read: Callable[[B], Tensor]) -> Tensor:
        """Apply ``read(micro-batch [b]) -> [b, *]`` to a whole batch [B]; rows keep their order. -> [B, *].

        While the model is divided among the processes, all of them call it together, and make equally many passes.
        """
        return self.updater.in_micro_batches(batch, read)

    def step_mean(self, batch: B, read: Callable[[B], Tensor]) -> Tensor:
        """Return the mean of ``read(micro-batch [b]) -> [b, *]`` over a step's rows of all processes. [B] -> [*].

        It is computed in float64 where the device has it, and returned in float32 on the CPU.
        """
        return self.updater.step_mean(batch, read)

    # ------------------------------------------------------------------------------------- evaluating and logging

    def evaluate(self) -> dict[str, float]:
        """Measure the model on the evaluation prompts and the held-out samples; training is not affected.

        Returns:
            Means by name. Of the responses to the prompts: ``eval/reward``, ``eval/<metric>``, ``eval/length``; with a
            swept setting each name ends in ``@setting=value``. Of the held-out samples: ``eval/loss/total`` and the
            algorithm's other metrics.

        Raises:
            DataError: there are neither evaluation prompts nor held-out samples.
        """
        return evaluate(self)

    @contextmanager
    def _sampling_model(self) -> Iterator[None]:
        """Let every process sample with the model inside the block."""
        self.models.build()  # all processes together
        with self.sharding.unsharded():
            yield

    def evaluation(self) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Return means over the evaluation prompts by name (``eval/...``), and one record per response."""
        raise NotImplementedError(f"{type(self).__name__} cannot evaluate on prompts; write evaluation")


def _due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0
