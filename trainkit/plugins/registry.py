"""Trainer names, registered by a decorator or found through entry points. A plugin is imported on first use."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar, cast, overload

import pluggy

from trainkit.errors import PluginError, RegistryError
from trainkit.plugins.contract import fault
from trainkit.plugins.discovery import find_plugin, is_installed, load_plugin, owner_of, trainers, why_disabled

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
        RegistryError: the name belongs to another class or to an installed plugin; the class has no method config of
            that name; it lacks a method that an algorithm implements, or has a misspelt one; or its `group` or
            `remembers` is not valid. Says which.
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
        own = method.__module__ == cls.__module__
        raise RegistryError(
            f"trainer {name!r} has a method config whose name is {given!r}; write name: str = {name!r} in "
            + (
                method.__qualname__
                if own
                else f"a class derived from {method.__qualname__}, and make that method_class"
            )
        )
    if told := fault(cls, method.model_fields):
        raise RegistryError(f"{cls.__qualname__} cannot be registered as {name!r}: {told}")
    if owner := owner_of(name, cls.__module__):
        raise RegistryError(
            f"the trainer name {name!r} belongs to {owner}, whose module alone may register it; "
            f"give {cls.__module__}.{cls.__qualname__} another name"
        )
    taken = _TRAINERS.get(name)
    if taken is not None and (taken.__module__, taken.__qualname__) != (cls.__module__, cls.__qualname__):
        raise RegistryError(
            f"the trainer name {name!r} is taken by {taken.__module__}.{taken.__qualname__}; "
            f"give {cls.__module__}.{cls.__qualname__} another name"
        )
    _TRAINERS[name] = cls
    return cls


def get_trainer(name: str) -> type[AccelerateRLTrainer[Any]]:
    """Return the trainer class registered as ``name`` (case-insensitive); import its plugin if necessary.

    Raises:
        RegistryError: there is no such trainer; lists the installed ones.
        PluginError: its plugin is disabled, or cannot be used; names the distribution.
    """
    key = name.lower()
    if key in _TRAINERS and (by := why_disabled(key, _TRAINERS[key].__module__)):
        if is_installed(key, _TRAINERS[key].__module__):
            find_plugin(key)  # raises an error that names the distribution
        raise PluginError(f"the trainer {key!r} is disabled by {by}")
    if key not in _TRAINERS:
        before = dict(_TRAINERS)
        try:
            load_plugin(key, registered=before)
        except PluginError:
            _TRAINERS.clear()  # what a module registered before it failed must not look usable afterwards
            _TRAINERS.update(before)
            raise
        if key not in _TRAINERS:
            raise RegistryError(
                f'plugin {find_plugin(key)} registers no trainer of that name; it needs @register_trainer("{key}")'
            )
    return cast("type[AccelerateRLTrainer[Any]]", _TRAINERS[key])


def is_registered(name: str) -> bool:
    """Return whether a trainer of that name is registered; import nothing."""
    return name.lower() in _TRAINERS


def check_brought(names: Iterable[str], hooks: pluggy.PluginManager) -> None:
    """Check that each of the plugins ``names``, loaded into ``hooks``, has a trainer of its name or hooks.

    Raises:
        PluginError: one has neither.
    """
    for plugin in map(find_plugin, names):
        if not is_registered(plugin.name) and not hooks.get_hookcallers(sys.modules[plugin.module]):
            raise PluginError(
                f"plugin {plugin} provides nothing: it registers no trainer {plugin.name!r} and has no hooks; it needs "
                f'@register_trainer("{plugin.name}"), or functions marked @trainkit.hookimpl'
            )


def available_trainers() -> list[str]:
    """Return the names that a config may use: registered trainers and usable installed plugins, without importing any.

    Plugins that are disabled, broken, shadowed or made for another version of trainkit are excluded, as far as this is
    known without importing them. So are plugins whose source registers no trainer of their name, and names that begin
    with an underscore, which are private, such as those of the conformance kit.
    """
    here = (name for name, cls in _TRAINERS.items() if not why_disabled(name, cls.__module__))
    return sorted(name for name in {*trainers(), *here} if not name.startswith("_"))
