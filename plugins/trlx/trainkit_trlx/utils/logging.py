"""Logging of trlX: loggers of this package, with verbosity and ranks."""

from __future__ import annotations

import logging
import os
from logging import CRITICAL, DEBUG, ERROR, FATAL, INFO, NOTSET, WARN, WARNING
from typing import Any

from transformers.utils import logging as transformers_logging

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
    "disable_default_handler",
    "disable_progress_bar",
    "enable_default_handler",
    "enable_progress_bar",
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


_handler = logging.StreamHandler()


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


def enable_default_handler() -> None:
    """Write what the package logs to standard error."""
    logging.getLogger(ROOT).addHandler(_handler)


def disable_default_handler() -> None:
    """Leave what the package logs to other handlers."""
    logging.getLogger(ROOT).removeHandler(_handler)


def enable_progress_bar() -> None:
    """Show the progress bars of transformers, while models are loaded."""
    transformers_logging.enable_progress_bar()


def disable_progress_bar() -> None:
    """Remove the progress bars of transformers."""
    transformers_logging.disable_progress_bar()
