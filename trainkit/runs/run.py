"""A run's directory: its layout, saving, resuming and exporting.

::

    <run_dir>/config.yaml           the whole configuration
              starts.jsonl          one line per start: the time, its step, versions and device
              run.lock              the process that uses the directory, while one does
              metrics.jsonl         one line per step or evaluation
              samples.jsonl         evaluation samples, and the rollouts of some collections
              trackers.json         what identifies the run to wandb, trackio or mlflow, if one is on
              tensorboard/          events, if that tracker is on
              checkpoints/step_*/   to resume from
              experience/           what an offline run has made before its first step, until it is finished
              best/                 export of the best evaluation, with train.save_best
              model/                export at the end
"""

from __future__ import annotations

import json
import logging
import shutil
import signal
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from safetensors import SafetensorError

from trainkit.config import TRLConfig
from trainkit.errors import CheckpointError, ConfigError, HookError, ProcessError, printable
from trainkit.models.adapters import MARK
from trainkit.models.reloading import VERIFIED
from trainkit.runs import card, checkpoint, provenance, saving
from trainkit.runs.console import without_progress_bars
from trainkit.runs.journal import append
from trainkit.runs.lock import RunLock
from trainkit.runs.record import STARTS
from trainkit.runs.resuming import Resumption
from trainkit.runs.saving import Checkpoints
from trainkit.runs.stopping import Interrupted, Stop, lost, signals_noted, watched
from trainkit.runs.symptoms import Finding
from trainkit.security import file_name

if TYPE_CHECKING:
    from trainkit.runs.view import RunView

log = logging.getLogger(__name__)


class Run:
    """A run: its directory with the lock, its beginning and its end, signals, checkpoints and exports.

    What it holds is that of this process; checkpoints hold `Progress` instead.

    Args:
        view: the trainer.
        allow_drift: resume even if settings that affect training differ from those of the checkpoint.
    """

    def __init__(self, view: RunView, *, allow_drift: bool = False) -> None:
        self.view, self.allow_drift = view, allow_drift
        self.stop = Stop()
        """What the run was asked to end by, or to save."""
        self.learning = False
        """Whether `learn` makes the steps of the run, rather than a loop of the caller's own."""
        self.clock = time.perf_counter()
        """When the seconds of the run were last counted."""
        self.checkpoints = Checkpoints(view)
        """What writes checkpoints."""
        self.resumption = Resumption(self)
        """What loads them."""
        self._lock: RunLock | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Begin a run, and end it on exit: lock its directory, call the hooks `on_train_begin` and `on_train_end`.

        A run that saves checkpoints records signals for `requests`; they end any other run at once.

        Raises:
            HookError: an observer failed in `on_train_end`; all others were called. If the run itself ends with an
                error, that error is raised, and the observer's is logged.
        """
        self.learning = True
        self.begin()
        assert self.view.run_dir is not None
        self._acquire(self.view.run_dir)  # an earlier run of the same trainer has released it
        self.clock = time.perf_counter()
        self.view.last_step.forget()  # an earlier run may have ended with an error
        noted, config = self.stop, self.view.config.train
        limit = config.timeout if self.view.parallel.world > 1 else None
        try:
            with without_progress_bars(), signals_noted(noted, bool(config.save_interval)), watched(noted, limit):
                try:
                    yield
                except Interrupted:
                    self.view.last_step.restore()
                    self.end_by(self.requests()[0])
        except BaseException as error:
            self.checkpoints.save_after_error(error)
            if self.view.collector.ahead is not None:
                self.view.collector.ahead.cancel()
            if isinstance(error, KeyboardInterrupt):
                self.checkpoints.abandon()
            self.checkpoints.finish_after_error()
            _log_errors(self._end())
            if limit is not None and lost(error):
                raise self._lost(limit) from error
            raise
        if failures := self._end():
            _log_errors(failures[1:])
            raise failures[0]

    def _lost(self, limit: float) -> ProcessError:
        rank, step = self.view.parallel.rank, self.view.progress.step
        return ProcessError(
            f"process {rank} waited for another process after step {step}, which has ended, or made no progress for "
            f"{limit:g} s (train.timeout); its own error, or its stacks, say why"
        )

    def _end(self) -> list[HookError]:
        """Call the hook `on_train_end`, release the directory, and return the errors of the hook."""
        try:
            answers = self.view.hooks.hook.on_train_end(trainer=self.view)
        finally:
            self.stop.reason = ""
            self.learning = False
            self._release()
        return [answer for answer in answers if isinstance(answer, HookError)]

    def requests(self) -> tuple[int, bool]:
        """Return the signal by which any of the processes was asked to end, 0 if none was, and whether one should save.

        All processes call it. A request to save is returned once.
        """
        stop = self.stop
        stop.progressed()
        asked, saves = stop.asked, stop.saves
        if self.view.parallel.world > 1:
            signals = self.view.parallel.max(torch.tensor([float(asked), float(saves)]))
            asked, saves = int(signals[0]), bool(signals[1])
        stop.saves = False
        return asked, saves

    def ends_early(self) -> bool:
        """Return whether the run ends at this step because a process has called `trainer.stop`, and record the reason.

        The reason is that of the first process that has one. If the run is done anyway, `trainer.stop` has no effect.
        """
        if self.view.done or not self.view.parallel.any_rank(bool(self.stop.reason)):
            return False
        at = self.view.progress
        at.stop_reason = next(filter(None, self.view.parallel.gather([self.stop.reason])))
        if self.view.parallel.is_main:
            log.warning("the run ends after step %d: %s", at.step, printable(at.stop_reason))
        return True

    def report_findings(self, findings: list[Finding]) -> None:
        """Log what the health monitor has found, append it to ``health.jsonl``, end the run if `train.health` says so.

        All processes have found the same.
        """
        mode, at = self.view.config.train.health, self.view.progress
        for finding in findings if mode != "off" else ():
            if self.view.parallel.is_main:
                log.warning("health (step %d): %s", at.step, printable(finding.message))
                try:
                    append(self.view.run_dir, "health.jsonl", [{"step": at.step, **asdict(finding)}])
                except OSError as error:  # it is logged; other processes go on
                    log.warning("cannot append to %s/health.jsonl: %s", self.view.run_dir, error.strerror)
            if mode == "stop":
                self.view.stop(f"health: {finding.message}")

    def end_by(self, signum: int) -> NoReturn:
        """Save a checkpoint and end the process.

        Raises:
            SystemExit: with 128 and the number of the signal, after the checkpoint is written.
        """
        path = self.checkpoints.save()
        name = signal.Signals(signum).name
        log.warning("stopped by %s after step %d; saved %s", name, self.view.progress.step, path)
        raise SystemExit(128 + signum)

    def begin(self) -> None:
        """Create and lock the directory, resume if the config says so, call `on_train_begin`. Later calls do nothing.

        Raises:
            ConfigError: another process uses the directory, or it holds a run that the config does not say to resume.
            CheckpointError: there is no checkpoint to resume from, or it is of another run; nothing has been written.
        """
        if self.view.run_dir is not None:
            return
        config = self.view.config
        name = f"{file_name(config.method.name)}-{datetime.now():%Y%m%d-%H%M%S}"
        self.view.identity.began  # noqa: B018  (all processes read it together)
        run_dir = Path(self.view.parallel.on_main(lambda: config.train.run_dir or str(_unused(Path("runs") / name))))
        self._acquire(run_dir)
        try:
            self.view.parallel.on_main(lambda: _check_directory(run_dir, config))  # before anything is written
            with without_progress_bars():
                self.resumption.resume(run_dir / "checkpoints")
                self.view.models.build()  # all processes create it together, before anything is written
            self.view.run_dir = run_dir
            self.view.parallel.sync_errors(lambda: self._tidy(run_dir) if self.view.parallel.is_main else None)
            self.view.hooks.hook.on_train_begin(trainer=self.view)
        except BaseException:
            self.learning = False
            self._release()
            raise

    def _acquire(self, run_dir: Path) -> None:
        def lock() -> None:
            if self._lock is None and self.view.parallel.is_main:
                self._lock = RunLock(run_dir)

        self.view.parallel.sync_errors(lock)

    def _release(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.release()

    def _tidy(self, run_dir: Path) -> None:
        """Write the configuration and a line about this start of an unfinished run; remove what killed ones left."""
        if not self.finished():
            self.view.config.save_yaml(run_dir / "config.yaml", places=True)
            append(run_dir, STARTS, [self._start()])
        for root in (run_dir, run_dir / "checkpoints"):
            checkpoint.remove_leftovers(root)

    def _start(self) -> dict[str, Any]:
        """Return what a process runs with that begins or resumes the run."""
        device = self.view.accelerator.device
        return {
            "time": datetime.now().astimezone().isoformat(timespec="seconds"),
            "began": self.view.identity.began.isoformat(timespec="seconds"),
            "step": self.view.progress.step,
            "versions": provenance.library_versions(),
            "makers": self.view.identity.makers,
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            "processes": self.view.parallel.world,
        }

    def finished(self) -> bool:
        """Return whether the run has made its last step and exported the model, so that nothing is left to do."""
        assert self.view.run_dir is not None
        return self.view.done and exported_step(self.view.run_dir / "model") == self.view.progress.step

    def export(self, directory: str | Path | None = None) -> Path:
        """Write the model by the trainer's `write_model`, and return its directory.

        The export is built in a temporary directory and then moved into place. Other files in the directory are kept.

        Raises:
            CheckpointError: writing failed, or what was written is not the trained model (`train.verify_export`); names
                the directory. An older export there is unchanged. The last step is in a checkpoint then.
            NonFiniteError: a weight is not finite; nothing is written.
        """
        self.begin()
        assert self.view.run_dir is not None
        target = (Path(directory) if directory else self.view.run_dir / "model").resolve()

        def build() -> str:
            self.checkpoints.refuse_non_finite()
            building = target.with_name(f".tmp-{target.name}-{uuid.uuid4().hex[:8]}")
            try:
                self._write_export(building, target)
                if fault := self.view.export_fault(building) if self._verifies() else "":
                    shutil.rmtree(building)
                    return fault
                checkpoint.move_in(building, target, last=MARK)
            except (OSError, SafetensorError) as error:
                shutil.rmtree(building, ignore_errors=True)
                needed = sum(parameter.nbytes for parameter in self.view.models.unwrapped.parameters())
                message = f"cannot export the model to {target}: {error} ({saving.room(target, needed)})"
                raise CheckpointError(message) from error
            return ""

        with self.view.parallel.sharding.collected():
            fault = self.view.parallel.on_main(build)
        if fault:
            kept = self.checkpoints.save_once()
            raise CheckpointError(
                f"the model was not exported to {target}: {fault}. The state after step {self.view.progress.step} is "
                f"in {kept}; to export it in any case, resume from there with train.verify_export=false"
            )
        return target

    def _verifies(self) -> bool:
        """Return whether exports are loaded again and compared: not if the model is divided among processes."""
        verify = self.view.config.train.verify_export
        if verify is None:
            verify = sum(parameter.nbytes for parameter in self.view.models.unwrapped.parameters()) <= VERIFIED
        return verify and not self.view.parallel.sharding.keeps_sharded

    def _write_export(self, building: Path, target: Path) -> None:
        self.view.write_model(building, target)
        card.write(self.view, building, target)
        mark = {"method": self.view.config.method.name, "step": self.view.progress.step}
        (building / MARK).write_text(json.dumps(mark), encoding="utf-8")

    def keep_best(self, metrics: Mapping[str, float]) -> None:
        """Export to ``best/`` if the evaluation is the best so far, by what `Trainer.compared` returns for it.

        Raises:
            ConfigError: evaluations have no such metric.
        """
        value = self.view.compared(metrics) if self.view.config.train.save_best else None
        if value is None or not value > self.view.progress.best:  # not if it is NaN
            return
        self.view.progress.best = value
        assert self.view.run_dir is not None
        self.export(self.view.run_dir / "best")


def _log_errors(failures: list[HookError]) -> None:
    for failure in failures:
        log.error("%s", failure, exc_info=failure.__cause__)


def _check_directory(run_dir: Path, config: TRLConfig[Any]) -> None:
    """Raise a ConfigError if this run would overwrite another run, or be mixed with it."""
    resume = config.train.resume
    if not (run_dir / "config.yaml").exists() or resume == "auto":
        return
    if resume is None:
        raise ConfigError(
            f"{run_dir} already holds a run; set train.resume to 'auto' to resume it, or give another train.run_dir"
        )
    if run_dir.resolve() not in (Path(resume).resolve(), *Path(resume).resolve().parents):
        raise ConfigError(
            f"{run_dir} already holds a run, and train.resume names a checkpoint of another run, {resume}; set "
            "train.resume to 'auto' to resume the run in this directory, or give another train.run_dir"
        )


def _unused(path: Path) -> Path:
    return path if not path.exists() else path.with_name(f"{path.name}-{uuid.uuid4().hex[:4]}")


def exported_step(directory: Path) -> int | None:
    """Return the step at which an export was written, or None if there is no complete export."""
    try:
        return int(json.loads((directory / MARK).read_text(encoding="utf-8"))["step"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
