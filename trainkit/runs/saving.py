"""Writing checkpoints: at once, or in a thread while the training goes on."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from torch import Tensor, nn

from trainkit.errors import CheckpointError, NonFiniteError, TrainkitError
from trainkit.runs import checkpoint
from trainkit.runs.resharding import local

if TYPE_CHECKING:
    from trainkit.runs.view import RunView

log = logging.getLogger(__name__)

PARTS = "parts"
"""The name of the files in which each process writes its part of the model and of the optimizer's state."""
METHOD = "method"
"""The name of the files in which each process writes the state of the algorithm, if it is not the same on all."""


class Saving:
    """A checkpoint that is being written in a thread of this process.

    Args:
        building: the directory that it is written into.
        step: its step.
        parts: what this process writes, by name.
    """

    def __init__(self, building: Path, step: int, parts: dict[str, checkpoint.Packed]) -> None:
        self.building, self.step, self.parts = building, step, parts
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="saving")
        self.committing = False
        self.job: Future[Any] = self._thread.submit(self._write)

    def _write(self) -> None:
        while self.parts:
            name = next(iter(self.parts))
            checkpoint.write_state(self.building, name, self.parts[name])
            del self.parts[name]  # its memory is no longer needed

    def commit(self, keep: int | None) -> None:
        """Begin to make it complete, once all processes have written their parts; None: another process does it."""
        self.committing = True
        work = (lambda: None) if keep is None else (lambda: checkpoint.commit(self.building, self.step, keep))
        self.job = self._thread.submit(work)

    def close(self) -> None:
        """End the thread, once what it writes is written."""
        self._thread.shutdown(wait=False)


def save_if_due(trainer: RunView, done: bool, *, asked: bool = False) -> None:
    """Save a checkpoint at the config's interval, when the run is ``done``, and when it was ``asked`` to.

    Otherwise finish one that has been written.

    Raises:
        CheckpointError: writing failed, and `train.on_save_error` is ``stop``.
    """
    with unless_it_goes_on(trainer):
        _save_if_due(trainer, done, asked)


@contextmanager
def unless_it_goes_on(trainer: RunView) -> Iterator[None]:
    """Log an error of saving inside the block instead of raising it, if `train.on_save_error` is ``continue``."""
    try:
        yield
    except CheckpointError as error:
        if trainer.config.train.on_save_error == "stop":
            raise
        if trainer.parallel.is_main:
            log.error("step %d: %s. The run goes on (train.on_save_error)", trainer.progress.step, error)


def _save_if_due(trainer: RunView, done: bool, asked: bool) -> None:
    every = trainer.config.train.save_interval
    if not every or not (done or asked or trainer.progress.step % every == 0):
        finish(trainer, wait=False)
    elif done or not trainer.config.train.save_async:
        save(trainer)
    else:
        save_later(trainer)


def save(trainer: RunView, root: Path | None = None) -> Path:
    """Write a complete checkpoint or none, and return its path. All processes call it; each saves its own store.

    Args:
        trainer: the trainer, whose run has begun.
        root: the directory of the checkpoints; by default that of the run.

    Raises:
        CheckpointError: writing failed; names the directory. Earlier checkpoints are unchanged.
    """
    finish(trainer)
    step, keep = trainer.progress.step, trainer.config.train.keep_checkpoints
    with _building(trainer, root) as building:
        states_differ = _states_differ(trainer)
        trainer.parallel.sync_errors(lambda: _parts(trainer, partial(checkpoint.write_state, building), states_differ))
        target = trainer.parallel.on_main(lambda: checkpoint.commit(building, step, keep))
    trainer.hooks.hook.on_save(trainer=trainer, step=step, path=target)
    return target


def save_later(trainer: RunView) -> None:
    """Copy everything that a checkpoint holds, and let a thread write it; `finish` makes the checkpoint complete.

    Raises:
        CheckpointError: as `save`.
    """
    finish(trainer)
    parts: dict[str, checkpoint.Packed] = {}

    def keep(name: str, state: checkpoint.State) -> None:
        parts[name] = checkpoint.pack(state)

    with _building(trainer) as building:
        states_differ = _states_differ(trainer)
        trainer.parallel.sync_errors(lambda: _parts(trainer, keep, states_differ))
        trainer.run_state.saving = Saving(building, trainer.progress.step, parts)


def finish(trainer: RunView, *, wait: bool = True) -> None:
    """Make a checkpoint complete whose parts a thread has written, and call `on_save`. All processes call it.

    Args:
        trainer: the trainer.
        wait: whether to wait for the threads of all processes; if not, they are asked once.

    Raises:
        CheckpointError: as `save`.
    """
    saving = trainer.run_state.saving
    if saving is None or (not wait and trainer.parallel.any_rank(not saving.job.done())):
        return
    try:
        with _explained(trainer, saving.building):
            if not saving.committing:
                trainer.parallel.sync_errors(saving.job.result)
                saving.commit(trainer.config.train.keep_checkpoints if trainer.parallel.is_main else None)
                if not wait:
                    return
            target = trainer.parallel.on_main(saving.job.result)
    except TrainkitError:
        abandon(trainer)
        raise
    abandon(trainer)
    trainer.hooks.hook.on_save(trainer=trainer, step=saving.step, path=target)


def save_after_error(trainer: RunView, error: BaseException) -> None:
    """Save the state after the last finished step, if checkpoints are wanted and that step has none; log if that fails.

    With several processes this needs all of them, so it is only done if all have the error.
    """
    alone = trainer.parallel.world == 1
    agreed = alone or getattr(error, "on_all_ranks", False)
    if not (agreed and trainer.config.train.save_interval and isinstance(error, Exception)):
        return
    if isinstance(error, CheckpointError) or not trainer.last_step.restore() or not trainer.progress.step:
        return
    try:
        save_once(trainer)
    except Exception as other:  # whatever it is, the error that ends the run is raised, and not this one
        log.error("the run ends with an error after step %d, which cannot be saved: %s", trainer.progress.step, other)


def save_once(trainer: RunView) -> Path:
    """Save the state after the last step, which an error follows, unless there is a checkpoint; return its path."""
    assert trainer.run_dir is not None
    finish(trainer)
    target = checkpoint.path_of(trainer.run_dir / "checkpoints", trainer.progress.step)
    if not trainer.parallel.on_main(target.exists):
        save(trainer)
        log.warning("the run ends with an error after step %d; saved %s", trainer.progress.step, target)
    return target


def finish_after_error(trainer: RunView) -> None:
    """Make a checkpoint complete that is being written when the run ends with an error; log if that fails, too.

    With several processes it is abandoned: they cannot agree on anything then. Earlier checkpoints remain.
    """
    try:
        if trainer.parallel.world == 1:
            finish(trainer)
    except TrainkitError as error:
        log.error("%s", error)
    abandon(trainer)


def abandon(trainer: RunView) -> None:
    """Let go of the checkpoint that is being written, if there is one."""
    saving, trainer.run_state.saving = trainer.run_state.saving, None
    if saving is not None:
        saving.close()


@contextmanager
def _building(trainer: RunView, root: Path | None = None) -> Iterator[Path]:
    """Make a directory in which a checkpoint is built inside the block."""
    assert trainer.run_dir is not None
    root, step = root or trainer.run_dir / "checkpoints", trainer.progress.step
    with _explained(trainer, root / "new"):
        building = Path(trainer.parallel.on_main(lambda: str(checkpoint.building_directory(root, step))))
    with _explained(trainer, building):
        yield building


@contextmanager
def _explained(trainer: RunView, building: Path) -> Iterator[None]:
    """Remove the directory after an error inside the block; raise errors of writing as a CheckpointError."""
    try:
        yield
    except (OSError, ValueError, SafetensorError, TrainkitError) as error:
        # safetensors raises an error of its own if the disk is full, and a path with a NUL is a ValueError
        shutil.rmtree(building, ignore_errors=True)
        if isinstance(error, TrainkitError):
            raise
        root = building.parent
        message = f"cannot save a checkpoint under {root}: {error} ({room(root, _bytes(trainer))})"
        raise CheckpointError(message) from error


def room(place: Path, needed: int) -> str:
    """Return how many bytes are needed, about, and how many are free where ``place`` is or would be, in words."""
    free = shutil.disk_usage(next(there for there in (place, *place.parents) if _exists(there))).free
    return f"about {needed / 1e6:.0f} MB needed, {free / 1e6:.0f} MB free"


def _exists(place: Path) -> bool:
    try:
        return place.exists()
    except (OSError, ValueError):  # a name that is too long, or has a NUL
        return False


def _bytes(trainer: RunView) -> int:
    """Return about how many bytes a checkpoint has: the trained weights and the optimizer's state, of all processes."""
    optimizer = getattr(trainer.models.optimizer, "optimizer", trainer.models.optimizer)
    state = (value for values in optimizer.state.values() for value in values.values() if isinstance(value, Tensor))
    here = sum(local(tensor).nbytes for tensor in (*trained(trainer.models.unwrapped).values(), *state))
    return here * (trainer.parallel.world if trainer.parallel.sharding.divides else 1)


def _states_differ(trainer: RunView) -> bool:
    """Return whether the state of the algorithm is not the same on all processes."""
    if trainer.parallel.world == 1:
        return False
    digest = trainer.parallel.sync_errors(lambda: checkpoint.digest(trainer.state_dict()))
    return len(set(trainer.parallel.gather([digest]))) > 1


def _parts(trainer: RunView, put: Callable[[str, checkpoint.State], object], states_differ: bool) -> None:
    """Call ``put`` with the name and the state of each part of a checkpoint that this process writes.

    The state of the algorithm is one of them if it is that of this process alone (``states_differ``).
    """
    rank = trainer.parallel.rank
    if not trainer.plan.collects_once and len(trainer.store):
        put(f"store-{rank:05d}", {"experience": trainer.store.experience})
    if trainer.collector.ahead is not None:
        put(f"ahead-{rank:05d}", {"collections": trainer.collector.ahead.state()})
    loop = {**loop_state(trainer), **trainer.identity.state()}
    if states_differ:
        put(f"{METHOD}-{rank:05d}", {"method": loop["method"]})
    if trainer.parallel.sharding.keeps_sharded:
        refuse_non_finite(trainer)
        state, loop["optimizer"] = loop["optimizer"]["state"], {**loop["optimizer"], "state": {}}
        put(f"{PARTS}-{rank:05d}", {"model": trained(trainer.models.unwrapped), "optimizer": state})
    else:
        with trainer.parallel.sharding.unsharded():
            if trainer.parallel.is_main:
                refuse_non_finite(trainer)
                put("model", trained(trainer.models.unwrapped))
    if trainer.parallel.is_main:
        put("loop", loop)


def refuse_non_finite(trainer: RunView) -> None:
    """Raise a NonFiniteError if a weight is NaN or infinite, before a checkpoint or an export is made of it."""
    weights = ((name, local(p)) for name, p in trainer.models.unwrapped.named_parameters())
    broken = [name for name, part in weights if not part.isfinite().all()]
    if broken:
        raise NonFiniteError(
            f"after step {trainer.progress.step} the weights are not finite in {', '.join(broken[:3])}; nothing was "
            "saved or exported. Lower optimizer.lr, and resume from the previous checkpoint"
        )


def loop_state(trainer: RunView) -> dict[str, Any]:
    """Return everything that further training depends on, except the model's weights and the store."""
    return {
        "progress": asdict(trainer.progress),
        "method": trainer.state_dict(),
        "hooks": trainer.hooks.state_dict(),
        "health": trainer.health.state_dict(),
        **trainer.models.state_dict(),
    }


def trained(model: nn.Module) -> dict[str, Tensor]:
    """Return the model's state without its frozen parameters, which the initial model provides."""
    frozen = {name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad}
    return {name: tensor for name, tensor in model.state_dict().items() if name not in frozen}
