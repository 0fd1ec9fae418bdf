"""Logging of trlX: loggers of this package, with verbosity and ranks."""

from __future__ import annotations

import logging
import os
from logging import CRITICAL, DEBUG, ERROR, FATAL, INFO, NOTSET, WARN, WARNING
from typing import Any

__all__ = [
    "CRITICAL",
    "DEBUG",
    "ERROR",
    "FATAL",
    "INFO",
    "NOTSET",
    "WARN",
    "WARNING",
    "MultiProcessAdapter",
    "get_logger",
    "get_verbosity",
    "set_verbosity",
    "set_verbosity_debug",
    "set_verbosity_error",
    "set_verbosity_info",
    "set_verbosity_warning",
]

ROOT = "trainkit_trlx"
NAMES = logging.getLevelNamesMapping()
logging.getLogger(ROOT).setLevel(NAMES.get(os.environ.get("TRLX_VERBOSITY", "info").upper(), INFO))


class MultiProcessAdapter(logging.LoggerAdapter[logging.Logger]):
    """A logger that writes on the processes of ``ranks`` alone: ``logger.info("text", ranks=["0", "1"])``."""

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        """Log a message on the given ranks, the first by default; ``["all"]`` stands for all of them."""
        ranks, rank = kwargs.pop("ranks", ["0"]), os.environ.get("RANK", "0")
        if self.isEnabledFor(level) and (ranks == ["all"] or rank in map(str, ranks)):
            self.logger.log(level, f"[RANK {rank}] {msg}", *args, **kwargs)


def get_logger(name: str | None = None) -> MultiProcessAdapter:
    """Return the logger of a name below the package's."""
    inside = name is not None and name.split(".")[0] == ROOT
    return MultiProcessAdapter(logging.getLogger(name if inside else f"{ROOT}.{name}" if name else ROOT), {})


def get_verbosity() -> int:
    """Return the level of the package's loggers."""
    return logging.getLogger(ROOT).getEffectiveLevel()


def set_verbosity(verbosity: int) -> None:
    """Set the level of the package's loggers."""
    logging.getLogger(ROOT).setLevel(verbosity)


def set_verbosity_info() -> None:
    """Show information."""
    set_verbosity(INFO)


def set_verbosity_warning() -> None:
    """Show warnings."""
    set_verbosity(WARNING)


def set_verbosity_debug() -> None:
    """Show everything."""
    set_verbosity(DEBUG)


def set_verbosity_error() -> None:
    """Show errors."""
    set_verbosity(ERROR)
