"""Names of trainers, engines, shardings and classes with hooks, registered by decorators or found by entry points.

A plugin is imported when a name of it is first used.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Protocol, TypeVar, cast, overload

from trainkit.errors import PluginError, RegistryError, describe, suggest
from trainkit.plugins.contract import fault
from trainkit.plugins.discovery import (
    ACCELERATE_TRACKERS,
    BUILT_IN,
    ENGINE,
    GROUPS,
    HOOKS,
    NAMED_IN,
    RESERVED,
    SAMPLER,
    SHARDING,
    TRACKER,
    TRAINER,
    UNKNOWN,
    PluginInfo,
    find_plugin,
    import_plugin,
    import_settings,
    is_installed,
    kinds_of,
    of_kind,
    of_old_group,
    owner_of,
    why_disabled,
)
from trainkit.plugins.hookspecs import PROJECT

C = TypeVar("C", bound=type)


class Settings(Protocol):
    """The settings of a plugin: a `trainkit.PluginConfig`."""

    def __init__(self, **fields: Any) -> None: ...

    @property
    def name(self) -> str:
        """The name of the plugin."""


@dataclass(frozen=True)
class Registered:
    """A class that is registered under a name: an engine, a sharding, or a class with hooks, of which each run makes
    an object."""

    made: type[Any]
    """The class."""
    settings: type[Any] | None
    """The class of its settings, derived from `trainkit.config.PluginConfig`; None if it has no settings."""
    tracker: bool = False
    """Whether it is a tracker, which `train.trackers` names; other hooks are named in `plugins`."""


@dataclass
class Part:
    """A part of trainkit of which a run has one, and for which plugins provide further classes."""

    kind: str
    """What it is called, and the kind of its plugins."""
    base: str
    """The public name of the interface."""
    own: Mapping[str, str]
    """The classes of trainkit itself, by their names in configurations: ``module:class``."""
    classes: dict[str, Registered] = field(default_factory=dict)
    """The classes that plugins have registered, by name."""

    @property
    def label(self) -> str:
        """What it is called in full, with its article."""
        return NAMED_IN[self.kind][0]

    @property
    def key(self) -> str:
        """The setting that names it."""
        return NAMED_IN[self.kind][1]


ENGINES = Part(
    ENGINE,
    "trainkit.rollouts:Engine",
    {"local": "trainkit.rollouts.local:LocalEngine"},
)
"""Generation engines."""
SHARDINGS = Part(
    SHARDING,
    "trainkit:Sharding",
    {"none": "trainkit.trainer.sharding:Replicated", "fsdp2": "trainkit.trainer.sharding:FSDP2"},
)
"""Ways to divide the model among processes."""
PARTS = (ENGINES, SHARDINGS)
HOOKED = (HOOKS, SAMPLER, TRACKER)
"""The kinds of plugins that have hooks."""

_TRAINERS: dict[str, type] = {}
_HOOKS: dict[str, Registered] = {}


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
    if name in RESERVED:
        raise RegistryError(f"the name {name!r} is a command of `trainkit config`; give {cls.__qualname__} another")
    for part in PARTS:
        if name in part.own:
            raise RegistryError(
                f"the name {name!r} belongs to trainkit's own {part.kind}; give {cls.__qualname__} another"
            )
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


def get_trainer(name: str) -> type[Any]:
    """Return the trainer class registered as ``name`` (case-insensitive); import its plugin if necessary.

    Raises:
        RegistryError: there is no such trainer; lists the installed ones.
        PluginError: its plugin is disabled, or cannot be used; names the distribution.
    """
    key = name.lower()
    if key in _TRAINERS:
        _check_usable("trainer", key, _TRAINERS[key], TRAINER)
    else:
        _load(key, _TRAINERS, TRAINER)
    return _TRAINERS[key]


def _check_usable(what: str, key: str, cls: type, *kinds: str) -> None:
    """Raise an error if the class that is registered as ``key`` is disabled, or its plugin is unusable."""
    if is_installed(key, cls.__module__):
        _check_kind(find_plugin(key, kinds=kinds), _registered_kinds(key))
    elif by := why_disabled(key, cls.__module__):
        raise PluginError(f"the {what} {key!r} is disabled by {by}")


def get_method_class(name: str) -> type[Any]:
    """Return the class of a method's settings (case-insensitive name); import no more than is necessary for it.

    It is read from the submodule ``config`` of the plugin's package, if there is one that has it. Otherwise the plugin
    is imported.

    Raises:
        RegistryError, PluginError: as `get_trainer`.
    """
    key = name.lower()
    alone = None if key in _TRAINERS else settings_alone(key)
    method_class: type[Any] = get_trainer(name).method_class if alone is None else alone
    return method_class


def settings_alone(name: str) -> type[Any] | None:
    """Return the class of a method's settings from the submodule ``config`` of its plugin's package, if that has it.

    Raises:
        RegistryError, PluginError: the plugin cannot be used.
    """
    if TRAINER not in kinds_of(name):
        return None
    with _undone_by_errors():
        module = import_settings(find_plugin(name, kinds=[TRAINER]))
    for found in vars(module).values() if module else ():
        if isinstance(found, type) and _method_name(found) == name:
            return found
    return None


def _method_name(cls: type) -> str | None:
    """Return the name of the method whose settings the class has; None if it is another class."""
    fields = getattr(cls, "model_fields", {}) if hasattr(cls, "section_defaults") else {}
    return str(fields["name"].default).lower() if "name" in fields else None


def _load(key: str, listed: Mapping[str, Any], *kinds: str) -> None:
    """Import the plugin ``key`` of one of these ``kinds``.

    If there is none, the message lists what is in ``listed``, and the installed plugins of these ``kinds``.

    Raises:
        RegistryError, PluginError: as `find_plugin` and `import_plugin`; it registers nothing of its name, or is in
            the group of another kind. What a module registered before it failed is removed.
    """
    if (here := _registered_kinds(key)) and not kinds_of(key) & {*kinds}:
        what, setting = NAMED_IN[min(here)]
        raise RegistryError(f"{key!r} is {what}; name it in {setting}")
    with _undone_by_errors():
        module = import_plugin(plugin := find_plugin(key, listed, kinds))
    found = _registered_kinds(key)
    if key not in _HOOKS and (hooks := hooks_of(module)):
        found.add(SAMPLER if "make_sampler" in hooks else HOOKS)
    _check_kind(plugin, found)


def _check_kind(plugin: PluginInfo, found: set[str]) -> None:
    """Raise an error unless the kinds that the plugin's module provides are those of its entry-point group."""
    if plugin.kind in found:
        return
    if found:
        raise PluginError(
            f"plugin {plugin} is {NAMED_IN[min(found)][0]}, and its entry point is in the group "
            f"{GROUPS[plugin.kind]!r}; write it into {GROUPS[min(found)]!r} in its pyproject.toml, and install it again"
        )
    how = {SAMPLER: "a function make_sampler marked @trainkit.hookimpl", HOOKS: "functions marked @trainkit.hookimpl"}
    decorator = f'@register_{"hooks" if plugin.kind == SAMPLER else plugin.kind}("{plugin.name}")'
    needs = " or ".join([decorator, *([how[plugin.kind]] if plugin.kind in how else [])])
    raise RegistryError(f"plugin {plugin} registers no {plugin.kind} of that name; it needs {needs}")


def _registered_kinds(name: str) -> set[str]:
    """Return the kinds of what is registered as ``name``, of trainkit itself too."""
    kinds = {part.kind for part in PARTS if name in {*part.own, *part.classes}}
    kinds |= {TRAINER} if name in _TRAINERS else set()
    if hooks := _HOOKS.get(name):
        kinds.add(TRACKER if hooks.tracker else SAMPLER if "make_sampler" in hooks_of(hooks.made) else HOOKS)
    return kinds


@contextmanager
def _undone_by_errors() -> Iterator[None]:
    """Remove what was registered inside the block if importing a plugin fails."""
    registries = _registries()
    before = [dict(registry) for registry in registries]
    try:
        yield
    except PluginError:
        for registry, earlier in zip(registries, before, strict=True):
            registry.clear()
            registry.update(earlier)
        raise


def _registries() -> tuple[dict[str, Any], ...]:
    """Return everything that is registered, by kind and name."""
    return _TRAINERS, _HOOKS, *(part.classes for part in PARTS)


def is_registered(name: str) -> bool:
    """Return whether a trainer of that name is registered; import nothing."""
    return name.lower() in _TRAINERS


def available_trainers() -> list[str]:
    """Return the names that a config may use: registered trainers and usable installed plugins, without importing any.

    Plugins that are disabled, made for another version of trainkit, or whose name is another's, are excluded. So are
    names that begin with an underscore, which are private, such as those of the conformance kit.
    """
    here = (name for name, cls in _TRAINERS.items() if not why_disabled(name, cls.__module__))
    return sorted(name for name in {*of_kind(TRAINER), *here} if not name.startswith("_"))


# --------------------------------------------------------------------------------------------- engines and shardings


def register_engine(name: str, settings: type[Settings] | None = None) -> Callable[[C], C]:
    """Register a generation engine, which a run names in `rollout.engine`: ``@register_engine("mine", MyConfig)``.

    Names are case-insensitive.

    Args:
        name: its name in configurations.
        settings: the class of its settings, derived from `trainkit.PluginConfig`; None if it has no settings.

    Raises:
        RegistryError: the name belongs to another class or to an installed plugin; the class does not derive from
            `trainkit.rollouts.Engine` or lacks one of its methods. Says which.
    """
    return lambda cls: _register_part(ENGINES, cls, name.lower(), settings)


def register_sharding(name: str, settings: type[Settings] | None = None) -> Callable[[C], C]:
    """Register a way to divide the model, which a run names in `train.sharding`: ``@register_sharding("mine", Mine)``.

    Names are case-insensitive.

    Args:
        name: its name in configurations.
        settings: the class of its settings, derived from `trainkit.PluginConfig`; None if it has no settings.

    Raises:
        RegistryError: the name belongs to another class or to an installed plugin; the class does not derive from
            `trainkit.Sharding` or lacks one of its methods. Says which.
    """
    return lambda cls: _register_part(SHARDINGS, cls, name.lower(), settings)


def _register_part(part: Part, cls: C, name: str, settings: type[Settings] | None) -> C:
    fault, base = "", part.base.replace(":", ".")
    if not issubclass(cls, _at(part.base)):
        fault = f"it does not derive from {base}"
    elif missing := sorted(getattr(cls, "__abstractmethods__", ())):
        fault = f"it does not define {' and '.join(missing)}; write it in the class"
    if fault := fault or _wrong_settings(settings):
        raise RegistryError(f"{cls.__qualname__} cannot be registered as {name!r}: {fault}")
    taken = part.classes.get(name)
    _check_name(part.kind, name, cls, taken.made if taken else None)
    part.classes[name] = Registered(cls, settings)
    return cls


def _at(place: str) -> type:
    """Return the class at ``module:name``."""
    module, _, name = place.partition(":")
    return cast(type, getattr(import_module(module), name))


def get_part(part: Part, name: str) -> Registered:
    """Return the class of a part that is registered as ``name`` (case-insensitive); import its plugin if necessary.

    Raises:
        RegistryError: there is no such plugin, or it provides another part; lists the installed ones.
        PluginError: its plugin is disabled, or cannot be used; names the distribution.
    """
    key, kind = name.lower(), part.kind
    if key in part.own:
        return Registered(_at(part.own[key]), None)
    if not (is_known(key) or key in BUILT_IN):
        known = available_parts(part)
        raise RegistryError(
            f"there is no {kind} {name!r}{suggest(key, known)}; {part.key} names {', '.join(known)}, or another "
            f"{kind} plugin that is installed{of_old_group()}"
        )
    if key in part.classes:
        _check_usable(kind, key, part.classes[key].made, kind)
    elif (kinds := kinds_of(key) | _registered_kinds(key)) and not kinds & {kind, UNKNOWN}:
        raise RegistryError(f"{name!r} is no {kind}; {part.key} names {', '.join(available_parts(part))}")
    else:
        _load(key, part.classes, kind)
    return part.classes[key]


def get_engine(name: str) -> Registered:
    """Return the engine registered as ``name``, as `get_part`."""
    return get_part(ENGINES, name)


def get_sharding(name: str) -> Registered:
    """Return the sharding registered as ``name``, as `get_part`."""
    return get_part(SHARDINGS, name)


def available_parts(part: Part) -> list[str]:
    """Return the names that the part's setting may have: trainkit's own, registered and usable installed ones.

    Names that begin with an underscore are private, as those of trainers.
    """
    here = (name for name, found in part.classes.items() if not why_disabled(name, found.made.__module__))
    return sorted(name for name in {*part.own, *of_kind(part.kind), *here} if not name.startswith("_"))


# -------------------------------------------------------------------------------------------------------- hooks


def register_hooks(name: str, settings: type[Settings] | None = None) -> Callable[[C], C]:
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


def register_tracker(name: str, settings: type[Settings] | None = None) -> Callable[[C], C]:
    """Register a tracker: a class with hooks, `log_metrics` among them, which a run names in `train.trackers`.

    Its hooks are called on the main process only. Otherwise like `register_hooks`.

    Args:
        name: its name in configurations.
        settings: the class of its settings, derived from `trainkit.PluginConfig`; None if it has no settings.

    Raises:
        RegistryError: as `register_hooks`; the class does not implement `log_metrics`, or implements `make_sampler`.
    """
    return lambda cls: _register_hooks(cls, name.lower(), settings, tracker=True)


def _register_hooks(cls: C, name: str, settings: type[Settings] | None, *, tracker: bool) -> C:
    if fault := _fault(cls, settings, tracker):
        raise RegistryError(f"{cls.__qualname__} cannot be registered as {name!r}: {fault}")
    taken = _HOOKS.get(name)
    _check_name("plugin", name, cls, taken.made if taken else None)
    _HOOKS[name] = Registered(cls, settings, tracker)
    return cls


def _fault(cls: type, settings: type[Settings] | None, tracker: bool) -> str:
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
    return [name for name in dir(plugin) if hasattr(inspect.getattr_static(plugin, name, None), f"{PROJECT}_impl")]


def get_hooks(name: str) -> Registered | None:
    """Return the class with hooks that is registered as ``name`` (case-insensitive); import its plugin if necessary.

    None if the plugin registers no such class: it is a trainer, or its module has hooks.

    Raises:
        RegistryError: there is no such plugin; lists the installed ones.
        PluginError: the plugin is disabled, or cannot be used; names the distribution.
    """
    key = name.lower()
    if key in _HOOKS:
        _check_usable("plugin", key, _HOOKS[key].made, *HOOKED, TRAINER)
    elif {*HOOKED} & (kinds := kinds_of(key)) or not (key in _TRAINERS or TRAINER in kinds):
        _load(key, _HOOKS, *HOOKED)
    elif key not in _TRAINERS:
        _load(key, _TRAINERS, TRAINER)
    return _HOOKS.get(key)


def is_known(name: str) -> bool:
    """Return whether a class is registered as ``name``, or a plugin of that name is installed."""
    return name.lower() in {name for registry in _registries() for name in registry} or is_installed(name.lower(), "")


def is_tracker(name: str) -> bool:
    """Return whether ``name`` is a plugin that is a tracker; import it if necessary.

    Raises:
        RegistryError, PluginError: the plugin cannot be used.
    """
    found = None if name in ACCELERATE_TRACKERS or not is_known(name) else get_hooks(name)
    return found is not None and found.tracker
