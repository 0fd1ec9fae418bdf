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
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch
from accelerate import Accelerator
from safetensors import SafetensorError

from trainkit.config import PluginConfig, TRLConfig
from trainkit.errors import CheckpointError, ConfigError, HookError, ProcessError, describe, printable
from trainkit.models.adapters import MARK
from trainkit.models.policy import Policy
from trainkit.models.reference import fingerprint
from trainkit.models.reloading import VERIFIED
from trainkit.runs import card, checkpoint, provenance, saving
from trainkit.runs.console import without_progress_bars
from trainkit.runs.fingerprints import differing
from trainkit.runs.journal import append
from trainkit.runs.lock import RunLock
from trainkit.runs.progress import Progress
from trainkit.runs.record import STARTS
from trainkit.runs.resharding import divided_like, own_rows
from trainkit.runs.saving import METHOD, PARTS, trained
from trainkit.runs.stopping import Interrupted, lost, signals_noted, watched
from trainkit.runs.symptoms import Finding
from trainkit.runs.trackers import default_trackers
from trainkit.security import file_name

if TYPE_CHECKING:
    from trainkit.runs.view import RunView

log = logging.getLogger(__name__)

MAY_CHANGE = (
    "train.",
    "plugins",
    "rollout.engine.",
    "model.kwargs",
    "tokenizer.",
    "environment.workers",
    "environment.timeout",
    "reward.timeout",
    "reward.retries",
    "reward.retry_on",
)
"""Prefixes of the settings that may differ when resuming, except those in `MUST_NOT_CHANGE`."""
MUST_NOT_CHANGE = (
    "train.seed",
    "train.batch_size",
    "train.max_grad_norm",
    "train.mixed_precision",
    "train.seq_length",
    "tokenizer.kwargs.truncation_side",
)
"""Settings among these that change how training proceeds, and so may not differ when resuming."""
CANNOT_CHANGE = ("method.name", "optimizer.name")
"""Settings that may not differ even with ``allow_drift``: the state in a checkpoint depends on them."""
LENGTH = ("train.total_steps", "train.epochs", "train.health", "plugins")
"""Settings that decide how long a run is. If one is changed, a run that `trainer.stop` ended continues."""

T = TypeVar("T")


def trackers(entries: list[str | PluginConfig], accelerator: Accelerator) -> list[object]:
    """Return trainkit's own trackers and accelerate's; there are none on processes other than the main one."""
    return default_trackers(entries) if accelerator.is_main_process else []


@contextmanager
def running(trainer: RunView) -> Iterator[None]:
    """Begin a run, and end it on exit: lock its directory, call the hooks `on_train_begin` and `on_train_end`.

    A run that saves checkpoints records signals for `requests`; they end any other run at once.

    Raises:
        HookError: an observer failed in `on_train_end`; all others were called. If the run itself ends with an error,
            that error is raised, and the observer's is logged.
    """
    trainer.run_state.learning = True
    begin(trainer)
    assert trainer.run_dir is not None
    _lock(trainer, trainer.run_dir)  # an earlier run of the same trainer has released it
    trainer.run_state.clock = time.perf_counter()
    trainer.last_step.forget()  # an earlier run may have ended with an error
    noted, config = trainer.run_state.stop, trainer.config.train
    limit = config.timeout if trainer.parallel.world > 1 else None
    try:
        with without_progress_bars(), signals_noted(noted, bool(config.save_interval)), watched(noted, limit):
            try:
                yield
            except Interrupted:
                trainer.last_step.restore()
                stop(trainer, requests(trainer)[0])
    except BaseException as error:
        saving.save_after_error(trainer, error)
        if trainer.collector.ahead is not None:
            trainer.collector.ahead.cancel()
        if isinstance(error, KeyboardInterrupt):
            saving.abandon(trainer)
        saving.finish_after_error(trainer)
        _log_errors(_end(trainer))
        if limit is not None and lost(error):
            raise _lost(trainer, limit) from error
        raise
    if failures := _end(trainer):
        _log_errors(failures[1:])
        raise failures[0]


def _lost(trainer: RunView, limit: float) -> ProcessError:
    rank, step = trainer.parallel.rank, trainer.progress.step
    return ProcessError(
        f"process {rank} waited for another process after step {step}, which has ended, or made no progress for "
        f"{limit:g} s (train.timeout); its own error, or its stacks, say why"
    )


def _end(trainer: RunView) -> list[HookError]:
    """Call the hook `on_train_end`, release the directory, and return the errors of the hook."""
    try:
        answers = trainer.hooks.hook.on_train_end(trainer=trainer)
    finally:
        trainer.run_state.stop.reason = ""
        trainer.run_state.learning = False
        _unlock(trainer)
    return [answer for answer in answers if isinstance(answer, HookError)]


def _log_errors(failures: list[HookError]) -> None:
    for failure in failures:
        log.error("%s", failure, exc_info=failure.__cause__)


def requests(trainer: RunView) -> tuple[int, bool]:
    """Return the signal by which any of the processes was asked to end, 0 if none was, and whether one should save.

    All processes call it. A request to save is returned once.
    """
    stop = trainer.run_state.stop
    stop.progressed()
    asked, saves = stop.asked, stop.saves
    if trainer.parallel.world > 1:
        signals = trainer.parallel.max(torch.tensor([float(asked), float(saves)]))
        asked, saves = int(signals[0]), bool(signals[1])
    stop.saves = False
    return asked, saves


def ends_early(trainer: RunView) -> bool:
    """Return whether the run ends at this step because a process has called `trainer.stop`, and record the reason.

    The reason is that of the first process that has one. If the run is done anyway, `trainer.stop` has no effect.
    """
    if trainer.done or not trainer.parallel.any_rank(bool(trainer.run_state.stop.reason)):
        return False
    at = trainer.progress
    at.stop_reason = next(filter(None, trainer.parallel.gather([trainer.run_state.stop.reason])))
    if trainer.parallel.is_main:
        log.warning("the run ends after step %d: %s", at.step, printable(at.stop_reason))
    return True


def report_findings(trainer: RunView, findings: list[Finding]) -> None:
    """Log what the health monitor has found, append it to ``health.jsonl``, and end the run if `train.health` says so.

    All processes have found the same.
    """
    mode, at = trainer.config.train.health, trainer.progress
    for finding in findings if mode != "off" else ():
        if trainer.parallel.is_main:
            log.warning("health (step %d): %s", at.step, printable(finding.message))
            try:
                append(trainer.run_dir, "health.jsonl", [{"step": at.step, **asdict(finding)}])
            except OSError as error:  # it is logged; other processes go on
                log.warning("cannot append to %s/health.jsonl: %s", trainer.run_dir, error.strerror)
        if mode == "stop":
            trainer.stop(f"health: {finding.message}")


def stop(trainer: RunView, signum: int) -> NoReturn:
    """Save a checkpoint and end the process.

    Raises:
        SystemExit: with 128 and the number of the signal, after the checkpoint is written.
    """
    path = saving.save(trainer)
    name = signal.Signals(signum).name
    log.warning("stopped by %s after step %d; saved %s", name, trainer.progress.step, path)
    raise SystemExit(128 + signum)


def begin(trainer: RunView) -> None:
    """Create and lock the run directory, resume if the config says so, call `on_train_begin`. Later calls do nothing.

    Raises:
        ConfigError: another process uses the directory, or it holds a run that the config does not say to resume.
        CheckpointError: there is no checkpoint to resume from, or it belongs to another run; nothing has been written.
    """
    if trainer.run_dir is not None:
        return
    config = trainer.config
    name = f"{file_name(config.method.name)}-{datetime.now():%Y%m%d-%H%M%S}"
    trainer.identity.began  # noqa: B018  (all processes read it together)
    run_dir = Path(trainer.parallel.on_main(lambda: config.train.run_dir or str(_unused(Path("runs") / name))))
    _lock(trainer, run_dir)
    try:
        trainer.parallel.on_main(lambda: _check_directory(run_dir, config))  # before anything is written
        with without_progress_bars():
            resume(trainer, run_dir / "checkpoints")
            trainer.models.build()  # all processes create it together, before anything is written
        trainer.run_dir = run_dir
        trainer.parallel.sync_errors(lambda: _tidy(trainer, run_dir) if trainer.parallel.is_main else None)
        trainer.hooks.hook.on_train_begin(trainer=trainer)
    except BaseException:
        trainer.run_state.learning = False
        _unlock(trainer)
        raise


def _lock(trainer: RunView, run_dir: Path) -> None:
    def lock() -> None:
        if trainer.run_state.lock is None and trainer.parallel.is_main:
            trainer.run_state.lock = RunLock(run_dir)

    trainer.parallel.sync_errors(lock)


def _unlock(trainer: RunView) -> None:
    lock, trainer.run_state.lock = trainer.run_state.lock, None
    if lock is not None:
        lock.release()


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


def _tidy(trainer: RunView, run_dir: Path) -> None:
    """Write the configuration and a line about this start unless the run is finished; remove what killed ones left."""
    if not finished(trainer):
        trainer.config.save_yaml(run_dir / "config.yaml", places=True)
        append(run_dir, STARTS, [_start(trainer)])
    for root in (run_dir, run_dir / "checkpoints"):
        checkpoint.remove_leftovers(root)


def _start(trainer: RunView) -> dict[str, Any]:
    """Return what a process runs with that begins or resumes the run."""
    device = trainer.accelerator.device
    return {
        "time": datetime.now().astimezone().isoformat(timespec="seconds"),
        "began": trainer.identity.began.isoformat(timespec="seconds"),
        "step": trainer.progress.step,
        "versions": provenance.library_versions(),
        "makers": trainer.identity.makers,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "processes": trainer.parallel.world,
    }


def finished(trainer: RunView) -> bool:
    """Return whether the run has made its last step and exported the model, so that nothing is left to do."""
    assert trainer.run_dir is not None
    return trainer.done and exported_step(trainer.run_dir / "model") == trainer.progress.step


def _unused(path: Path) -> Path:
    return path if not path.exists() else path.with_name(f"{path.name}-{uuid.uuid4().hex[:4]}")


# --------------------------------------------------------------------------------------------------- checkpoints


def _load_trained(trainer: RunView, state: Mapping[str, Any], loop: Mapping[str, Any]) -> None:
    """Load a state that `trained` returned.

    Raises:
        ValueError: it does not fit the model, or ``loop`` does not fit the run; names what. Weights have not changed.
    """
    sharding = trainer.parallel.sharding
    with nullcontext() if sharding.keeps_sharded else sharding.unsharded(write=True):
        weights = trained(trainer.models.unwrapped)
        if wrong := sorted(weights.keys() ^ state.keys()):
            raise ValueError(f"{wrong[0]} is {'not' if wrong[0] in weights else 'only'} in the checkpoint")
        for name, tensor in weights.items():
            if tuple(tensor.shape) != tuple(state[name].shape):
                there, here = tuple(state[name].shape), tuple(tensor.shape)
                raise ValueError(f"{name} is {there} in the checkpoint, and {here} in the model")
        _check_loop(trainer, loop)
        with torch.no_grad():
            for name, tensor in weights.items():
                tensor.copy_(divided_like(tensor, checkpoint.whole(state[name])))


def _check_loop(trainer: RunView, state: Mapping[str, Any]) -> None:
    """Check that what `saving.loop_state` returned is whole, and fits the model and the schedule.

    Raises:
        ValueError: it does not; names what is missing or different.
    """
    trainer.models.check_state(state)
    fields = {"progress": asdict(trainer.progress), "scheduler": trainer.models.scheduler.state_dict()}
    for part, here in fields.items():
        if differing_names := sorted(here.keys() ^ state[part].keys()):
            raise ValueError(
                f"{differing_names[0]} of its {part} is {'missing' if differing_names[0] in here else 'unknown'}"
            )


def _load_loop(trainer: RunView, state: Mapping[str, Any]) -> None:
    """Restore what `saving.loop_state` returned."""
    trainer.models.load_state_dict(state, state["progress"]["step"])
    trainer.load_state_dict(state["method"])
    trainer.hooks.load_state_dict(state["hooks"])
    trainer.health.load_state_dict(state["health"])
    trainer.progress.become(Progress(**state["progress"]))
    trainer.collector.resumed()


def resume(trainer: RunView, root: Path) -> None:
    """Resume from a checkpoint if the config says so; ``root`` is the directory of the run's own checkpoints.

    Raises:
        CheckpointError: the run has saved checkpoints, and none of them is intact; or as `load`.
    """
    checkpoint_path = trainer.config.train.resume
    if checkpoint_path == "auto":
        if newest := trainer.parallel.on_main(lambda: checkpoint.newest_whole(root)):
            load(trainer, newest)
        elif broken := sorted(path.name for path in root.glob("step_*")):
            raise CheckpointError(
                f"no checkpoint under {root} is intact ({', '.join(broken)}), so the run cannot resume; repair one, or "
                "remove the directory to start a new run"
            )
    elif checkpoint_path is not None:
        load(trainer, Path(checkpoint_path))


def load(trainer: RunView, path: Path) -> None:
    """Load the checkpoint at ``path``, or the newest intact one under it.

    Raises:
        CheckpointError: there is none, it is not intact, or it belongs to another configuration or initial model.
    """
    saving.finish(trainer)
    path = trainer.parallel.on_main(lambda: _found_at(path))
    state = checkpoint.read_state(path, "loop")
    state |= _own_method(trainer, path, state["processes"])
    trainer.models.build()  # creates model, optimizer and reference from the initial weights
    drift = [*_check_identity(trainer, state, path), *provenance.changes(state.get("makers"), trainer.identity.makers)]
    trainer.run_state.recorded_frozen = state["frozen"]
    trainer.store.clear()
    recorded = state.get("progress", {})
    trainer.run_state.recorded_trunk = recorded.get("keeps_trunk")
    if trainer.plan.collects_once:
        trainer.collector.fill()  # an offline store is not saved: the dataset and the initial model determine it
    filled = trainer.progress.prompts
    try:
        _load_trained(trainer, _model_state(path, state), state)
        _load_loop(trainer, state)
    except (RuntimeError, ValueError, KeyError) as error:  # torch raises these if the state does not fit
        raise CheckpointError(f"{path} does not fit this model: {error}") from error
    at = trainer.progress
    at.position = _position(trainer, state)
    _load_held(trainer, path, state["processes"], filled)
    trainer.recorder.pending = {}
    trainer.run_state.resumed = [f"resumed from {path} at step {at.step}", *(f"  changed: {line}" for line in drift)]
    if trainer.accelerator.device.type != "cpu":
        trainer.run_state.resumed.append(
            "  this device may add in another order, so a run without the stop could differ by rounding"
        )
    if at.stop_reason:
        trainer.run_state.resumed.append(_stopped(trainer, state["config"]))


def _own_method(trainer: RunView, path: Path, there: int) -> dict[str, Any]:
    """Return the state of the algorithm in this process, if it is not the same on the ``there`` processes.

    Raises:
        CheckpointError: the run has another number of processes.
    """
    rank, world = trainer.parallel.rank, trainer.parallel.world
    if not (path / f"{METHOD}-00000.json").exists():
        return {}
    if there != world:
        raise CheckpointError(
            f"{path} has a state of {trainer.config.method.name!r} for each of {there} processes, which {world} cannot "
            f"share; resume with {there}. A state that trainer.reduce or trainer.gather makes equal on all processes "
            "fits any number"
        )
    return checkpoint.read_state(path, f"{METHOD}-{rank:05d}")


def _position(trainer: RunView, state: Mapping[str, Any]) -> int:
    """Return the minibatches made in the pass of a checkpoint, in those of this run's `train.batch_size`."""
    rows: int = state["progress"]["position"] * state["config"]["train"]["batch_size"]
    return rows // trainer.config.train.batch_size


def _model_state(path: Path, state: dict[str, Any]) -> Mapping[str, Any]:
    """Return the model's state in a checkpoint; if it is in parts, complete the optimizer's in ``state``, too."""
    if not list(path.glob(f"{PARTS}-*")):
        return checkpoint.read_state(path, "model")
    parts = checkpoint.read_parts(path, PARTS)
    state["optimizer"]["state"] = parts["optimizer"]
    model: Mapping[str, Any] = parts["model"]
    return model


def _load_held(trainer: RunView, path: Path, there: int, filled: int) -> None:
    """Load what each process holds of the collections; divide it anew if ``there`` were other processes.

    ``filled`` are the prompts, or samples, of an offline store in this process.
    """
    at, rank, world = trainer.progress, trainer.parallel.rank, trainer.parallel.world
    read = [rank] if there == world else range(there)
    if (path / "store-00000.json").exists():
        parts = [checkpoint.read_state(path, f"store-{index:05d}")["experience"] for index in read]
        rows, each = len(parts[0]), trainer.collector.batches.rows_of_a_prompt(len(parts[0]))
        at.prompts = at.prompts if there == world else rows // each * there // world
        trainer.store.experience = parts[0] if there == world else own_rows(parts, each, rank, world)
    elif there != world:
        at.prompts = filled
    ahead = trainer.collector.ahead
    if ahead is not None and (path / "ahead-00000.json").exists():
        states = [checkpoint.read_state(path, f"ahead-{index:05d}")["collections"] for index in read]
        ahead.load(states, anew=there != world)


def _stopped(trainer: RunView, before: Mapping[str, Any]) -> str:
    """Return what to log about a run that `trainer.stop` ended; it continues if the config says so."""
    at = trainer.progress
    ended = f"the run was ended after step {at.step}: {at.stop_reason}"
    drift = checkpoint.config_drift(before, trainer.config.to_dict())
    if changed := [line.partition(":")[0] for line in drift if line.startswith(LENGTH)]:
        at.stop_reason = ""
        return f"{ended}. It continues, because of a change of {', '.join(changed)}"
    return f"{ended}. It continues only if {', '.join(LENGTH[:-1])} or {LENGTH[-1]} is changed"


def _found_at(path: Path) -> Path:
    """Return the checkpoint at ``path``, as `_whole_at`; raise a CheckpointError, too, if it is no possible path."""
    try:
        return _whole_at(path)
    except (OSError, ValueError) as error:  # the name is too long, or has a NUL
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(f"train.resume is {describe(str(path))}, which cannot be read: {reason}") from error


def _whole_at(path: Path) -> Path:
    """Return ``path`` if it is a checkpoint, or the newest one under it; raise a CheckpointError if none is intact."""
    if (path / checkpoint.MANIFEST).exists():
        if fault := checkpoint.find_fault(path):
            raise CheckpointError(f"the checkpoint {path} is not intact: {fault}. Resume from another checkpoint")
        return path
    newest = checkpoint.newest_whole(path / "checkpoints" if (path / "checkpoints").is_dir() else path)
    if newest is None:
        raise CheckpointError(f"there is no intact checkpoint at or under {path}; look for directories step_*")
    return newest


def _check_identity(trainer: RunView, state: Mapping[str, Any], path: Path) -> list[str]:
    """Return the differences from the run that made a checkpoint; raise a CheckpointError unless they are allowed."""
    now = trainer.identity.state()
    drift = checkpoint.config_drift(state["config"], now["config"])
    fixed = [line for line in drift if not line.startswith(MAY_CHANGE) or line.startswith(MUST_NOT_CHANGE)]
    if fixed and not trainer.run_state.allow_drift:
        raise CheckpointError(
            f"{path} was made with another configuration; resuming would not continue that run:\n  "
            + "\n  ".join(fixed)
            + "\nSet these back, start a new run from its export, or allow this (--allow-drift, allow_drift=True)"
        )
    if never := [line for line in fixed if line.startswith(CANNOT_CHANGE)]:
        raise CheckpointError(
            f"{path} was made with another method or optimizer: {'; '.join(never)}. Set it back, or start a new run"
        )
    data = [f"data: {name} changed" for name in differing(state["data"], now["data"])]
    if data and not trainer.run_state.allow_drift:
        raise CheckpointError(
            f"{path} belongs to a run with other data, and resuming would not continue that run:\n  "
            + "\n  ".join(data)
            + "\nGive what that run was given, start a new run from its export, or allow this (--allow-drift, "
            "allow_drift=True)"
        )
    weights = []
    if state["reference"] != now["reference"]:
        weights.append(f"initial model: {state['reference']} there, {now['reference']} here")
    if _differ(state["frozen"], now["frozen"]):
        weights.append(_frozen_line(state["frozen"], now["frozen"]))
    if weights and not trainer.run_state.allow_drift:
        raise CheckpointError(f"{path} belongs to a run with another {'; another '.join(weights)}")
    processes = [f"processes: {state['processes']} there, {now['processes']} here"]
    return [*fixed, *data, *weights, *(processes if state["processes"] != now["processes"] else [])]


def check_frozen_models(trainer: RunView, policy: Policy) -> None:
    """Check that a model which is frozen after a run has resumed is one that the run was made with.

    A checkpoint does not know models that the run first used later.

    Raises:
        CheckpointError: the checkpoint is of a run with another frozen model instead.
    """
    there = trainer.run_state.recorded_frozen
    if there is None:
        return
    loaded = [each.fingerprint for each in trainer.models.frozen if each.loaded]
    here = [*loaded, fingerprint(policy.state_dict())]
    if not _differ(there, here):
        return
    if not trainer.run_state.allow_drift:
        raise CheckpointError(f"the run has resumed from that of another {_frozen_line(there, here)}")
    log.warning("the run has resumed from that of another %s", _frozen_line(there, here))


def _differ(there: list[str], here: list[str]) -> bool:
    """Return whether each of the two has a model that the other has not; if only one has more, it uses more."""
    return bool(set(there) - set(here)) and bool(set(here) - set(there))


def _frozen_line(there: list[str], here: list[str]) -> str:
    return f"frozen model: {', '.join(there)} there, {', '.join(here)} here"


# ------------------------------------------------------------------------------------------------------- exports


def export(trainer: RunView, directory: str | Path | None = None) -> Path:
    """Write the model by the trainer's `write_model`, and return its directory.

    The export is built in a temporary directory and then moved into place. Other files in the directory are kept.

    Raises:
        CheckpointError: writing failed, or what was written is not the trained model (`train.verify_export`); names the
            directory. An older export there is unchanged. The state after the last step is in a checkpoint then.
        NonFiniteError: a weight is not finite; nothing is written.
    """
    begin(trainer)
    assert trainer.run_dir is not None
    target = (Path(directory) if directory else trainer.run_dir / "model").resolve()

    def build() -> str:
        saving.refuse_non_finite(trainer)
        building = target.with_name(f".tmp-{target.name}-{uuid.uuid4().hex[:8]}")
        try:
            _write_export(trainer, building, target)
            if fault := trainer.export_fault(building) if _verifies(trainer) else "":
                shutil.rmtree(building)
                return fault
            checkpoint.move_in(building, target, last=MARK)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(building, ignore_errors=True)
            needed = sum(parameter.nbytes for parameter in trainer.models.unwrapped.parameters())
            message = f"cannot export the model to {target}: {error} ({saving.room(target, needed)})"
            raise CheckpointError(message) from error
        return ""

    with trainer.parallel.sharding.collected():
        fault = trainer.parallel.on_main(build)
    if fault:
        kept = saving.save_once(trainer)
        raise CheckpointError(
            f"the model was not exported to {target}: {fault}. The state after step {trainer.progress.step} is in "
            f"{kept}; to export it in any case, resume from there with train.verify_export=false"
        )
    return target


def _verifies(trainer: RunView) -> bool:
    """Return whether exports are loaded again and compared: not if the model is divided among processes."""
    verify = trainer.config.train.verify_export
    if verify is None:
        verify = sum(parameter.nbytes for parameter in trainer.models.unwrapped.parameters()) <= VERIFIED
    return verify and not trainer.parallel.sharding.keeps_sharded


def _write_export(trainer: RunView, building: Path, target: Path) -> None:
    trainer.write_model(building, target)
    card.write(trainer, building, target)
    mark = {"method": trainer.config.method.name, "step": trainer.progress.step}
    (building / MARK).write_text(json.dumps(mark), encoding="utf-8")


def exported_step(directory: Path) -> int | None:
    """Return the step at which an export was written, or None if there is no complete export."""
    try:
        return int(json.loads((directory / MARK).read_text(encoding="utf-8"))["step"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def keep_best(trainer: RunView, metrics: Mapping[str, float]) -> None:
    """Export to ``best/`` if the evaluation is the best so far, by what `Trainer.compared` returns for it.

    Raises:
        ConfigError: evaluations have no such metric.
    """
    value = trainer.compared(metrics) if trainer.config.train.save_best else None
    if value is None or not value > trainer.progress.best:  # not if it is NaN
        return
    trainer.progress.best = value
    assert trainer.run_dir is not None
    export(trainer, trainer.run_dir / "best")
