"""The loop, on accelerate: written once, for every algorithm and whatever model it trains."""

from __future__ import annotations

import logging
import math
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from trainkit import metrics as m
from trainkit.backend import use_fast_exact_matmul
from trainkit.config import MethodConfig, TRLConfig
from trainkit.data import Batch, Row
from trainkit.errors import ConfigError, DataError, NonFiniteError
from trainkit.formats import Prompts, prompt_rows
from trainkit.functional import exact
from trainkit.pipeline import Pipeline, Stream, is_stream
from trainkit.plugins import hook_manager, is_installed, without_disabled
from trainkit.registry import check_brought, get_trainer
from trainkit.seeding import Seen, generator, global_rng
from trainkit.trainer import optim, provenance, run
from trainkit.trainer.base import BaseRLTrainer, Verdict
from trainkit.trainer.evaluation import held_out
from trainkit.trainer.launch import make_accelerator
from trainkit.trainer.lock import RunLock
from trainkit.trainer.stopping import Stop

log = logging.getLogger(__name__)

M = TypeVar("M", bound=MethodConfig)
B = TypeVar("B", bound=Batch)

MICROBATCH_TOKENS = {"cpu": 2048}
"""Tokens of a micro-batch where its rows are not set, by kind of device: more keep no core busier ..."""
OTHER_TOKENS = 32_768
"""... but do keep an accelerator so, within limits; memory grows with them."""


@dataclass
class Progress:
    """Where a run stands: all of the loop's own state, in plain numbers."""

    step: int = 0
    """Optimizer steps made, or left out by `judge`."""
    collection: int = 0
    """Collections finished."""
    cursor: int = 0
    """Rows of the stream used up by finished collections."""
    epoch: int = 0
    """Passes made over the present collection."""
    position: int = 0
    """Minibatches made in the present pass."""
    stopped: bool = False
    """`judge` has left out what remains of the present collection."""
    sampled: int = 0
    """Parts of collections made, which key the randomness of sampling; the same on all processes."""
    generated: int = 0
    """Calls of `generate`, which key theirs."""
    samples: int = 0
    """Rows of experience made so far, all processes."""
    tokens: int = 0
    """Units of averaging (`Batch.unit`: tokens, pairs, rows) in the steps so far, all processes."""
    seconds: float = 0.0
    """Wall time spent, over all resumed parts of the run."""
    best: float = -math.inf
    """Highest mean reward of an evaluation."""
    evaluated: int | None = None
    """The step of the last evaluation ..."""
    evaluation: dict[str, float] = field(default_factory=dict)
    """... and what it found."""
    sampler: str = ""
    """The class of the sampler that ..."""
    sampler_exact: bool | None = None
    """... gives the policy's own numbers, or not, as its first collection showed; None before that."""


class AcceleratedLoop(BaseRLTrainer[M]):
    """Everything about training that is neither the algorithm nor the kind of model.

    `AccelerateRLTrainer` adds what language models need. A trainer of other models derives from this class and says
    how they are read and written: `get_arch`, `make_experience`, `evaluation`, `write_model`, and what of
    `fit_prompts`, `read_samples` and `default_prompts` it needs.

    Nothing heavy happens at construction: model and optimizer are made on first use, after the data were checked.

    Args:
        config: the run's configuration.
        model: a live model, instead of ``config.model.model_path``; it is trained in place.
        callbacks: objects with ``@hookimpl`` methods.
        allow_drift: resume also where settings differ on which the course of training depends.
        **kwargs: those of `BaseRLTrainer`.

    Raises:
        ConfigError, PluginError: at the door, before a model is loaded.
    """

    @classmethod
    def tiny_arguments(cls) -> dict[str, Any]:
        """Arguments of `trainkit.train` of which `trainkit.testing.trainers.tiny_trainer` makes a trainer.

        For language models those that differ from what suits most of them.
        """
        return {}

    @classmethod
    def tiny_contexts(cls) -> dict[str, dict[str, Any]]:
        """Settings, by field of the method, under which the field matters in a tiny run; most fields need none.

        They are dotted: ``{"horizon": {"method.target": 0.01}}``. The field's own value there is the one that the kit
        compares with the usual one.
        """
        return {}

    def __init__(
        self,
        config: TRLConfig[M],
        *,
        model: Any = None,
        callbacks: Iterable[object] = (),
        allow_drift: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(config, **kwargs)
        self.accelerator: Accelerator = make_accelerator(config.train.mixed_precision)
        self._leave_out_disabled()
        config = self.config
        use_fast_exact_matmul(self.accelerator.device)
        self._check_split()
        if config.train.save_best and not self.online:
            raise ConfigError(
                f"train.save_best goes by the reward of evaluations, and {config.method.name!r} has none; leave it out"
            )
        optim.check(config)
        self.live_model = model
        self.hooks = hook_manager(self._plugin_names(), [*callbacks, *run.trackers(config, self.accelerator)])
        check_brought(self._plugin_names(), self.hooks)
        self.progress = Progress()
        self.unit = "tokens"
        """What ``progress.tokens`` counts, as the batch of the last step says."""
        self.pipeline: Pipeline | Stream | None = None
        self.eval_rows: list[Row] = []
        self.eval_samples: list[Row] = []
        self.held_out: Batch | None = None
        """The experience of `eval_samples`, made at the first evaluation."""
        self.run_dir: Path | None = None
        self.allow_drift = allow_drift
        self.resumed: list[str] = []
        """What to tell people about the checkpoint that the run goes on from."""
        self._lock: RunLock | None = None
        self._stop = Stop()
        self._pending: m.Metrics = {}
        self._rollouts: list[Any] = []
        self._seen: Seen = Counter()
        self._draws: int | None = None  # of the part of a collection that is being made
        self._clock = time.perf_counter()

    @property
    def needs_reference(self) -> bool:
        """Whether the algorithm compares with a frozen copy of the model as it was before the first update."""
        return False

    # ------------------------------------------------------------------------------------------------ construction

    def _check_split(self) -> None:
        world, config = self.accelerator.num_processes, self.config
        if config.train.batch_size % world:
            raise ConfigError(
                f"train.batch_size is {config.train.batch_size}, which {world} processes cannot share equally; "
                "give a multiple"
            )
        k = self.samples_per_prompt
        if config.rollout.num_rollouts % (world * k):
            raise ConfigError(
                f"rollout.num_rollouts is {config.rollout.num_rollouts}, which is not {k} per prompt for as many "
                f"prompts in each of {world} processes; give a multiple of {world * k}"
            )

    def _leave_out_disabled(self) -> None:
        """The configuration, and so its record, without the plugins that the run goes on without."""
        usable, told = without_disabled(self.config.plugins)
        if usable != self.config.plugins:
            self.config = self.config.model_copy(update={"plugins": usable})
        for message in told if self.accelerator.is_main_process else ():
            log.warning("%s", message)

    def _plugin_names(self) -> list[str]:
        name = self.config.method.name
        own = [name] if get_trainer(name) is type(self) and is_installed(name, type(self).__module__) else []
        return [*own, *self.config.plugins]

    @cached_property
    def makers(self) -> list[provenance.Maker]:
        """trainkit and the plugins of the run, with distributions and versions; for checkpoints and model cards."""
        return provenance.makers(self.config.method.name, self._plugin_names())

    @cached_property
    def unwrapped(self) -> Any:
        """The trainable model itself, outside whatever accelerate wraps it in."""
        with global_rng(self.config.train.seed, "model", device=self.accelerator.device):
            return self.get_arch(self.config)

    @cached_property
    def _prepared(self) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        model = self.unwrapped.to(self.accelerator.device)
        if self.accelerator.num_processes > 1:  # as DDP will do, but before the reference is made
            broadcast([tensor.data for tensor in (*model.parameters(), *model.buffers())])
        reference = self.make_reference(model) if self.needs_reference else None  # before the weights can move
        optimizer = optim.make_optimizer(self.config.optimizer, model, scaled=self.accelerator.scaler is not None)
        return (*self.accelerator.prepare(model, optimizer), reference)

    @property
    def policy(self) -> nn.Module:
        """The trainable model as `loss` must call it, so that gradients are synchronised."""
        return self._prepared[0]

    @property
    def optimizer(self) -> Any:
        """The prepared optimizer."""
        return self._prepared[1]

    def make_reference(self, model: Any) -> Any:
        """A frozen copy of ``model`` as it is now, with its state under ``policy``."""
        raise NotImplementedError(f"{type(self).__name__} needs a reference; write make_reference")

    @property
    def reference(self) -> Any:
        """The model as it was before the first update, frozen; for algorithms with ``needs_reference``."""
        reference = self._prepared[2]
        if reference is None:
            raise AttributeError(f"{type(self).__name__} keeps no reference; set needs_reference = True in the class")
        return reference

    @cached_property
    def start(self) -> str | None:
        """What identifies the weights that the run started from, which checkpoints do not hold; it never changes."""
        return run.fingerprint_start(self)

    @cached_property
    def scheduler(self) -> LRScheduler:
        """The learning-rate schedule, over the run's steps."""
        if not self.total_steps and self.config.scheduler.name != "constant":
            raise ConfigError(
                f"the schedule {self.config.scheduler.name!r} ends at the run's last step, which is not known; "
                "set train.total_steps"
            )
        inner = getattr(self.optimizer, "optimizer", self.optimizer)  # accelerate's wrapper is no torch optimizer
        return optim.make_scheduler(self.config.scheduler, inner, self.total_steps)

    # -------------------------------------------------------------------------------------------------------- data

    def add_prompt_pipeline(self, prompts: Pipeline | Prompts) -> None:
        """Take the prompts to train on: a pipeline, or whatever `trainkit.train` takes. All are checked now."""
        if not isinstance(prompts, Pipeline):
            prompts = Pipeline(self.read_prompts(prompts), seed=self.config.train.seed)
        self.pipeline = prompts

    def add_samples(self, samples: Iterable[Any], rewards: Iterable[Any] | None = None) -> None:
        """Take the samples to train on offline. All are checked now; those of a stream as they are read.

        Raises:
            DataError: one of them cannot be used.
            ConfigError: samples are a stream, and the settings or other arguments need its length.
        """
        if is_stream(samples):
            self._add_stream(samples, rewards)
        else:
            self.pipeline = Pipeline(self.arrange(self.read_samples(samples, rewards)), seed=self.config.train.seed)

    def _add_stream(self, samples: Iterable[Any], rewards: Any) -> None:
        train = self.config.train
        if rewards is not None or train.total_steps is None or train.epochs is not None:
            raise ConfigError(
                "samples is a stream, whose length is not known: set train.total_steps, leave out train.epochs, and "
                "give rewards within its rows, as the label of unpaired preference. If it is small enough to be read "
                "before training, give list(samples)"
            )
        plain = getattr(self.arrange, "__func__", None) is AcceleratedLoop.arrange
        stream = Stream(
            samples, lambda rows, first: self.arrange(self.read_samples(rows, first=first)), one_to_one=plain
        )
        stream.check()
        self.pipeline = stream

    def add_eval_pipeline(self, prompts: Prompts) -> None:
        """Take the prompts of evaluations."""
        self.eval_rows = self.read_prompts(prompts)

    def add_eval_samples(self, samples: Iterable[Any], rewards: Iterable[Any] | None = None) -> None:
        """Take held-out samples, over which evaluations measure the loss and what belongs to it."""
        if self.online:
            raise ConfigError(
                f"eval_samples are measured by the loss, and {self.config.method.name!r} learns from what it samples "
                "itself; give eval_prompts"
            )
        rows, world = self.read_samples(samples, rewards), self.accelerator.num_processes
        if len(rows) < world:
            raise DataError(f"there are {len(rows)} eval_samples for {world} processes; give at least one for each")
        self.eval_samples, self.held_out = rows, None

    def read_prompts(self, prompts: Prompts) -> list[Row]:
        """Prompts as rows that can be used, all of them checked."""
        return self.fit_prompts(prompt_rows(prompts))

    def fit_prompts(self, rows: list[Row]) -> list[Row]:
        """The rows of prompts that can be used, all of them checked."""
        return rows

    def arrange(self, rows: list[Row]) -> list[Row]:
        """Samples as the rows that are shuffled and stepped over: as they are, or several in one."""
        return rows

    def read_samples(
        self, samples: Iterable[Any], rewards: Iterable[Any] | None = None, *, first: int = 0
    ) -> list[Row]:
        """Samples to learn from as rows, all of them checked; errors count them from ``first`` on."""
        raise NotImplementedError(f"{type(self).__name__} learns from {' and '.join(self.inputs)}, not from samples")

    def default_prompts(self) -> list[Any]:
        """The prompts to train on where none are given.

        Raises:
            DataError: there are none.
        """
        raise DataError(f"{self.config.method.name!r} needs prompts; give prompts")

    # -------------------------------------------------------------------------------------------- the loop: learn

    @cached_property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run, if none are left out by `Verdict.STOP`."""
        train, collections = self.config.train, self.collections
        if collections is None or self.passes is None:
            return train.total_steps or 0
        steps = collections * self.passes * math.ceil(self.experience_rows / train.batch_size)
        return steps if train.total_steps is None else min(steps, train.total_steps)

    @property
    def passes(self) -> int | None:
        """How often one collection of experience is gone over; None: until the run ends."""
        return 1 if isinstance(self.pipeline, Stream) else super().passes

    @property
    def collects_once(self) -> bool:
        """Whether there is one collection, of the whole dataset."""
        return not self.online and isinstance(self.pipeline, Pipeline)

    @property
    def collections(self) -> int | None:
        """Collections that the run's epochs are worth; None: as many as `total_steps` needs."""
        if not isinstance(self.pipeline, Pipeline):
            return None
        if self.collects_once:
            return 1
        return None if self.epochs is None else math.ceil(self.epochs * len(self.pipeline) / self.collection_rows)

    @property
    def done(self) -> bool:
        """Whether the run's steps are made, or its epochs are used up: with early stopping they are in fewer steps."""
        at, collections = self.progress, self.collections
        used_up = collections is not None and at.collection + self._collection_used >= collections
        return used_up or at.step >= self.total_steps

    @property
    def _collection_used(self) -> bool:
        return self.progress.stopped or (self.passes is not None and self.progress.epoch >= self.passes)

    def learn(self) -> None:
        """Train until `done`, from a checkpoint if the config says so.

        Raises:
            DataError: there is nothing to learn from.
            NonFiniteError: a loss or gradient is not finite; the weights have not moved.
            RewardError: the reward function failed.
            CheckpointError: a checkpoint cannot be written, or resumed from with this config.
            SystemExit: 143, after SIGTERM and a checkpoint.
        """
        missing = [] if self.pipeline is not None else [self.inputs[-1]]
        missing += ["reward_fn"] if self.online and self.reward_fn is None else []
        if missing:
            raise DataError(
                f"{type(self).__name__} learns from {' and '.join(self.inputs)}; give {' and '.join(missing)}"
            )
        with run.running(self):
            if run.finished(self):
                return
            if self.progress.step == 0:
                self._evaluate_if(self.total_steps > 0)
            for batch in self._minibatches():
                self._train_on(batch)
                self._evaluate_if(self.done or _due(self.progress.step, self.config.train.eval_interval))
                run.save_if_due(self, self.done)
                if self.done:
                    break
                if run.asked_to_stop(self):
                    run.stop(self)
            run.export(self)

    def begin(self) -> None:
        """Make the run directory, or go on from a checkpoint, as `learn` does first; only the first call does."""
        run.begin(self)

    def _minibatches(self) -> Iterator[Batch]:
        """The minibatches of the run from where it stands; `progress` counts one as made when it is handed out."""
        at = self.progress
        while not self.done:
            if not len(self.store):
                self.collect()
            while not self._collection_used:
                yield from self._one_pass()
            at.cursor += self.collection_rows
            self._next_collection()

    def _next_collection(self) -> None:
        at = self.progress
        self.store.clear()
        at.collection, at.epoch, at.position, at.stopped = at.collection + 1, 0, 0, False

    def _one_pass(self) -> Iterator[Batch]:
        at, seed = self.progress, self.config.train.seed
        size = self.config.train.batch_size // self.accelerator.num_processes
        order = generator(seed, "order", at.collection, at.epoch)
        for batch in self.store.batches(size, order, start=at.position):
            if at.stopped:
                return
            at.position += 1
            if at.position * size >= len(self.store):
                at.epoch, at.position = at.epoch + 1, 0
            yield batch

    @property
    def collection_rows(self) -> int:
        """Rows of the stream that one collection uses, all processes together."""
        if not self.collects_once:
            return self.config.rollout.num_rollouts // self.samples_per_prompt
        assert isinstance(self.pipeline, Pipeline)
        world = int(self.accelerator.num_processes)
        return math.ceil(len(self.pipeline) / world) * world  # as many for each, the first ones once more if need be

    @property
    def experience_rows(self) -> int:
        """Rows of experience that one collection makes, or at most makes, all processes together."""
        return self.collection_rows * self.samples_per_prompt

    def collect(self) -> None:
        """Fill the store with one collection of experience, and tell the hooks."""
        started = time.perf_counter()
        self.fill_store()
        self._time("time/collect", started)
        self.hooks.hook.on_experience(trainer=self, experience=self.store.experience, rollouts=self._rollouts)

    def fill_store(self) -> None:
        """Fill the store with one collection of experience."""
        assert self.pipeline is not None
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        taken = self.pipeline.take(self.progress.cursor, self.collection_rows, rank=rank, world=world)
        rows = [row for row in taken for _ in range(self.samples_per_prompt)]
        self._rollouts, self._seen = [], Counter()
        size, sampled = self.config.rollout.batch_size, self.progress.sampled
        self.unwrapped.eval()
        with torch.no_grad(), self.accelerator.autocast():  # policy, sampler and reference at the loss's precision
            for start in range(0, len(rows), size):
                if run.asked_to_stop(self):  # the collection is made again when the run is resumed
                    self.store.clear()
                    self.progress.sampled = sampled
                    run.stop(self)
                with self._part_of_collection():
                    self.store.push(self.make_experience(rows[start : start + size]))
            self.store.experience = self.prepare_experience(self.store.experience)
        self.progress.samples += len(self.store) * world

    @contextmanager
    def _part_of_collection(self) -> Iterator[None]:
        self._draws = 0
        try:
            yield
        finally:
            self._draws = None
        self.progress.sampled += 1

    def next_draw(self) -> tuple[int, ...]:
        """Keys of the next draw for training.

        They count the parts of collections and the draws within a part, so that a process which draws less often in a
        part than others, or not at all, is in the next one where they are. Outside of `make_experience` a draw counts
        as a part, and all processes should draw alike.
        """
        at, before = self.progress, self._draws
        if before is None:
            at.sampled += 1
            return (at.sampled - 1,)
        self._draws = before + 1
        return (at.sampled, before) if before else (at.sampled,)

    def _train_on(self, batch: Batch) -> None:
        started = time.perf_counter()
        self.record(self.update(batch))
        self._time("time/update", started)
        self._log()
        self.hooks.hook.on_step(trainer=self, step=self.progress.step)

    def update(self, batch: Batch) -> m.Metrics:
        """One optimizer step on ``batch``: the whole of it, for every algorithm.

        The gradient is that of the mean over the batches of all processes, however they are split (law 3). A step that
        `judge` leaves out, or that has nothing to average over, is left out on all of them; it counts, and the schedule
        moves on.

        Raises:
            NonFiniteError: the loss or the gradient is not finite; neither weights nor optimizer have moved.
        """
        self.unit = batch.unit
        at, scheduler = self.progress, self.scheduler  # the schedule must exist before the optimizer steps
        weight = self.reduce(batch.weight.to(self.accelerator.device))
        found, verdict = {}, Verdict.SKIP
        if weight > 0:
            found = self._gradient(batch, weight)
            verdict = self._judged(found)
        found |= self._make_step(found) if verdict is Verdict.STEP else {"train/skipped": m.Mean.of(torch.ones(()))}
        self.optimizer.zero_grad()
        optim.advance(scheduler)
        self.unwrapped.eval()
        at.step, at.tokens, at.stopped = at.step + 1, at.tokens + int(weight), verdict is Verdict.STOP
        if verdict is Verdict.STEP:
            self.after_step()
        return {**found, "train/lr": m.Mean.of(torch.tensor(self._lr, dtype=torch.float64))}

    def _gradient(self, batch: Batch, weight: Tensor) -> m.Metrics:
        """Leave the gradient of the mean over ``weight`` units, those of all processes, and give the loss's metrics."""
        device, rank = self.accelerator.device, self.accelerator.process_index
        self.unwrapped.eval()
        with torch.no_grad(), self.accelerator.autocast():
            micros = self.micro_batches(self.prepare_step(batch))
        share = weight / self.accelerator.num_processes  # because gradients are averaged over processes
        found: m.Metrics = {}
        self.policy.train()
        with global_rng(self.config.train.seed, "dropout", self.progress.step, rank, device=device):
            for index, micro in enumerate(micros):
                with self._synchronised(last=index == len(micros) - 1):
                    found = m.merge(found, self._backward(micro.to(device), share))
        return found

    def _judged(self, found: m.Metrics) -> Verdict:
        """`judge`'s verdict on metrics of all processes, so that all hear the same; who does not judge pays nothing."""
        if not self._judges:
            return Verdict.STEP
        return self.judge(m.compute(found, self.reduce))

    @property
    def _judges(self) -> bool:
        return getattr(self.judge, "__func__", None) is not BaseRLTrainer.judge

    def _make_step(self, found: m.Metrics) -> m.Metrics:
        """Clip the gradient and step; ``train/skipped`` where a step can be left out, by `judge` or fp16's scaler."""
        norm = self._clip(self.policy)
        self._refuse_non_finite(found, norm)
        self.optimizer.step()
        made: m.Metrics = {"train/grad_norm": m.Mean.of(norm)}
        if self._judges or self.accelerator.scaler is not None:
            skipped = self.accelerator.optimizer_step_was_skipped  # by the scaler, on overflow
            made["train/skipped"] = m.Mean.of(torch.tensor(float(skipped)))
        return made

    def micro_batches(self, batch: B) -> list[B]:
        """What goes through the model at a time."""
        tokens = MICROBATCH_TOKENS.get(self.accelerator.device.type, OTHER_TOKENS)
        return batch.split(self.config.train.microbatch_size, tokens)

    def in_micro_batches(self, batch: B, read: Callable[[B], Tensor]) -> Tensor:
        """``read(micro-batch [b]) -> [b, *]`` of a whole batch [B], in the order of its rows. -> [B, *]."""
        tokens = MICROBATCH_TOKENS.get(self.accelerator.device.type, OTHER_TOKENS)
        groups = batch.groups(self.config.train.microbatch_size, tokens)
        found = torch.cat([read(batch.select(rows)) for rows in groups])
        return found[torch.cat(groups).argsort().to(found.device)]

    def measure(self, micro: Batch) -> tuple[Tensor, m.Metrics]:
        """The algorithm's loss [] and its metrics, the loss itself among them."""
        with self.accelerator.autocast():
            loss, found = self.loss(micro)
        weight = exact(micro.weight.to(loss.device))
        return loss, {**found, "loss/total": m.Mean(exact(loss.detach()) * weight, weight)}

    def _backward(self, micro: Batch, share: Tensor) -> m.Metrics:
        loss, found = self.measure(micro)
        self.accelerator.backward(loss * micro.weight.to(share.device) / share)
        return found

    def _synchronised(self, last: bool) -> Any:
        """Gradients are exchanged between processes with the last micro-batch only."""
        return torch.enable_grad() if last else self.accelerator.no_sync(self.policy)

    def _clip(self, policy: nn.Module) -> Tensor:
        limit = self.config.train.max_grad_norm
        norm = self.accelerator.clip_grad_norm_(policy.parameters(), math.inf if limit is None else limit)
        return torch.as_tensor(norm).detach()

    def _refuse_non_finite(self, found: m.Metrics, norm: Tensor) -> None:
        loss = self.reduce(torch.stack(found["loss/total"].tensors()))
        overflow = self.accelerator.scaler is not None  # fp16: the scaler skips the step and lowers its scale
        if bool(loss.isfinite().all()) and (bool(norm.isfinite()) or overflow):
            return
        named = [
            name for name, p in self.unwrapped.named_parameters() if p.grad is not None and not p.grad.isfinite().all()
        ]
        self.optimizer.zero_grad()
        raise NonFiniteError(
            f"step {self.progress.step + 1}: the loss is {float(loss[0] / loss[1])} and the gradient norm {float(norm)}"
            f"{'; not finite in ' + ', '.join(named[:3]) if named else ''}. The weights have not moved. Look at the "
            "rewards, lower optimizer.lr, or set train.max_grad_norm"
        )

    @property
    def _lr(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    # ----------------------------------------------------------------------------------------- for the algorithm

    def record(self, metrics: m.Metrics) -> None:
        """Add metrics to those that are logged with the next step."""
        self._pending = m.merge(self._pending, metrics)

    def reduce(self, x: Tensor) -> Tensor:
        """``x`` summed over all processes, on the device it came from."""
        if self.accelerator.num_processes == 1:
            return x
        total: Tensor = self.accelerator.reduce(x.to(self.accelerator.device), "sum")
        return total.to(x.device)

    # ------------------------------------------------------------------------------------- evaluating and logging

    def evaluate(self) -> dict[str, float]:
        """Measure the model on the evaluation prompts and the held-out samples; training is not disturbed.

        Returns:
            Means by name: ``eval/reward``, ``eval/<metric>``, ``eval/length`` of responses to the prompts, where with
            a swept setting each name ends in ``@setting=value``; ``eval/loss/total`` and the algorithm's other metrics
            of the samples.

        Raises:
            DataError: there is nothing to measure on.
        """
        if not self.eval_rows and not self.eval_samples:
            raise DataError(
                "there are no evaluation prompts and no held-out samples; give eval_prompts or eval_samples, or call "
                "add_eval_pipeline(prompts)"
            )
        self.policy  # noqa: B018  (made by all processes together, also where one has no rows)
        found, samples = self.evaluation() if self.eval_rows else ({}, [])
        found |= held_out(self) if self.eval_samples else {}
        self.progress.evaluated, self.progress.evaluation = self.progress.step, dict(found)
        if self.accelerator.is_main_process:
            self.hooks.hook.log_metrics(trainer=self, step=self.progress.step, metrics=dict(found))
        self.hooks.hook.on_evaluate(trainer=self, step=self.progress.step, metrics=dict(found), samples=samples)
        return found

    def evaluation(self) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Means over the evaluation prompts by name, ``eval/...``, and a record of each response."""
        raise NotImplementedError(f"{type(self).__name__} cannot evaluate on prompts; write evaluation")

    def _evaluate_if(self, due: bool) -> None:
        if due and (self.eval_rows or self.eval_samples) and self.config.train.eval_interval:
            run.keep_best(self, self.evaluate())

    def _log(self) -> dict[str, float]:
        now = time.perf_counter()
        self.progress.seconds, self._clock = self.progress.seconds + now - self._clock, now
        found = m.compute(self._pending, self.reduce)
        self._pending = {}
        if self.accelerator.is_main_process:
            self.hooks.hook.log_metrics(trainer=self, step=self.progress.step, metrics=dict(found))
        return found

    def _time(self, name: str, started: float) -> None:
        self.record({name: m.Mean.of(torch.tensor(time.perf_counter() - started, device=self.accelerator.device))})

    # ------------------------------------------------------------------------------------------------------ saving

    def save_pretrained(self, directory: str | Path | None = None) -> Path:
        """Export the model; to the run directory without an argument."""
        return run.export(self, directory)

    @abstractmethod
    def write_model(self, building: Path, target: Path) -> None:
        """Write an export into the directory ``building``, which then becomes ``target``."""

    def model_card(self) -> dict[str, str]:
        """What the model card of an export says of this kind of model.

        ``library_name`` and ``pipeline_tag`` are those of the hub; ``loading`` is Python code that loads what
        ``directory`` names. Each may be missing.
        """
        return {}

    def save(self, directory: str | Path | None = None) -> Path:
        """Write a checkpoint now; to the run directory without an argument."""
        return run.save(self, None if directory is None else Path(directory))

    def load(self, directory: str | Path) -> None:
        """Take over everything from a checkpoint directory, or from the newest whole one under a directory."""
        run.load(self, Path(directory))

    def loop_state(self) -> dict[str, Any]:
        """Everything that training on depends on beside the model's weights and the store."""
        return {
            "progress": asdict(self.progress),
            "method": self.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "scaler": None if self.accelerator.scaler is None else self.accelerator.scaler.state_dict(),
        }

    def load_loop_state(self, state: dict[str, Any]) -> None:
        """Take over what `loop_state` gave."""
        optim.load(self.optimizer, self.scheduler, state)
        if self.accelerator.scaler is not None and state["scaler"] is not None:
            self.accelerator.scaler.load_state_dict(state["scaler"])
        self.load_state_dict(state["method"])
        self.progress = Progress(**state["progress"])


def _due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0
