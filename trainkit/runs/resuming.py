"""Resuming a run: what of a checkpoint must fit the run, and loading it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trainkit.errors import CheckpointError, describe
from trainkit.models.policy import Policy
from trainkit.models.reference import fingerprint
from trainkit.runs import checkpoint, provenance
from trainkit.runs.fingerprints import differing
from trainkit.runs.progress import Progress
from trainkit.runs.resharding import divided_like, own_rows
from trainkit.runs.saving import METHOD, PARTS, trained

if TYPE_CHECKING:
    from trainkit.runs.run import Run

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


class Resumption:
    """Loads a checkpoint into a run.

    Args:
        run: the run.
    """

    def __init__(self, run: Run) -> None:
        self.run, self.view = run, run.view
        self.recorded_frozen: list[str] | None = None
        """Fingerprints of the frozen models of the run that was resumed; None if none was."""
        self.recorded_trunk: bool | None = None
        """Whether the run that is being resumed keeps the output of frozen layers; None if none is."""
        self.messages: list[str] = []
        """What to log about the checkpoint that the run resumes from."""

    def _load_trained(self, state: Mapping[str, Any], loop: Mapping[str, Any]) -> None:
        """Load a state that `trained` returned.

        Raises:
            ValueError: it does not fit the model, or ``loop`` the run; names what. Weights have not changed.
        """
        sharding = self.view.parallel.sharding
        with nullcontext() if sharding.keeps_sharded else sharding.unsharded(write=True):
            weights = trained(self.view.models.unwrapped)
            if wrong := sorted(weights.keys() ^ state.keys()):
                raise ValueError(f"{wrong[0]} is {'not' if wrong[0] in weights else 'only'} in the checkpoint")
            for name, tensor in weights.items():
                if tuple(tensor.shape) != tuple(state[name].shape):
                    there, here = tuple(state[name].shape), tuple(tensor.shape)
                    raise ValueError(f"{name} is {there} in the checkpoint, and {here} in the model")
            self._check_loop(loop)
            with torch.no_grad():
                for name, tensor in weights.items():
                    tensor.copy_(divided_like(tensor, checkpoint.whole(state[name])))

    def _check_loop(self, state: Mapping[str, Any]) -> None:
        """Check that what `saving.loop_state` returned is whole, and fits the model and the schedule.

        Raises:
            ValueError: it does not; names what is missing or different.
        """
        self.view.models.check_state(state)
        fields = {"progress": asdict(self.view.progress), "scheduler": self.view.models.scheduler.state_dict()}
        for part, here in fields.items():
            if differing_names := sorted(here.keys() ^ state[part].keys()):
                raise ValueError(
                    f"{differing_names[0]} of its {part} is {'missing' if differing_names[0] in here else 'unknown'}"
                )

    def _load_loop(self, state: Mapping[str, Any]) -> None:
        """Restore what `saving.loop_state` returned."""
        self.view.models.load_state_dict(state, state["progress"]["step"])
        self.view.load_state_dict(state["method"])
        self.view.hooks.load_state_dict(state["hooks"])
        self.view.health.load_state_dict(state["health"])
        self.view.progress.become(Progress(**state["progress"]))
        self.view.collector.resumed()

    def resume(self, root: Path) -> None:
        """Resume from a checkpoint if the config says so; ``root`` is the directory of the run's own checkpoints.

        Raises:
            CheckpointError: the run has saved checkpoints, and none of them is intact; or as `load`.
        """
        checkpoint_path = self.view.config.train.resume
        if checkpoint_path == "auto":
            if newest := self.view.parallel.on_main(lambda: checkpoint.newest_whole(root)):
                self.load(newest)
            elif broken := sorted(path.name for path in root.glob("step_*")):
                raise CheckpointError(
                    f"no checkpoint under {root} is intact ({', '.join(broken)}), so the run cannot resume; repair "
                    "one, or remove the directory to start a new run"
                )
        elif checkpoint_path is not None:
            self.load(Path(checkpoint_path))

    def load(self, path: Path) -> None:
        """Load the checkpoint at ``path``, or the newest intact one under it.

        Raises:
            CheckpointError: there is none, it is not intact, or it belongs to another configuration or initial model.
        """
        self.run.checkpoints.finish()
        path = self.view.parallel.on_main(lambda: _found_at(path))
        state = checkpoint.read_state(path, "loop")
        state |= self._own_method(path, state["processes"])
        self.view.models.build()  # creates model, optimizer and reference from the initial weights
        drift = [
            *self._check_identity(state, path),
            *provenance.changes(state.get("makers"), self.view.identity.makers),
        ]
        self.recorded_frozen = state["frozen"]
        self.view.store.clear()
        recorded = state.get("progress", {})
        self.recorded_trunk = recorded.get("keeps_trunk")
        if self.view.plan.collects_once:
            self.view.collector.fill()  # an offline store is not saved: the dataset and the initial model determine it
        filled = self.view.progress.prompts
        try:
            self._load_trained(_model_state(path, state), state)
            self._load_loop(state)
        except (RuntimeError, ValueError, KeyError) as error:  # torch raises these if the state does not fit
            raise CheckpointError(f"{path} does not fit this model: {error}") from error
        at = self.view.progress
        at.position = self._position(state)
        self._load_held(path, state["processes"], filled)
        self.view.recorder.pending = {}
        self.messages = [f"resumed from {path} at step {at.step}", *(f"  changed: {line}" for line in drift)]
        if self.view.accelerator.device.type != "cpu":
            self.messages.append(
                "  this device may add in another order, so a run without the stop could differ by rounding"
            )
        if at.stop_reason:
            self.messages.append(self._stopped(state["config"]))

    def _own_method(self, path: Path, there: int) -> dict[str, Any]:
        """Return the state of the algorithm in this process, if it is not the same on the ``there`` processes.

        Raises:
            CheckpointError: the run has another number of processes.
        """
        rank, world = self.view.parallel.rank, self.view.parallel.world
        if not (path / f"{METHOD}-00000.json").exists():
            return {}
        if there != world:
            raise CheckpointError(
                f"{path} has a state of {self.view.config.method.name!r} for each of {there} processes, which {world} "
                f"cannot share; resume with {there}. A state that trainer.reduce or trainer.gather makes equal on all "
                "processes fits any number"
            )
        return checkpoint.read_state(path, f"{METHOD}-{rank:05d}")

    def _position(self, state: Mapping[str, Any]) -> int:
        """Return the minibatches made in the pass of a checkpoint, in those of this run's `train.batch_size`."""
        rows: int = state["progress"]["position"] * state["config"]["train"]["batch_size"]
        return rows // self.view.config.train.batch_size

    def _load_held(self, path: Path, there: int, filled: int) -> None:
        """Load what each process holds of the collections; divide it anew if ``there`` were other processes.

        ``filled`` are the prompts, or samples, of an offline store in this process.
        """
        at, rank, world = self.view.progress, self.view.parallel.rank, self.view.parallel.world
        read = [rank] if there == world else range(there)
        if (path / "store-00000.json").exists():
            parts = [checkpoint.read_state(path, f"store-{index:05d}")["experience"] for index in read]
            rows, each = len(parts[0]), self.view.collector.batches.rows_of_a_prompt(len(parts[0]))
            at.prompts = at.prompts if there == world else rows // each * there // world
            self.view.store.experience = parts[0] if there == world else own_rows(parts, each, rank, world)
        elif there != world:
            at.prompts = filled
        ahead = self.view.collector.ahead
        if ahead is not None and (path / "ahead-00000.json").exists():
            states = [checkpoint.read_state(path, f"ahead-{index:05d}")["collections"] for index in read]
            ahead.load(states, anew=there != world)

    def _stopped(self, before: Mapping[str, Any]) -> str:
        """Return what to log about a run that `trainer.stop` ended; it continues if the config says so."""
        at = self.view.progress
        ended = f"the run was ended after step {at.step}: {at.stop_reason}"
        drift = checkpoint.config_drift(before, self.view.config.to_dict())
        if changed := [line.partition(":")[0] for line in drift if line.startswith(LENGTH)]:
            at.stop_reason = ""
            return f"{ended}. It continues, because of a change of {', '.join(changed)}"
        return f"{ended}. It continues only if {', '.join(LENGTH[:-1])} or {LENGTH[-1]} is changed"

    def _check_identity(self, state: Mapping[str, Any], path: Path) -> list[str]:
        """Return the differences from the run of a checkpoint; raise a CheckpointError unless they are allowed."""
        now = self.view.identity.state()
        drift = checkpoint.config_drift(state["config"], now["config"])
        fixed = [line for line in drift if not line.startswith(MAY_CHANGE) or line.startswith(MUST_NOT_CHANGE)]
        if fixed and not self.run.allow_drift:
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
        if data and not self.run.allow_drift:
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
        if weights and not self.run.allow_drift:
            raise CheckpointError(f"{path} belongs to a run with another {'; another '.join(weights)}")
        processes = [f"processes: {state['processes']} there, {now['processes']} here"]
        return [*fixed, *data, *weights, *(processes if state["processes"] != now["processes"] else [])]

    def check_frozen_models(self, policy: Policy) -> None:
        """Check that a model which is frozen after a run has resumed is one that the run was made with.

        A checkpoint does not know models that the run first used later.

        Raises:
            CheckpointError: the checkpoint is of a run with another frozen model instead.
        """
        there = self.recorded_frozen
        if there is None:
            return
        loaded = [each.fingerprint for each in self.view.models.frozen if each.loaded]
        here = [*loaded, fingerprint(policy.state_dict())]
        if not _differ(there, here):
            return
        if not self.run.allow_drift:
            raise CheckpointError(f"the run has resumed from that of another {_frozen_line(there, here)}")
        log.warning("the run has resumed from that of another %s", _frozen_line(there, here))


def _model_state(path: Path, state: dict[str, Any]) -> Mapping[str, Any]:
    """Return the model's state in a checkpoint; if it is in parts, complete the optimizer's in ``state``, too."""
    if not list(path.glob(f"{PARTS}-*")):
        return checkpoint.read_state(path, "model")
    parts = checkpoint.read_parts(path, PARTS)
    state["optimizer"]["state"] = parts["optimizer"]
    model: Mapping[str, Any] = parts["model"]
    return model


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


def _differ(there: list[str], here: list[str]) -> bool:
    """Return whether each of the two has a model that the other has not; if only one has more, it uses more."""
    return bool(set(there) - set(here)) and bool(set(here) - set(there))


def _frozen_line(there: list[str], here: list[str]) -> str:
    return f"frozen model: {', '.join(there)} there, {', '.join(here)} here"
