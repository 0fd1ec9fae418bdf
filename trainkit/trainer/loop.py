"""The training loop on accelerate: one implementation for every algorithm and every kind of model."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from trainkit import metrics as m
from trainkit.config import MethodConfig
from trainkit.data import Batch, Pipeline, RolloutStore, Row, shuffled
from trainkit.errors import (
    ConfigError,
    DataError,
    NonFiniteError,
    OutOfMemoryError,
    PluginError,
    RewardError,
    TrainkitError,
)
from trainkit.functional import exact
from trainkit.models.fitting import ADVICE, RowLimit, first_line, no_smaller, out_of_memory, release
from trainkit.rollouts import name_of
from trainkit.runs import hub, run, saving
from trainkit.runs.stopping import Interrupted
from trainkit.seeding import generator, global_rng
from trainkit.trainer import offloading, optim
from trainkit.trainer.base import BaseRLTrainer, Verdict
from trainkit.trainer.collecting import Collection
from trainkit.trainer.evaluation import evaluate, evaluate_if
from trainkit.trainer.inputs import TrainerInputs
from trainkit.trainer.minibatches import Layout, minibatches
from trainkit.trainer.returns import checked_batch, checked_loss, checked_verdict
from trainkit.trainer.sharding import whole_tensor

M = TypeVar("M", bound=MethodConfig)
B = TypeVar("B", bound=Batch)
T = TypeVar("T")
R = TypeVar("R")

log = logging.getLogger(__name__)

MOST_UNUSABLE = 3
"""Collections in a row without a usable score, with which a run ends."""
MICROBATCH_TOKENS = {"cpu": 2048}
"""Tokens of a micro-batch where `train.microbatch_size` is not set, by device type. More do not speed up a CPU."""
OTHER_TOKENS = 32_768
"""The same for all other devices. Accelerators are faster with more tokens, up to a limit; memory use grows, too."""


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
        if (
            self.config.train.save_best
            and not (self.eval_rows or self.eval_samples)
            and self.accelerator.is_main_process
        ):
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
        if self.progress.step == 0 and not self.total_steps and self.accelerator.is_main_process:
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
            self._tell_short_step(len(steps[at.position]), len(order))
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

    def _tell_short_step(self, rows: int, total: int) -> None:
        """Log, once, that a step has fewer rows than `train.batch_size`; ``total`` rows are in the collection."""
        size = self.config.train.batch_size
        if rows >= size or self._short_step_told or not self.accelerator.is_main_process:
            return
        self._short_step_told = True
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

    def _tell_repeated(self) -> None:
        """Log how many rows a collection uses beyond the epochs of the run."""
        at, rows = self.progress, self.rows_to_use
        if not isinstance(self.pipeline, Pipeline) or rows is None or not self.accelerator.is_main_process:
            return
        if self.collects_once and at.taken > len(self.pipeline):
            log.warning(
                "%d of %d rows of the dataset are used twice in every epoch: %d processes need equally many",
                at.taken - len(self.pipeline),
                len(self.pipeline),
                self.accelerator.num_processes,
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
        rows, world = len(self.store), self.accelerator.num_processes
        counts = self.gather([rows])
        if len(set(counts)) > 1:
            raise PluginError(
                f"{self.config.method.name!r} made {' and '.join(map(str, counts))} rows of experience on {world} "
                "processes; prepare_experience must return equally many on each, as for trainer.gather"
            )
        return Layout(self.rows_of_a_prompt(rows), world, self.accelerator.process_index)

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
        if self._before is not None and not self._torn:
            self.progress, was_empty = self._before
            if was_empty:
                self.store.clear()
            self._before = None
        return not self._torn

    def collect(self) -> None:
        """Fill the store with one collection of experience, and call the hook `on_experience` if there is any.

        Experience that is made step by step is only promised here, and observed when it is made.
        """
        started = time.perf_counter()
        self._mark()
        with self._stop.interruptible(self._runs_alone):
            self.fill_store()
        self._tell_repeated()
        self._before = None
        if self._in_steps:
            return
        self._time("time/collect", started)
        if len(self.store):
            self.hooks.hook.on_experience(trainer=self, experience=self.store.experience, rollouts=self._rollouts)

    def fill_store(self) -> None:
        """Fill the store with one collection of experience."""
        at = self.progress
        self._collection = Collection(at.collection, at.collection, at.cursor)
        self.policy  # noqa: B018  (all processes make it together, also one that samples nothing)
        with self.inference():
            self.collect_experience()
            at.taken, at.prompts = self._collection.taken, self._collection.prompts
            if self._in_steps:
                return
            drops = self.config.reward.on_nonfinite == "drop_row"
            if len(self.store) or not drops:
                self._torn = True
                with self._stop.interruptible(False):
                    self._prepare_store()
                self._torn = False
        if drops:
            self._count_unusable()
        self.progress.samples += len(self.store) * self.accelerator.num_processes

    def _count_unusable(self) -> None:
        """Count collections in a row that leave nothing to train on.

        Raises:
            RewardError: it is the third one, so the run learns nothing.
        """
        at = self.progress
        if len(self.store):
            at.unusable = 0
            return
        if at.unusable + 1 == MOST_UNUSABLE:
            source = "" if self.reward_fn is None else f"{name_of(self.reward_fn)}: "
            error = RewardError(
                f"after step {at.step}: {source}{MOST_UNUSABLE} collections in a row have no response with a usable "
                f"score; of the last one, {at.taken * self.samples_per_prompt} responses are dropped "
                "(reward.on_nonfinite 'drop_row'). Look at what the reward function returns"
            )
            error.everywhere = True
            raise error
        at.unusable += 1

    def collect_experience(self) -> None:
        """Push the experience of one collection to the store."""
        assert self.pipeline is not None
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
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
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
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
        with self._stop.interruptible(self._runs_alone), self.inference():
            self.collected_rows = len(self.store)
            with self._discarding_records() if again else nullcontext():
                size = self.config.rollout.batch_size
                parts = [self._made(rows[start : start + size]).to("cpu") for start in range(0, len(rows), size)]
            self.collected_rows = 0
            offloading.offload_reference(self)
        made = type(parts[0]).cat(parts)
        if self._in_steps:
            self._time("time/collect", started)
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
            self._stop.saves = True
            return
        progress, store = self.progress, self.store
        self.progress, self.store = replace(self._before[0]), RolloutStore()
        try:
            with saving.unless_it_goes_on(self):
                saving.save(self)
        finally:
            self.progress, self.store = progress, store

    @property
    def _runs_alone(self) -> bool:
        """Whether what this process makes now can be ended at any time, because no other one takes part in it."""
        return self.accelerator.num_processes == 1 and self.ahead is None

    @property
    def _samples_alone(self) -> bool:
        """Whether sampling and scoring can be ended at any time: no other process takes part in it."""
        return self.ahead is None and not self.stays_divided

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
        self.progress.samples += len(self.store) * self.accelerator.num_processes
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
        self._time("time/update", started)
        self._log()
        self.hooks.hook.on_step(trainer=self, step=self.progress.step)

    def update(self, batch: Batch) -> m.Metrics:
        """Make one optimizer step on ``batch``, and return its metrics. Every algorithm is trained by this method.

        The gradient is that of the mean over the batches of all processes, however they are split. A step that `judge`
        skips, or whose weight is 0, is skipped on all processes. It is counted, and the schedule advances.

        Raises:
            NonFiniteError: the loss or the gradient is not finite; neither the weights nor the optimizer have changed.
        """
        self.unit = batch.unit
        at, scheduler = self.progress, self.scheduler  # the schedule must exist before the optimizer steps
        self._warn_past_the_end()
        weight = self.reduce(batch.weight.to(self.accelerator.device))
        found, verdict = {}, Verdict.SKIP
        if weight > 0:
            found = self._gradient(batch, weight)
            verdict = self._judged(found)
        found |= self._make_step(found) if verdict is Verdict.STEP else {"train/skipped": m.Mean.of(torch.ones(()))}
        self.optimizer.zero_grad()
        rate = self._lr  # the one of this step; the schedule moves on to that of the next
        optim.advance(scheduler)
        self.unwrapped.eval()
        at.step, at.tokens, at.stopped = at.step + 1, at.tokens + int(weight), verdict is Verdict.STOP
        if verdict is Verdict.STEP and not self._overflowed:
            at.trained += len(batch) * self.accelerator.num_processes
            self._after_step()
        self._torn = False
        return {**found, "train/lr": m.Mean.of(torch.tensor(rate, dtype=torch.float64))}

    def _after_step(self) -> None:
        """Call `after_step`; the model is gathered for it only if it is overridden."""
        if getattr(self.after_step, "__func__", None) is not BaseRLTrainer.after_step:
            with self.sharding.whole(write=True):
                self.after_step()

    @property
    def _overflowed(self) -> bool:
        """Whether fp16's gradient scaler has skipped the last step, because gradients overflowed."""
        return self.accelerator.scaler is not None and bool(self.accelerator.optimizer_step_was_skipped)

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
                self._lr,
            )

    def _gradient(self, batch: Batch, weight: Tensor) -> m.Metrics:
        """Compute the gradient of the mean over ``weight`` units, those of all processes, and return the metrics."""
        share = weight / self.accelerator.num_processes  # because gradients are averaged over processes
        prepared = self._prepared_for_step(batch)
        recorded = self._pending
        while (found := self._attempt(self.micro_batches(prepared), share)) is None:
            self._pending = recorded
            self.optimizer.zero_grad()
            release()
        self.sharding.exchange()
        return found

    def _attempt(self, micros: list[Batch], share: Tensor) -> m.Metrics | None:
        """Make the passes of a step; return None if they are to be made again with the new `row_limit`.

        That is when they did not fit into the memory of some process. Random numbers are drawn anew in each attempt, so
        the gradient is that of a step which was made with this number of rows from the beginning.

        Raises:
            OutOfMemoryError: they did not fit, and there are no smaller micro-batches.
        """
        found: m.Metrics = {}
        fault = ""
        try:
            found = self._passes(micros, share)
        except (RuntimeError, MemoryError) as error:
            if isinstance(error, TrainkitError) or not out_of_memory(error):
                raise
            self.optimizer.zero_grad()
            fault = first_line(error)
            if self.row_limit is None:
                raise OutOfMemoryError(
                    f"a micro-batch of {max(map(len, micros))} rows does not fit into memory ({fault}). Set "
                    f"train.microbatch_size to a smaller number, or to 'auto'. {ADVICE}"
                ) from error
        return found if self.row_limit is None or self._fits(self.row_limit, max(map(len, micros)), fault) else None

    def _fits(self, limit: RowLimit, rows: int, fault: str) -> bool:
        """Return whether a step with micro-batches of ``rows`` rows has fit on every process; if not, halve the limit.

        All processes then have the same limit.
        """
        most = torch.tensor([rows // 2 if fault else limit.rows or math.inf, -float(bool(fault))])
        least, failed = self.min(most).tolist()
        if failed and not least:
            error = OutOfMemoryError(no_smaller(fault or "on another process"))
            error.everywhere = True
            raise error
        limit.rows = int(least) if least < math.inf else None
        if failed and self.accelerator.is_main_process:
            log.warning(
                "step %d does not fit into memory; it is made again with micro-batches of %d rows (gradient unchanged)",
                self.progress.step + 1,
                limit.rows,
            )
        return not failed

    def _passes(self, micros: list[Batch], share: Tensor) -> m.Metrics:
        """Make the passes of a step: accumulate the gradient, and return the metrics."""
        device, rank = self.accelerator.device, self.accelerator.process_index
        found: m.Metrics = {}
        self.policy.train()
        with global_rng(self.config.train.seed, "dropout", self.progress.step, rank, device=device):
            passes = self.sharding.passes(len(micros))
            for index in range(passes):
                with self.sharding.synchronised(last=index == passes - 1):
                    if index < len(micros):
                        found = m.merge(found, self._backward(micros[index].to(device), share))
                    else:  # other processes have more; all make the passes together
                        self._backward(micros[-1].to(device), share, factor=0.0)
        return found

    def _prepared_for_step(self, batch: Batch) -> Batch:
        """Return what `prepare_step` makes of the batch; the model is gathered for it only if it is overridden."""
        if getattr(self.prepare_step, "__func__", None) is BaseRLTrainer.prepare_step:
            return batch
        with self.inference():
            return checked_batch(self, "prepare_step", self.prepare_step(batch))

    def _judged(self, found: m.Metrics) -> Verdict:
        """Return `judge`'s verdict on the metrics of all processes, so that it is the same on each of them.

        The metrics are computed only if the algorithm overrides `judge`.
        """
        if not self._judges:
            return Verdict.STEP
        nothing = dict.fromkeys(found, math.nan)  # for metrics of which nothing was counted
        return checked_verdict(self, self.judge(nothing | m.compute(found, self.reduce)))

    @property
    def _judges(self) -> bool:
        return getattr(self.judge, "__func__", None) is not BaseRLTrainer.judge

    def _make_step(self, found: m.Metrics) -> m.Metrics:
        """Clip the gradient and step; record ``train/skipped`` if `judge` or fp16's scaler can skip steps."""
        norm = self.sharding.clip(self.config.train.max_grad_norm)
        self._refuse_non_finite(found, norm)
        self._torn = True
        self.optimizer.step()
        made: m.Metrics = {"train/grad_norm": m.Mean.of(norm)}
        if self._judges or self.accelerator.scaler is not None:
            skipped = self.accelerator.optimizer_step_was_skipped  # by the scaler, on overflow
            made["train/skipped"] = m.Mean.of(torch.tensor(float(skipped)))
        return made

    @property
    def _most(self) -> tuple[int | None, int | None]:
        """The most rows and tokens of a micro-batch."""
        size = self.config.train.microbatch_size
        if isinstance(size, int):
            return size, None
        return None if self.row_limit is None else self.row_limit.rows, self.tokens_of_a_micro_batch

    def micro_batches(self, batch: B) -> list[B]:
        """Split a batch into the parts that go through the model one at a time."""
        return [batch] if len(groups := self._groups(batch)) == 1 else [batch.select(rows) for rows in groups]

    @property
    def tokens_of_a_micro_batch(self) -> int:
        """About how many tokens a micro-batch has, unless `train.microbatch_size` is a number."""
        return MICROBATCH_TOKENS.get(self.accelerator.device.type, OTHER_TOKENS)

    def _groups(self, batch: Batch) -> list[Tensor]:
        return batch.groups(*self._most, together=self.samples_per_prompt, shared=self.progress.shares_prompts)

    def in_micro_batches(self, batch: B, read: Callable[[B], Tensor]) -> Tensor:
        """Apply ``read(micro-batch [b]) -> [b, *]`` to a whole batch [B]; rows keep their order. -> [B, *].

        While the model is divided among the processes, all of them call it together, and make equally many passes.
        """
        if self.row_limit is None:
            return self._read_in_groups(batch, read)
        return self.row_limit.without_gradient(len(batch), lambda: self._read_in_groups(batch, read))

    def _read_in_groups(self, batch: B, read: Callable[[B], Tensor]) -> Tensor:
        groups = self._groups(batch)
        found = torch.cat(self.each_together(groups, lambda rows: read(batch.select(rows))))
        return found[torch.cat(groups).argsort().to(found.device)]

    def each_together(self, items: Sequence[T], call: Callable[[T], R]) -> list[R]:
        """Return what ``call`` returns for each item.

        While the model is divided, processes with fewer items repeat the last one and ignore the result, so that all
        run the model equally often.
        """
        runs_alone = self.sharding.gathered or not self.sharding.stays_divided
        more = 0 if runs_alone else self.sharding.passes(len(items)) - len(items)
        found = [call(item) for item in items]
        with self._discarding_records():
            for _ in range(more):
                call(items[-1])
        return found

    @torch.no_grad()
    def step_mean(self, batch: B, read: Callable[[B], Tensor]) -> Tensor:
        """Return the mean of ``read(micro-batch [b]) -> [b, *]`` over a step's rows of all processes. [B] -> [*].

        It is computed in float64 where the device has it, and returned in float32 on the CPU.
        """
        device = self.accelerator.device
        parts = self.each_together(self.micro_batches(batch), lambda micro: exact(read(micro.to(device))).sum(0).cpu())
        sums = torch.stack(parts).sum(0)
        counted = self.reduce(torch.cat([sums.flatten(), sums.new_tensor([len(batch)])]))
        mean: Tensor = counted[:-1] / counted[-1]
        return mean.view(sums.shape).float()

    def measure(self, micro: Batch) -> tuple[Tensor, m.Metrics]:
        """Return the algorithm's loss [] and its metrics, the loss itself among them."""
        with self.accelerator.autocast():
            loss, found = checked_loss(self, self.loss(micro))
        weight = exact(micro.weight.to(loss.device))
        return loss, {**found, "loss/total": m.Mean(exact(loss.detach()) * weight, weight)}

    def _backward(self, micro: Batch, share: Tensor, factor: float = 1.0) -> m.Metrics:
        loss, found = self.measure(micro)
        self.sharding.backward(loss * micro.weight.to(share.device) / share * factor)
        return found

    def _refuse_non_finite(self, found: m.Metrics, norm: Tensor) -> None:
        loss = self.reduce(torch.stack(found["loss/total"].tensors()))
        overflow = self.accelerator.scaler is not None  # fp16: the scaler skips the step and lowers its scale
        if bool(loss.isfinite().all()) and (bool(norm.isfinite()) or overflow):
            return
        grads = {name: whole_tensor(p.grad) for name, p in self.unwrapped.named_parameters() if p.grad is not None}
        named = [name for name, grad in grads.items() if not grad.isfinite().all()]
        self.optimizer.zero_grad()
        raise NonFiniteError(
            f"step {self.progress.step + 1}: the loss is {float(loss[0] / loss[1])} and the gradient norm {float(norm)}"
            f"{'; not finite in ' + ', '.join(named[:3]) if named else ''}. The weights have not moved. Look at the "
            "rewards, lower optimizer.lr, or set train.max_grad_norm"
        )

    @property
    def _lr(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

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
        self.policy  # noqa: B018  (all processes make it together)
        with self.sharding.whole():
            yield

    def evaluation(self) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Return means over the evaluation prompts by name (``eval/...``), and one record per response."""
        raise NotImplementedError(f"{type(self).__name__} cannot evaluate on prompts; write evaluation")


def _due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0
