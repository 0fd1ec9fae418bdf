"""The experience of an offline collection, in files of the run's directory while the run lasts.

A run that is stopped and resumed reads what it had made; a short one leaves no files.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trainkit.data import Batch, Row
from trainkit.errors import CheckpointError
from trainkit.runs import checkpoint
from trainkit.runs.saving import identity
from trainkit.seeding import PLACE
from trainkit.trainer.stored import without_trunk

if TYPE_CHECKING:
    from trainkit.trainer.loop import AcceleratedLoop

    Trainer = AcceleratedLoop[Any]

log = logging.getLogger(__name__)

EVERY = 10.0
"""Seconds of making experience after which it is written to files."""
TOLD_EVERY = 30.0
"""Seconds between two messages about how much is made."""
DIRECTORY = "experience"
READ_BY_EXPERIENCE = ("train.seed", "train.seq_length", "train.mixed_precision")
"""Settings of the section ``train`` that experience may depend on."""


def made(trainer: Trainer, parts: list[list[Row]]) -> Iterator[Batch]:
    """Make the experience of each part of an offline collection, or read it if the run made it before it was stopped.

    The progress is logged.
    """
    files = Files(trainer)
    begun = told = written = time.monotonic()
    try:
        for index, rows in enumerate(parts):
            trainer._stop_if_asked()
            batch = files.read(rows)
            if batch is None:
                batch = trainer.made_experience(rows)
                files.add(rows, batch)
            yield trainer.through_trunk(batch)
            now, last = time.monotonic(), index + 1 == len(parts)
            if now - written >= EVERY or (last and now - begun >= EVERY):
                files.write()
                written = now
            if now - told >= TOLD_EVERY and not last and trainer.collects_once and trainer.accelerator.is_main_process:
                log.warning(
                    "experience is made of %d of %d rows (%.0f s)",
                    sum(map(len, parts[: index + 1])) * trainer.accelerator.num_processes,
                    sum(map(len, parts)) * trainer.accelerator.num_processes,
                    now - begun,
                )
                told = now
    except BaseException:
        if time.monotonic() - begun >= EVERY:
            files.write()
        raise


def remove(trainer: Trainer) -> None:
    """Remove the files of a finished run."""
    if trainer.run_dir is not None and trainer.accelerator.is_main_process:
        shutil.rmtree(trainer.run_dir / DIRECTORY, ignore_errors=True)


class Files:
    """The files of this process: the experience of parts, by their rows; without a directory or checkpoints, none."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        directory = trainer.run_dir or trainer.config.train.run_dir  # the latter while a run resumes
        keeps = trainer.collects_once and trainer.config.train.save_interval and directory is not None
        rank = trainer.accelerator.process_index
        self.root = Path(directory) / DIRECTORY / f"process_{rank:05d}" if keeps and directory is not None else None
        self.new: dict[str, Batch] = {}
        self.there = {} if self.root is None or not self.root.is_dir() else self._found(self.root)

    def _found(self, root: Path) -> dict[str, Batch]:
        found: dict[str, Batch] = {}
        for path in checkpoint.checkpoints(root):
            if checkpoint.find_fault(path) is None:
                state = checkpoint.read_state(path, "made")
                found |= state["parts"] if state["of"] == self._of() else {}
        return found

    def _of(self) -> str:
        """Return a fingerprint of what experience is made of, besides its rows."""
        known = identity(self.trainer)
        train = {name: known["config"]["train"][name.partition(".")[2]] for name in READ_BY_EXPERIENCE}
        config = {name: section for name, section in known["config"].items() if name != "train"} | train
        return _digest({**known, "config": config, "processes": None})

    def read(self, rows: list[Row]) -> Batch | None:
        """Return the experience of ``rows`` if every process has that of its own."""
        if self.root is None:
            return None
        batch = self.there.pop(_key(rows), None)
        accelerator = self.trainer.accelerator
        missing = accelerator.num_processes > 1 and self.trainer.max(torch.tensor(float(batch is None)))
        return None if batch is None or missing else batch.to(accelerator.device)

    def add(self, rows: list[Row], batch: Batch) -> None:
        """Add what was made of ``rows``, to be written."""
        if self.root is not None:
            self.new[_key(rows)] = without_trunk(batch).to("cpu")

    def write(self) -> None:
        """Write what was added since the last call; log if that fails, because the run can go on without."""
        new, self.new = self.new, {}
        if self.root is None or not new:
            return
        with self.trainer._stop.interruptible(False):
            try:
                number = len(checkpoint.checkpoints(self.root))
                building = checkpoint.building_directory(self.root, number)
                checkpoint.write_state(building, "made", {"of": self._of(), "parts": new})
                checkpoint.commit(building, number, sys.maxsize)
            except (OSError, CheckpointError) as error:
                log.warning("experience is not kept for a resumed run: %s", error)


def _key(rows: list[Row]) -> str:
    return _digest([row[PLACE] for row in rows])


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()
