"""Finding plugins by their entry points, importing the ones a run names, and gathering their hooks."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType

import pluggy

from trainkit import hookspecs
from trainkit.errors import PluginError, RegistryError, suggest
from trainkit.guard import watch
from trainkit.hookspecs import GROUP


@dataclass(frozen=True)
class PluginInfo:
    """One entry point of the group ``trainkit``, known without importing anything."""

    name: str
    """What a config writes."""
    module: str
    """The module that holds the plugin."""
    distribution: str
    """The installed distribution that provides it."""
    version: str
    """That distribution's version."""

    @classmethod
    def of(cls, entry: EntryPoint) -> PluginInfo:
        """Read an entry point's metadata."""
        dist = entry.dist
        return cls(entry.name.lower(), entry.value, dist.name if dist else "?", dist.version if dist else "?")

    def __str__(self) -> str:
        return f"{self.name} ({self.distribution} {self.version}, module {self.module})"


def discover() -> list[PluginInfo]:
    """Every installed plugin, sorted by name; reads metadata only. The same name may appear twice."""
    return sorted({PluginInfo.of(entry) for entry in entry_points(group=GROUP)}, key=lambda p: (p.name, p.distribution))


def find_plugin(name: str, registered: Iterable[str] = ()) -> PluginInfo:
    """The one installed plugin called ``name`` (case-insensitive); ``registered`` are further names to suggest.

    Raises:
        RegistryError: there is none, or two distributions claim the name; the message lists the choices.
    """
    installed = discover()
    found = [plugin for plugin in installed if plugin.name == name.lower()]
    if not found:
        names = sorted({*registered, *(plugin.name for plugin in installed)})
        raise RegistryError(
            f"no plugin {name!r} is installed{suggest(name.lower(), names)}; available: {', '.join(names) or 'none'}. "
            f"trainkit's own algorithms are packages named like 'trainkit-{name.lower()}'; "
            f"a plugin of yours needs an entry point in the group {GROUP!r}"
        )
    if len(found) > 1:
        raise RegistryError(
            f"the plugin name {name!r} is claimed twice: {'; '.join(map(str, found))}. Uninstall all but one"
        )
    return found[0]


def load_plugin(name: str, registered: Iterable[str] = ()) -> ModuleType:
    """Import the installed plugin called ``name``; ``registered`` as in `find_plugin`.

    Raises:
        RegistryError: no such plugin, or the name is claimed twice.
        PluginError: importing it failed; names the distribution and chains the cause.
    """
    plugin = find_plugin(name, registered)
    try:
        return importlib.import_module(plugin.module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a plugin may even call sys.exit() at import; only its own runs may suffer
        raise PluginError(
            f"plugin {plugin} failed to import: {type(error).__name__}: {error}. "
            f"Repair or uninstall the distribution {plugin.distribution!r}; other plugins are not affected"
        ) from error


def hook_manager(modules: Iterable[str], objects: Iterable[object]) -> pluggy.PluginManager:
    """Hooks of the named plugins and of plain objects (callbacks, trackers), checked for misspelt names.

    An error that one of them raises when it is called says whose it is; see `trainkit.guard`.

    Args:
        modules: plugin names to load; each module is registered once, whatever its number of names.
        objects: instances with ``@hookimpl`` methods.

    Raises:
        PluginError: a hook does not exist, has wrong arguments, or an object implements none.
    """
    manager = pluggy.PluginManager(GROUP)
    manager.add_hookspecs(hookspecs)
    named = {load_plugin(name): f"plugin {find_plugin(name)}" for name in modules}
    for plugin, owner in [*named.items(), *((each, "") for each in objects)]:
        label = getattr(plugin, "__name__", type(plugin).__name__)
        if isinstance(plugin, type):
            raise PluginError(f"callback {label} is a class; give an object, {label}(...)")
        try:
            manager.register(plugin)
            manager.check_pending()
        except (pluggy.PluginValidationError, ValueError) as error:
            raise PluginError(f"the hooks of {label} do not fit: {error}") from error
        if not isinstance(plugin, ModuleType) and not manager.get_hookcallers(plugin):
            raise PluginError(
                f"callback {label} implements no hook; mark its methods with @trainkit.hookimpl. Hooks: "
                f"{', '.join(sorted(n for n in vars(manager.hook) if not n.startswith('_')))}"
            )
        watch(manager, plugin, owner or f"callback {label}")
    return manager


def is_imported(plugin: PluginInfo) -> bool:
    """Whether the plugin's module is loaded in this process."""
    return plugin.module in sys.modules
