"""Making the trials of a sweep, several at a time."""

from __future__ import annotations

import math
import shutil
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from optuna.trial import FrozenTrial, Trial, TrialState

from trainkit.errors import ConfigError, SweepError
from trainkit.runs.lock import RunLock, is_held
from trainkit.runs.stopping import Stop, signals_noted
from trainkit.security import file_name
from trainkit_sweep.progress import Progress
from trainkit_sweep.sources import Sweep
from trainkit_sweep.study import ERROR, Study
from trainkit_sweep.trials import Run, folder

POLL = 0.25
"""Seconds between two looks at the runs."""
FAILURES = 3
"""Failed trials after which a sweep that has no valid one ends."""


def run_sweep(
    sweep: Sweep, url: str | None = None, *, options: Sequence[str] = (), progress: Progress | None = None
) -> int:
    """Make the trials of a sweep that are not made yet, those that an earlier call has not finished included.

    SIGINT, SIGTERM and SIGHUP end the runs, which save if they save checkpoints, and the call.

    Args:
        sweep: the sweep.
        url: a database that several machines share; None for SQLite in the directory of the sweep.
        options: further options of ``trainkit train`` for each run.
        progress: what shows the trials; None for the console.

    Returns:
        The number of the signal that has ended the call; 0 if all trials are made, or being made by other workers.

    Raises:
        ConfigError: another process makes the trials of this directory, or the sweep has changed.
        SweepError: no trial is valid, or the database cannot be reached.
    """
    with _alone(sweep.directory, shared=url is not None):
        study = Study(sweep, url)
        try:
            with study.reachable():
                worker = _Worker(study, options, progress or Progress(study))
                worker.begin()
                return worker.work()
        finally:
            study.close()


@contextmanager
def _alone(directory: Path, shared: bool) -> Iterator[None]:
    """Lock the directory; if several machines may share it, only for this machine."""
    place = directory / "workers" / file_name(socket.gethostname()) if shared else directory
    if is_held(place):
        raise ConfigError(
            f"another process makes the trials in {directory}; wait until it ends, or stop it. More runs at the same "
            "time are --workers N"
        )
    lock = RunLock(place)
    try:
        yield
    finally:
        lock.release()


@dataclass
class _Worker:
    study: Study
    options: Sequence[str]
    progress: Progress
    runs: dict[int, Run] = field(default_factory=dict)
    """The runs that go on, by the numbers of their trials."""
    stop: Stop = field(default_factory=Stop)
    failed: int = 0
    """Trials that have failed since the beginning."""

    def begin(self) -> None:
        """Prepare the study, and remove what is left of an attempt whose trials have all failed."""
        directory = self.study.sweep.directory
        if self.study.begin():
            for path in directory.glob("trial_[0-9][0-9][0-9][0-9]*"):
                shutil.rmtree(path, ignore_errors=True)
            self.progress.say("all trials of an earlier attempt had failed; the sweep begins anew")
        self.progress.begin()

    def work(self) -> int:
        """Make trials until there are no more, or a signal asks to end; return the signal."""
        with signals_noted(self.stop, True):
            try:
                try:
                    with self.progress:
                        while self.stop.asked == 0 and (self._fill() or self.runs):
                            self._step()
                            time.sleep(POLL)
                finally:
                    self._end(signal.SIGTERM)
            except KeyboardInterrupt:  # asked twice
                self.stop.asked = signal.SIGINT
            finally:
                self._end(getattr(signal, "SIGKILL", signal.SIGTERM))
        if not self.stop.asked:
            self._require_a_valid_trial()
        return self.stop.asked

    def _fill(self) -> bool:
        """Begin trials until as many runs go on as there are workers; return whether one was begun."""
        begun, settings = False, self.study.sweep.settings
        while len(self.runs) < settings.workers and (trial := self.study.claim()):
            begun = True
            self._next(trial)
        return begun

    def _next(self, trial: Trial) -> None:
        """Begin the run of the first seed that has no value, or complete the trial."""
        sweep, known = self.study.sweep, self.study.values(trial)
        left = [seed for seed in sweep.settings.seeds if seed not in known]
        if not left:
            mean = math.fsum(known.values()) / len(known)
            self._tell(trial, TrialState.COMPLETE, mean)
            return
        used = {run.slot for run in self.runs.values()}
        slot = min(set(range(sweep.settings.workers)) - used)
        run = Run(sweep, trial, self.study.parameters(trial), left[0], slot, self.options)
        run.reported.update(trial.storage.get_trial(trial._trial_id).intermediate_values)
        self.runs[trial.number] = run
        run.start()
        self.progress.started(run)

    def _step(self) -> None:
        """Look at every run once."""
        for number in self.study.beat({number: run.trial for number, run in self.runs.items()}):
            run = self.runs.pop(number)  # this machine was silent for long, and another one has taken the trial over
            run.stop()
            run.wait()
            self.progress.say(f"trial {number} was taken over by another worker")
        for number, run in list(self.runs.items()):
            ended = run.poll()
            self._prune(run)
            if ended:
                run.stop()
                run.wait()
                run.poll()  # what it has written last
                del self.runs[number]
                if not self.stop.asked or run.process is None or run.process.returncode == 0:
                    self._finish(run)
                else:
                    self.study.requeue(run.trial)

    def _prune(self, run: Run) -> None:
        """Report new evaluations of the first seed, and end the run if the pruner says so."""
        if run.seed != self.study.sweep.settings.seeds[0] or run.pruned or run.fault:
            return
        for step in [step for step in run.evaluations if step not in run.reported]:
            value = run.evaluations[step]
            run.reported.add(step)
            if math.isfinite(value):
                run.trial.report(value, step)
                if run.trial.should_prune():
                    run.pruned = True
                    run.stop()
                    return

    def _finish(self, run: Run) -> None:
        """Record what has become of a run."""
        if run.pruned:
            self._tell(run.trial, TrialState.PRUNED)
        elif run.failure:
            self.failed += 1
            self._tell(run.trial, TrialState.FAIL, error=f"seed {run.seed}: {run.failure}")
            if not self._valid() and (run.hopeless or self.failed >= FAILURES):
                raise self._no_valid_trial()
        else:
            self.study.record(run.trial, run.seed, run.value)
            self._next(run.trial)

    def _tell(self, trial: Trial, state: TrialState, value: float | None = None, error: str = "") -> None:
        self.study.tell(trial, state, value, error)
        self.progress.ended(trial.number)
        if self.study.sweep.settings.keep == "best":
            self._tidy()

    def _tidy(self) -> None:
        """Remove checkpoints and models of all finished trials but the best one."""
        best = self.study.valid[:1]
        for trial in self.study.trials:
            if trial.state.is_finished() and trial not in best:
                place = folder(self.study.sweep.directory, trial.number)
                for path in place.glob("seed_*/*"):
                    if path.name in ("checkpoints", "model", "best"):
                        shutil.rmtree(path, ignore_errors=True)

    def _end(self, signum: int) -> None:
        """End all runs; their trials wait to be made."""
        for run in self.runs.values():
            run.stop(signum)
        for run in self.runs.values():
            run.wait()
        for number, run in list(self.runs.items()):
            run.poll()
            del self.runs[number]
            if run.pruned:
                self._finish(run)
                continue
            if not run.failure:
                self.study.record(run.trial, run.seed, run.value)
            self.study.requeue(run.trial)

    def _valid(self) -> bool:
        return any(trial.state in (TrialState.COMPLETE, TrialState.PRUNED) for trial in self.study.trials)

    def _require_a_valid_trial(self) -> None:
        trials = self.study.trials
        if not self.study.valid and all(trial.state.is_finished() for trial in trials):
            raise self._no_valid_trial()

    def _no_valid_trial(self) -> SweepError:
        failed = [trial for trial in self.study.trials if trial.state == TrialState.FAIL]
        if not failed:
            return SweepError("no trial is valid: all were pruned; set pruner: none, and give the sweep another name")
        first = failed[0]
        logs = folder(self.study.sweep.directory, first.number)
        return SweepError(
            f"no trial is valid: {_count(failed)} failed, trial {first.number} for this reason:\n"
            f"{first.user_attrs.get(ERROR, 'unknown')}\n"
            f"The logs are in {logs}. Correct the cause and give the same command again"
        )


def _count(failed: Sequence[FrozenTrial]) -> str:
    return "the only one" if len(failed) == 1 else f"all {len(failed)}"
