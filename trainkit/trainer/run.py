"""A run's directory: what is written where, saving, resuming, exporting.

::

    <run_dir>/config.yaml           the whole configuration
              metrics.jsonl         one line per step or evaluation
              samples.jsonl         evaluation samples, and the first few of every collection
              tensorboard/          events, if that tracker is on
              checkpoints/step_*/   to resume from
              best/                 export with the highest evaluation reward, if asked for
              model/                export at the end
"""

from __future__ import annotations

import logging
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from trainkit.config import TRLConfig
from trainkit.errors import CheckpointError, ConfigError
from trainkit.models.adapters import HEADS, save_model
from trainkit.models.reference import fingerprint
from trainkit.trackers import default_trackers, without_progress_bars
from trainkit.trainer import checkpoint

if TYPE_CHECKING:
    from trainkit.trainer.accelerate import AccelerateRLTrainer

    Trainer = AccelerateRLTrainer[Any]

log = logging.getLogger(__name__)

MAY_CHANGE = ("train.", "plugins", "model.kwargs", "tokenizer.")
"""Settings that may differ when resuming ..."""
MUST_NOT_CHANGE = ("train.seed", "train.batch_size", "train.max_grad_norm", "train.mixed_precision", "train.seq_length")
"""... except these of the section ``train``, on which the course of training depends."""


def trackers(config: TRLConfig[Any], accelerator: Accelerator) -> list[object]:
    """The run's trackers, on the main process."""
    return default_trackers(config.train.trackers) if accelerator.is_main_process else []


@contextmanager
def running(trainer: Trainer) -> Iterator[None]:
    """A run: its directory is there, and the hooks are told of its beginning and its end."""
    begin(trainer)
    trainer._clock = time.perf_counter()
    try:
        with without_progress_bars():
            yield
    finally:
        trainer.hooks.hook.on_train_end(trainer=trainer)


def begin(trainer: Trainer) -> None:
    """Make the run directory, resume if the config says so, tell the hooks; only the first call does anything.

    Raises:
        ConfigError: the directory holds another run and the config does not say to resume.
        CheckpointError: there is nothing to resume from, or it belongs to another run; nothing has been written.
    """
    if trainer.run_dir is not None:
        return
    config = trainer.config
    name = f"{config.method.name}-{datetime.now():%Y%m%d-%H%M%S}"
    chosen: list[Any] = [config.train.run_dir or str(_unused(Path("runs") / name))]
    if trainer.accelerator.num_processes > 1:
        broadcast_object_list(chosen)
    run_dir = Path(chosen[0])
    if (run_dir / "config.yaml").exists() and config.train.resume is None:
        raise ConfigError(
            f"{run_dir} already holds a run; set train.resume to 'auto' to go on with it, or give another train.run_dir"
        )
    trainer.accelerator.wait_for_everyone()
    with without_progress_bars():
        resume(trainer, run_dir / "checkpoints")
        trainer.policy  # noqa: B018  (made by all processes together, and before anything is written)
    if trainer.accelerator.is_main_process:
        run_dir.mkdir(parents=True, exist_ok=True)
        config.save_yaml(run_dir / "config.yaml")
    trainer.run_dir = run_dir
    trainer.hooks.hook.on_train_begin(trainer=trainer)


def _unused(path: Path) -> Path:
    return path if not path.exists() else path.with_name(f"{path.name}-{uuid.uuid4().hex[:4]}")


# --------------------------------------------------------------------------------------------------- checkpoints


def save_if_due(trainer: Trainer, done: bool) -> None:
    """Save a checkpoint at the config's interval, and at the end."""
    every = trainer.config.train.save_interval
    if every and (done or trainer.progress.step % every == 0):
        save(trainer)


def save(trainer: Trainer, root: Path | None = None) -> Path:
    """Write a checkpoint of everything, whole or not at all. All processes call it; each saves its own store.

    Raises:
        CheckpointError: the disk refused; says where. What was there before is untouched.
    """
    begin(trainer)
    assert trainer.run_dir is not None
    accelerator, step = trainer.accelerator, trainer.progress.step
    root = root or trainer.run_dir / "checkpoints"
    building: Path | None = None
    try:
        chosen: list[Any] = [str(checkpoint.building_directory(root, step)) if accelerator.is_main_process else None]
        if accelerator.num_processes > 1:
            broadcast_object_list(chosen)
        building = Path(chosen[0])
        if trainer.online and len(trainer.store):
            name = f"store-{accelerator.process_index:05d}"
            checkpoint.write_state(building, name, {"experience": trainer.store.experience})
        if accelerator.is_main_process:
            checkpoint.write_state(building, "model", _trained(trainer))
            checkpoint.write_state(building, "loop", {**trainer.loop_state(), **_identity(trainer)})
        accelerator.wait_for_everyone()
        target = root / f"step_{step:08d}"
        if accelerator.is_main_process:
            target = checkpoint.commit(building, step, trainer.config.train.keep_checkpoints)
    except (OSError, SafetensorError) as error:  # the latter is how safetensors says that the disk is full
        if building is not None:
            shutil.rmtree(building, ignore_errors=True)
        free = shutil.disk_usage(next(place for place in (root, *root.parents) if place.exists())).free
        raise CheckpointError(f"cannot save a checkpoint under {root}: {error} ({free / 1e6:.0f} MB free)") from error
    accelerator.wait_for_everyone()
    trainer.hooks.hook.on_save(trainer=trainer, step=step, path=target)
    return target


def _identity(trainer: Trainer) -> dict[str, Any]:
    """What a checkpoint must agree on with the run that resumes from it."""
    if trainer.needs_reference:
        start: str | None = fingerprint(trainer.reference.policy.state_dict())
    else:
        state, trained = trainer.unwrapped.state_dict(), _trained(trainer)
        frozen = {name: tensor for name, tensor in state.items() if name not in trained}
        start = fingerprint(frozen) if frozen else None
    return {"config": trainer.config.to_dict(), "reference": start, "processes": trainer.accelerator.num_processes}


def _trained(trainer: Trainer) -> dict[str, Tensor]:
    """The model's state without frozen parameters, which are the initial model's: all of it, or an adapter, or so."""
    model = trainer.unwrapped
    frozen = {name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad}
    return {name: tensor for name, tensor in model.state_dict().items() if name not in frozen}


def _load_trained(trainer: Trainer, state: Mapping[str, Tensor], path: Path) -> None:
    expected = _trained(trainer).keys()
    if wrong := sorted(expected ^ state.keys()):
        where = "is not in" if wrong[0] in expected else "is only in"
        raise CheckpointError(f"{path} does not fit the model: {wrong[0]} {where} the checkpoint")
    try:
        trainer.unwrapped.load_state_dict(state, strict=False)
    except RuntimeError as error:
        raise CheckpointError(f"{path} does not fit the model: {error}") from error


def resume(trainer: Trainer, root: Path) -> None:
    """Go on from a checkpoint if the config says so; ``root`` is where the run's own are."""
    wanted = trainer.config.train.resume
    if wanted == "auto":
        if found := checkpoint.newest_whole(root):
            load(trainer, found)
    elif wanted is not None:
        load(trainer, Path(wanted))


def load(trainer: Trainer, path: Path) -> None:
    """Take over a checkpoint, or the newest whole one under ``path``.

    Raises:
        CheckpointError: none is there, it is not whole, or it belongs to another configuration or start.
    """
    if not (path / checkpoint.MANIFEST).exists():
        root = path / "checkpoints" if (path / "checkpoints").is_dir() else path
        found = checkpoint.newest_whole(root)
        if found is None:
            raise CheckpointError(f"there is no whole checkpoint at or under {path}; look for directories step_*")
        path = found
    elif fault := checkpoint.find_fault(path):
        raise CheckpointError(f"the checkpoint {path} is not whole: {fault}. Resume from another")
    state = checkpoint.read_state(path, "loop")
    _check_identity(trainer, state, path)
    trainer.store.clear()
    if trainer.pipeline is not None and not trainer.online:
        trainer.fill_store()  # an offline store follows from the dataset and the initial model, so it is not saved
    trainer.policy  # noqa: B018  (makes model, optimizer and reference, from the initial weights)
    _load_trained(trainer, checkpoint.read_state(path, "model"), path)
    trainer.load_loop_state(state)
    store = path / f"store-{trainer.accelerator.process_index:05d}.json"
    if store.exists():
        trainer.store.experience = checkpoint.read_state(path, store.stem)["experience"]
    trainer._pending = {}
    log.info("resumed from %s at step %d", path, trainer.progress.step)


def _check_identity(trainer: Trainer, state: Mapping[str, Any], path: Path) -> None:
    drift = checkpoint.config_drift(state["config"], trainer.config.to_dict())
    fixed = [line for line in drift if not line.startswith(MAY_CHANGE) or line.startswith(MUST_NOT_CHANGE)]
    if fixed:
        raise CheckpointError(
            f"{path} was made with another configuration; resuming would not continue that run:\n  "
            + "\n  ".join(fixed)
            + "\nSet these back, or start a new run from its export"
        )
    now = _identity(trainer)
    for key, what in (("processes", "number of processes"), ("reference", "initial model")):
        if state[key] != now[key]:
            raise CheckpointError(f"{path} belongs to a run with another {what}: {state[key]} there, {now[key]} here")


# ------------------------------------------------------------------------------------------------------- exports


def export(trainer: Trainer, directory: str | Path | None = None) -> Path:
    """Write model, tokenizer and heads so that transformers loads the model; built aside, then moved into place.

    Of a model with an adapter, only the adapter is written; `trainkit merge` makes a whole model of it. Other files
    in the directory stay as they are.

    Raises:
        CheckpointError: the disk refused; says where. An older export there is untouched.
    """
    begin(trainer)
    assert trainer.run_dir is not None
    target = (Path(directory) if directory else trainer.run_dir / "model").resolve()
    if trainer.accelerator.is_main_process:
        building = target.with_name(f".tmp-{target.name}-{uuid.uuid4().hex[:8]}")
        try:
            save_model(trainer.unwrapped.model, building, target)
            trainer.tokenizer.save_pretrained(building)
            state = trainer.unwrapped.state_dict()
            if heads := {k: v.contiguous() for k, v in state.items() if not k.startswith("model.")}:
                save_file(heads, building / HEADS)
            checkpoint.move_in(building, target)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(building, ignore_errors=True)
            raise CheckpointError(f"cannot export the model to {target}: {error}") from error
    trainer.accelerator.wait_for_everyone()
    return target


def keep_best(trainer: Trainer, found: Mapping[str, float]) -> None:
    """Export to ``best/`` if the mean reward (at the first value of a sweep) is the highest so far."""
    reward = next((value for name, value in found.items() if name.startswith("eval/reward")), None)
    if reward is None or not trainer.config.train.save_best or reward <= trainer.progress.best:
        return
    trainer.progress.best = reward
    assert trainer.run_dir is not None
    export(trainer, trainer.run_dir / "best")
