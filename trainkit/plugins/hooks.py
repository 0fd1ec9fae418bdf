"""The hooks of a run: those of its plugins and of its callbacks, with their settings and their state."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import pluggy

from trainkit.errors import PluginError, TrainkitError, suggest
from trainkit.plugins import hookspecs
from trainkit.plugins.discovery import TRAINER, PluginInfo, find_installed, find_plugin, import_plugin
from trainkit.plugins.guard import error_text, one_line, watch
from trainkit.plugins.hookspecs import PROJECT
from trainkit.plugins.registry import PARTS, Registered, Settings, get_hooks, get_part, get_trainer


def entry_name(entry: str | Settings) -> str:
    """Return the name, in lower case, of the plugin that an entry of `plugins` or `train.trackers` names."""
    return (entry if isinstance(entry, str) else entry.name).lower()


class HookManager(pluggy.PluginManager):
    """The hooks of a run, and the state of the objects that are made of registered classes."""

    def __init__(self) -> None:
        super().__init__(PROJECT)
        self.add_hookspecs(hookspecs)
        self.made: dict[str, Any] = {}
        """The objects by the name of their plugin."""

    def parse_hookimpl_opts(self, plugin: object, name: str) -> Any:
        """Return the options of a hook; of names with an underscore None, without a look at what they hold."""
        return None if name.startswith("_") else super().parse_hookimpl_opts(plugin, name)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the objects that have one, by the name of their plugin.

        Raises:
            PluginError: the method ``state_dict`` of one failed; names the plugin.
        """
        return {name: _call(name, plugin, "state_dict") for name, plugin in self._with_state()}

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; a plugin without a state in ``states`` keeps the one that it has.

        Raises:
            PluginError: the method ``load_state_dict`` of one failed; names the plugin.
        """
        for name, plugin in self._with_state():
            if name in states:
                _call(name, plugin, "load_state_dict", states[name])

    def _with_state(self) -> list[tuple[str, Any]]:
        return [(name, plugin) for name, plugin in self.made.items() if hasattr(plugin, "state_dict")]


def _call(name: str, plugin: Any, method: str, *arguments: Any) -> Any:
    try:
        return getattr(plugin, method)(*arguments)
    except Exception as error:
        raise PluginError(f"{method} of the plugin {name!r} failed: {error_text(error)}") from error


def hook_manager(plugins: Iterable[str | Settings], objects: Iterable[object]) -> HookManager:
    """Return a manager with the hooks of the named plugins and of plain objects (callbacks, trackers).

    If a class with hooks is registered under the name of a plugin, an object of it is made; otherwise the hooks of the
    plugin's module are used. Names and arguments of the hooks are checked. An error of a hook names its owner; see
    `trainkit.plugins.guard`.

    Args:
        plugins: names or settings of plugins; a module with several names is registered once.
        objects: instances with ``@hookimpl`` methods.

    Raises:
        PluginError: a hook does not exist or has wrong arguments, an object implements no hook, or a plugin cannot be
            used.
    """
    manager = HookManager()
    for name, entry in {entry_name(entry): entry for entry in plugins}.items():
        hooks, plugin = get_hooks(name), find_installed(name)
        label = f"plugin {plugin or name}"
        if hooks is not None:
            manager.made[name] = _make(hooks, entry, label)
            _add(manager, manager.made[name], label, name)
        elif plugin is not None:
            _add_module(manager, plugin, label)
    for callback in objects:
        add_callback(manager, callback)
    return manager


def add_callback(manager: HookManager, callback: object) -> None:
    """Add the hooks of an object to those of a run, for events that come.

    Raises:
        PluginError: it is a class, has no hook, or its hooks have wrong arguments.
    """
    label = getattr(callback, "__name__", type(callback).__name__)
    if isinstance(callback, type):
        raise PluginError(f"callback {label} is a class; give an object, {label}(...)")
    _register(manager, callback, label)
    if not manager.get_hookcallers(callback):
        raise PluginError(
            f"callback {label} implements no hook; mark its methods with @trainkit.hookimpl. Hooks: "
            f"{', '.join(sorted(n for n in vars(manager.hook) if not n.startswith('_')))}"
        )
    watch(manager, callback, f"callback {label}")


def check_plugin(name: str, kind: str) -> None:
    """Import an installed plugin, and check its hooks without making an object, which may need settings.

    Raises:
        RegistryError, PluginError: the plugin cannot be used.
    """
    if kind == TRAINER:
        get_trainer(name)
    elif parts := [part for part in PARTS if part.kind == kind]:
        get_part(parts[0], name)
    elif hooks := get_hooks(name):
        _add(HookManager(), object.__new__(hooks.made), f"plugin {find_plugin(name)}", name)
    else:
        hook_manager([name], [])


def _make(hooks: Registered, entry: str | Settings, label: str) -> Any:
    """Return an object of the class, with the settings of ``entry``, or with the default ones if it is a name.

    Raises:
        PluginError: its constructor failed.
    """
    try:
        if hooks.settings is None:
            return hooks.made()
        return hooks.made(hooks.settings(name=entry_name(entry)) if isinstance(entry, str) else entry)
    except TrainkitError:
        raise
    except Exception as error:
        raise PluginError(f"the hooks of {label} cannot be made: {error_text(error)}") from error


def _add_module(manager: HookManager, plugin: PluginInfo, label: str) -> None:
    """Register the hooks of the plugin's module, unless they are registered under another of its names."""
    module = import_plugin(plugin)
    if not manager.is_registered(module):
        _add(manager, module, label)


def _add(manager: HookManager, plugin: object, label: str, name: str | None = None) -> None:
    _register(manager, plugin, label, name)
    watch(manager, plugin, label)


def _register(manager: pluggy.PluginManager, plugin: object, label: str, name: str | None = None) -> None:
    try:
        _check_names(manager, plugin)
        manager.register(plugin, name)
        manager.check_pending()
        for caller in manager.get_hookcallers(plugin) or ():
            (implementation,) = (each for each in caller.get_hookimpls() if each.plugin is plugin)
            _check_called(caller, implementation)
    except (pluggy.PluginValidationError, ValueError) as error:
        raise PluginError(f"the hooks of {label} do not fit: {one_line(error)}") from error


def _check_names(manager: pluggy.PluginManager, plugin: object) -> None:
    """Check the names of hooks and of their arguments, as pluggy does, whose messages do not say what was meant.

    Raises:
        ValueError: there is no such hook, or it is given no such argument; suggests the nearest.
    """
    for name in dir(plugin):
        options = manager.parse_hookimpl_opts(plugin, name)
        if options is None:
            continue
        hook = options.get("specname") or name
        caller = getattr(manager.hook, hook, None)
        if caller is None or caller.spec is None:
            if not options.get("optionalhook"):
                hooks = [each for each, caller_of in vars(manager.hook).items() if getattr(caller_of, "spec", None)]
                raise ValueError(f"unknown hook {hook!r}{suggest(hook, hooks)}")
            continue
        arguments = caller.spec.argnames
        for argument, parameter in inspect.signature(getattr(plugin, name)).parameters.items():
            plain = parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
            if plain and parameter.default is parameter.empty and argument not in arguments:
                near = suggest(argument, arguments)
                raise ValueError(f"{name} takes {argument!r}{near}; it may take {', '.join(arguments)}")


def _check_called(caller: pluggy.HookCaller, hook: pluggy.HookImpl) -> None:
    """Check for signatures that pluggy accepts, but calls without the arguments or never runs.

    Raises:
        ValueError: the hook has one; says which.
    """
    function, arguments = hook.function, caller.spec.argnames if caller.spec else ()
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise ValueError(f"{caller.name} is async, and hooks are not awaited; write def")
    if inspect.isgeneratorfunction(function) and not (hook.wrapper or hook.hookwrapper):
        raise ValueError(f"{caller.name} is a generator, whose body would never run; remove yield")
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ValueError(f"{caller.name} takes {parameter}, and would be given nothing; name the arguments")
        plain = parameter.kind is not parameter.KEYWORD_ONLY and parameter.default is parameter.empty
        if not plain and (parameter.name in arguments or parameter.default is parameter.empty):
            raise ValueError(
                f"{caller.name} takes {parameter.name!r} with a default or as keyword-only, and would not be given "
                f"it; write it as a plain argument"
            )
