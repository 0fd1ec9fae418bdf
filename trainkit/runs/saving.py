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


class Checkpoints:
    """Writes the checkpoints of a run.

    Args:
        view: the trainer.
    """

    def __init__(self, view: RunView) -> None:
        self.view = view
        self._saving: Saving | None = None
        """The checkpoint that is being written while the training goes on."""

    def save_if_due(self, done: bool, *, asked: bool = False) -> None:
        """Save a checkpoint at the config's interval, when the run is ``done``, and when it was ``asked`` to.

        Otherwise finish one that has been written.

        Raises:
            CheckpointError: writing failed, and `train.on_save_error` is ``stop``.
        """
        with self.unless_it_goes_on():
            self._save_if_due(done, asked)

    @contextmanager
    def unless_it_goes_on(self) -> Iterator[None]:
        """Log an error of saving inside the block instead of raising it, if `train.on_save_error` is ``continue``."""
        try:
            yield
        except CheckpointError as error:
            if self.view.config.train.on_save_error == "stop":
                raise
            if self.view.parallel.is_main:
                log.error("step %d: %s. The run goes on (train.on_save_error)", self.view.progress.step, error)

    def _save_if_due(self, done: bool, asked: bool) -> None:
        every = self.view.config.train.save_interval
        if not every or not (done or asked or self.view.progress.step % every == 0):
            self.finish(wait=False)
        elif done or not self.view.config.train.save_async:
            self.save()
        else:
            self.save_later()

    def save(self, root: Path | None = None) -> Path:
        """Write a complete checkpoint or none, and return its path. All processes call it; each saves its own store.

        Args:
            root: the directory of the checkpoints; by default that of the run.

        Raises:
            CheckpointError: writing failed; names the directory. Earlier checkpoints are unchanged.
        """
        self.finish()
        step, keep = self.view.progress.step, self.view.config.train.keep_checkpoints
        with self._building(root) as building:
            states_differ = self._states_differ()
            self.view.parallel.sync_errors(
                lambda: self._parts(partial(checkpoint.write_state, building), states_differ)
            )
            target = self.view.parallel.on_main(lambda: checkpoint.commit(building, step, keep))
        self.view.hooks.hook.on_save(trainer=self.view, step=step, path=target)
        return target

    def save_later(self) -> None:
        """Copy everything that a checkpoint holds, and let a thread write it; `finish` makes the checkpoint complete.

        Raises:
            CheckpointError: as `save`.
        """
        self.finish()
        parts: dict[str, checkpoint.Packed] = {}

        def keep(name: str, state: checkpoint.State) -> None:
            parts[name] = checkpoint.pack(state)

        with self._building() as building:
            states_differ = self._states_differ()
            self.view.parallel.sync_errors(lambda: self._parts(keep, states_differ))
            self._saving = Saving(building, self.view.progress.step, parts)

    def finish(self, *, wait: bool = True) -> None:
        """Make a checkpoint complete whose parts a thread has written, and call `on_save`. All processes call it.

        Args:
            wait: whether to wait for the threads of all processes; if not, they are asked once.

        Raises:
            CheckpointError: as `save`.
        """
        saving = self._saving
        if saving is None or (not wait and self.view.parallel.any_rank(not saving.job.done())):
            return
        try:
            with self._explained(saving.building):
                if not saving.committing:
                    self.view.parallel.sync_errors(saving.job.result)
                    saving.commit(self.view.config.train.keep_checkpoints if self.view.parallel.is_main else None)
                    if not wait:
                        return
                target = self.view.parallel.on_main(saving.job.result)
        except TrainkitError:
            self.abandon()
            raise
        self.abandon()
        self.view.hooks.hook.on_save(trainer=self.view, step=saving.step, path=target)

    def save_after_error(self, error: BaseException) -> None:
        """Save the state after the last finished step if checkpoints are wanted, but for a step that has one.

        If that fails, log it.

        With several processes this needs all of them, so it is only done if all have the error.
        """
        alone = self.view.parallel.world == 1
        agreed = alone or getattr(error, "on_all_ranks", False)
        if not (agreed and self.view.config.train.save_interval and isinstance(error, Exception)):
            return
        if isinstance(error, CheckpointError) or not self.view.last_step.restore() or not self.view.progress.step:
            return
        try:
            self.save_once()
        except Exception as other:  # whatever it is, the error that ends the run is raised, and not this one
            log.error(
                "the run ends with an error after step %d, which cannot be saved: %s", self.view.progress.step, other
            )

    def save_once(self) -> Path:
        """Save the state after the last step, which an error follows, unless there is a checkpoint; return its path."""
        assert self.view.run_dir is not None
        self.finish()
        target = checkpoint.path_of(self.view.run_dir / "checkpoints", self.view.progress.step)
        if not self.view.parallel.on_main(target.exists):
            self.save()
            log.warning("the run ends with an error after step %d; saved %s", self.view.progress.step, target)
        return target

    def finish_after_error(self) -> None:
        """Make a checkpoint complete that is being written when the run ends with an error; log if that fails, too.

        With several processes it is abandoned: they cannot agree on anything then. Earlier checkpoints remain.
        """
        try:
            if self.view.parallel.world == 1:
                self.finish()
        except TrainkitError as error:
            log.error("%s", error)
        self.abandon()

    def abandon(self) -> None:
        """Let go of the checkpoint that is being written, if there is one."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.close()

    @contextmanager
    def _building(self, root: Path | None = None) -> Iterator[Path]:
        """Make a directory in which a checkpoint is built inside the block."""
        assert self.view.run_dir is not None
        root, step = root or self.view.run_dir / "checkpoints", self.view.progress.step
        with self._explained(root / "new"):
            building = Path(self.view.parallel.on_main(lambda: str(checkpoint.building_directory(root, step))))
        with self._explained(building):
            yield building

    @contextmanager
    def _explained(self, building: Path) -> Iterator[None]:
        """Remove the directory after an error inside the block; raise errors of writing as a CheckpointError."""
        try:
            yield
        except (OSError, ValueError, SafetensorError, TrainkitError) as error:
            # safetensors raises an error of its own if the disk is full, and a path with a NUL is a ValueError
            shutil.rmtree(building, ignore_errors=True)
            if isinstance(error, TrainkitError):
                raise
            root = building.parent
            message = f"cannot save a checkpoint under {root}: {error} ({room(root, self._bytes())})"
            raise CheckpointError(message) from error

    def _bytes(self) -> int:
        """Return about how many bytes a checkpoint has: trained weights and the optimizer's state, of all processes."""
        optimizer = getattr(self.view.models.optimizer, "optimizer", self.view.models.optimizer)
        state = (value for values in optimizer.state.values() for value in values.values() if isinstance(value, Tensor))
        here = sum(local(tensor).nbytes for tensor in (*trained(self.view.models.unwrapped).values(), *state))
        return here * (self.view.parallel.world if self.view.parallel.sharding.divides else 1)

    def _states_differ(self) -> bool:
        """Return whether the state of the algorithm is not the same on all processes."""
        if self.view.parallel.world == 1:
            return False
        digest = self.view.parallel.sync_errors(lambda: checkpoint.digest(self.view.state_dict()))
        return len(set(self.view.parallel.gather([digest]))) > 1

    def _parts(self, put: Callable[[str, checkpoint.State], object], states_differ: bool) -> None:
        """Call ``put`` with the name and the state of each part of a checkpoint that this process writes.

        The state of the algorithm is one of them if it is that of this process alone (``states_differ``).
        """
        rank = self.view.parallel.rank
        if not self.view.plan.collects_once and len(self.view.store):
            put(f"store-{rank:05d}", {"experience": self.view.store.experience})
        if self.view.collector.ahead is not None:
            put(f"ahead-{rank:05d}", {"collections": self.view.collector.ahead.state()})
        loop = {**self.loop_state(), **self.view.identity.state()}
        if states_differ:
            put(f"{METHOD}-{rank:05d}", {"method": loop["method"]})
        if self.view.parallel.sharding.keeps_sharded:
            self.refuse_non_finite()
            state, loop["optimizer"] = loop["optimizer"]["state"], {**loop["optimizer"], "state": {}}
            put(f"{PARTS}-{rank:05d}", {"model": trained(self.view.models.unwrapped), "optimizer": state})
        else:
            with self.view.parallel.sharding.unsharded():
                if self.view.parallel.is_main:
                    self.refuse_non_finite()
                    put("model", trained(self.view.models.unwrapped))
        if self.view.parallel.is_main:
            put("loop", loop)

    def refuse_non_finite(self) -> None:
        """Raise a NonFiniteError if a weight is NaN or infinite, before a checkpoint or an export is made of it."""
        weights = ((name, local(p)) for name, p in self.view.models.unwrapped.named_parameters())
        broken = [name for name, part in weights if not part.isfinite().all()]
        if broken:
            raise NonFiniteError(
                f"after step {self.view.progress.step} the weights are not finite in {', '.join(broken[:3])}; nothing "
                "was saved or exported. Lower optimizer.lr, and resume from the previous checkpoint"
            )

    def loop_state(self) -> dict[str, Any]:
        """Return everything that further training depends on, except the model's weights and the store."""
        return {
            "progress": asdict(self.view.progress),
            "method": self.view.state_dict(),
            "hooks": self.view.hooks.state_dict(),
            "health": self.view.health.state_dict(),
            **self.view.models.state_dict(),
        }


def room(place: Path, needed: int) -> str:
    """Return how many bytes are needed, about, and how many are free where ``place`` is or would be, in words."""
    free = shutil.disk_usage(next(there for there in (place, *place.parents) if _exists(there))).free
    return f"about {needed / 1e6:.0f} MB needed, {free / 1e6:.0f} MB free"


def _exists(place: Path) -> bool:
    try:
        return place.exists()
    except (OSError, ValueError):  # a name that is too long, or has a NUL
        return False


def trained(model: nn.Module) -> dict[str, Tensor]:
    """Return the model's state without its frozen parameters, which the initial model provides."""
    frozen = {name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad}
    return {name: tensor for name, tensor in model.state_dict().items() if name not in frozen}
