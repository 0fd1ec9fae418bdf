"""What a run has written so far, read without torch: its configuration, metrics, findings and state."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any, Self

from trainkit.errors import DataError
from trainkit.plain import read_yaml
from trainkit.runs.lock import NAME, is_held

log = logging.getLogger(__name__)

RUNNING, DONE, STOPPED, KILLED = "running", "done", "stopped", "killed"
STARTS = "starts.jsonl"
DEEPEST = 4
"""Levels of directories in which runs are looked for."""
NOT_MAIN = ("length", "time", "turns", "failed")
"""Metrics of evaluations that tell what a model does, not how well."""


def first_start(run_dir: str | None, resume: str | None) -> datetime:
    """Return when a run began: the present, or the first start of the run that it resumes.

    Args:
        run_dir: the directory of the run.
        resume: None; ``auto``, for the run in ``run_dir``; or a checkpoint.
    """
    resumed = run_dir if resume == "auto" else resume and Path(resume).absolute().parents[1]
    with suppress(DataError, LookupError, TypeError, ValueError):  # without it, today is as good as any day
        first = Record(Path(resumed or "")).starts[0] if resumed else {}
        return datetime.fromisoformat(first.get("began") or first["time"])
    return datetime.now().astimezone()


@dataclass(frozen=True)
class Record:
    """A run, by its directory. A run that goes on can be read, too.

    Raises:
        DataError: a file of it cannot be read, or has a line that is not a JSON object; names it.
    """

    path: Path

    @cached_property
    def config(self) -> dict[str, Any]:
        """The configuration, as plain data; it need not be valid here.

        Raises:
            ConfigError: the file cannot be read.
            DataError: there is none.
        """
        if not self.path.is_dir():
            raise DataError(f"there is no directory {str(self.path)!r}; give the directory of a run (train.run_dir)")
        if not (self.path / "config.yaml").exists():
            raise DataError(f"{str(self.path)!r} has no config.yaml; give the directory of a run (train.run_dir)")
        return read_yaml(self.path / "config.yaml")

    def checked(self) -> Self:
        """Return the run itself.

        Raises:
            DataError: it is not one of trainkit, or of another version.
            ConfigError, DataError: as `config`.
        """
        if not isinstance(self.config.get("method"), dict | str):
            raise DataError(f"{str(self.path)!r} is no run of trainkit: its config.yaml names no method")
        if any("step" not in start for start in self.starts):
            raise DataError(f"{str(self.path / STARTS)!r} has a start without a step; another version made the run")
        return self

    @property
    def method(self) -> str:
        """The name of the algorithm; empty if the configuration names none."""
        section = self.config.get("method")
        return str(section.get("name", "") if isinstance(section, dict) else section or "")

    def setting(self, section: str, name: str, default: Any = None) -> Any:
        """Return a setting of the configuration, or ``default`` if it has none."""
        values = self.config.get(section)
        return values.get(name, default) if isinstance(values, dict) else default

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of ``metrics.jsonl``, of training and of evaluations."""
        return read_lines(self.path / "metrics.jsonl")

    @cached_property
    def series(self) -> dict[str, dict[int, float]]:
        """The metrics by name, each by step. The last one counts where a step is recorded twice."""
        series: dict[str, dict[int, float]] = {}
        for line in self.metrics:
            step = line.get("step")
            for name, value in line.items() if isinstance(step, int) else ():
                if name != "step" and isinstance(value, int | float) and not isinstance(value, bool):
                    series.setdefault(name, {})[int(step)] = float(value)  # type: ignore[arg-type]
        return {name: dict(sorted(values.items())) for name, values in series.items()}

    @cached_property
    def starts(self) -> list[dict[str, Any]]:
        """When, at which step and with which versions processes have begun or resumed the run."""
        return read_lines(self.path / STARTS)

    def evaluated(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return the samples of the first and of the last evaluation; the first is empty if there was only one."""
        first: list[dict[str, Any]] = []
        last: list[dict[str, Any]] = []
        for sample in lines_of(self.path / "samples.jsonl"):
            if sample.get("kind") != "evaluation":
                continue
            if last and sample.get("step") != last[-1].get("step"):
                first, last = first or last, []
            last.append(sample)
        return first, last

    def collected(self) -> list[dict[str, Any]]:
        """Return the rollouts of the newest collection, or of one before it if the run has no ``newest.jsonl``."""
        last = read_lines(self.path / "newest.jsonl")
        if last:
            return last
        for line in lines_of(self.path / "samples.jsonl"):
            if line.get("kind") == "rollout":
                last = last if last and last[-1].get("step") == line.get("step") else []
                last.append(line)
        return last

    @cached_property
    def findings(self) -> list[dict[str, Any]]:
        """What the health monitor has found: ``step``, ``check`` and ``message``."""
        return read_lines(self.path / "health.jsonl")

    @property
    def step(self) -> int:
        """The last step of which there are metrics."""
        return max((int(line["step"]) for line in self.metrics if isinstance(line.get("step"), int)), default=0)

    @property
    def evaluation(self) -> dict[str, float]:
        """The metrics of the last evaluation, with their step; empty if there was none."""
        evaluations = (line for line in reversed(self.metrics) if any(name.startswith("eval/") for name in line))
        return next(evaluations, {})

    @property
    def state(self) -> str:
        """``running``, ``done`` (the model is exported), ``stopped``, or ``killed``: it left its lock behind."""
        if (self.path / NAME).exists():
            return RUNNING if is_held(self.path) else KILLED
        mark: dict[str, Any] = {}
        with suppress(OSError, ValueError):
            mark = json.loads((self.path / "model" / "trainkit.json").read_text(encoding="utf-8"))
        return DONE if mark.get("step") == self.step else STOPPED


def find_runs(directory: Path) -> Iterator[Record]:
    """Yield the runs in a directory and below it, sorted by path."""

    def below(place: Path, levels: int) -> Iterator[Path]:
        if (place / "config.yaml").is_file() and any((place / name).is_file() for name in ("metrics.jsonl", STARTS)):
            yield place
        elif levels:
            with suppress(OSError):
                for inner in sorted(place.iterdir()):
                    if inner.is_dir() and not inner.is_symlink():
                        yield from below(inner, levels - 1)

    yield from map(Record, below(directory, DEEPEST))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return what `lines_of` yields."""
    return list(lines_of(path))


def lines_of(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a file, without a last line that is cut off; none if there is no file.

    Raises:
        DataError: the file cannot be read, or a line is not a JSON object; names it.
    """
    at = 1
    try:
        with path.open(encoding="utf-8") as file:
            for line in file:
                if line.endswith("\n"):  # otherwise it is being written, or was cut off
                    yield dict(json.loads(line))
                at += 1
    except FileNotFoundError:
        return
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {path}: {error}") from error
    except (ValueError, TypeError, RecursionError) as error:
        raise DataError(f"{path}, line {at}: not a JSON object ({error})") from error


def free_directory(path: str) -> str:
    """Return a directory for a new run: ``path``, or with a number if that holds a run, and tell of it."""
    names = (path if number == 1 else f"{path}-{number}" for number in count(1))
    free = next(name for name in names if not (Path(name) / "config.yaml").exists())
    if free != path:
        log.warning("%s holds a run; this one is written to %s", path, free)
    return free


def main_metric(names: Iterable[str]) -> str | None:
    """Return the metric that says best how good a model is, of those that a run has recorded; None if there is none."""
    present = list(names)

    def ranked() -> Iterator[str]:
        yield from (name for name in present if name.startswith("eval/reward"))
        yield from (name for name in present if name.startswith("eval/") and not name[5:].startswith(NOT_MAIN))
        yield from (name for name in ("reward/mean", "loss/total") if name in present)
        yield from (name for name in present if not name.startswith("time/"))

    return next(ranked(), None)
