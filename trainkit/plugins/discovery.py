"""Finding plugins by their entry points, refusing those that cannot be used, importing the ones a run names.

What is wrong with one plugin is said of that plugin alone, with its distribution and version; the others work.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import Distribution, distributions
from types import ModuleType
from urllib.parse import unquote, urlsplit

import pluggy

from trainkit.errors import PluginError, RegistryError, suggest
from trainkit.plugins import hookspecs
from trainkit.plugins.guard import one_line, said, watch
from trainkit.plugins.hookspecs import GROUP
from trainkit.plugins.inspection import TRAINER, UNKNOWN, read_module

BUILT_IN = {
    "best_of_k": "trainkit-dpo",
    "ddpo": "trainkit-ddpo",
    "dpo": "trainkit-dpo",
    "ilql": "trainkit-ilql",
    "online_dpo": "trainkit-dpo",
    "ppo": "trainkit-ppo",
    "reward": "trainkit-reward",
    "rft": "trainkit-rft",
    "rloo": "trainkit-rloo",
    "sft": "trainkit-sft",
}
"""trainkit's own algorithms, and the distributions they are in; no other may claim their names, installed or not."""
DISABLE = "TRAINKIT_DISABLE_PLUGINS"
"""The environment variable that names plugins or distributions to do without, separated by commas."""

OK, BROKEN, BLOCKED, SHADOWED = "ok", "broken", "blocked", "shadowed"

_disabled: list[tuple[str, str]] = []
"""What `disabled` names at present, each with what to call who said so."""


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
    api: str = ""
    """The versions of trainkit that its distribution requires; empty if it requires none."""
    origin: str = ""
    """``built-in``, ``editable`` and the source's directory, or the directory that it is installed in."""
    kind: str = UNKNOWN
    """``trainer``, ``sampler`` (provides one), ``tracker`` (has hooks that observe), or several; ``?`` if its source
    does not tell."""
    state: str = OK
    """``ok``, ``broken`` (its import fails), ``blocked`` (disabled, or made for another trainkit) or ``shadowed`` (its
    name is another's)."""
    why: str = ""
    """Why it is not ``ok``, in a line that names distribution and version."""

    def __str__(self) -> str:
        return f"{self.name} ({self.distribution} {self.version}, module {self.module})"

    def refused(self, state: str, reason: str) -> PluginInfo:
        """The same in another state."""
        return replace(self, state=state, why=f"{self.distribution} {self.version}: {reason}")


def discover() -> list[PluginInfo]:
    """Every installed plugin, sorted by name; reads metadata and source, imports nothing.

    The same name may appear twice.
    """
    return [_examined(plugin) for plugin in _claims()]


def find_plugin(name: str, registered: Iterable[str] = ()) -> PluginInfo:
    """The one usable plugin called ``name`` (case-insensitive); ``registered`` are further names to suggest.

    Raises:
        RegistryError: there is none, or its name is a built-in's or claimed twice; the message lists the choices.
        PluginError: it is disabled, made for another version of trainkit, or cannot be imported.
    """
    claims = _claims()
    found = [_examined(plugin) for plugin in claims if plugin.name == name.lower()]
    if usable := [plugin for plugin in found if plugin.state == OK]:
        return usable[0]
    if not found:
        names = sorted({*registered, *(plugin.name for plugin in claims if plugin.state == OK)})
        own = BUILT_IN.get(name.lower())
        raise RegistryError(
            f"no plugin {name!r} is installed{suggest(name.lower(), names)}; available: {', '.join(names) or 'none'}. "
            + (f"It is in {own}: pip install {own}" if own else f"One of yours needs an entry point in {GROUP!r}")
        )
    told = "; ".join(plugin.why for plugin in found)
    if {plugin.state for plugin in found} == {SHADOWED} and name.lower() not in BUILT_IN:
        raise RegistryError(
            f"the plugin name {name!r} is claimed twice: {'; '.join(map(str, found))}. Uninstall all but one, or "
            f"disable it by its distribution: {DISABLE}={found[0].distribution}"
        )
    error = RegistryError if SHADOWED in {plugin.state for plugin in found} else PluginError
    raise error(f"the plugin {name.lower()!r} cannot be used: {told}")


def load_plugin(name: str, registered: Iterable[str] = ()) -> ModuleType:
    """Import the installed plugin called ``name``; ``registered`` as in `find_plugin`.

    Raises:
        RegistryError, PluginError: as `find_plugin`.
        PluginError: importing it failed; names the distribution and chains the cause.
    """
    return _import(find_plugin(name, registered))


def _import(plugin: PluginInfo) -> ModuleType:
    try:
        return importlib.import_module(plugin.module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a plugin may even call sys.exit() at import; only its own runs may suffer
        raise PluginError(
            f"plugin {plugin} failed to import: {said(error)}. "
            f"Repair or uninstall the distribution {plugin.distribution!r}, or disable it; other plugins are not "
            "affected"
        ) from error


# ---------------------------------------------------------------------------------------------------- installed


def _claims() -> list[PluginInfo]:
    """Every installed plugin, as far as metadata tell what it is; the same name may appear twice."""
    found: dict[tuple[str, str], PluginInfo] = {}
    seen: set[str] = set()
    for dist in distributions():
        text = _text(dist, "entry_points.txt")
        if f"[{GROUP}]" not in text:
            continue
        name, version = _identity(dist)
        if canonical(name) not in seen:  # of two copies on the path the first is the one in use
            seen.add(canonical(name))
            found |= {(p.name, f"{p.distribution} {p.module}"): p for p in _plugins_of(dist, name, version)}
    claims = sorted(found.values(), key=lambda plugin: (plugin.name, plugin.distribution, plugin.module))
    return [_judged(plugin, claims) for plugin in claims]


def _identity(dist: Distribution) -> tuple[str, str]:
    try:
        return dist.name or "?", dist.version or "?"
    except Exception:  # metadata that are not there, or no text; what is raised differs by version
        return "?", "?"


def _plugins_of(dist: Distribution, name: str, version: str) -> Iterator[PluginInfo]:
    try:
        entries = [(entry.name.lower(), entry.value) for entry in dist.entry_points.select(group=GROUP)]
    except Exception as error:  # one malformed file must not hide all plugins
        broken = PluginInfo(canonical(name), "?", name, version, origin=_origin(dist))
        yield broken.refused(BROKEN, f"its entry points cannot be read ({one_line(error)}); reinstall it")
        return
    try:
        api, fault = _required(dist), ""
    except ValueError as error:
        api, fault = "?", f"its requirement on trainkit cannot be read: {one_line(error)}"
    for entry, module in entries:
        built_in = canonical(BUILT_IN.get(entry, "")) == canonical(name)
        plugin = PluginInfo(entry, module, name, version, api, "built-in" if built_in else _origin(dist))
        yield plugin.refused(BROKEN, fault) if fault else plugin


def _required(dist: Distribution) -> str:
    """The versions of trainkit that the distribution requires.

    Raises:
        ValueError: that requirement does not parse.
    """
    from packaging.requirements import Requirement

    ours = re.compile(rf"{GROUP}\s*([\[(<>=!~;@]|$)", re.IGNORECASE)
    requirements = [Requirement(line) for line in dist.requires or () if ours.match(line.strip())]
    specifiers = [r.specifier for r in requirements if r.marker is None or r.marker.evaluate({"extra": ""})]
    return ",".join(str(specifier) for specifier in specifiers if str(specifier))


def _origin(dist: Distribution) -> str:
    try:
        given = json.loads(_text(dist, "direct_url.json") or "{}")
        if given.get("dir_info", {}).get("editable"):
            return f"editable {unquote(urlsplit(given['url']).path)}"
        return str(dist.locate_file(""))
    except (ValueError, KeyError, AttributeError, NotImplementedError):
        return "?"


def _text(dist: Distribution, file: str) -> str:
    try:
        return dist.read_text(file) or ""
    except (OSError, ValueError):
        return ""


def canonical(distribution: str) -> str:
    """The name of a distribution as installers compare it."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def _judged(plugin: PluginInfo, claims: Sequence[PluginInfo]) -> PluginInfo:
    """``plugin``, blocked or shadowed if it is."""
    if reason := _blocked(plugin):
        return plugin.refused(BLOCKED, reason)
    if plugin.state == BROKEN:
        return plugin
    owner = BUILT_IN.get(plugin.name)
    if owner and canonical(plugin.distribution) != owner:
        return plugin.refused(SHADOWED, f"the name {plugin.name!r} is that of trainkit's own {owner}; it needs another")
    if owner:
        return plugin
    rivals = [p for p in claims if p.name == plugin.name and p is not plugin and not _blocked(p)]
    if rivals:
        others = ", ".join(f"{rival.distribution} {rival.version} (module {rival.module})" for rival in rivals)
        return plugin.refused(
            SHADOWED, f"the name {plugin.name!r} is claimed by {others} too; uninstall or disable one of them"
        )
    return plugin


def _blocked(plugin: PluginInfo) -> str:
    """Why ``plugin`` may not be used, whatever it holds; empty if it may."""
    if by := disabled_by(plugin.name, plugin.distribution):
        return f"disabled by {by}"
    if plugin.api in ("", "?"):
        return ""
    from packaging.specifiers import SpecifierSet

    from trainkit import __version__

    if SpecifierSet(plugin.api).contains(__version__, prereleases=True):
        return ""
    return f"it is made for trainkit {plugin.api}, and this is trainkit {__version__}; install another version"


def _examined(plugin: PluginInfo) -> PluginInfo:
    """``plugin`` with its kind, broken if its module cannot be imported, as its source tells."""
    if plugin.state == BROKEN:
        return plugin
    if all(part.isidentifier() for part in plugin.module.split(".")):
        reading = read_module(plugin.module, plugin.name)
        known, fault = replace(plugin, kind=reading.kind), reading.fault
    else:
        known = plugin
        fault = f"its entry point is {plugin.name} = {plugin.module!r}; the value is a module alone, without a class"
    return known.refused(BROKEN, fault) if fault and known.state == OK else known


# ----------------------------------------------------------------------------------------------------- disabled


@contextmanager
def disabled(names: Iterable[str], by: str) -> Iterator[None]:
    """Do without the plugins or distributions ``names`` inside; ``by`` is what errors say they are disabled by."""
    given = [(name.strip().lower(), by) for name in names]
    _disabled.extend(given)
    try:
        yield
    finally:
        for pair in given:
            _disabled.remove(pair)


def disabled_by(name: str, distribution: str | None = None) -> str:
    """What disables the plugin: the environment variable, an option; empty if nothing does."""
    for given, by in _disabling():
        if given == name.lower() or (distribution and canonical(given) == canonical(distribution)):
            return by
    return ""


def _disabling() -> list[tuple[str, str]]:
    variable = [name.strip().lower() for name in os.environ.get(DISABLE, "").split(",")]
    return [*_disabled, *((name, DISABLE) for name in variable if name)]


def unknown_disabled(known: Iterable[str] = ()) -> list[tuple[str, str]]:
    """(by, what is wrong) of every name that is disabled and belongs to no installed plugin, nor to ``known``."""
    if not _disabling():
        return []
    claims = _claims()
    names = {plugin.name for plugin in claims} | {name.lower() for name in known}
    homes = {canonical(plugin.distribution) for plugin in claims}
    return [
        (by, f"{by} names {name!r}, which is no installed plugin or distribution{suggest(name, names | homes)}")
        for name, by in _disabling()
        if name not in names and canonical(name) not in homes
    ]


def without_disabled(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Those of the plugins ``names`` that are not disabled, and what to tell people: which are, and what by."""
    told = [message for _, message in unknown_disabled(names)]
    gone = {name: by for name in names if (by := why_disabled(name))}
    told += [f"the plugin {name!r} is disabled by {by}; the run goes on without it" for name, by in gone.items()]
    return [name for name in names if name not in gone], told


def why_disabled(name: str, module: str = "") -> str:
    """What disables all that is called ``name``, or what of it is in ``module``; empty if nothing does."""
    if not _disabling():
        return ""
    claims = [plugin for plugin in _claims() if plugin.name == name.lower() and _is_of(plugin, module)]
    reasons = [disabled_by(plugin.name, plugin.distribution) for plugin in claims] or [disabled_by(name)]
    return reasons[0] if all(reasons) else ""


# ---------------------------------------------------------------------------------------------------- for names


def is_installed(name: str, module: str) -> bool:
    """Whether ``module`` belongs to an installed plugin of that name."""
    return any(plugin.name == name and _is_of(plugin, module) for plugin in _claims())


def trainers() -> list[str]:
    """Names of the installed plugins that can be used and, as their source tells, are trainers."""
    return sorted({plugin.name for plugin in discover() if plugin.state == OK and TRAINER in plugin.kind})


def owner_of(name: str, module: str) -> str:
    """Whose the plugin name is, in words, where ``module`` is no part of its owner; empty otherwise."""
    own = BUILT_IN.get(name)
    if own:
        return "" if own.replace("-", "_") == module.split(".")[0] else f"trainkit's own {own}"
    claims = [plugin for plugin in _claims() if plugin.name == name and plugin.state != BLOCKED]
    return "" if any(_is_of(plugin, module) for plugin in claims) else " and ".join(map(str, claims))


def _is_of(plugin: PluginInfo, module: str) -> bool:
    """Whether ``module`` is in the plugin's package; an empty one is in any."""
    return not module or plugin.module.split(".")[0] == module.split(".")[0]


# -------------------------------------------------------------------------------------------------------- hooks


def hook_manager(modules: Iterable[str], objects: Iterable[object]) -> pluggy.PluginManager:
    """Hooks of the named plugins and of plain objects (callbacks, trackers), checked for misspelt names.

    An error that one of them raises when it is called says whose it is; see `trainkit.plugins.guard`.

    Args:
        modules: plugin names to load; each module is registered once, whatever its number of names.
        objects: instances with ``@hookimpl`` methods.

    Raises:
        PluginError: a hook does not exist, has wrong arguments, or an object implements none.
    """
    manager = pluggy.PluginManager(GROUP)
    manager.add_hookspecs(hookspecs)
    once: dict[str, PluginInfo] = {}
    for plugin in map(find_plugin, modules):
        once.setdefault(plugin.module, plugin)
    for plugin in once.values():
        module = _import(plugin)
        _register_hooks(manager, module, f"plugin {plugin}")
        watch(manager, module, f"plugin {plugin}")
    for callback in objects:
        label = getattr(callback, "__name__", type(callback).__name__)
        if isinstance(callback, type):
            raise PluginError(f"callback {label} is a class; give an object, {label}(...)")
        _register_hooks(manager, callback, label)
        if not manager.get_hookcallers(callback):
            raise PluginError(
                f"callback {label} implements no hook; mark its methods with @trainkit.hookimpl. Hooks: "
                f"{', '.join(sorted(n for n in vars(manager.hook) if not n.startswith('_')))}"
            )
        watch(manager, callback, f"callback {label}")
    return manager


def _register_hooks(manager: pluggy.PluginManager, plugin: object, label: str) -> None:
    try:
        manager.register(plugin)
        manager.check_pending()
        for caller in manager.get_hookcallers(plugin) or ():
            (own,) = (found for found in caller.get_hookimpls() if found.plugin is plugin)
            _check_called(caller, own)
    except (pluggy.PluginValidationError, ValueError) as error:
        raise PluginError(f"the hooks of {label} do not fit: {one_line(error)}") from error


def _check_called(caller: pluggy.HookCaller, hook: pluggy.HookImpl) -> None:
    """What pluggy lets pass, and then never gives or never runs.

    Raises:
        ValueError: says what.
    """
    function, told = hook.function, caller.spec.argnames if caller.spec else ()
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise ValueError(f"{caller.name} is async, and hooks are not awaited; write def")
    if inspect.isgeneratorfunction(function) and not (hook.wrapper or hook.hookwrapper):
        raise ValueError(f"{caller.name} is a generator, whose body would never run; leave yield out")
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ValueError(f"{caller.name} takes {parameter}, and would be given nothing; name the arguments")
        plain = parameter.kind is not parameter.KEYWORD_ONLY and parameter.default is parameter.empty
        if not plain and (parameter.name in told or parameter.default is parameter.empty):
            raise ValueError(
                f"{caller.name} takes {parameter.name!r} with a default or by keyword alone, and would not be given "
                f"it; write it as a plain argument"
            )


def is_imported(plugin: PluginInfo) -> bool:
    """Whether the plugin's module is loaded in this process."""
    return plugin.module in sys.modules
