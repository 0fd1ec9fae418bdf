"""Which functions of a class of trlX a user has replaced: in a subclass, on the class itself, or on an object."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any, TypeVar

T = TypeVar("T", bound=type)
_FIRST: dict[type, dict[str, Any]] = {}


def remembered(cls: T) -> T:
    """Remember what a class has when it is defined, and return it; a decorator."""
    _FIRST[cls] = {name: inspect.getattr_static(cls, name) for name in dir(cls)}
    return cls


def own_class(cls: type[Any]) -> type[Any]:
    """Return the first class of this package among a class and those that it derives from; without one `object`."""
    package = __name__.partition(".")[0]
    return next((each for each in cls.__mro__ if each.__module__.partition(".")[0] == package), object)


def replaced(owner: Any, names: Iterable[str] | None = None) -> list[str]:
    """Return which functions are not those that this package has under their names.

    Args:
        owner: a class that derives from one of this package, or an object of it.
        names: their names; None: all public ones besides those that make objects.
    """
    cls, own = (owner, {}) if isinstance(owner, type) else (type(owner), getattr(owner, "__dict__", {}))
    first = _FIRST.get(own_class(cls), {})
    if names is None:
        names = [name for name, value in first.items() if inspect.isfunction(value) and not name.startswith("_")]
    return [name for name in names if name in own or inspect.getattr_static(cls, name, None) is not first.get(name)]
