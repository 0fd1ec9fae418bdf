"""Which model a directory of a run, an export or a hub id names; read without torch."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from trainkit.config import absent
from trainkit.errors import ConfigError
from trainkit.runs.record import RUNNING, Record

CONFIG = "config.yaml"
"""The file of a run with its configuration."""
HOLD_MODELS = ("config.json", "adapter_config.json", "model_index.json")
"""Files of which a directory with a model has at least one."""
EXPORTS = ("model", "best")
"""The directories of a run with exports: that of the end, and that of the best evaluation."""


@dataclass(frozen=True)
class Source:
    """A model that is named by a directory or a hub id.

    Attributes:
        model: the directory of the model, or its hub id.
        run: the run that exported it; None if it is no export within a run.
    """

    model: str
    run: Path | None = None

    @cached_property
    def mark(self) -> dict[str, Any]:
        """The ``method`` and the ``step`` of an export; empty for other models."""
        return self._read("trainkit.json")

    @cached_property
    def pipeline(self) -> str:
        """The class of a diffusion pipeline; empty for other models."""
        return str(self._read("model_index.json").get("_class_name", ""))

    @property
    def directory(self) -> Path:
        """The directory of the model.

        Raises:
            ConfigError: the model is named by a hub id.
        """
        if not Path(self.model).is_dir():
            raise ConfigError(f"there is no directory {self.model!r}; give the directory of a run or of a model")
        return Path(self.model)

    def _read(self, name: str) -> dict[str, Any]:
        with suppress(OSError, ValueError, TypeError):
            return dict(json.loads((Path(self.model) / name).read_text(encoding="utf-8")))
        return {}


def find_model(name: str, *, best: bool = False) -> Source:
    """Return the model that ``name`` names.

    Args:
        name: the directory of a run (its export is meant), of an export or of another model, or a hub id.
        best: of a run, whether its export with the best evaluation is meant, not that of the end.

    Raises:
        ConfigError: there is no such directory, it holds no model, or the run has no export; says what to do.
    """
    if missing := absent(name):
        raise ConfigError(f"{missing} Give the directory of a run or of a model, or a hub id")
    path = Path(name)
    is_run = (path / CONFIG).is_file() and not _holds_model(path)
    if best and not is_run:
        raise ConfigError(f"--best is the best export of a run, and {name!r} is the directory of no run; omit it")
    if is_run:
        return Source(str(_export(path, "best" if best else "model")), path)
    if not path.exists():
        return Source(name)
    if not _holds_model(path):
        raise ConfigError(_no_model(path))
    parent = path.resolve().parent
    of_run = path.resolve().name in EXPORTS and (path / "trainkit.json").is_file() and (parent / CONFIG).is_file()
    return Source(name, path.parent if of_run and path.name in EXPORTS else parent if of_run else None)


def _holds_model(path: Path) -> bool:
    return any((path / name).is_file() for name in HOLD_MODELS)


def _export(run: Path, name: str) -> Path:
    if _holds_model(run / name):
        return run / name
    record = Record(run)
    if name == "best":
        raise ConfigError(
            f"the run {str(run)!r} has no {run / name}, which train.save_best writes after evaluations; omit --best"
        )
    total = record.setting("train", "total_steps")
    where = f"step {record.step}{'' if total is None else f' of {total}'}"
    best = " Its best export so far: --best" if _holds_model(run / "best") else ""
    if record.state == RUNNING:
        raise ConfigError(
            f"the run {str(run)!r} is at {where}, and exports its model at the end: wait for {run / name}.{best}"
        )
    raise ConfigError(
        f"the run {str(run)!r} has no {run / name}: it ended at {where}, before the export. Train it to its end with "
        f"the command that began it and train.resume=auto.{best}"
    )


def _no_model(path: Path) -> str:
    """Return what a directory without a model is, and what to give instead."""
    exports = [str(path / name) for name in EXPORTS if _holds_model(path / name)]
    if path.parent.name == "checkpoints":
        return (
            f"{str(path)!r} is a checkpoint, from which a run resumes; give the run {str(path.parent.parent)!r}, whose "
            "export is used"
        )
    if not path.is_dir():
        return f"{str(path)!r} is a file; give the directory of a run or of a model, or a hub id"
    hint = (
        f"give {exports[0]!r}" if exports else "give the directory of a run (train.run_dir) or of a model, or a hub id"
    )
    return f"{str(path)!r} holds neither a model ({', '.join(HOLD_MODELS)}) nor a run ({CONFIG}); {hint}"
