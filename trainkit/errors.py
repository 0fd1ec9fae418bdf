"""The exception tree. Every message says what was given, what is allowed, and what to do."""

from __future__ import annotations


class TrainkitError(Exception):
    """Base of every error that trainkit raises on purpose."""


class ConfigError(TrainkitError, ValueError):
    """A configuration, or a combination of arguments, that cannot be run."""


class RegistryError(TrainkitError, LookupError):
    """A trainer or plugin name that is unknown, taken twice, or belongs to nothing usable."""


class PluginError(TrainkitError, ImportError):
    """A plugin that was asked for and could not be loaded, or whose hooks do not fit."""


class HookError(PluginError):
    """A hook of a plugin or callback that raised during a run; what it raised is the ``__cause__``."""


class DataError(TrainkitError, ValueError):
    """Prompts, samples or a tokenizer that cannot be trained on."""


class RewardError(TrainkitError, ValueError):
    """A reward or metric function that raised, or returned what it must not."""


class NonFiniteError(TrainkitError, ArithmeticError):
    """A loss or gradient that is NaN or infinite; the weights have not moved."""


class CheckpointError(TrainkitError, RuntimeError):
    """A checkpoint that cannot be written, read, or resumed with this configuration."""


def describe(value: object, limit: int = 80) -> str:
    """Return ``value`` as error messages quote it: its repr, cut to ``limit`` characters, and its type."""
    text = repr(value)
    return f"{text if len(text) <= limit else text[: limit - 1] + '…'} ({type(value).__name__})"


def suggest(name: str, choices: object) -> str:
    """Return ``"; did you mean 'x'?"`` for the choice nearest to ``name``, or an empty string."""
    from difflib import get_close_matches

    near = get_close_matches(name, [str(c) for c in choices], n=1, cutoff=0.6)  # type: ignore[attr-defined]
    return f"; did you mean {near[0]!r}?" if near else ""
