"""Trackers that get metrics by TRL's names alone."""

from __future__ import annotations

import os
from typing import Any

from accelerate.utils import LoggerType

from trainkit.errors import ConfigError
from trainkit_migrate.shared import RenamingTracker, renaming_trackers


def take_trackers(entries: list[Any], names: str = "trl") -> tuple[list[RenamingTracker], list[Any]]:
    """Make the trackers of accelerate that are to get TRL's names, and return them and the entries that are left.

    Args:
        entries: ``train.trackers``.
        names: by which names they get metrics: ``"trl"``, or ``"trainkit"``, for which all entries are left.

    Raises:
        ConfigError: the names are of neither.
    """
    if names not in ("trl", "trainkit"):
        raise ConfigError(f"log_names should be 'trl' or 'trainkit'; given {names!r}")
    if names == "trainkit":
        return [], entries
    known = {each.value for each in LoggerType}
    taken = [each for each in entries if (each if isinstance(each, str) else each.name) in known]
    made = [] if int(os.environ.get("RANK", 0)) else renaming_trackers(taken)
    return made, [each for each in entries if each not in taken]
