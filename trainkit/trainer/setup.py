"""The base of the loop: processes, plugins, model, optimizer, schedule, metrics and saved state."""

from __future__ import annotations

import logging
import time
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from trainkit import metrics as m
from trainkit.config import MethodConfig, TRLConfig
from trainkit.data import Batch, Pipeline, Row, Stream
from trainkit.errors import ConfigError, describe, suggest
from trainkit.models.backend import (
    use_exact_convolutions,
    use_fast_exact_matmul,
    use_right_attention,
    warn_of_slow_bf16,
)
from trainkit.models.fitting import RowLimit
from trainkit.plugins import get_trainer, hook_manager
from trainkit.plugins.discovery import ACCELERATE_TRACKERS, is_installed, without_disabled
from trainkit.plugins.hooks import name_of
from trainkit.plugins.registry import is_tracker
from trainkit.runs import Record, hub, provenance, run, saving
from trainkit.runs.fingerprints import Fingerprints
from trainkit.runs.health import Health
from trainkit.runs.history import History, overview
from trainkit.runs.parallel import Parallel
from trainkit.runs.progress import Progress
from trainkit.runs.record import first_start
from trainkit.runs.view import RunState
from trainkit.seeding import Seen
from trainkit.trainer import offloading, optim
from trainkit.trainer.base import BaseRLTrainer
from trainkit.trainer.collecting import AsyncCollector, Collection
from trainkit.trainer.launch import default_precision, make_accelerator
from trainkit.trainer.models import Models
from trainkit.trainer.recording import Recorder
from trainkit.trainer.returns import checked_metrics
from trainkit.trainer.settings import check_run, check_split
from trainkit.trainer.sharding import Replicated, Sharding, make_sharding
from trainkit.trainer.update import Updater

log = logging.getLogger(__name__)

M = TypeVar("M", bound=MethodConfig)
B = TypeVar("B", bound=Batch)
T = TypeVar("T")


class PreparedTrainer(BaseRLTrainer[M]):
    """A trainer with its processes, plugins, model, optimizer, schedule, metrics and saved state.

    Construction is cheap: the model and the optimizer are made on first use, after the data have been checked.
    """

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
        precision = config.train.mixed_precision or default_precision()
        if config.train.mixed_precision is None and precision != "no":  # so that the run is resumed with it
            config = config.evolve(train={"mixed_precision": precision})
        super().__init__(config, **kwargs)
        self.accelerator: Accelerator = make_accelerator(precision, config.train.timeout)
        self.run_state = RunState(allow_drift=allow_drift)
        """What the run keeps in this process besides its progress."""
        sharding = make_sharding(config.train.sharding, self.accelerator)
        self.parallel = Parallel(self.accelerator, self.run_state.stop, sharding)
        """The processes of the run, and how they divide the model."""
        self._leave_out_disabled()
        config = self.config
        use_fast_exact_matmul(self.accelerator.device)
        use_exact_convolutions(self.accelerator.device)
        use_right_attention(self.accelerator.device)
        if precision == "bf16":
            warn_of_slow_bf16(self.accelerator.device.type)
        self.sharding.check(config)
        check_split(config, self.samples_per_prompt, self.parallel.world)
        check_run(config)
        self._check_retries()
        self._check_collecting()
        if config.train.save_best is True and not self.rewarded and self.metric_fn is None:
            raise ConfigError(
                f"train.save_best compares rewards of evaluations, and {config.method.name!r} has none; set it to "
                "false, or name a metric: {metric: eval/loss/total, mode: min}"
            )
        optim.check(config)
        optim.check_given(config, optimizer, scheduler, replicated=type(self.sharding) is Replicated)
        if config.train.push_to_hub is not None and self.parallel.is_main:
            hub.check(config.train.push_to_hub)
        self.live_model = model
        self.chosen_reference: Any = self._choose_reference(reference)
        """The reference that the user chose, a model object or what names one; None: the model's start."""
        self.collected_rows = 0
        """The rows of the collection at hand in this process, while experience is made of samples; or else 0."""
        others = [entry for entry in config.train.trackers if not is_tracker(name_of(entry))]
        trackers = [entry for entry in config.train.trackers if entry not in others]
        own = self._own_plugin()
        self.hooks = hook_manager(
            [*own, *config.plugins, *(trackers if self.parallel.is_main else [])],
            [*callbacks, *run.trackers(others, self.accelerator)],
        )
        self._plugin_names = [*own, *map(name_of, [*config.plugins, *trackers])]
        self.progress = Progress()
        size, alone = config.train.microbatch_size, self.parallel.world == 1
        usual = alone and self.sharding.repeats and self.accelerator.device.type != "cpu"
        auto = size == "auto" or (size is None and usual)
        self.row_limit = RowLimit(lambda: self.progress) if auto else None
        """The most rows of a micro-batch that fit, if `train.microbatch_size` is ``auto``, as it is on one GPU."""
        self.models = Models(
            config,
            self.parallel,
            live=lambda: self.live_model,
            row_limit=self.row_limit,
            optimizer=optimizer,
            scheduler=scheduler,
            make_policy=lambda config: self.get_arch(config),
            finish=lambda policy: self._finish(policy),
            make_reference=lambda policy: self._make_reference(policy),
            before_dividing=lambda reference: self._before_dividing(reference),
            copied=lambda: self._copies_model,
            total_steps=lambda: self.total_steps,
        )
        """The policy, its reference and further frozen models, the optimizer and the schedule."""
        self.recorder = Recorder()
        """The metrics of the next line of the log."""
        self.updater = Updater(
            config.train, self, self.models, self.parallel, self.recorder, self.progress, lambda: self.inference()
        )
        """What makes the optimizer steps."""
        self.health = Health(half_precision=precision != "no")
        """What watches the metrics."""
        self._before: tuple[Progress, bool] | None = None
        """The progress before the minibatch or collection at hand, and whether the store was empty; None if none is."""
        self.pipeline: Pipeline | Stream | None = None
        self._data_seen: tuple[Pipeline, Fingerprints] | None = None
        """The data whose fingerprints are known."""
        self.eval_rows: list[Row] = []
        self.eval_samples: list[Row] = []
        self.held_out: Batch | None = None
        """The experience of `eval_samples`, made at the first evaluation."""
        self.run_dir: Path | None = None
        self._collection = Collection()
        self.ahead: AsyncCollector | None = None
        """The collections that are sampled before their turn; None unless `rollout.staleness` is set."""
        self._warned_past_the_end = False
        self._warned_of_short_step = False

    @property
    def sharding(self) -> Sharding:
        """How the trained model is divided among the processes."""
        return self.parallel.sharding  # type: ignore[no-any-return]

    @property
    def needs_reference(self) -> bool:
        """Whether the algorithm compares with a reference.

        It is a frozen copy of the model as it was before the first update, unless the user chooses another model.
        """
        return False

    @property
    def reference_makes_experience(self) -> bool:
        """Whether `make_experience` runs the reference and no other model, and nothing else asks the reference.

        Experience of a dataset is then made when the first pass comes to its rows, with weights that have moved, unless
        `prepare_experience` is overridden. On an accelerator, the weights of the reference are moved to the CPU in
        between; later reads move them back.
        """
        return False

    # ------------------------------------------------------------------------------------------------ construction

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
        if type(self)._load_reference is PreparedTrainer._load_reference:
            raise ConfigError(f"{given}, and {name!r} can only compare with the start of its model; remove it")
        return chosen

    def _check_collecting(self) -> None:
        """Raise a `ConfigError` if engine, staleness or correction are set; only language models are sampled so."""
        if given := self._collecting_settings():
            raise ConfigError(
                f"{' and '.join(given)} cannot be set with {self.config.method.name!r}, which samples by itself; "
                "remove it"
            )

    def _collecting_settings(self) -> list[str]:
        """Return which settings of engine, staleness and correction differ from their defaults."""
        rollout = self.config.rollout
        keys = ("engine", "staleness", "correction", "correction_level", "correction_cap")
        return [f"rollout.{key}" for key in keys if getattr(rollout, key) != type(rollout).model_fields[key].default]

    def _check_retries(self) -> None:
        """Raise a `ConfigError` if a step cannot be made again after one process ran out of memory."""
        if self.config.train.microbatch_size == "auto" and not self.sharding.repeats:
            raise ConfigError(
                f"train.microbatch_size is 'auto', and with train.sharding {name_of(self.config.train.sharding)!r} "
                "processes wait for each other within a pass, so none can make it again alone; give a number, which "
                "trainkit estimate finds"
            )

    def _leave_out_disabled(self) -> None:
        """Remove plugins that are disabled from the configuration, and so from the record of the run."""
        config = self.config
        named = map(name_of, [*config.plugins, *config.train.trackers])
        usable, told = without_disabled([name for name in named if name not in ACCELERATE_TRACKERS])
        plugins, trackers = (
            [entry for entry in entries if name_of(entry) in {*usable, *ACCELERATE_TRACKERS}]
            for entries in (config.plugins, config.train.trackers)
        )
        if plugins != config.plugins or trackers != config.train.trackers:
            train = config.train.model_copy(update={"trackers": trackers})
            self.config = config.model_copy(update={"plugins": plugins, "train": train})
        for message in told if self.parallel.is_main else ():
            log.warning("%s", message)

    def _own_plugin(self) -> list[str]:
        name = self.config.method.name
        return [name] if get_trainer(name) is type(self) and is_installed(name, type(self).__module__) else []

    @cached_property
    def began(self) -> datetime:
        """When the run began; if it is resumed, when its first process did. All processes read it together."""
        config = self.config.train
        return self.parallel.on_main(lambda: first_start(config.run_dir, config.resume))

    @cached_property
    def makers(self) -> list[provenance.Maker]:
        """Provenance for checkpoints and model cards: distributions and versions of trainkit and the plugins."""
        return provenance.makers(self.config.method.name, self._plugin_names)

    def compared(self, found: Mapping[str, float]) -> float | None:
        """Return by what `train.save_best` compares an evaluation, larger is better; None leaves the evaluation out.

        It is the metric of the setting, with the opposite sign if smaller is better, and of a swept setting that at the
        first value.

        Args:
            found: what `evaluate` returned.

        Raises:
            ConfigError: evaluations have no such metric.
        """
        wanted = self.config.train.save_best
        name, sign = "eval/reward", 1
        if not isinstance(wanted, bool):
            name, sign = wanted.metric, -1 if wanted.mode == "min" else 1
        values = [value for key, value in found.items() if key == name or key.startswith(f"{name}@")]
        if not values and not (wanted is True and self.rewarded):
            raise ConfigError(
                f"train.save_best compares {name!r}, which is no metric of this run's evaluations"
                f"{suggest(name, found)}; they have {', '.join(sorted(found))}"
            )
        return sign * values[0] if values else None

    def _finish(self, policy: Any) -> None:
        """Check a new policy, and set what it needs to know of the run."""

    @property
    def _copies_model(self) -> bool:
        """Whether every process makes a copy of the model at the start, such as that of an engine."""
        return False

    def _before_dividing(self, reference: Any) -> None:
        """Do what needs whole models, before they are divided for good."""
        self.start = self.parallel.on_main(lambda: run.fingerprint_start(self, reference))
        for frozen in self.models.frozen:
            frozen.fingerprint = self.parallel.on_main(lambda frozen=frozen: frozen.fingerprint)  # type: ignore[misc]

    def _make_reference(self, model: nn.Module) -> Any:
        """Return the reference of a new policy; None if the algorithm has none."""
        if not self.needs_reference:
            return None
        return self.make_reference(model) if self.chosen_reference is None else self._load_reference()

    def _load_reference(self) -> Any:
        """Return the reference that the user chose; trainers that do not override this refuse a chosen reference."""
        raise NotImplementedError

    @property
    def unwrapped(self) -> Any:
        """The trainable model itself, without the wrapper of accelerate."""
        return self.models.unwrapped

    @property
    def policy(self) -> nn.Module:
        """The trainable model as `loss` must call it, so that gradients are synchronised."""
        self.models.build()
        return self.models.policy  # type: ignore[no-any-return]

    @property
    def optimizer(self) -> Any:
        """The optimizer as prepared by accelerate."""
        self.models.build()
        return self.models.optimizer

    def make_reference(self, model: Any) -> Any:
        """Return a frozen copy of ``model`` as it is now; its attribute ``policy`` holds the copied module."""
        raise NotImplementedError(f"{type(self).__name__} needs a reference; write make_reference")

    @property
    def reference(self) -> Any:
        """The model as it was before the first update, or the one that the user chose; frozen.

        For algorithms with ``needs_reference``.
        """
        self.models.build()
        reference = self.models.reference
        if reference is None:
            raise AttributeError(f"{type(self).__name__} keeps no reference; set needs_reference = True in the class")
        offloading.reload_reference(reference, self.accelerator.device)
        return reference

    @cached_property
    def start(self) -> str | None:
        """Fingerprint of the weights that the run started from and that checkpoints do not hold; it never changes."""
        self.models.build()
        if "start" in vars(self):  # computed before the model was divided
            return vars(self)["start"]  # type: ignore[no-any-return]
        with self.sharding.unsharded():
            return run.fingerprint_start(self, self.models.reference)

    # implemented by the loop; needed here by the schedule and by checkpoints

    @property
    @abstractmethod
    def fingerprints(self) -> Fingerprints:
        """Fingerprints of what the run learns from."""

    @property
    @abstractmethod
    def total_steps(self) -> int:
        """Optimizer steps of the whole run; 0 where that is not known."""

    @property
    @abstractmethod
    def done(self) -> bool:
        """Whether nothing is left to train."""

    @property
    @abstractmethod
    def collects_once(self) -> bool:
        """Whether there is one collection, of the whole dataset."""

    @abstractmethod
    def fill_store(self) -> None:
        """Fill the store with one collection of experience."""

    def forget_last_step(self) -> None:
        """Begin anew with the state at hand, after an earlier run that may have ended with an error."""
        self._before, self.updater.changing = None, False

    @property
    def collection_number(self) -> int:
        """The number of the collection at hand; 0 for those that the caller of `step` gives."""
        return self._collection.number

    @abstractmethod
    def back_to_last_step(self) -> bool:
        """Return to the state after the last finished step, after an error; return whether that is possible."""

    @abstractmethod
    def rows_of_a_prompt(self, rows: int) -> int:
        """Return how many adjacent rows belong to a prompt, of ``rows`` that this process holds."""

    # ------------------------------------------------------------------------------------------------- collections

    @property
    def _sampling(self) -> Collection:
        """The collection that this thread samples, ahead of its turn or not."""
        ahead: Collection | None = self.recorder.collection
        return self._collection if ahead is None else ahead

    @property
    def _rollouts(self) -> list[Any]:
        """What was sampled for the collection, for the hooks."""
        return self._sampling.rollouts

    @_rollouts.setter
    def _rollouts(self, rollouts: list[Any]) -> None:
        self._sampling.rollouts = rollouts

    @property
    def _seen(self) -> Seen:
        """Counts of the responses of the collection so far, by the position of their row."""
        return self._sampling.seen

    @contextmanager
    def inference(self) -> Iterator[None]:
        """Run the model inside the block without gradient, at the precision of the loss.

        Every process has the whole model, and runs it as often as it wants. But if it `keeps_sharded`, all run it
        together: the same calls in the same order, and `in_micro_batches` makes equally many passes on each.
        """
        self.unwrapped.eval()
        gathered = nullcontext() if self.keeps_sharded else self.sharding.unsharded()
        with gathered, torch.no_grad(), self.accelerator.autocast():
            yield

    @property
    def keeps_sharded(self) -> bool:
        """Whether the model is divided among the processes also while experience is made of data or of rollouts.

        It is if `train.sharding` allows it, unless responses are sampled with the trained model itself, which every
        process does at its own pace, or the algorithm samples in an own `make_experience`.
        """
        return self.sharding.keeps_sharded and not self.online

    # ----------------------------------------------------------------------------------------- numbers of all processes

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
        self.run_state.stop.reason = self.run_state.stop.reason or reason

    def _log(self) -> dict[str, float]:
        now = time.perf_counter()
        self.progress.seconds, self.run_state.clock = self.progress.seconds + now - self.run_state.clock, now
        found = m.compute(self.recorder.take(), self.reduce)
        if self.parallel.is_main:
            self.hooks.hook.log_metrics(trainer=self, step=self.progress.step, metrics=dict(found))
        run.report_findings(self, self.health.trained(found))
        return found

    @property
    def history(self) -> History:
        """The metrics of the run so far, as its directory has them: a table, `to_pandas` and `plot` in notebooks."""
        return History({} if self.run_dir is None else Record(self.run_dir).series)

    def _repr_html_(self) -> str:
        """Return a table for notebooks: the method, the directory, how far the run is, and the last evaluation."""
        return overview(self)

    # ------------------------------------------------------------------------------------------------------ saving

    def save_pretrained(self, directory: str | Path | None = None) -> Path:
        """Export the model, by default to the run directory."""
        return run.export(self, directory)

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
        self.parallel.on_main(lambda: hub.check(id, token))
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

    def save(self, directory: str | Path | None = None) -> Path:
        """Write a checkpoint now, by default to the run directory."""
        run.begin(self)
        return saving.save(self, None if directory is None else Path(directory))

    def load(self, directory: str | Path) -> None:
        """Restore everything from a checkpoint directory, or from the newest complete checkpoint under a directory."""
        run.load(self, Path(directory))

    def loop_state(self) -> dict[str, Any]:
        """Return everything that further training depends on, except the model's weights and the store."""
        self.models.build()
        return {
            "progress": asdict(self.progress),
            "method": self.state_dict(),
            "hooks": self.hooks.state_dict(),
            "health": self.health.state_dict(),
            **self.models.state_dict(),
        }

    def check_loop_state(self, state: Mapping[str, Any]) -> None:
        """Check that what `loop_state` returned is whole, and fits the model and the schedule.

        Raises:
            ValueError: it does not; names what is missing or different.
        """
        self.models.build()
        self.models.check_state(state)
        fields = {"progress": asdict(self.progress), "scheduler": self.models.scheduler.state_dict()}
        for part, own in fields.items():
            if odd := sorted(own.keys() ^ state[part].keys()):
                raise ValueError(f"{odd[0]} of its {part} is {'missing' if odd[0] in own else 'unknown'}")

    def load_loop_state(self, state: dict[str, Any]) -> None:
        """Restore what `loop_state` returned."""
        self.models.build()
        self.models.load_state_dict(state, state["progress"]["step"])
        self.load_state_dict(state["method"])
        self.hooks.load_state_dict(state["hooks"])
        self.health.load_state_dict(state["health"])
        self.progress.become(Progress(**state["progress"]))
