"""Logging of trlX: loggers of this package, with verbosity and ranks."""

from __future__ import annotations

import logging
import os
from functools import partial
from logging import CRITICAL, DEBUG, ERROR, FATAL, INFO, NOTSET, WARN, WARNING
from typing import Any

from tqdm import auto  # type: ignore[import-untyped]
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
    "add_handler",
    "disable_default_handler",
    "disable_progress_bar",
    "disable_propagation",
    "enable_default_handler",
    "enable_explicit_format",
    "enable_progress_bar",
    "enable_propagation",
    "get_log_levels_dict",
    "get_logger",
    "get_verbosity",
    "is_progress_bar_enabled",
    "log_levels",
    "remove_handler",
    "reset_format",
    "set_verbosity",
    "set_verbosity_debug",
    "set_verbosity_error",
    "set_verbosity_info",
    "set_verbosity_warning",
    "tqdm",
]

ROOT = "trainkit_trlx"
log_levels = {
    name: logging.getLevelNamesMapping()[name.upper()] for name in ("debug", "info", "warning", "error", "critical")
}
"""The levels by the names that ``TRLX_VERBOSITY`` may have."""


def _first_level() -> int:
    """Return the level that ``TRLX_VERBOSITY`` names; that of information if it names none."""
    name = os.environ.get("TRLX_VERBOSITY", "info").lower()
    if name not in log_levels:
        logging.getLogger(ROOT).warning("TRLX_VERBOSITY is %r; it may be %s", name, ", ".join(log_levels))
    return log_levels.get(name, INFO)


logging.getLogger(ROOT).setLevel(_first_level())
_handler = logging.StreamHandler()


class MultiProcessAdapter(logging.LoggerAdapter[logging.Logger]):
    """A logger that writes on the processes of ``ranks`` alone: ``logger.info("text", ranks=["0", "1"])``."""

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        """Log a message on the given ranks, the first by default; ``["all"]`` and ``[]`` stand for all of them."""
        ranks, rank = kwargs.pop("ranks", ["0"]), os.environ.get("RANK", "0")
        if self.isEnabledFor(level) and (ranks in ([], ["all"]) or rank in map(str, ranks)):
            self.logger.log(level, f"[RANK {rank}] {msg}", *args, **kwargs)

    def warning_advice(self, *args: Any, **kwargs: Any) -> None:
        """Log a warning, unless ``TRLX_NO_ADVISORY_WARNINGS`` is set."""
        if not os.environ.get("TRLX_NO_ADVISORY_WARNINGS"):
            self.warning(*args, **kwargs)


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


set_verbosity_debug = partial(set_verbosity, DEBUG)
set_verbosity_info = partial(set_verbosity, INFO)
set_verbosity_warning = partial(set_verbosity, WARNING)
set_verbosity_error = partial(set_verbosity, ERROR)


def enable_default_handler() -> None:
    """Write what the package logs to standard error."""
    logging.getLogger(ROOT).addHandler(_handler)


def disable_default_handler() -> None:
    """Leave what the package logs to other handlers."""
    logging.getLogger(ROOT).removeHandler(_handler)


def add_handler(handler: logging.Handler) -> None:
    """Give what the package logs to a handler."""
    logging.getLogger(ROOT).addHandler(handler)


def remove_handler(handler: logging.Handler) -> None:
    """Take a handler away.

    Raises:
        ValueError: it is none of the package's.
    """
    if handler not in logging.getLogger(ROOT).handlers:
        raise ValueError(f"{handler!r} is no handler of this package; give one that add_handler was called with")
    logging.getLogger(ROOT).removeHandler(handler)


def disable_propagation() -> None:
    """Hide what the package logs from the handlers of other loggers."""
    logging.getLogger(ROOT).propagate = False


def enable_propagation() -> None:
    """Show what the package logs to the handlers of other loggers, as at first."""
    logging.getLogger(ROOT).propagate = True


def enable_explicit_format() -> None:
    """Let the package's handlers write time, level, place and message."""
    line = logging.Formatter("[%(asctime)s] [%(levelname)s] [%(filename)s:%(lineno)d:%(funcName)s] %(message)s")
    for handler in logging.getLogger(ROOT).handlers:
        handler.setFormatter(line)


def reset_format() -> None:
    """Let the package's handlers write the message alone."""
    for handler in logging.getLogger(ROOT).handlers:
        handler.setFormatter(None)


def get_log_levels_dict() -> dict[str, int]:
    """Return the levels by the names that ``TRLX_VERBOSITY`` may have."""
    return log_levels


_progress = True


class tqdm(auto.tqdm):  # type: ignore[misc]  # noqa: N801
    """A progress bar that is not shown after `disable_progress_bar`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **(kwargs if _progress else {**kwargs, "disable": True}))


def is_progress_bar_enabled() -> bool:
    """Return whether progress bars are shown."""
    return _progress


def enable_progress_bar() -> None:
    """Show the progress bars of this module, and those of transformers while models are loaded."""
    _show(True)


def disable_progress_bar() -> None:
    """Hide the progress bars of this module and of transformers."""
    _show(False)


def _show(shown: bool) -> None:
    global _progress
    _progress = shown
    switch: Any = transformers_logging.enable_progress_bar if shown else transformers_logging.disable_progress_bar
    switch()
