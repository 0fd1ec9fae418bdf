"""A configuration from a file with changes of the command line, checked as a whole."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainkit.config.faults import Fault
from trainkit.config.places import COMMAND_LINE, leaves, value_at
from trainkit.config.tree import TRLConfig, merged, nest
from trainkit.errors import ConfigError, describe, suggest
from trainkit.plain import Key, read_yaml_lines
from trainkit.plugins.registry import is_known

PATHS: tuple[Key, ...] = (("model", "model_path"), ("model", "reference_path"), ("tokenizer", "tokenizer_path"))
"""Settings that are a directory or a hub id."""
TRLX = ("ppoconfig", "ilqlconfig", "sftconfig", "rftconfig")
"""The names of methods in configurations of trlX, in small letters."""


def read_config(path: Path, changes: Mapping[str, Any] | None = None) -> TRLConfig[Any]:
    """Read a configuration from a YAML file, and change it by dotted path, as `TRLConfig.update` does.

    File and changes are validated together, and directories that are not there are faults.

    Raises:
        ConfigError: the file cannot be read, or the configuration is invalid; lists every fault with its key and place.
    """
    if "=" in path.name and not os.path.exists(path):
        raise ConfigError(
            f"given {str(path)!r} instead of a configuration file; give the file first: CONFIG.yaml {path}"
        )
    if (path / "config.yaml").is_file():
        raise ConfigError(f"{str(path)!r} is a directory; give its file: {path / 'config.yaml'}")
    if not os.path.exists(path) and is_known(str(path)):
        raise ConfigError(f"{str(path)!r} is no file; write one with trainkit config show {path} > {path}.yaml")
    data, lines = read_yaml_lines(path)
    places: dict[Key, str] = {key: f"{path}:{line}" for key, line in lines.items()}
    for setting, value in (changes or {}).items():
        change = nest(setting, value)
        data = merged(data, change)
        places = {key: place for key, place in places.items() if value_at(data, key) is not ...}
        places |= dict.fromkeys(leaves(change), COMMAND_LINE)
    return TRLConfig.from_dict(data, places, faults=[*_of_trlx(data, path), *absent_paths(data)])


def _of_trlx(data: Mapping[str, Any], path: Path) -> Iterator[Fault]:
    """Yield a fault if it is a configuration of trlX."""
    if str(value_at(data, ("method", "name"))).lower() in TRLX:
        yield Fault(("method",), f"this is a configuration of trlX; trainkit migrate {path} prints one of trainkit")


def absent_paths(data: Mapping[str, Any]) -> Iterator[Fault]:
    """Yield a fault for each setting that can only be a local directory, which is not there."""
    for key in PATHS:
        value = value_at(data, key)
        if isinstance(value, str) and (missing := absent(value)):
            yield Fault(key, f"{missing} Give a directory that is there, or a hub id (given {describe(value)})")
    resume = value_at(data, ("train", "resume"))
    if isinstance(resume, str) and resume != "auto" and not os.path.exists(resume):
        yield Fault(("train", "resume"), f"there is no such checkpoint (given {describe(resume)}); give one, or auto")


def absent(given: str) -> str:
    """Return which directory is not there, if ``given`` can only be a local one, as hub ids have one slash at most."""
    if not given or re.match(r"~|\$\w|https?://", given):  # refused for another reason
        return ""
    path = Path(given)
    local = path.is_absolute() or given.startswith((".", "~")) or len(path.parts) > 2
    if os.path.exists(path) or not (local or (len(path.parts) == 2 and os.path.isdir(path.parent))):
        return ""
    first = next(part for part in [*reversed(path.parents), path] if not os.path.exists(part))
    around: list[str] = []
    with suppress(OSError):  # it is no directory, or cannot be read
        around = [str(other) for other in first.parent.iterdir()]
    return f"there is no directory {str(first)!r}{suggest(str(first), around) or '.'}"
