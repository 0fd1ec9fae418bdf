"""The training loop on accelerate: one implementation for every algorithm and every kind of model."""

from __future__ import annotations

import logging
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from trainkit import metrics as m
from trainkit.config import MethodConfig, TRLConfig
from trainkit.data import Batch, Pipeline, Prompts, Row, Stream, is_stream, prompt_rows
from trainkit.data.columns import without
from trainkit.data.pipeline import EqualSidesError
from trainkit.errors import ConfigError, DataError, describe
from trainkit.models.backend import use_fast_and_exact_kernels
from trainkit.models.fitting import RowLimit
from trainkit.plugins import get_trainer, hook_manager
from trainkit.plugins.discovery import is_installed
from trainkit.plugins.hooks import entry_name
from trainkit.plugins.registry import is_tracker
from trainkit.runs import Record, hub
from trainkit.runs.health import Health
from trainkit.runs.history import History, overview, watched
from trainkit.runs.identity import Identity
from trainkit.runs.parallel import Parallel
from trainkit.runs.progress import Progress
from trainkit.runs.run import Run
from trainkit.runs.trackers import default_trackers
from trainkit.trainer import offloading, optim
from trainkit.trainer.base import BaseRLTrainer, overridden
from trainkit.trainer.collect import Collector
from trainkit.trainer.evaluate import Evaluator
from trainkit.trainer.launch import default_precision, make_accelerator, with_precision
from trainkit.trainer.minibatches import LastStep
from trainkit.trainer.models import Models
from trainkit.trainer.plan import Plan
from trainkit.trainer.recording import Recorder
from trainkit.trainer.returns import checked_batch, checked_metrics
from trainkit.trainer.settings import check_run, without_disabled_plugins
from trainkit.trainer.sharding import Sharding, make_sharding
from trainkit.trainer.update import Updater

M = TypeVar("M", bound=MethodConfig)
B = TypeVar("B", bound=Batch)
T = TypeVar("T")

log = logging.getLogger(__name__)


class AcceleratedLoop(BaseRLTrainer[M]):
    """The parts of training that depend neither on the algorithm nor on the kind of model.

    `AccelerateRLTrainer` adds what language models need. A trainer of other models derives from this class and
    implements `get_arch`, `make_experience`, `loss` and `write_model`, and those of `evaluation`, `fit_prompts`,
    `read_samples` and `default_prompts` that it needs.

    A trainer is composed of parts: `plan`, `models`, `updater`, `collector` and `evaluator`, over `parallel`,
    `progress` and `store`. Construction is cheap: the model and the optimizer are made on first use, after the data
    have been checked.

    Args:
        config: the run's configuration.
        model: a live model, instead of ``config.model.model_path``; it is trained in place.
        reference: a live model to compare with, instead of the trained model's start; it is frozen in place.
        callbacks: objects with ``@hookimpl`` methods.
        allow_drift: resume even if settings that affect training differ from those of the checkpoint.
        optimizer: an optimizer, or a function that makes it, instead of that of the configuration.
        scheduler: the same for the learning-rate schedule.
        **kwargs: those of `BaseRLTrainer`.

    Raises:
        ConfigError, PluginError: raised at construction, before a model is loaded.
    """

    collector_class: ClassVar[type[Collector]] = Collector
    """The class of `collector`; a trainer of other models may derive its own."""
    low_by_default: ClassVar[bool] = False
    """Whether the weights may be in bfloat16, with float32 copies in the optimizer, where `model.dtype` is not set."""

    def __init__(
        self,
        config: TRLConfig[M],
        *,
        model: Any = None,
        reference: Any = None,
        callbacks: Iterable[object] = (),
        allow_drift: bool = False,
        optimizer: torch.optim.Optimizer | optim.MakeOptimizer | None = None,
        scheduler: LRScheduler | optim.MakeScheduler | None = None,
        **kwargs: Any,
    ) -> None:
        given = model is not None or optimizer is not None
        open_dtype = config.model.dtype is None
        config = with_precision(config, default_precision(), low=self.low_by_default, given=given)
        precision = config.train.mixed_precision or "no"
        super().__init__(config, **kwargs)
        self.accelerator = make_accelerator(precision, config.train.timeout)
        self.run = Run(self, allow_drift=allow_drift)
        """The run: its directory, checkpoints, exports, signals."""
        sharding = make_sharding(config.train.sharding, self.accelerator)
        self.parallel = Parallel(self.accelerator, self.run.stop, sharding)
        """The processes of the run, and how they divide the model."""
        self.config = config = without_disabled_plugins(self.config, logs=self.parallel.is_main)
        if open_dtype and config.model.dtype == "bfloat16" and self.parallel.is_main:
            log.info("weights are in bfloat16, with float32 copies in the optimizer; to change that, set model.dtype")
        use_fast_and_exact_kernels(self.parallel.device, precision, deterministic=config.train.deterministic)
        self.sharding.check(config)
        check_run(config)
        if config.train.push_to_hub is not None and self.parallel.is_main:
            hub.check_repo(config.train.push_to_hub)
        self.live_model = model
        self.chosen_reference: Any = self._choose_reference(reference)
        """The reference that the user chose, a model object or what names one; None: the model's start."""
        own = self._own_plugin
        trackers = [entry for entry in config.train.trackers if is_tracker(entry_name(entry))]
        others = [entry for entry in config.train.trackers if entry not in trackers]
        self.hooks = hook_manager(
            [*own, *config.plugins, *(trackers if self.parallel.is_main else [])],
            [*callbacks, *(default_trackers(others) if self.parallel.is_main else [])],
        )
        self.identity = Identity(self, [*own, *map(entry_name, [*config.plugins, *trackers])])
        """What the run is made of, and when it began."""
        self.pipeline: Pipeline | Stream | None = None
        self.eval_rows: list[Row] = []
        self.eval_samples: list[Row] = []
        self.run_dir: Path | None = None
        self.progress = Progress()
        self.plan = Plan(self, self.parallel, self.progress, lambda: self.pipeline)
        """How many rows, collections and steps the run has."""
        self.models = self._make_models(optimizer, scheduler)
        """The policy, its reference and further frozen models, the optimizer and the schedule."""
        self.recorder = Recorder()
        """The metrics of the next line of the log."""
        self.updater = Updater(
            config.train, self, self.models, self.parallel, self.recorder, self.progress, self.inference
        )
        """What makes the optimizer steps."""
        self.last_step = LastStep(self.progress, self.store, self.updater)
        """The state after the last finished step, to which an error returns."""
        self._make_parts()

    def _make_models(self, optimizer: Any, scheduler: Any) -> Models:
        size, alone = self.config.train.microbatch_size, self.parallel.world == 1
        usual = alone and self.sharding.repeats and self.parallel.device.type != "cpu"
        auto = size == "auto" or (size is None and usual)
        return Models(
            self.config,
            self.parallel,
            live=lambda: self.live_model,
            row_limit=RowLimit(lambda: self.progress) if auto else None,
            optimizer=optimizer,
            scheduler=scheduler,
            make_policy=lambda config: self.get_arch(config),
            finish=lambda policy: self._finish(policy),
            make_reference=lambda policy: self._make_reference(policy),
            before_dividing=lambda reference: self._before_dividing(reference),
            copied=lambda: self._copies_model,
            total_steps=lambda: self.total_steps,
        )

    def _make_parts(self) -> None:
        """Make the parts that depend on the kind of model. Overridden as a whole."""
        self.health = Health(half_precision=self.accelerator.mixed_precision != "no")
        """What watches the metrics."""
        self.collector = self.collector_class(self, self, self.inference, self._before_offloading)
        """What fills the store."""
        self.evaluator = Evaluator(self, self, self.inference, self._sampling_model)
        """What measures the model."""

    def _before_offloading(self) -> None:
        """Make what reads the reference later."""
        self.evaluator.prepare_held_out()
        self.identity.start  # noqa: B018  (checkpoints have its fingerprint, which reads all weights)

    def _choose_reference(self, live: Any) -> Any:
        """Return the live reference, or what the configuration names as the reference; None if neither is given.

        Raises:
            ConfigError: both are given, or one, and the algorithm has no reference that can be chosen.
        """
        path, name = self.config.model.reference_path, self.config.method.name
        if live is not None and path is not None:
            raise ConfigError(f"a reference is given, and model.reference_path is {path!r}; give one of the two")
        chosen = path if live is None else live
        if chosen is None:
            return None
        given = f"{'model.reference_path' if live is None else 'reference'} is given"
        if not self.needs_reference:
            raise ConfigError(f"{given}, and {name!r} with these settings compares with no reference; remove it")
        if type(self)._load_reference is AcceleratedLoop._load_reference:
            raise ConfigError(f"{given}, and {name!r} can only compare with the start of its model; remove it")
        return chosen

    @property
    def _own_plugin(self) -> list[str]:
        name = self.config.method.name
        return [name] if get_trainer(name) is type(self) and is_installed(name, type(self).__module__) else []

    # ----------------------------------------------------------------------------------------------------------- data

    def add_prompt_pipeline(self, prompts: Pipeline | Prompts) -> None:
        """Set the prompts to train on: a pipeline, or what `trainkit.train` takes. All are checked now."""
        if not isinstance(prompts, Pipeline):
            if self.online and "samples" in self.inputs:
                raise ConfigError(
                    f"prompts are given, and {self.config.method.name!r} samples responses to the prompts of samples; "
                    "give samples (add_samples)"
                )
            prompts = Pipeline(self.read_prompts(prompts), seed=self.config.train.seed)
        self.pipeline = prompts

    def add_samples(self, samples: Iterable[Any], rewards: Iterable[Any] | None = None) -> None:
        """Set the samples to train on offline. All are checked now; samples of a stream are checked as they are read.

        Raises:
            DataError: one of them cannot be used.
            ConfigError: ``samples`` is a stream, and the settings or other arguments need its length.
        """
        if is_stream(samples):
            self.pipeline = self._as_stream(samples, rewards)
        else:
            self.pipeline = Pipeline(self.arrange(self.read_samples(samples, rewards)), seed=self.config.train.seed)

    def _as_stream(self, samples: Iterable[Any], rewards: Any) -> Stream:
        train = self.config.train
        if rewards is not None or train.total_steps is None or train.epochs is not None:
            raise ConfigError(
                "samples is a stream, whose length is not known: set train.total_steps, omit train.epochs, and give "
                "rewards within its rows, as the label of unpaired preference. If it is small enough to be read "
                "before training, give list(samples)"
            )

        def read(rows: list[Any], first: int) -> list[Row]:
            with suppress(EqualSidesError):  # it is logged; others follow
                return self.arrange(self.read_samples(rows, first=first))
            return []

        stream = Stream(samples, read, one_to_one=self._one_to_one)
        stream.check()
        return stream

    @property
    def _one_to_one(self) -> bool:
        """Whether each sample is one row."""
        return not overridden(self.arrange, AcceleratedLoop.arrange) and not {"pairs", "prompts"} & {*self.inputs}

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
        self.eval_samples, self.evaluator.held_out = rows, None

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
    def _missing_inputs(self) -> list[str]:
        """What is missing of what the algorithm learns from."""
        data = [] if self.pipeline is not None else ["samples" if "samples" in self.inputs else "prompts"]
        return data + (["reward_fn"] if self.rewarded and self.reward_fn is None else [])

    @property
    def passes(self) -> int | None:
        """How many times one collection of experience is iterated over; None: until the run ends."""
        return 1 if self.online or isinstance(self.pipeline, Stream) else self.plan.epochs

    @property
    def collection_rows(self) -> int:
        """Rows of the dataset that one collection uses, over all processes."""
        return self.plan.collection_rows

    @property
    def experience_rows(self) -> int:
        """Rows of experience that one collection makes, at most, over all processes."""
        return self.collection_rows * self.samples_per_prompt

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run, if `Verdict.STOP` does not shorten a collection; 0: not known."""
        return self.plan.total_steps

    @property
    def done(self) -> bool:
        """Whether the run's steps are made, its epochs are used up, or `stop` has ended it."""
        return self.plan.done

    # ------------------------------------------------------------------------------------------------------- training

    def learn(self) -> None:
        """Train until `done` or until `stop` is called, resuming from a checkpoint if the config says so.

        Raises:
            DataError: there is nothing to learn from.
            NonFiniteError: a loss or gradient is not finite; the weights have not moved.
            RewardError: the reward function failed.
            CheckpointError: a checkpoint cannot be written, or cannot be resumed from with this config.
            SystemExit: 143, 130 or 129, after SIGTERM, SIGINT or SIGHUP and a checkpoint.
        """
        if missing := self._missing_inputs:
            raise DataError(
                f"{type(self).__name__} learns from {' and '.join(self.inputs)}; give {' and '.join(missing)}"
            )
        if self.config.train.save_best and not (self.eval_rows or self.eval_samples) and self.parallel.is_main:
            log.warning("train.save_best has no effect without evaluations; give eval_prompts or eval_samples")
        with self.run.running():
            if not self.run.finished():
                self._evaluate_at_start()
                for batch in self.collector.minibatches():
                    self._train_on(batch)
                    if not self._observe():
                        break
                if self.progress.unusable:  # the last collections had no step, at whose end this would be done
                    self.evaluator.evaluate_if(self.evaluator.missing)
                    self.run.checkpoints.save_if_due(self.done)
                self.run.export()
        hub.push_at_end(self)

    def _evaluate_at_start(self) -> None:
        """Evaluate before the first step, or after that of a checkpoint if an error had prevented it."""
        if self.progress.step == 0 and not self.total_steps and self.parallel.is_main:
            log.warning("train.total_steps is 0: nothing is trained, and the model is exported as it is")
        self.evaluator.evaluate_if(self.evaluator.missing)

    def _observe(self) -> bool:
        """Evaluate and save after a step, if that is due; return whether the run goes on."""
        self.evaluator.evaluate_if(self.evaluator.due)
        if self.run.ends_early():
            self.evaluator.evaluate_if(self.progress.evaluated != self.progress.step)
        signum, saves = self.run.requests()
        self.run.checkpoints.save_if_due(self.done, asked=saves)
        if signum and not self.done:
            self.run.end_by(signum)
        return not self.done

    def _train_on(self, batch: Batch) -> None:
        started = time.perf_counter()
        self.record(self.update(batch))
        self.last_step.finish()
        self.recorder.record_seconds("time/update", started)
        self._log_step()
        self.hooks.hook.on_step(trainer=self, step=self.progress.step)

    def _log_step(self) -> dict[str, float]:
        """Log the metrics that were recorded since the last line of the log, and return them."""
        now = time.perf_counter()
        self.progress.seconds, self.run.clock = self.progress.seconds + now - self.run.clock, now
        metrics = m.compute(self.recorder.take(), self.reduce)
        if self.parallel.is_main:
            self.hooks.hook.log_metrics(trainer=self, step=self.progress.step, metrics=dict(metrics))
        self.run.report_findings(self.health.trained(metrics))
        return metrics

    def begin(self) -> None:
        """Make the run directory or resume from a checkpoint, as `learn` does first; later calls have no effect."""
        self.run.begin()

    def collect(self) -> None:
        """Fill the store with one collection of experience, and call the hook `on_experience`."""
        self.collector.collect()

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
        rows, size = self.arrange(self.read_samples(samples, rewards)), self.config.rollout.batch_size

        def push() -> None:
            for start in range(0, len(rows), size):
                experience = self.make_experience(rows[start : start + size])
                self.store.push(checked_batch(self, "make_experience", experience))

        return self.learn_collection(push, passes=1)

    def learn_collection(self, push: Callable[[], None], passes: int, **fields: Any) -> dict[str, float]:
        """Learn from a collection in a loop of your own, and return the metrics, averaged over its optimizer steps.

        Args:
            push: pushes the experience of this process to `store`.
            passes: the number of passes over it.
            **fields: those of the `Collection`.
        """
        self.begin()
        self.store.clear()
        self.collector.begin_own(**fields)
        with self.inference():
            push()
            self.collector.prepare()
        self.progress.samples += len(self.store) * self.parallel.world
        self.collector.observe(self.store.experience)
        for _ in range(passes):
            for batch in self.collector.one_pass():
                self.record(self.update(batch))
                self.hooks.hook.on_step(trainer=self, step=self.progress.step)
        self.collector.end()
        return self._log_step()

    def update(self, batch: Batch) -> m.Metrics:
        """Make one optimizer step on ``batch``, and return its metrics; see `Updater.update`."""
        self.collector.trains()
        return self.updater.update(batch)

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

    def stop(self, reason: str) -> None:
        """End the run after the step at hand, with the evaluation, checkpoint and export of a regular end.

        Any process may call it, also only some of them. A call before the first step, or while experience is collected
        or a checkpoint is saved, ends the run after the next step. It has no effect outside of `learn`.

        Args:
            reason: why; it is logged and kept in checkpoints and in the model card. Of several calls the first counts.

        Raises:
            ConfigError: ``reason`` is not text, or is empty.
        """
        if not isinstance(reason, str) or not reason.strip():
            raise ConfigError(f"trainer.stop(reason) logs why the run ends; given {describe(reason)}. Give a text")
        self.run.stop.reason = self.run.stop.reason or reason

    # --------------------------------------------------------------------------------------------------------- models

    @property
    def sharding(self) -> Sharding:
        """How the trained model is divided among the processes."""
        return self.parallel.sharding  # type: ignore[no-any-return]

    @property
    def unwrapped(self) -> Any:
        """The trainable model itself, without the wrapper of accelerate."""
        return self.models.unwrapped

    @property
    def policy(self) -> nn.Module:
        """The trainable model as `loss` must call it, so that gradients are synchronised."""
        self.models.check_built("the policy")
        return self.models.policy  # type: ignore[no-any-return]

    @property
    def optimizer(self) -> Any:
        """The optimizer as prepared by accelerate."""
        self.models.check_built("the optimizer")
        return self.models.optimizer

    @property
    def reference(self) -> Any:
        """The model as it was before the first update, or the one that the user chose; frozen.

        For algorithms with ``needs_reference``.
        """
        self.models.check_built("the reference")
        reference = self.models.reference
        if reference is None:
            raise AttributeError(f"{type(self).__name__} keeps no reference; set needs_reference = True in the class")
        offloading.reload_reference(reference, self.parallel.device)
        return reference

    def make_reference(self, model: Any) -> Any:
        """Return a frozen copy of ``model`` as it is now; its attribute ``policy`` holds the copied module."""
        raise NotImplementedError(f"{type(self).__name__} needs a reference; write make_reference")

    def _make_reference(self, model: nn.Module) -> Any:
        """Return the reference of a new policy; None if the algorithm has none."""
        if not self.needs_reference:
            return None
        return self.make_reference(model) if self.chosen_reference is None else self._load_reference()

    def _load_reference(self) -> Any:
        """Return the reference that the user chose; trainers that do not override this refuse a chosen reference."""
        raise NotImplementedError

    def _finish(self, policy: Any) -> None:
        """Check a new policy, and set what it needs to know of the run."""

    @property
    def _copies_model(self) -> bool:
        """Whether this process makes a copy of the model at the start, such as that of an engine."""
        return False

    def _before_dividing(self, reference: Any) -> None:
        """Do what needs whole models, before they are divided for good."""
        self.identity.read_whole(reference)

    @contextmanager
    def inference(self) -> Iterator[None]:
        """Run the model inside the block without gradient, at the precision of the loss.

        Every process has the whole model, and runs it as often as it wants. But if the collector `keeps_sharded`, all
        run it together: the same calls in the same order, and `in_micro_batches` makes equally many passes on each.
        """
        self.models.build()
        self.unwrapped.eval()
        gathered = nullcontext() if self.collector.keeps_sharded else self.sharding.unsharded()
        with gathered, torch.no_grad(), self.accelerator.autocast():
            yield

    @contextmanager
    def _sampling_model(self) -> Iterator[None]:
        """Let every process sample with the model inside the block."""
        self.models.build()  # all processes together
        with self.sharding.unsharded():
            yield

    # ----------------------------------------------------------------------------------- evaluating, metrics, history

    def evaluate(self) -> dict[str, float]:
        """Measure the model on the evaluation prompts and the held-out samples; training is not affected.

        Returns:
            Means by name. Of the responses to the prompts: ``eval/reward``, ``eval/<metric>``, ``eval/length``; with a
            swept setting each name ends in ``@setting=value``. Of the held-out samples: ``eval/loss/total`` and the
            algorithm's other metrics.

        Raises:
            DataError: there are neither evaluation prompts nor held-out samples.
        """
        return self.evaluator.evaluate()

    def evaluation(self) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Return means over the evaluation prompts by name (``eval/...``), and one record per response."""
        raise NotImplementedError(f"{type(self).__name__} cannot evaluate on prompts; write evaluation")

    def compared(self, metrics: Mapping[str, float]) -> float | None:
        """Return by what `train.save_best` compares an evaluation, larger is better; None leaves the evaluation out.

        It is the metric of the setting, with the opposite sign if smaller is better, and of a swept setting that at the
        first value.

        Args:
            metrics: what `evaluate` returned.

        Raises:
            ConfigError: evaluations have no such metric.
        """
        return self.evaluator.compared(metrics)

    def replay(self, experience: B, earlier: list[B], *, collections: int, prompts: int) -> B:
        """Return a collection with experience of earlier ones, and keep it for later ones; for `prepare_experience`.

        Which prompts are drawn follows from the run's seed and the collection, and not from the number of processes.
        Each is drawn once at most, and trained on as its experience was made: with the log-probabilities of when it was
        sampled. The class overrides `experience_rows`, to which the rows of so many prompts are added.

        Args:
            experience: the collection, with equally many rows for every prompt.
            earlier: those before it in this process, an attribute of `remembers`, first an empty list; the collection
                is appended, and the oldest are removed.
            collections: how many are kept.
            prompts: how many prompts, over all processes, are added with all their rows; less if fewer are kept.
        """
        return self.collector.batches.replay(experience, earlier, collections=collections, prompts=prompts)

    def record(self, metrics: m.Metrics) -> None:
        """Add metrics to those that are logged with the next step; evaluating and generating discard them.

        Those of a collection that is sampled ahead are logged when it is trained on.

        Raises:
            PluginError: they are no dict of `Mean` and `Std` by name.
        """
        self.recorder.record(checked_metrics(self, "record", metrics))

    def reduce(self, x: Tensor) -> Tensor:
        """Return ``x`` summed over all processes, on the device it came from."""
        return self.parallel.reduce(x)

    def min(self, x: Tensor) -> Tensor:
        """Return the elementwise minimum of ``x`` over all processes, on the device it came from; NaN if one is NaN."""
        return self.parallel.min(x)

    def max(self, x: Tensor) -> Tensor:
        """Return the elementwise maximum of ``x`` over all processes, on the device it came from; NaN if one is NaN."""
        return self.parallel.max(x)

    def gather(self, items: Sequence[T]) -> list[T]:
        """Return the ``items`` of all processes as one list, those of the first process first."""
        return self.parallel.gather(items)

    @property
    def history(self) -> History:
        """The metrics of the run so far, as its directory has them: a table, `to_pandas` and `plot` in notebooks."""
        return History({} if self.run_dir is None else Record(self.run_dir).series)

    def watch(self, port: int = 0) -> Any:
        """Serve a page about this run while it goes on, as ``trainkit watch`` does, from a thread of this process.

        Args:
            port: the port on this machine; 0 for a free one.

        Returns:
            What a notebook shows as the page: its ``url``, and ``close()`` to end it.

        Raises:
            ConfigError: `train.run_dir` is not set and the run has not begun, or the port cannot be used.
            RegistryError: the distribution with the page is not installed.
        """
        return watched(self, port)

    def _repr_html_(self) -> str:
        """Return a table for notebooks: the method, the directory, how far the run is, and the last evaluation."""
        return overview(self)

    # --------------------------------------------------------------------------------------------- saving and exporting

    def save(self, directory: str | Path | None = None) -> Path:
        """Write a checkpoint now, by default to the run directory."""
        self.begin()
        return self.run.checkpoints.save(None if directory is None else Path(directory))

    def load(self, directory: str | Path) -> None:
        """Restore everything from a checkpoint directory, or from the newest complete checkpoint under a directory."""
        self.run.resumption.load(Path(directory))

    def save_pretrained(self, directory: str | Path | None = None) -> Path:
        """Export the model, by default to the run directory, and return its directory.

        A language model is written for transformers: base-model weights, config and tokenizer; heads are in a separate
        file. ``AutoModelForCausalLM.from_pretrained(directory)``, of an encoder-decoder ``AutoModelForSeq2SeqLM``,
        loads a model with equal logits.
        """
        return self.run.export(directory)

    def push_to_hub(
        self,
        repo: str | None = None,
        *,
        private: bool = True,
        revision: str | None = None,
        token: str | None = None,
    ) -> str:
        """Export the model to the run directory, publish it on the hub of Hugging Face, and return its address.

        The model card, the configuration without secrets, and the metrics of the run are published with it. If the
        upload fails, another call continues it. Only the main process uploads; the others wait.

        Args:
            repo: the id of the repository, ``owner/name``. None: that of `train.push_to_hub`.
            private: whether a new repository is private; one that exists keeps its visibility.
            revision: the branch, which is created if there is none. None: ``main``.
            token: the token of the hub. None: that of ``HF_TOKEN`` or of ``hf auth login``.

        Raises:
            ConfigError: no repository is given, its id is not valid, there is no token, or ``HF_HUB_OFFLINE`` is set.
            CheckpointError: the export cannot be written.
            HubError: the hub refused the model or could not be reached; the export is in the run directory.
        """
        id = repo if repo is not None else self.config.train.push_to_hub
        if id is None:
            raise ConfigError("push_to_hub() needs the id of a repository: give owner/name, or set train.push_to_hub")
        self.parallel.on_main(lambda: hub.check_repo(id, token))
        export = self.save_pretrained()
        return self.parallel.on_main(lambda: hub.push(export, id, private=private, revision=revision, token=token))

    @abstractmethod
    def write_model(self, building: Path, target: Path) -> None:
        """Write an export into the directory ``building``, which then becomes ``target``."""

    def export_fault(self, directory: Path) -> str:
        """Load the export that `write_model` wrote, and return how it differs from the trained model; empty if not."""
        return ""

    def model_card(self) -> dict[str, str]:
        """Return what the model card of an export says about this kind of model.

        ``library_name`` and ``pipeline_tag`` are fields of the Hub; ``loading`` is Python code that loads the export
        from the variable ``directory``. Each may be missing.
        """
        return {}
