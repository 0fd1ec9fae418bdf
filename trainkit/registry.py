"""Trainer names: registered by a decorator, found through entry points. Imports no plugin until one is asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast, overload

from trainkit.errors import PluginError, RegistryError
from trainkit.plugins import discover, load_plugin

if TYPE_CHECKING:
    from trainkit.trainer.accelerate import AccelerateRLTrainer

C = TypeVar("C", bound=type)

_TRAINERS: dict[str, type] = {}


@overload
def register_trainer(name: str) -> Callable[[C], C]: ...
@overload
def register_trainer(name: C) -> C: ...
def register_trainer(name: str | C) -> Callable[[C], C] | C:
    """Register a trainer class: ``@register_trainer("grpo")``, or ``@register_trainer`` under the class's name.

    Names are case-insensitive. Running the same definition again (a notebook cell, a reload) replaces it.

    Raises:
        RegistryError: the name belongs to another class, or the class is no trainer of that name.
    """
    if isinstance(name, str):
        return lambda cls: _register(cls, name.lower())
    return _register(name, name.__name__.lower())


def _register(cls: C, name: str) -> C:
    method = getattr(cls, "method_class", None)
    if method is None:
        raise RegistryError(
            f"{cls.__qualname__} cannot be registered as {name!r}: it names no method config. "
            f"Derive it as class {cls.__name__}(AccelerateRLTrainer[YourConfig]), YourConfig being a MethodConfig"
        )
    if (given := method.model_fields["name"].default) != name:
        raise RegistryError(
            f"trainer {name!r} has a method config whose name is {given!r}; write name: str = {name!r} "
            f"in {method.__qualname__}"
        )
    taken = _TRAINERS.get(name)
    if taken is not None and (taken.__module__, taken.__qualname__) != (cls.__module__, cls.__qualname__):
        raise RegistryError(
            f"the trainer name {name!r} is taken by {taken.__module__}.{taken.__qualname__}; "
            f"give {cls.__module__}.{cls.__qualname__} another"
        )
    _TRAINERS[name] = cls
    return cls


def get_trainer(name: str) -> type[AccelerateRLTrainer[Any]]:
    """The trainer class registered as ``name`` (case-insensitive), importing its plugin if need be.

    Raises:
        RegistryError: no such trainer; lists what is installed.
        PluginError: its plugin fails to import; names the distribution.
    """
    key = name.lower()
    if key not in _TRAINERS:
        before = dict(_TRAINERS)
        try:
            module = load_plugin(key, registered=before)
        except PluginError:
            _TRAINERS.clear()  # what a module registered before it failed must not look usable afterwards
            _TRAINERS.update(before)
            raise
        if key not in _TRAINERS:
            raise RegistryError(
                f"the plugin {key!r} (module {module.__name__}) registers no trainer of that name; "
                f'it needs @register_trainer("{key}")'
            )
    return cast("type[AccelerateRLTrainer[Any]]", _TRAINERS[key])


def available_trainers() -> list[str]:
    """Names that a config may use: registered ones and installed plugins (which are not imported)."""
    return sorted({*_TRAINERS, *(plugin.name for plugin in discover())})
