"""The exception classes. Every message says what was given, what is allowed, and what to do."""

from __future__ import annotations

import linecache
import os
import re
import sysconfig
import traceback
from collections.abc import Iterable, Iterator
from types import TracebackType

from trainkit.security import hidden

TRACEBACK = "TRAINKIT_TRACEBACK"
"""The environment variable with which the command line and notebooks show the traceback of errors."""


class TrainkitError(Exception):
    """Base class of all errors that trainkit raises deliberately."""

    on_all_ranks = False
    """Whether all processes of the run raise it at the same time, and so can still act together."""
    from_other_rank = False
    """Whether it is the error of another process, which reports it."""

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython shows of the error: the lines of the user's own code, and the message."""
        if os.environ.get(TRACEBACK, "").lower() not in ("", "0", "false", "no", "off"):
            return traceback.format_exception(self)
        cause = self.__cause__
        own = [*user_lines(self.__traceback__), *user_lines(None if cause is None else cause.__traceback__)]
        hint = [] if cause is None else [f"(%env {TRACEBACK}=1, and %tb, show the traceback)"]
        message = "\n".join(map(printable, str(self).split("\n")))
        return [*dict.fromkeys(own), f"{type(self).__name__}: {message}", *hint]


class ConfigError(TrainkitError, ValueError):
    """An invalid configuration, or an invalid combination of arguments."""


class RegistryError(TrainkitError, LookupError):
    """A trainer or plugin name that is unknown, registered twice, or refers to something that cannot be used."""


class PluginError(TrainkitError, ImportError):
    """A requested plugin that could not be loaded, has invalid hooks, or returned something invalid from a method."""


class HookError(PluginError):
    """A hook of a plugin or callback that raised an exception during a run; that exception is the ``__cause__``."""


class DataError(TrainkitError, ValueError):
    """Prompts, samples or a tokenizer that cannot be used for training."""


class RewardError(TrainkitError, ValueError):
    """A reward or metric function that raised an exception, took too long, or returned an invalid value."""


class EngineError(TrainkitError, RuntimeError):
    """A generation engine that failed, or answered with something else than was asked for."""


class EpisodeError(TrainkitError, RuntimeError):
    """An environment that raised an exception, took too long, or returned an invalid prompt or turn."""


class NonFiniteError(TrainkitError, ArithmeticError):
    """A loss or gradient that is NaN or infinite; the weights were not updated."""


class OutOfMemoryError(TrainkitError, RuntimeError):
    """A pass that does not fit into memory, and that cannot be made with fewer rows; the weights were not updated."""


class ProcessError(TrainkitError, RuntimeError):
    """Another process of the run has ended, or did not answer within `train.timeout`."""


class CheckpointError(TrainkitError, RuntimeError):
    """A checkpoint that cannot be written, read, or resumed with this configuration."""


class HubError(TrainkitError, RuntimeError):
    """The hub of Hugging Face refused a model, or could not be reached."""


class SweepError(TrainkitError, RuntimeError):
    """A sweep of which no trial is valid, or whose database cannot be reached."""


def user_lines(trace: TracebackType | None) -> Iterator[str]:
    """Yield the lines of a traceback that are neither in trainkit and its plugins nor in installed packages."""
    paths = sysconfig.get_paths()
    installed = tuple(f"{paths[name]}{os.sep}" for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    while trace is not None:
        code, module = trace.tb_frame.f_code, str(trace.tb_frame.f_globals.get("__name__", ""))
        line = linecache.getline(code.co_filename, trace.tb_lineno, trace.tb_frame.f_globals).strip()
        if line and not code.co_filename.startswith(installed) and not module.startswith("trainkit"):
            yield printable(f"line {trace.tb_lineno}{f' in {code.co_name}' * (code.co_name[0] != '<')}: {line}")
        trace = trace.tb_next


def describe(value: object, limit: int = 80) -> str:
    """Return ``value`` as error messages quote it: its repr, without secrets and cut to ``limit``, and its type."""
    text = repr(hidden(value))
    return f"{text if len(text) <= limit else text[: limit - 1] + '…'} ({type(value).__name__})"


def printable(text: str) -> str:
    """Return ``text`` on one line, without control characters, by which data could control a terminal."""
    return "".join(character if character.isprintable() else " " for character in text)


def suggest(name: str, choices: Iterable[object]) -> str:
    """Return ``"; did you mean 'x'?"`` for the choice nearest to ``name``, or an empty string.

    The case of letters makes no difference. Without a near choice it is the only one that has ``name`` among its words,
    or that is a word of ``name``.
    """
    from difflib import get_close_matches

    known = {choice.lower(): choice for choice in map(str, choices)}
    near = get_close_matches(name.lower(), known, n=1, cutoff=0.6)
    words = re.findall(r"[a-z0-9]+", name.lower())
    within = [choice for choice in known if name.lower() in choice.split("_") or choice in words]
    found = near or (within if len(within) == 1 else [])
    return f"; did you mean {known[found[0]]!r}?" if found else ""


def edits(a: str, b: str) -> int:
    """Return the letters to insert, delete or replace to make ``b`` of ``a``. Levenshtein 1966."""
    row = list(range(len(b) + 1))
    for i, letter in enumerate(a, 1):
        before, row = row, [i]
        for j, other in enumerate(b, 1):
            row.append(min(row[-1] + 1, before[j] + 1, before[j - 1] + (letter != other)))
    return row[-1]
