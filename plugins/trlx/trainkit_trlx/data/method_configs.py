"""The registry of method configurations."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Self

_METHODS: dict[str, Any] = {}


def register_method(name: Any) -> Any:
    """Register a `MethodConfig` under its class name, or under a given one: ``@register_method("Name")``."""

    def register(cls: Any, key: str) -> Any:
        _METHODS[key.lower()] = cls
        setattr(sys.modules[__name__], key.lower(), cls)
        return cls

    return (lambda cls: register(cls, name)) if isinstance(name, str) else register(name, name.__name__)


@dataclass
@register_method
class MethodConfig:
    """Base class of the settings of an algorithm."""

    name: str

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Self:
        """Return the settings with these fields."""
        return cls(**config)


def get_method(name: str) -> type[MethodConfig]:
    """Return the class of a registered method.

    Raises:
        ValueError: there is no method of this name.
    """
    if name.lower() not in _METHODS:
        near = get_close_matches(name.lower(), _METHODS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{name!r} is no registered method{hint}. Known: {', '.join(sorted(_METHODS))}")
    return _METHODS[name.lower()]  # type: ignore[no-any-return]
