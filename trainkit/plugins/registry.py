"""Names of trainers, engines and classes with hooks, registered by decorators or found through entry points.

A plugin is imported when a name of it is first used.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast, overload

from trainkit.errors import PluginError, RegistryError, describe, suggest
from trainkit.plugins.contract import fault
from trainkit.plugins.discovery import (
    ACCELERATE_TRACKERS,
    BUILT_IN,
    engines,
    find_installed,
    find_plugin,
    is_installed,
    load_plugin,
    owner_of,
    trainers,
    why_disabled,
)
from trainkit.plugins.hookspecs import GROUP

if TYPE_CHECKING:
    from trainkit.config import PluginConfig
    from trainkit.rollouts.engines import Engine
    from trainkit.trainer.accelerate import AccelerateRLTrainer

C = TypeVar("C", bound=type)


@dataclass(frozen=True)
class HookClass:
    """A class with hooks that is registered under a name. Each run makes an object of it."""

    made: type
    """The class."""
    settings: type[PluginConfig] | None
    """The class of its settings, derived from `trainkit.config.PluginConfig`; None if it has no settings."""
    tracker: bool
    """Whether it is a tracker, which `train.trackers` names; other hooks are named in `plugins`."""


@dataclass(frozen=True)
class EngineClass:
    """An engine that is registered under a name."""

    made: type[Engine]
    """The class."""
    settings: type[PluginConfig] | None
    """The class of its settings, derived from `trainkit.config.PluginConfig`; None if it has no settings."""


LOCAL = "local"
"""The name of the engine that is part of trainkit itself."""

_TRAINERS: dict[str, type] = {}
_HOOKS: dict[str, HookClass] = {}
_ENGINES: dict[str, EngineClass] = {}


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
    _check_name("trainer", name, cls, _TRAINERS.get(name))
    _TRAINERS[name] = cls
    return cls


def _check_name(what: str, name: str, cls: type, taken: type | None) -> None:
    """Check that ``cls`` may be registered under ``name``, where ``taken`` is registered now.

    Raises:
        RegistryError: the name belongs to another class, or to an installed plugin of another module.
    """
    if name == LOCAL:
        raise RegistryError(f"the name {name!r} belongs to trainkit's own engine; give {cls.__qualname__} another")
    if owner := owner_of(name, cls.__module__):
        raise RegistryError(
            f"the {what} name {name!r} belongs to {owner}, whose module alone may register it; "
            f"give {cls.__module__}.{cls.__qualname__} another name"
        )
    if taken is not None and (taken.__module__, taken.__qualname__) != (cls.__module__, cls.__qualname__):
        raise RegistryError(
            f"the {what} name {name!r} is taken by {taken.__module__}.{taken.__qualname__}; "
            f"give {cls.__module__}.{cls.__qualname__} another name"
        )


def get_trainer(name: str) -> type[AccelerateRLTrainer[Any]]:
    """Return the trainer class registered as ``name`` (case-insensitive); import its plugin if necessary.

    Raises:
        RegistryError: there is no such trainer; lists the installed ones.
        PluginError: its plugin is disabled, or cannot be used; names the distribution.
    """
    key = name.lower()
    if key in _TRAINERS and (by := why_disabled(key, _TRAINERS[key].__module__)):
        find_installed(key, _TRAINERS[key].__module__)  # raises an error that names the distribution if it is unusable
        raise PluginError(f"the trainer {key!r} is disabled by {by}")
    if key not in _TRAINERS:
        _load(key)
        if key not in _TRAINERS:
            raise RegistryError(
                f'plugin {find_plugin(key)} registers no trainer of that name; it needs @register_trainer("{key}")'
            )
    return cast("type[AccelerateRLTrainer[Any]]", _TRAINERS[key])


def _load(key: str) -> None:
    """Import the plugin ``key``.

    Raises:
        RegistryError, PluginError: as `load_plugin`; what its module registered before it failed is removed.
    """
    if is_engine(key):
        raise RegistryError(f"{key!r} is a generation engine; name it in rollout.engine")
    registries: tuple[dict[str, Any], ...] = (_TRAINERS, _HOOKS, _ENGINES)
    before = [dict(registry) for registry in registries]
    try:
        load_plugin(key, registered=[name for registry in registries for name in registry])
    except PluginError:
        for registry, earlier in zip(registries, before, strict=True):
            registry.clear()
            registry.update(earlier)
        raise


def is_registered(name: str) -> bool:
    """Return whether a trainer of that name is registered; import nothing."""
    return name.lower() in _TRAINERS


def available_trainers() -> list[str]:
    """Return the names that a config may use: registered trainers and usable installed plugins, without importing any.

    Plugins that are disabled, broken, shadowed or made for another version of trainkit are excluded, as far as this is
    known without importing them. So are plugins whose source registers no trainer of their name, and names that begin
    with an underscore, which are private, such as those of the conformance kit.
    """
    here = (name for name, cls in _TRAINERS.items() if not why_disabled(name, cls.__module__))
    return sorted(name for name in {*trainers(), *here} if not name.startswith("_"))


# ------------------------------------------------------------------------------------------------------- engines


def register_engine(name: str, settings: type[PluginConfig] | None = None) -> Callable[[C], C]:
    """Register a generation engine, which a run names in `rollout.engine`: ``@register_engine("mine", MyConfig)``.

    Names are case-insensitive.

    Args:
        name: its name in configurations.
        settings: the class of its settings, derived from `trainkit.PluginConfig`; None if it has no settings.

    Raises:
        RegistryError: the name belongs to another class or to an installed plugin; the class does not derive from
            `trainkit.rollouts.Engine` or lacks one of its methods. Says which.
    """
    return lambda cls: _register_engine(cls, name.lower(), settings)


def _register_engine(cls: C, name: str, settings: type[PluginConfig] | None) -> C:
    from trainkit.rollouts.engines import Engine

    fault = ""
    if not issubclass(cls, Engine):
        fault = "it does not derive from trainkit.rollouts.Engine"
    elif missing := sorted(getattr(cls, "__abstractmethods__", ())):
        fault = f"it does not define {' and '.join(missing)}; write it in the class"
    if fault := fault or _wrong_settings(settings):
        raise RegistryError(f"{cls.__qualname__} cannot be registered as {name!r}: {fault}")
    taken = _ENGINES.get(name)
    _check_name("engine", name, cls, taken.made if taken else None)
    _ENGINES[name] = EngineClass(cls, settings)
    return cls


def get_engine(name: str) -> EngineClass:
    """Return the engine registered as ``name`` (case-insensitive); import its plugin if necessary.

    Raises:
        RegistryError: there is no such plugin, or it is no engine; lists the installed ones.
        PluginError: its plugin is disabled, or cannot be used; names the distribution.
    """
    key = name.lower()
    if key == LOCAL:
        from trainkit.rollouts.local import LocalEngine

        return EngineClass(LocalEngine, None)
    if not (is_known(key) or key in BUILT_IN):
        known = available_engines()
        raise RegistryError(
            f"there is no engine {name!r}{suggest(key, known)}; rollout.engine names {', '.join(known)}, or another "
            "engine plugin that is installed"
        )
    if not {key} & {*_TRAINERS, *_HOOKS, *_ENGINES}:
        _load(key)
    elif by := why_disabled(key):
        raise PluginError(f"the engine {key!r} is disabled by {by}")
    if key not in _ENGINES:
        raise RegistryError(f"{name!r} is no engine; rollout.engine names {', '.join(available_engines())}")
    return _ENGINES[key]


def available_engines() -> list[str]:
    """Return the names that `rollout.engine` may have: registered engines and usable installed ones.

    Names that begin with an underscore are private, as those of trainers.
    """
    here = (name for name, engine in _ENGINES.items() if not why_disabled(name, engine.made.__module__))
    return sorted(name for name in {LOCAL, *engines(), *here} if not name.startswith("_"))


def is_engine(name: str) -> bool:
    """Return whether an engine is registered as ``name``; import nothing."""
    return name.lower() in {LOCAL, *_ENGINES}


# -------------------------------------------------------------------------------------------------------- hooks


def register_hooks(name: str, settings: type[PluginConfig] | None = None) -> Callable[[C], C]:
    """Register a class with hooks: ``@register_hooks("early_stop", EarlyStopConfig)``.

    A run that names it in `plugins` makes one object of the class, with the settings as its only argument, or without
    an argument if there are no settings. Names are case-insensitive.

    Args:
        name: its name in configurations.
        settings: the class of its settings, derived from `trainkit.PluginConfig`; None if it has no settings.

    Raises:
        RegistryError: the name belongs to another class or to an installed plugin; the class has no hooks, or cannot
            be called with the settings. Says which.
    """
    return lambda cls: _register_hooks(cls, name.lower(), settings, tracker=False)


def register_tracker(name: str, settings: type[PluginConfig] | None = None) -> Callable[[C], C]:
    """Register a tracker: a class with hooks, `log_metrics` among them, which a run names in `train.trackers`.

    Its hooks are called on the main process only. Otherwise like `register_hooks`.

    Args:
        name: its name in configurations.
        settings: the class of its settings, derived from `trainkit.PluginConfig`; None if it has no settings.

    Raises:
        RegistryError: as `register_hooks`; the class does not implement `log_metrics`, or implements `make_sampler`.
    """
    return lambda cls: _register_hooks(cls, name.lower(), settings, tracker=True)


def _register_hooks(cls: C, name: str, settings: type[PluginConfig] | None, *, tracker: bool) -> C:
    if fault := _fault(cls, settings, tracker):
        raise RegistryError(f"{cls.__qualname__} cannot be registered as {name!r}: {fault}")
    taken = _HOOKS.get(name)
    _check_name("plugin", name, cls, taken.made if taken else None)
    _HOOKS[name] = HookClass(cls, settings, tracker)
    return cls


def _fault(cls: type, settings: type[PluginConfig] | None, tracker: bool) -> str:
    """Return why the class cannot be registered with its settings; empty if it can."""
    hooks = hooks_of(cls)
    if not hooks:
        return "it implements no hook; mark its methods with @trainkit.hookimpl"
    if tracker and "log_metrics" not in hooks:
        return "a tracker implements the hook log_metrics; write it, or use register_hooks"
    if tracker and "make_sampler" in hooks:
        return "a tracker exists on the main process only, so it cannot provide a sampler; use register_hooks"
    if fault := _wrong_settings(settings):
        return fault
    if hasattr(cls, "state_dict") != hasattr(cls, "load_state_dict"):
        return "it has one of state_dict and load_state_dict; write both"
    try:
        inspect.signature(cls).bind(*([] if settings is None else [settings]))
    except TypeError as error:
        given = "the settings as its only argument" if settings else "no argument, as it has no settings"
        return f"it is called with {given} ({error})"
    return ""


def _wrong_settings(settings: Any) -> str:
    if settings is None or "name" in getattr(settings, "model_fields", {}):
        return ""
    return f"its settings should be a class derived from trainkit.PluginConfig; given {describe(settings)}"


def hooks_of(plugin: object) -> list[str]:
    """Return the names of the hooks that a module, class or object implements."""
    return [name for name in dir(plugin) if hasattr(inspect.getattr_static(plugin, name, None), f"{GROUP}_impl")]


def get_hooks(name: str) -> HookClass | None:
    """Return the class with hooks that is registered as ``name`` (case-insensitive); import its plugin if necessary.

    None if the plugin registers no such class: it is a trainer, or its module has hooks.

    Raises:
        RegistryError: there is no such plugin; lists the installed ones.
        PluginError: the plugin is disabled, or cannot be used; names the distribution.
    """
    key = name.lower()
    known = _HOOKS.get(key)
    if known is None:
        if key not in _TRAINERS:  # if it is, its module is imported
            _load(key)
        return _HOOKS.get(key)
    if by := why_disabled(key, known.made.__module__):
        find_installed(key, known.made.__module__)  # raises an error that names the distribution if it is unusable
        raise PluginError(f"the plugin {key!r} is disabled by {by}")
    return known


def is_known(name: str) -> bool:
    """Return whether a class is registered as ``name``, or a plugin of that name is installed."""
    return name.lower() in {*_TRAINERS, *_HOOKS, *_ENGINES} or is_installed(name.lower(), "")


def is_tracker(name: str) -> bool:
    """Return whether ``name`` is a plugin that is a tracker; import it if necessary.

    Raises:
        RegistryError, PluginError: the plugin cannot be used.
    """
    if name in ACCELERATE_TRACKERS or not is_known(name):
        return False
    found = get_hooks(name)
    return found is not None and found.tracker
