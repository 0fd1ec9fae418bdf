"""The study of a sweep: its trials in a database, claimed by one worker each."""

from __future__ import annotations

import json
import socket
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import optuna
from optuna.exceptions import ExperimentalWarning, StorageInternalError, UpdateFinishedTrialError
from optuna.trial import FrozenTrial, Trial, TrialState
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from trainkit.config import differences
from trainkit.errors import ConfigError, SweepError, printable
from trainkit.security import MASK
from trainkit_sweep.sources import Sweep
from trainkit_sweep.space import grid

BEAT = 60.0
"""Seconds between the signs of life of a trial in the database."""
GRACE = 10 * BEAT
"""Seconds without a sign of life after which another machine makes the trial again."""
OWNER, ALIVE, VALUES, ERROR = "owner", "alive", "values", "error"
"""Attributes of a trial: where it runs, its last sign of life, the values of its seeds, and why it has failed."""
DEFINITION = "definition"
"""Attribute of a study: what its trials have in common, as JSON."""
VALID = (TrialState.COMPLETE, TrialState.PRUNED)

optuna.logging.set_verbosity(optuna.logging.ERROR)  # what it would say is said here


class Study:
    """The trials of a sweep.

    Every trial is made as *waiting* when the sweep begins. A worker claims one, and so makes it *running*. A trial
    whose worker has ended without a result waits again, with its number, parameters and the values of its seeds.

    Args:
        sweep: the sweep.
        url: the database; None for SQLite in the directory of the sweep.
        create: whether to make the study if there is none.

    Raises:
        ConfigError: the URL or its driver cannot be used, or there is no study.
        SweepError: the database cannot be reached.
    """

    def __init__(self, sweep: Sweep, url: str | None, *, create: bool = True) -> None:
        self.sweep, self.shared = sweep, url is not None
        self.url = url or f"sqlite:///{(sweep.directory / 'study.db').resolve()}"
        self.owner = f"{socket.gethostname()}:{sweep.directory.resolve()}"
        self._beaten = 0.0
        with self.reachable():
            self._storage = self._connected()
            self._load(create)

    def _connected(self) -> optuna.storages.RDBStorage:
        try:
            wait = {"connect_args": {"timeout": 60}} if make_url(self.url).drivername.startswith("sqlite") else {}
            return optuna.storages.RDBStorage(self.url, engine_kwargs={"pool_pre_ping": True, **wait})
        except ArgumentError:
            raise ConfigError(
                "the storage is no URL of a database; give one such as sqlite:///study.db, "
                "postgresql://user:password@host/name or mysql+pymysql://user:password@host/name"
            ) from None
        except ImportError as error:
            raise ConfigError(
                f"the storage {self.shown} needs a driver that is not installed "
                f"({printable(str(error.__cause__ or error))}); install it with pip"
            ) from None
        except RuntimeError as error:  # tables of another version of Optuna
            raise ConfigError(f"the storage {self.shown} cannot be used: {printable(str(error))}") from None

    def _load(self, create: bool) -> None:
        settings, name = self.sweep.settings, self.sweep.name
        pruner = self._pruner()
        if create:
            self.study = optuna.create_study(
                study_name=name,
                storage=self._storage,
                direction=settings.direction,
                load_if_exists=True,
                pruner=pruner,
                sampler=optuna.samplers.RandomSampler(),
            )
            return
        try:
            self.study = optuna.load_study(study_name=name, storage=self._storage, pruner=pruner)
        except KeyError:
            raise ConfigError(f"there is no study {name!r} in {self.shown}; run the sweep first") from None

    @property
    def shown(self) -> str:
        """The URL without its password."""
        return make_url(self.url).render_as_string(hide_password=True)

    @contextmanager
    def reachable(self) -> Iterator[None]:
        """Run the block; errors of the database become a SweepError that shows no password."""
        try:
            yield
        except (SQLAlchemyError, StorageInternalError) as error:
            cause = error.__cause__ if isinstance(error, StorageInternalError) else error
            told = str(getattr(cause, "orig", None) or cause or error)
            if password := make_url(self.url).password:
                told = told.replace(str(password), MASK)
            raise SweepError(
                f"the storage {self.shown} cannot be used: {' '.join(told.split())[:500]}. The runs are resumed when "
                "the same command is given again"
            ) from None

    # ------------------------------------------------------------------------------------------------- beginning

    def begin(self) -> bool:
        """Prepare the study: make its trials wait, and also those that this worker has not finished earlier.

        Return whether the study was begun anew, because all trials of an earlier attempt had failed.

        Raises:
            ConfigError: the sweep differs from the one that the study was begun with.
        """
        anew = self._all_failed()
        if anew:
            optuna.delete_study(study_name=self.sweep.name, storage=self._storage)
            self._load(create=True)
        self._compare()
        self.study.set_user_attr(DEFINITION, json.dumps(self._definition()))
        for trial in self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            if self._abandoned(trial, begins=True):
                self.requeue(trial)
        for _ in range(self.sweep.trials - len(self.study.get_trials(deepcopy=False))):
            self.study.add_trial(optuna.create_trial(state=TrialState.WAITING))
        return anew

    def _all_failed(self) -> bool:
        states = [trial.state for trial in self.study.get_trials(deepcopy=False)]
        return TrialState.FAIL in states and not {*VALID, TrialState.RUNNING} & {*states}

    def _definition(self) -> dict[str, Any]:
        """Return what the trials have in common, as plain data without secrets."""
        base = self.sweep.base.to_dict()
        base.get("train", {}).pop("run_dir", None)
        settings = self.sweep.settings.model_dump(mode="json", exclude={"run": {"config", "overrides"}})
        same = ("run", "parameters", "metric", "direction", "seeds")
        found = {**{name: settings[name] for name in same}, "config": base}
        return dict(json.loads(json.dumps(found)))  # as it is read back

    def _compare(self) -> None:
        trials = self.study.get_trials(deepcopy=False)
        before = self.study.user_attrs.get(DEFINITION)
        if before is None or all(trial.state == TrialState.WAITING and not trial.params for trial in trials):
            return
        changed = [f"{key}: {was} -> {now}" for key, was, now in differences(json.loads(before), self._definition())]
        if changed:
            raise ConfigError(
                f"the sweep {self.sweep.name!r} was begun with other settings, and its trials could not be compared: "
                f"{'; '.join(changed[:10])[:1500]}. Restore them, or give the sweep another name"
            )

    # --------------------------------------------------------------------------------------------------- claiming

    def claim(self) -> Trial | None:
        """Return a trial for this worker to make, with its parameters; None if none waits."""
        if self.shared:
            for trial in self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
                if self._abandoned(trial):
                    self.requeue(trial)
        for waiting in self.study.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
            if waiting.number < self.sweep.trials and self._taken(waiting):
                return self._drawn(waiting)
        return None

    def _taken(self, trial: FrozenTrial) -> bool:
        with suppress(UpdateFinishedTrialError):
            return self._storage.set_trial_state_values(trial._trial_id, state=TrialState.RUNNING)
        return False

    def _drawn(self, waiting: FrozenTrial) -> Trial:
        """Return a claimed trial with a value of every parameter."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            study = optuna.load_study(
                study_name=self.sweep.name,
                storage=self._storage,
                sampler=self._sampler(waiting.number),
                pruner=self._pruner(),
            )
            study.get_trials(deepcopy=False)  # its storage then knows the trial
            trial = Trial(study, waiting._trial_id)
            trial.set_user_attr(OWNER, self.owner)
            trial.set_user_attr(ALIVE, time.time())
            for name, dimension in self.sweep.space.items():
                dimension.draw(trial, name)
        return trial

    def _sampler(self, number: int) -> optuna.samplers.BaseSampler:
        """Return the sampler for a trial; its seed is the trial's number, so that resuming repeats no draw."""
        kind = self.sweep.settings.sampler
        if kind == "grid":
            return optuna.samplers.GridSampler(grid(self.sweep.space), seed=0)
        if kind == "random":
            return optuna.samplers.RandomSampler(seed=number)
        return optuna.samplers.TPESampler(seed=number, constant_liar=True)

    def _pruner(self) -> optuna.pruners.BasePruner:
        kind, train = self.sweep.settings.pruner, self.sweep.base.to_dict().get("train", {})
        if kind == "none":
            return optuna.pruners.NopPruner()
        if kind == "median":
            return optuna.pruners.MedianPruner()
        least, most = max(train.get("eval_interval", 1), 1), train.get("total_steps") or 0
        return optuna.pruners.HyperbandPruner(min_resource=least, max_resource=most if most > least else "auto")

    def _abandoned(self, trial: FrozenTrial, begins: bool = False) -> bool:
        """Return whether no worker makes a running trial; ``begins``: this worker makes none yet."""
        if begins and (not self.shared or trial.user_attrs.get(OWNER) == self.owner):
            return True  # the lock on the directory says that there is no other worker
        started = trial.datetime_start.timestamp() if trial.datetime_start else 0.0
        return self.shared and time.time() - max(float(trial.user_attrs.get(ALIVE, 0.0)), started) > GRACE

    # -------------------------------------------------------------------------------------------------- the trial

    def beat(self, trials: Mapping[int, Trial]) -> list[int]:
        """Record that trials are alive; return the numbers of those that another worker has taken over."""
        if not self.shared or time.monotonic() - self._beaten < BEAT:
            return []
        self._beaten, lost = time.monotonic(), []
        for number, trial in trials.items():
            now = self._storage.get_trial(trial._trial_id)
            if now.state != TrialState.RUNNING or now.user_attrs.get(OWNER) != self.owner:
                lost.append(number)
            else:
                trial.set_user_attr(ALIVE, time.time())
        return lost

    def requeue(self, trial: Trial | FrozenTrial) -> None:
        """Make a running trial wait again. It keeps its number and parameters."""
        with suppress(UpdateFinishedTrialError):
            self._storage.set_trial_state_values(trial._trial_id, state=TrialState.WAITING)

    def values(self, trial: Trial | FrozenTrial) -> dict[int, float]:
        """Return the values of a trial by seed, as far as they are known."""
        return {int(seed): float(value) for seed, value in trial.user_attrs.get(VALUES, {}).items()}

    def record(self, trial: Trial, seed: int, value: float) -> dict[int, float]:
        """Record the value of a seed, and return all that are known."""
        known = self.values(trial) | {seed: value}
        trial.set_user_attr(VALUES, {str(key): each for key, each in known.items()})
        return known

    def tell(self, trial: Trial, state: TrialState, value: float | None = None, error: str = "") -> None:
        """End a trial with a state."""
        if error:
            trial.set_user_attr(ERROR, error)
        self.study.tell(trial.number, value, state=state)

    def parameters(self, trial: Trial | FrozenTrial) -> dict[str, Any]:
        """Return the values of the settings in a trial."""
        return {name: self.sweep.space[name].value(stored) for name, stored in trial.params.items()}

    @property
    def trials(self) -> list[FrozenTrial]:
        """The trials, by number; of those beyond the number of trials, only those that were made."""
        everything = self.study.get_trials(deepcopy=False)
        return [each for each in everything if each.number < self.sweep.trials or each.state != TrialState.WAITING]

    @property
    def valid(self) -> list[FrozenTrial]:
        """The completed trials, the best first."""
        done = [trial for trial in self.trials if trial.state == TrialState.COMPLETE]
        sign = -1 if self.sweep.settings.direction == "maximize" else 1
        return sorted(done, key=lambda trial: (sign * float(trial.value or 0.0), trial.number))

    def close(self) -> None:
        """Close the connections to the database."""
        self._storage.engine.dispose()
