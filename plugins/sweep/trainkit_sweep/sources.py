"""A sweep from its file, checked as a whole before anything runs."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from trainkit.config import TRLConfig, default_config, read_config
from trainkit.config.faults import Fault, report
from trainkit.config.places import COMMAND_LINE, leaves
from trainkit.config.tree import nest
from trainkit.errors import ConfigError, describe, suggest
from trainkit.plain import Key, read_yaml_lines, to_yaml
from trainkit.security import file_name
from trainkit_sweep.settings import CHOICES, RANGE, Range, RunArguments, SweepConfig
from trainkit_sweep.space import Space, grid, make_space
from trainkit_sweep.trlx import from_trlx, is_of_trlx

OWN = {
    "train.seed": "give seeds",
    "train.run_dir": "give directory; every run has a directory of its own in it",
    "train.checkpoint_dir": "give directory; every run has a directory of its own in it",
    "train.resume": "a sweep resumes its own runs",
    "train.resume_from_checkpoint": "a sweep resumes its own runs",
}
"""Settings that a sweep sets itself, and what to do instead."""
FILES = (".jsonl", ".json", ".csv", ".parquet", ".txt", ".gz", ".py")
"""Suffixes of files that a run may name; without one of them, it names a directory, a hub id or a module."""


@dataclass(frozen=True)
class Hparams:
    """What ``main`` of a script is given: settings by dotted path."""

    settings: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Return them as nested dictionaries."""
        found: dict[str, Any] = {}
        for name, value in self.settings.items():
            *sections, last = name.split(".")
            here = found
            for section in sections:
                here = here.setdefault(section, {})
            here[last] = value
        return found

    def __str__(self) -> str:
        return to_yaml(dict(self.settings))


@dataclass(frozen=True)
class Sweep:
    """A sweep that was checked."""

    settings: SweepConfig
    name: str
    directory: Path
    base: TRLConfig[Any] | Hparams
    """The configuration that the parameters change; of a script, what it is given besides them."""
    space: Space

    @cached_property
    def trials(self) -> int:
        """The number of trials."""
        most = self.settings.trials
        if self.settings.sampler != "grid":
            return int(most or 0)
        points = math.prod(map(len, grid(self.space).values()))
        return points if most is None else min(most, points)

    def config(self, parameters: Mapping[str, Any]) -> TRLConfig[Any] | Hparams:
        """Return the configuration of a trial, except for its seed and directory."""
        return _configured(self.settings.run, parameters)


def read_sweep(path: Path, changes: Mapping[str, Any] | None = None) -> Sweep:
    """Read a sweep from a YAML file.

    Args:
        path: the file.
        changes: settings of the sweep that replace those in the file.

    Raises:
        ConfigError: the file cannot be read, or the sweep is invalid; lists every fault with its key and line.
    """
    data, lines = read_yaml_lines(path)
    places = {key: f"{path}:{line}" for key, line in lines.items()}
    changes, script = dict(changes or {}), (changes or {}).get("script")
    changes.pop("script", None)
    if is_of_trlx(data):
        data = from_trlx(data, script, places)
    elif script is not None:
        raise ConfigError(f"--script goes with a sweep of trlX; write run: {{script: {script}}} in {path}")
    data |= changes
    try:
        settings = SweepConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError(report(list(_faults(error)), places)) from None
    base = _configured(settings.run, {})
    faults = [*_own(settings), *_unusable(settings, base), *_absent(settings.run)] or list(_refused(settings))
    if faults:
        raise ConfigError(report(faults, places))
    name = settings.name or path.stem
    directory = Path(settings.directory or Path("sweeps") / file_name(name))
    return Sweep(settings, name, directory, base, make_space(settings.parameters, base, _accepts(settings)))


def _configured(run: RunArguments, changes: Mapping[str, Any]) -> TRLConfig[Any] | Hparams:
    """Return the configuration that a run would have; of a script, what it is given."""
    every = {**run.overrides, **changes}
    if run.script is not None:
        return Hparams(every)
    if run.config is None:
        return default_config(str(run.method)).update(every)
    return read_config(Path(run.config), every)


# ---------------------------------------------------------------------------------------------------------- faults


def _faults(error: ValidationError) -> Iterator[Fault]:
    """Yield the faults that validation has found."""
    for each in error.errors():
        loc = tuple(str(part) for part in each["loc"] if part not in (CHOICES, RANGE))
        given = describe(each["input"])
        if each["type"] == "extra_forbidden":
            known = list(_model_at(loc[:-1]).model_fields)
            yield Fault(loc, f"unknown field{suggest(loc[-1], known)} (known: {', '.join(known)})")
        elif each["type"] == "missing":
            yield Fault(loc, "required, not given")
        elif each["type"] == "value_error" and isinstance(each["input"], Mapping):
            yield Fault(loc, each["msg"].removeprefix("Value error, "))
        else:
            yield Fault(loc, f"{each['msg'].removeprefix('Value error, ').removeprefix('Input ')} (given {given})")


def _model_at(loc: Key) -> type[BaseModel]:
    models: dict[str, type[BaseModel]] = {"run": RunArguments, "parameters": Range}
    return models.get(next(iter(loc), ""), SweepConfig)


def _own(settings: SweepConfig) -> Iterator[Fault]:
    """Yield a fault for each setting that the sweep sets itself."""
    for name in settings.parameters:
        if name in OWN:
            yield Fault(("parameters", name), f"no parameter of a sweep; {OWN[name]}")
    for name, value in settings.run.overrides.items():
        for key in leaves(nest(name, value)):
            if (told := OWN.get(".".join(key))) is not None:
                yield Fault(("run", "overrides", name), f"{'.'.join(key)} cannot be set here; {told}")


def _unusable(settings: SweepConfig, base: TRLConfig[Any] | Hparams) -> Iterator[Fault]:
    """Yield what is wrong with the configuration, or with the grid, though each is valid."""
    if isinstance(base, Hparams):
        yield from _unusable_script(str(settings.run.script))
    elif base.train.resume is not None:
        yield Fault(("run",), f"the configuration sets train.resume; {OWN['train.resume']}. Remove it")
    elif not base.train.eval_interval and "train.eval_interval" not in settings.parameters:
        yield Fault(
            ("run",), "train.eval_interval is 0, and a sweep compares evaluations; set the steps between evaluations"
        )
    for name, given in settings.parameters.items():
        if settings.sampler == "grid" and isinstance(given, Range) and given.step is None:
            yield Fault(("parameters", name), "the sampler 'grid' needs a list of choices, or a range with a step")


def _unusable_script(script: str) -> Iterator[Fault]:
    """Yield why a script cannot be run; it is read, and not imported."""
    if not Path(script).is_file():
        return  # that is told
    try:
        tree = ast.parse(Path(script).read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError) as error:
        yield Fault(("run", "script"), f"{script!r} cannot be read: {error}")
        return
    if not any(isinstance(each, ast.FunctionDef) and each.name == "main" and each.args.args for each in tree.body):
        yield Fault(("run", "script"), f"{script!r} has no function main(hparams), which a trial calls")
    imported = {alias.name for each in ast.walk(tree) if isinstance(each, ast.Import) for alias in each.names}
    imported |= {str(each.module) for each in ast.walk(tree) if isinstance(each, ast.ImportFrom)}
    if any(name.partition(".")[0] == "trlx" for name in imported) and find_spec("trlx") is None:
        yield Fault(
            ("run", "script"),
            f"{script!r} imports trlx, which is not installed; `trainkit migrate {script}` shows how to import "
            "trainkit_trlx instead",
        )


def _absent(run: RunArguments) -> Iterator[Fault]:
    """Yield a fault for each file of data or code that is not there; every trial would fail with it."""
    for name, given in run:
        path = Path(given.partition(":")[0]) if isinstance(given, str) and name != "config" else Path()
        if path.suffix.lower() in FILES and not path.exists():
            around = map(str, path.parent.iterdir()) if path.parent.is_dir() else ()
            yield Fault(("run", name), f"there is no file {str(path)!r}{suggest(str(path), [*around])}")


def _refused(settings: SweepConfig) -> Iterator[Fault]:
    """Yield a fault for each parameter of which the configuration refuses a value, whatever the others are."""
    if settings.run.script is not None:  # its configuration is not known before it runs
        return
    first = {name: _candidates(given)[0] for name, given in settings.parameters.items()}
    last = {name: _candidates(given)[-1] for name, given in settings.parameters.items()}
    for name, given in settings.parameters.items():
        wrong = []
        for value in _candidates(given):
            told = [_why_refused(settings, {**others, name: value}) for others in ({}, first, last)]
            if all(told):
                wrong.append((value, told[0]))
        if wrong:
            more = f" (refused: {len(wrong)} of its values)" if len(wrong) > 1 else ""
            yield Fault(("parameters", name), f"{wrong[0][0]!r} is refused: {wrong[0][1]}{more}")


def _candidates(given: list[Any] | Range) -> list[Any]:
    return [given.low, given.high] if isinstance(given, Range) else given


def _why_refused(settings: SweepConfig, parameters: Mapping[str, Any]) -> str:
    """Return the faults of the configuration with these parameters; empty if it is valid."""
    try:
        _configured(settings.run, parameters)
    except ConfigError as error:
        told = "; ".join(line.strip() for line in str(error).split("\n")[1:]) or str(error)
        return told.replace(f" ({COMMAND_LINE})", "")
    return ""


def _accepts(settings: SweepConfig) -> Callable[[str, Any], bool]:
    """Return a function that tells whether the configuration accepts a value of a setting."""
    known = settings.run.script is None  # otherwise numbers are as they are written
    return lambda name, value: known and not _why_refused(settings, {name: value})
