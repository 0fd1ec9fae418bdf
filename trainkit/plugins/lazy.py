"""Packages that import what they export when it is first used."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any


def lazy_names(
    package: str, names: Sequence[str], *modules: str
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package that exports ``names`` from ``modules``, imported on demand.

    A name is looked for in the modules in their order, so the first ones should be the light ones::

        __all__ = ["MineConfig", "MineTrainer"]
        __getattr__, __dir__ = lazy_names(__name__, __all__, "config", "trainer")

    Args:
        package: the package, ``__name__``.
        names: the names that it exports, ``__all__``.
        modules: its modules, without the name of the package.
    """

    def find(name: str) -> Any:
        for module in modules if name in names else ():
            try:
                imported = import_module(f"{package}.{module}")
            except AttributeError as error:  # of the module's own code: it does not say that there is no such name
                raise ImportError(f"importing {package}.{module} failed: AttributeError: {error}") from error
            if hasattr(imported, name):
                value = vars(sys.modules[package])[name] = getattr(imported, name)
                return value
        raise AttributeError(f"module {package!r} has no attribute {name!r}; it has {', '.join(names)}")

    return find, lambda: sorted({*vars(sys.modules[package]), *names})
