"""Collecting: rows → rollouts → scores → experience → store, one collection at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor

from trainkit import metrics as m
from trainkit.config import TRLConfig
from trainkit.data import Batch, Rollouts, Row
from trainkit.errors import ConfigError, RewardError
from trainkit.models import Policy
from trainkit.rollouts import name_of
from trainkit.runs.view import RunView
from trainkit.trainer import dynamic
from trainkit.trainer.ahead import AsyncCollector
from trainkit.trainer.base import BaseRLTrainer, overridden
from trainkit.trainer.collection import Collection
from trainkit.trainer.minibatches import Minibatches
from trainkit.trainer.offloading import ReferenceOffloading
from trainkit.trainer.returns import checked_batch
from trainkit.trainer.sampling import Sampling
from trainkit.trainer.scoring import ScoredRollouts, Scoring
from trainkit.trainer.settings import changed_settings
from trainkit.trainer.sharing import PromptSharing
from trainkit.trainer.trunk import TrunkCache

MAX_EMPTY_COLLECTIONS = 3
"""Collections in a row without a usable score, with which a run ends."""
SEEN = 16
"""Pairs by which it is decided whether the prompts of a dataset are shared."""


class Collector:
    """Fills the store with experience, by the algorithm's `make_experience`, and yields it in minibatches.

    `minibatches` calls `collect` for each collection, and `one_pass` for each pass over it. A collection is made by
    `fill`: `push_experience` (`begin`, then `make` for each `rollout.batch_size` rows, now or when a step first reads
    them), `prepare`, `filled`.

    Args:
        algorithm: makes and prepares experience.
        view: the run, whose store is filled, and which may be asked to end or to save within a collection.
        inference: returns a context in which the model is run without gradient.
        before_offloading: called before the reference is moved to the CPU, to do what reads it later.

    Raises:
        ConfigError: settings of how responses are sampled do not suit the algorithm.
    """

    def __init__(
        self,
        algorithm: BaseRLTrainer[Any],
        view: RunView,
        inference: Callable[[], AbstractContextManager[None]],
        before_offloading: Callable[[], object],
    ) -> None:
        self.algorithm, self.view, self._inference = algorithm, view, inference
        self.parallel, self.progress, self.store, self.plan = view.parallel, view.progress, view.store, view.plan
        self.updater, self.recorder, self.last_step = view.updater, view.recorder, view.last_step
        self.interruptible = view.run.stop.interruptible
        self.batches = Minibatches(algorithm, view.plan, view.store, view.parallel, view.progress, view.last_step)
        """Which rows make up a minibatch."""
        self.offloading = ReferenceOffloading(algorithm, view.plan, view.models, before_offloading)
        """What moves the reference to the CPU after it has made experience."""
        self.collection = Collection()
        """The collection that is trained on, or made for it."""
        self.ahead: AsyncCollector | None = None
        """The collections that are sampled before their turn; None unless `rollout.staleness` is set."""
        self.check()

    @property
    def config(self) -> TRLConfig[Any]:
        """The run's configuration."""
        return self.view.config

    @property
    def current(self) -> Collection:
        """The collection that this thread samples, ahead of its turn or not."""
        ahead: Collection | None = self.recorder.collection
        return self.collection if ahead is None else ahead

    @property
    def keeps_sharded(self) -> bool:
        """Whether the model is divided among the processes also while experience is made of data or of rollouts.

        It is if `train.sharding` allows it, unless responses are sampled with the trained model itself, which every
        process does at its own pace, or the algorithm samples in an own `make_experience`.
        """
        return bool(self.parallel.sharding.keeps_sharded) and not self.algorithm.online

    def check(self) -> None:
        """Raise a `ConfigError` if engine, staleness or correction are set; only language models are sampled so."""
        if changed := changed_settings(self.config):
            raise ConfigError(
                f"{' and '.join(changed)} cannot be set with {self.config.method.name!r}, which samples by itself; "
                "remove it"
            )

    def resumed(self) -> None:
        """Take over the progress of a run that was resumed."""

    # ------------------------------------------------------------------------------------------------- the whole run

    def minibatches(self) -> Iterator[Batch]:
        """Yield the remaining minibatches of the run; `progress` counts a minibatch as made when it is yielded."""
        while not self.plan.done:
            if not len(self.store):
                self.collect()
            while len(self.store) and not self.plan.collection_used:
                yield from self.one_pass()
            self.progress.cursor += self.progress.taken
            self.end()

    def one_pass(self) -> Iterator[Batch]:
        """Yield the remaining minibatches of a pass over the collection in the store."""
        return self.batches.of_pass(self.collection, counted=self.in_steps)

    def end(self) -> None:
        """End the collection at hand; the next one begins with an empty store."""
        at = self.progress
        self.store.clear()
        at.collection, at.epoch, at.position, at.stopped = at.collection + 1, 0, 0, False

    def begin_own(self, **fields: Any) -> None:
        """Begin a collection that the caller of `step` or `learn_from` gives; ``fields`` are those of `Collection`."""
        self.collection = Collection(**fields)
        self.progress.epoch, self.progress.position, self.progress.stopped = 0, 0, False

    # --------------------------------------------------------------------------------------------------- a collection

    def collect(self) -> None:
        """Fill the store with one collection of experience, and call the hook `on_experience` if there is any.

        Experience that is made step by step is only promised here, and observed when it is made.
        """
        started = time.perf_counter()
        self.last_step.mark()
        with self.interruptible(self.runs_alone):
            self.fill()
        self.plan.warn_of_repeated_rows()
        self.last_step.finish()
        if self.in_steps:
            return
        self.recorder.record_seconds("time/collect", started)
        if len(self.store):
            self.observe(self.store.experience)

    def observe(self, experience: Batch) -> None:
        """Call the hook `on_experience` with experience, and what was sampled for it."""
        hook = self.view.hooks.hook
        hook.on_experience(trainer=self.view, experience=experience, rollouts=self.collection.rollouts)

    def fill(self) -> None:
        """Fill the store with one collection of experience."""
        at = self.progress
        self.collection = Collection(at.collection, at.collection, at.cursor)
        self.view.models.build()  # all processes together, also one that samples nothing
        drops = self.config.reward.on_nonfinite == "drop_row"
        with self._inference():
            self.push_experience()
            at.taken, at.prompts = self.collection.taken, self.collection.prompts
            if not self.in_steps and (len(self.store) or not drops):
                self.updater.changing = True
                with self.interruptible(False):
                    self.prepare()
                self.updater.changing = False
        if drops:
            self._count_unusable()
        if not self.in_steps:
            at.samples += len(self.store) * self.parallel.world
        self.filled()

    def filled(self) -> None:
        """Do what follows when all rows of a collection are made or promised."""

    def trains(self) -> None:
        """Do what precedes each step."""

    def push_experience(self) -> None:
        """Push the experience of one collection to the store, or promise it."""
        rows = self._rows(self.collection)
        self.begin(rows)
        if self.plan.collects_once and not self.algorithm.group:
            self._promise_experience()
            if not self.in_steps:
                self.store.experience  # noqa: B018  (all of it is made now)
            return
        for start in range(0, len(rows), size := self.config.rollout.batch_size):
            self.stop_if_asked()
            self.store.push(self.make(rows[start : start + size]))

    def _rows(self, collection: Collection) -> list[Row]:
        """Return this process's rows of a collection: those of the dataset, each for every response to it."""
        pipeline, count = self.view.pipeline, self.plan.collection_rows
        assert pipeline is not None
        taken = pipeline.take(collection.cursor, count, rank=self.parallel.rank, world=self.parallel.world)
        collection.taken, collection.prompts = count, len(taken)
        return [row for row in taken for _ in range(self.algorithm.samples_per_prompt)]

    def begin(self, rows: list[Row]) -> None:
        """Prepare for making experience of ``rows``, those of a collection in this process."""

    def make(self, rows: list[Row]) -> Batch:
        """Return what `make_experience` makes of rows of a collection, checked."""
        made = checked_batch(self.algorithm, "make_experience", self.algorithm.make_experience(rows))
        return self.algorithm.through_trunk(made)

    def prepare(self) -> None:
        """Apply `prepare_experience` to the collection in the store."""
        self.collection.ref_logprobs = getattr(self.store.experience, "ref_logprobs", None)
        rows, prepared = len(self.store), self.algorithm.prepare_experience(self.store.experience)
        self.store.experience = checked_batch(self.algorithm, "prepare_experience", prepared)
        self.collection.ordered &= len(self.store) == rows

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
            reward_fn = self.algorithm.reward_fn
            source = "" if reward_fn is None else f"{name_of(reward_fn)}: "
            error = RewardError(
                f"after step {at.step}: {source}{MAX_EMPTY_COLLECTIONS} collections in a row have no response with a "
                f"usable score; of the last one, {at.taken * self.algorithm.samples_per_prompt} responses are dropped "
                "(reward.on_nonfinite 'drop_row'). Look at what the reward function returns"
            )
            error.on_all_ranks = True
            raise error
        at.unusable += 1

    # ----------------------------------------------------------------------------- experience of a dataset, by steps

    @property
    def in_steps(self) -> bool:
        """Whether the experience of a dataset is made when its rows are first read, and not before the first step."""
        whole = overridden(self.algorithm.prepare_experience, BaseRLTrainer.prepare_experience)
        return self.collection.ordered and self.algorithm.reference_makes_experience and not whole

    def _promise_experience(self) -> None:
        """Promise the experience of a dataset, in parts that are the rows of a step of the first pass.

        Which rows are made together then does not depend on the length of the run, or on where it is resumed.
        """
        self.collection.ordered = True
        rank, world = self.parallel.rank, self.parallel.world
        steps = self.offloading.steps_at_a_time()
        parts = self.batches.order(0, self.plan.collection_rows).split(steps * self.config.train.batch_size)
        for number, rows in enumerate(parts):
            self.store.promise(
                len(rows) // world, partial(self._make_promised, number * steps, rows[rank::world].tolist())
            )

    def _make_promised(self, step: int, positions: list[int]) -> Batch:
        """Make the experience of the rows at ``positions`` of the dataset, those from a step of the first pass on."""
        pipeline = self.view.pipeline
        assert pipeline is not None
        if not self.in_steps:
            self.stop_if_asked()
        started, at = time.perf_counter(), self.progress
        again = at.epoch > 0 or at.position > step  # a run that was resumed
        rows = [row for position in positions for row in pipeline.take(position, 1)]
        with self.interruptible(self.runs_alone), self._inference():
            with self.recorder.discarding() if again else nullcontext():
                made = self._make_in_parts(rows)
            self.offloading.offload()
        if self.in_steps:
            self.recorder.record_seconds("time/collect", started)
            if not again:
                self.observe(made)
        return made

    def _make_in_parts(self, rows: list[Row]) -> Batch:
        size = self.config.rollout.batch_size
        parts = [self.make(rows[start : start + size]).to("cpu") for start in range(0, len(rows), size)]
        return type(parts[0]).cat(parts)

    # --------------------------------------------------------------------------------------- requests to end or save

    def stop_if_asked(self) -> None:
        """End the process if it is asked to, within a collection, which is sampled again when the run is resumed."""
        beside_training = self.current.weights is not None  # the loop then stops between two steps
        if beside_training:
            return
        signum, saves = self.view.run.requests()
        if saves:
            self._save_before_collection()
        if signum:
            self.store.clear()
            self.view.run.end_by(signum)

    def _save_before_collection(self) -> None:
        """Save the state before the collection that is being made; it is made again if the run resumes from there."""
        if self.last_step.before is None:  # the collection is made because a run resumes
            self.view.run.stop.saves = True
            return
        progress = replace(self.progress)
        self.progress.become(self.last_step.before)
        try:
            with self.store.emptied(), self.view.run.checkpoints.unless_it_goes_on():
                self.view.run.checkpoints.save()
        finally:
            self.progress.become(progress)

    @property
    def runs_alone(self) -> bool:
        """Whether what this process makes now can be ended at any time, because no other one takes part in it."""
        return self.parallel.world == 1 and self.ahead is None

    @property
    def samples_alone(self) -> bool:
        """Whether sampling and scoring can be ended at any time: no other process takes part in it."""
        return self.ahead is None and not self.keeps_sharded


class RolloutCollector(Collector):
    """Collects scored rollouts of a language model, or samples as `Collector` does.

    Rollouts are made by `sampled` (rows → rollouts → scores, by `scored`), and `experience` makes experience of them.

    Filtered collections (`keep`, `reward.on_nonfinite: drop_row`) are those of `trainkit.trainer.dynamic`, and
    collections that are sampled ahead those of `trainkit.trainer.ahead`.

    Args:
        *parts: those of `Collector`.
        sampling: samples responses.
        scoring: scores them.
        sharing: decides whether the prompts of a collection are shared.
        trunk: keeps the output of frozen layers of an offline collection.
        encode_pairs: encodes rows of pairs.
        scores_rollouts: returns whether experience is made of scored rollouts, and not by an own `make_experience`.
        samples_as_usual: returns whether `sample` and `sample_and_score` are not overridden.
    """

    algorithm: Any

    def __init__(
        self,
        *parts: Any,
        sampling: Sampling,
        scoring: Scoring,
        sharing: PromptSharing,
        trunk: TrunkCache,
        encode_pairs: Callable[[list[Row]], Any],
        scores_rollouts: Callable[[], bool],
        samples_as_usual: Callable[[], bool],
    ) -> None:
        self.sampling, self.scoring, self.sharing, self.trunk = sampling, scoring, sharing, trunk
        self._encode_pairs = encode_pairs
        self._scores_rollouts, self._samples_as_usual = scores_rollouts, samples_as_usual
        super().__init__(*parts)
        if self.config.rollout.staleness:
            self.ahead = self.sampling.ahead = AsyncCollector(self)

    @property
    def keeps_sharded(self) -> bool:
        """Whether the model is divided among the processes also while experience is made."""
        usual = self._scores_rollouts() and self._samples_as_usual()
        return super().keeps_sharded or (usual and self.sampling.samples_apart)

    def check(self) -> None:
        """Raise a `ConfigError` if settings of sampling and scoring do not suit the algorithm."""
        config, algorithm, name = self.config, self.algorithm, self.config.method.name
        changed = changed_settings(config)
        if not algorithm.online and set(changed) - {"rollout.engine"}:  # evaluations and generate() use the engine
            raise ConfigError(
                f"{' and '.join(changed)} cannot be set with {name!r}, which learns from "
                f"{' and '.join(algorithm.inputs)} and samples nothing to train on; remove it"
            )
        if config.rollout.staleness and not self._scores_rollouts():
            raise ConfigError(
                f"rollout.staleness is {config.rollout.staleness}, and {name!r} makes its experience while it samples "
                "(make_experience), with the newest weights; set it to 0"
            )
        if config.rollout.staleness and algorithm.forks and self.sampling.environment is not None:
            raise ConfigError(
                f"rollout.staleness is {config.rollout.staleness}, and {name!r} branches episodes (forks), whose "
                "environments no checkpoint holds; set it to 0"
            )
        if algorithm.rewarded and config.reward.on_nonfinite != "error" and not self._scores_rollouts():
            raise ConfigError(
                f"reward.on_nonfinite is {config.reward.on_nonfinite!r}, and {name!r} makes its experience while it "
                "scores (make_experience); set it to 'error'"
            )
        if (
            config.rollout.max_refills != type(config.rollout).model_fields["max_refills"].default
            and not algorithm.keeps
        ):
            raise ConfigError(
                f"rollout.max_refills is {config.rollout.max_refills}, and {name!r} trains on everything that it "
                "samples; remove it"
            )

    def resumed(self) -> None:
        """Take over the progress of a run that was resumed."""
        self.sharing.apply()

    def filled(self) -> None:
        """Record the calls of the reward function; log once per run if equal scores teach nothing."""
        self.scoring.record_collection(self.collection)
        self.trunk.rows = 0

    def trains(self) -> None:
        """Let the engine rest."""
        self.sampling.rest()

    def push_experience(self) -> None:
        """Push the experience of one collection to the store."""
        if not self._scores_rollouts():
            super().push_experience()
            return
        if self.ahead is None:
            parts = self.sampled(self.collection)
            first = list(islice(parts, 1))
            self.decide_sharing(first)
            self._push_scored(chain(first, parts))
            return
        self.collection = self.ahead.turn()
        staleness = torch.tensor(float(self.collection.staleness))
        self.recorder.pending = m.merge(
            self.recorder.pending, self.collection.records, {"rollout/staleness": m.Mean.of(staleness)}
        )
        self.decide_sharing(self.collection.parts)
        self._push_scored(self.collection.parts)
        self.collection.parts = []

    def _push_scored(self, parts: Iterator[ScoredRollouts] | list[ScoredRollouts]) -> None:
        for rollouts, scores in parts:
            self.store.push(self.experience(rollouts, scores))

    def experience(self, rollouts: Rollouts, scores: Tensor) -> Batch:
        """Return what the algorithm's `experience` makes of scored rollouts, checked. ``scores``: [B] or [B, T]."""
        policy = self.view.models.unwrapped
        if isinstance(policy, Policy):  # the frozen layers run here, and not again
            rollouts = replace(rollouts, sequences=policy.through_trunk(rollouts.sequences))
        return checked_batch(self.algorithm, "experience", self.algorithm.experience(rollouts, scores))

    def decide_sharing(self, parts: Sequence[ScoredRollouts]) -> None:
        """Decide by the first of the ``parts`` whether the prompts of the collection are shared."""
        self.sharing.decide(parts[0][0].sequences if parts else None)

    def begin(self, rows: list[Row]) -> None:
        """Decide whether the output of frozen layers is kept, and by some pairs whether prompts are shared."""
        if self.algorithm.online:
            self.sampling.give_weights()
        else:
            self.trunk.begin(len(rows))
        pairs = "pairs" in self.algorithm.inputs and bool(rows)
        self.sharing.decide(self._encode_pairs(rows[:SEEN]).both if pairs else None)

    def _make_in_parts(self, rows: list[Row]) -> Batch:
        self.trunk.rows = len(self.store)
        made = super()._make_in_parts(rows)
        self.trunk.rows = 0
        return made

    # ------------------------------------------------------------------------------------------------ scored rollouts

    def sampled(self, collection: Collection) -> Iterator[ScoredRollouts]:
        """Sample and score a collection; yield its rollouts with their scores [B] or [B, T], in parts."""
        if self.algorithm.keeps or self.config.reward.on_nonfinite == "drop_row":
            yield from dynamic.sampled(self, collection)
            return
        rows, size = self._rows(collection), self.config.rollout.batch_size
        yield from self.scored([rows[start : start + size] for start in range(0, len(rows), size)])

    def scored(self, parts: list[list[Row]]) -> Iterator[ScoredRollouts]:
        """Sample and score the rows of each part that has any. All processes have equally many parts.

        Raises:
            TrainkitError: that of a process whose reward function or environment has failed; raised on all processes.
        """
        self.sampling.give_weights()
        clipped = list[ScoredRollouts]() if self.config.reward.on_nonfinite == "clip" else None
        if self._samples_as_usual():  # the engine can begin with what several calls of `sample` will ask
            self.sampling.begin([rows for rows in parts if rows], self.current.seen)
        for rows in parts:
            self.stop_if_asked()
            scored = self.parallel.sync_errors(partial(self._score_part, rows))
            if scored is None:
                continue
            if clipped is None:
                yield scored
            else:
                clipped.append(scored)
        self.scoring.agree_on_names()
        if clipped is not None:
            yield from self.scoring.clipped(clipped)

    def _score_part(self, rows: list[Row]) -> ScoredRollouts | None:
        """Sample and score rows, if there are any, unless the run is asked to end."""
        with self.interruptible(self.samples_alone):
            return self.algorithm.sample_and_score(rows) if rows else None
