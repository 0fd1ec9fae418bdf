"""Checks of the arguments of TRL's classes."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from functools import wraps
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, TypeVar

from trainkit.errors import ConfigError, describe, suggest

C = TypeVar("C", bound=type)
KINDS: dict[Any, tuple[Any, str]] = {
    int: (Integral, "an integer"),
    float: (Real, "a number"),
    str: (str, "text"),
    dict: (Mapping, "a dictionary"),
    list: (list | tuple, "a list"),
    Callable: (Callable, "a function"),
}


def checked(cls: C) -> C:
    """Make a dataclass check the names and types of its arguments.

    It raises a ConfigError that names the argument, what was given, and what it should be.
    """
    init, hints = cls.__init__, typing.get_type_hints(cls)  # type: ignore[misc]

    @wraps(init)
    def checking(self: Any, *args: Any, **kwargs: Any) -> None:
        refuse_unknown(cls, {name: value for name, value in kwargs.items() if name not in hints}, [*hints])
        for name, value in (dict(zip(hints, args, strict=False)) | kwargs).items():
            if wanted := fault(value, hints[name]):
                raise ConfigError(f"{name} of {cls.__name__} should be {wanted}; given {describe(value)}")
        init(self, *args, **kwargs)

    cls.__init__ = checking  # type: ignore[misc]
    return cls


def fault(value: Any, hint: Any) -> str:
    """Return what a value should be by its annotation; empty if it is, or if that is not known."""
    kinds = typing.get_args(hint) if isinstance(hint, UnionType) else (hint,)
    plain = [typing.get_origin(kind) or kind for kind in kinds]
    if any(kind is typing.Literal for kind in plain) or (value is None and NoneType in plain):
        return ""  # the choices are checked where they are used
    if isinstance(value, str) and list[str] in kinds:  # one text stands for a list of it, as all-linear
        return ""
    if bool in plain:
        return "" if isinstance(value, bool) else "True or False"
    wanted = [KINDS[kind] for kind in plain if kind in KINDS]
    fits = not isinstance(value, bool) and any(isinstance(value, kind) for kind, _ in wanted)
    return (
        ""
        if fits or not wanted
        else " or ".join([*(text for _, text in wanted), *(["None"] if NoneType in plain else [])])
    )


def refuse_unknown(cls: type, given: Mapping[str, Any], known: list[str] | None = None) -> None:
    """Raise a ConfigError if arguments are given that a class does not have."""
    if not given:
        return
    parameters = inspect.signature(cls).parameters.values()
    known = known or [each.name for each in parameters if each.kind is not each.VAR_KEYWORD]
    name = next(iter(given))
    raise ConfigError(f"{cls.__name__} takes no {name}{suggest(name, known) or '.'} It takes: {', '.join(known)}")


def check_takes(name: str, function: Callable[..., Any] | None, *arguments: str) -> None:
    """Raise a ValueError unless a function takes these arguments by their places, or if it is none; None: not given."""
    if function is None:
        return
    if not callable(function):
        raise ValueError(f"{name} should be a function; given {describe(function)}")
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        called = f"with {', '.join(arguments)}" if arguments else "without arguments"
        raise ValueError(f"{name} is called {called}, which it does not take: {error}") from error
    except ValueError:  # functions in C have no signature
        return
