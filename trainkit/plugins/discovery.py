"""Discovery of plugins by their entry points. Unusable plugins are refused, and those that a run names are imported.

A fault of one plugin affects that plugin alone. The message names its distribution and version.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import lru_cache
from types import ModuleType
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from trainkit.errors import PluginError, RegistryError, suggest
from trainkit.plugins.guard import one_line, said
from trainkit.plugins.hookspecs import GROUP
from trainkit.plugins.inspection import UNKNOWN, absent_import, exists, found_once, read_module

if TYPE_CHECKING:
    from importlib.metadata import Distribution

BUILT_IN = {
    "best_of_k": "trainkit-dpo",
    "cpo": "trainkit-orpo",
    "ddpo": "trainkit-ddpo",
    "distill": "trainkit-distill",
    "distill_offline": "trainkit-distill",
    "dpo": "trainkit-dpo",
    "early_stop": "trainkit-early-stop",
    "grpo": "trainkit-grpo",
    "ilql": "trainkit-ilql",
    "kto": "trainkit-kto",
    "online_dpo": "trainkit-dpo",
    "orpo": "trainkit-orpo",
    "ppo": "trainkit-ppo",
    "ray": "trainkit-ray",
    "reward": "trainkit-reward",
    "rft": "trainkit-rft",
    "rloo": "trainkit-rloo",
    "sft": "trainkit-sft",
    "vllm": "trainkit-vllm",
    "zero2": "trainkit-deepspeed",
    "zero3": "trainkit-deepspeed",
}
"""trainkit's own plugins and their distributions. No other distribution may use these names, installed or not."""
RESERVED = frozenset(("check", "diff", "schema", "show"))
"""Names that no plugin may have: the commands of ``trainkit config``, which takes names of plugins too."""
ACCELERATE_TRACKERS = frozenset(
    ("aim", "clearml", "comet_ml", "dvclive", "mlflow", "swanlab", "tensorboard", "trackio", "wandb")
)
"""Names of accelerate's trackers. No plugin may use them, because `train.trackers` names both kinds of trackers."""
CLASS_NAME = re.compile(r"^accelerate|(?:config|trainer)$")
"""What the names of other frameworks' classes have besides the name of the algorithm."""
DISABLE = "TRAINKIT_DISABLE_PLUGINS"
"""The environment variable that names plugins or distributions to disable, separated by commas; `ALL` names those that
are not trainkit's own."""
LOAD = "TRAINKIT_LOAD_PLUGINS"
"""The environment variable that names the plugins or distributions that may be used besides trainkit's own."""
ALL = "all"

OK, BROKEN, BLOCKED, SHADOWED = "ok", "broken", "blocked", "shadowed"

_disabled: list[tuple[str, str]] = []
"""(name, what disables it) of each name that `disabled` disables at present."""


@dataclass(frozen=True)
class PluginInfo:
    """One entry point of the group ``trainkit``, read without importing anything."""

    name: str
    """The name that a configuration uses."""
    module: str
    """The module that holds the plugin."""
    distribution: str
    """The installed distribution that provides it."""
    version: str
    """That distribution's version."""
    api: str = ""
    """The versions of trainkit that its distribution requires; empty if it requires none."""
    origin: str = ""
    """``built-in``, ``editable`` with the directory of the source, or the directory that it is installed in."""
    kind: str = UNKNOWN
    """``trainer``, ``engine``, ``sharding``, ``sampler`` (provides one), ``tracker`` (is registered as one), ``hooks``
    (has other hooks), or several; ``?`` if its source does not show it."""
    state: str = OK
    """``ok``, ``broken`` (its import fails), ``blocked`` (disabled, or made for another version of trainkit) or
    ``shadowed`` (its name belongs to another plugin)."""
    why: str = ""
    """Why it is not ``ok``, in one line with distribution and version."""

    def __str__(self) -> str:
        return f"{self.name} ({self.distribution} {self.version}, module {self.module})"

    def refused(self, state: str, reason: str) -> PluginInfo:
        """Return the same plugin in another state, for this reason."""
        return replace(self, state=state, why=f"{self.distribution} {self.version}: {reason}")


def discover() -> list[PluginInfo]:
    """Return every installed plugin, sorted by name. Read metadata and source, and import nothing.

    The same name may appear twice.
    """
    if found := _discovered.get():
        return list(found)
    with found_once():
        made = [_with_imports(_examined(plugin)) for plugin in _claims()]
    if found is not None:
        found.extend(made)
    return made


def find_plugin(name: str, registered: Iterable[str] = (), kinds: Iterable[str] = ()) -> PluginInfo:
    """Return the one usable plugin called ``name`` (case-insensitive).

    Args:
        name: its name.
        registered: further names for the error message.
        kinds: the kinds of plugins that the message lists; all by default.

    Raises:
        RegistryError: there is none, or its name is reserved for a built-in or claimed twice; lists the choices.
        PluginError: it is disabled, made for another version of trainkit, or cannot be imported.
    """
    return _usable(name, _claims(), registered, kinds)


def find_installed(name: str, module: str = "") -> PluginInfo | None:
    """Return the one usable plugin called ``name``; None if no installed plugin of that name has ``module``.

    Raises:
        RegistryError, PluginError: as `find_plugin`.
    """
    claims = _claims()
    return _usable(name, claims) if any(plugin.name == name and _is_of(plugin, module) for plugin in claims) else None


def _usable(
    name: str, claims: Sequence[PluginInfo], registered: Iterable[str] = (), kinds: Iterable[str] = ()
) -> PluginInfo:
    found = [_examined(plugin) for plugin in claims if plugin.name == name.lower()]
    if usable := [plugin for plugin in found if plugin.state == OK]:
        return usable[0]
    if not found:
        names = sorted({*registered, *(plugin.name for plugin in claims if plugin.state == OK)})
        own, near = BUILT_IN.get(name.lower()), suggest(CLASS_NAME.sub("", name.lower()), names)
        given = {*kinds}
        others = {each.name for each in discover() if each.kind != UNKNOWN and not given & {*each.kind.split(", ")}}
        listed = [each for each in names if each in registered or each not in others] if given else names
        raise RegistryError(
            f"no plugin {name!r} is installed{near}; available: {', '.join(listed) or 'none'}. "
            + (f"It is in {own}: pip install {own}" if own else f"A plugin needs an entry point in the group {GROUP!r}")
        )
    told = "; ".join(plugin.why for plugin in found)
    if {plugin.state for plugin in found} == {SHADOWED} and name.lower() not in {*BUILT_IN, *ACCELERATE_TRACKERS}:
        raise RegistryError(
            f"the plugin name {name!r} is claimed twice: {'; '.join(map(str, found))}. Uninstall all but one, or "
            f"disable it by its distribution: {DISABLE}={found[0].distribution}"
        )
    error = RegistryError if SHADOWED in {plugin.state for plugin in found} else PluginError
    raise error(f"the plugin {name.lower()!r} cannot be used: {told}")


def load_plugin(name: str, registered: Iterable[str] = (), kinds: Iterable[str] = ()) -> ModuleType:
    """Import the installed plugin called ``name``; ``registered`` and ``kinds`` as in `find_plugin`.

    Raises:
        RegistryError, PluginError: as `find_plugin`.
        PluginError: importing it failed; names the distribution and chains the cause.
    """
    return import_plugin(find_plugin(name, registered, kinds))


def import_plugin(plugin: PluginInfo) -> ModuleType:
    """Import the module of ``plugin``; if it is a package with a ``__getattr__``, also the names in its ``__all__``.

    Raises:
        PluginError: importing it failed; names the distribution and chains the cause.
    """
    module = _imported(plugin, plugin.module)
    if "__getattr__" in vars(module):  # it registers nothing before they are imported
        for name in getattr(module, "__all__", ()):
            _imported(plugin, plugin.module, name)
    return module


def import_settings(plugin: PluginInfo) -> ModuleType | None:
    """Import the submodule ``config`` of the plugin's package; None if there is none.

    Raises:
        PluginError: as `import_plugin`.
    """
    module = f"{plugin.module}.config"
    return _imported(plugin, module) if exists(module) else None


def _imported(plugin: PluginInfo, module: str, name: str = "") -> ModuleType:
    """Import a module of ``plugin``, and the attribute ``name`` of it."""
    try:
        found = importlib.import_module(module)
        if name:
            getattr(found, name, None)
        return found
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a plugin may even call sys.exit() at import; that must not affect other plugins
        raise PluginError(
            f"plugin {plugin} failed to import: {said(error)}. "
            f"Repair or uninstall the distribution {plugin.distribution!r}, or disable it; other plugins are not "
            "affected"
        ) from error


# ---------------------------------------------------------------------------------------------------- installed


_kept: ContextVar[list[PluginInfo] | None] = ContextVar("_kept", default=None)
_discovered: ContextVar[list[PluginInfo] | None] = ContextVar("_discovered", default=None)
"""What `discover` has returned inside `unchanged`; empty before its first call."""


@contextmanager
def unchanged() -> Iterator[None]:
    """Look only once for what is installed inside the block, in which nothing is installed or disabled."""
    tokens = _kept.set(_claims()), _discovered.set(_discovered.get() or [])
    try:
        yield
    finally:
        _kept.reset(tokens[0])
        _discovered.reset(tokens[1])


def _claims() -> list[PluginInfo]:
    """Return every installed plugin, as its metadata describe it; the same name may appear twice."""
    if (kept := _kept.get()) is not None:
        return kept
    found: dict[tuple[str, str], PluginInfo] = {}
    seen: set[str] = set()
    for path in sys.path:
        changed = _changed(path)
        settled = time.time_ns() - changed > SETTLED
        for name, plugins in (_read if settled else _read.__wrapped__)(path, changed):
            if name not in seen:  # of two copies on the path the first is the one in use
                seen.add(name)
                found |= {(p.name, f"{p.distribution} {p.module}"): p for p in plugins}
    claims = sorted(found.values(), key=lambda plugin: (plugin.name, plugin.distribution, plugin.module))
    return [_judged(plugin, claims) for plugin in claims]


SETTLED = 5 * 10**9
"""Nanoseconds after which a directory that has changed is taken to be written: an installer may be at work before."""


def _changed(path: str) -> int:
    """Return when a directory or archive of ``sys.path`` has changed, in nanoseconds; 0 if it does not exist."""
    try:
        return os.stat(path or ".").st_mtime_ns
    except OSError:
        return 0


@lru_cache(maxsize=64)
def _read(path: str, changed: int) -> list[tuple[str, list[PluginInfo]]]:  # noqa: ARG001  (what was read then)
    """Return the distributions in ``path`` with plugins, and these; reading all metadata takes milliseconds."""
    from importlib.metadata import distributions  # slow, and not needed for --help

    found = [dist for dist in distributions(path=[path]) if f"[{GROUP}]" in _text(dist, "entry_points.txt")]
    named = [(dist, *_identity(dist)) for dist in found]
    return [(canonical(name), list(_plugins_of(dist, name, version))) for dist, name, version in named]


def _identity(dist: Distribution) -> tuple[str, str]:
    try:
        return dist.name or "?", dist.version or "?"
    except Exception:  # missing or unreadable metadata; the error differs between versions
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
    """Return the versions of trainkit that the distribution requires.

    Raises:
        ValueError: the requirement does not parse.
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
        return _place(dist)
    except (ValueError, KeyError, AttributeError):
        return "?"


def _place(dist: Distribution) -> str:
    """Return the directory that the distribution is installed in."""
    try:
        return str(dist.locate_file(""))
    except (ValueError, KeyError, AttributeError, NotImplementedError):
        return "?"


def _text(dist: Distribution, file: str) -> str:
    try:
        return dist.read_text(file) or ""
    except (OSError, ValueError):
        return ""


def canonical(distribution: str) -> str:
    """Return the normalised name of a distribution, as installers compare it."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def _judged(plugin: PluginInfo, claims: Sequence[PluginInfo]) -> PluginInfo:
    """Return ``plugin``, in the state ``blocked`` or ``shadowed`` if that applies."""
    if reason := _blocked(plugin):
        return plugin.refused(BLOCKED, reason)
    if plugin.state == BROKEN:
        return plugin
    owner = BUILT_IN.get(plugin.name)
    if owner and canonical(plugin.distribution) != owner:
        return plugin.refused(SHADOWED, f"the name {plugin.name!r} belongs to trainkit's own {owner}; choose another")
    if owner:
        return plugin
    if plugin.name in RESERVED:
        return plugin.refused(SHADOWED, f"the name {plugin.name!r} is a command of `trainkit config`; choose another")
    if plugin.name in ACCELERATE_TRACKERS:
        return plugin.refused(SHADOWED, f"the name {plugin.name!r} belongs to a tracker of accelerate; choose another")
    rivals = [p for p in claims if p.name == plugin.name and p is not plugin and not _blocked(p)]
    if rivals:
        others = ", ".join(f"{rival.distribution} {rival.version} (module {rival.module})" for rival in rivals)
        return plugin.refused(
            SHADOWED, f"the name {plugin.name!r} is claimed by {others} too; uninstall or disable one of them"
        )
    return plugin


def _blocked(plugin: PluginInfo) -> str:
    """Return why ``plugin`` may not be used, whatever its module contains; empty if it may."""
    if by := disabled_by(plugin.name, plugin.distribution):
        return f"disabled by {by}"
    if plugin.api in ("", "?"):
        return ""
    from packaging.specifiers import SpecifierSet

    from trainkit import __version__

    if SpecifierSet(plugin.api).contains(__version__, prereleases=True):
        return ""
    return f"it requires trainkit {plugin.api}, and this is trainkit {__version__}; install another version"


def _examined(plugin: PluginInfo) -> PluginInfo:
    """Return ``plugin`` with its kind; in the state ``broken`` if its source shows that it cannot be imported."""
    if plugin.state == BROKEN:
        return plugin
    if all(part.isidentifier() for part in plugin.module.split(".")):
        reading = read_module(plugin.module, plugin.name)
        known, fault = replace(plugin, kind=reading.kind), reading.fault
    else:
        known = plugin
        fault = f"its entry point is {plugin.name} = {plugin.module!r}; the value must be a module, without a class"
    return known.refused(BROKEN, fault) if fault and known.state == OK else known


def _with_imports(plugin: PluginInfo) -> PluginInfo:
    """Return ``plugin``, in the state ``broken`` if it imports what is not installed; a run gets the import's error."""
    absent = absent_import(plugin.module) if plugin.state == OK else ""
    return plugin.refused(BROKEN, f"{plugin.module} imports {absent}, which is not installed") if absent else plugin


# ----------------------------------------------------------------------------------------------------- disabled


@contextmanager
def disabled(names: Iterable[str], by: str) -> Iterator[None]:
    """Disable the plugins or distributions ``names`` inside the block; errors name ``by`` as the reason."""
    given = [(name.strip().lower(), by) for name in names]
    _disabled.extend(given)
    try:
        yield
    finally:
        for pair in given:
            _disabled.remove(pair)


def disabled_by(name: str, distribution: str | None = None) -> str:
    """Return what disables the plugin, an environment variable or an option; empty if nothing does."""
    foreign = distribution is not None and canonical(distribution) not in BUILT_IN.values()

    def is_meant(given: str) -> bool:
        return given == name.lower() or (distribution is not None and canonical(given) == canonical(distribution))

    for given, by in _disabling():
        if is_meant(given) or (given == ALL and foreign):
            return by
    return LOAD if LOAD in os.environ and foreign and not any(map(is_meant, _names(LOAD))) else ""


def _names(variable: str) -> list[str]:
    """Return the names in an environment variable."""
    return [name for given in os.environ.get(variable, "").split(",") if (name := given.strip().lower())]


def _disabling() -> list[tuple[str, str]]:
    return [*_disabled, *((name, DISABLE) for name in _names(DISABLE))]


def unknown_disabled(known: Iterable[str] = ()) -> list[tuple[str, str]]:
    """Return (by, message) for every name to disable or to load that is neither installed nor in ``known``."""
    named = [*_disabling(), *((name, LOAD) for name in _names(LOAD))]
    if not named:
        return []
    claims = _claims()
    names = {plugin.name for plugin in claims} | {name.lower() for name in known}
    homes = {canonical(plugin.distribution) for plugin in claims}
    return [
        (by, f"{by} names {name!r}, which is not an installed plugin or distribution{suggest(name, names | homes)}")
        for name, by in named
        if name not in names and canonical(name) not in homes and name != ALL
    ]


def without_disabled(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the plugins in ``names`` that are not disabled, and messages about those that are."""
    told = [message for _, message in unknown_disabled(names)]
    gone = {name: by for name in names if (by := why_disabled(name))}
    told += [f"the plugin {name!r} is disabled by {by}; the run goes on without it" for name, by in gone.items()]
    return [name for name in names if name not in gone], told


def why_disabled(name: str, module: str = "") -> str:
    """Return what disables every plugin called ``name`` (or those in ``module``); empty if one is not disabled."""
    if not _disabling() and LOAD not in os.environ:
        return ""
    claims = [plugin for plugin in _claims() if plugin.name == name.lower() and _is_of(plugin, module)]
    reasons = [disabled_by(plugin.name, plugin.distribution) for plugin in claims] or [disabled_by(name)]
    return reasons[0] if all(reasons) else ""


# -------------------------------------------------------------------------------------------------------- names


def is_installed(name: str, module: str) -> bool:
    """Return whether ``module`` belongs to an installed plugin called ``name``."""
    return any(plugin.name == name and _is_of(plugin, module) for plugin in _claims())


def of_kind(kind: str) -> list[str]:
    """Return the names of the usable installed plugins of a kind, according to their source."""
    return sorted({plugin.name for plugin in discover() if plugin.state == OK and kind in plugin.kind.split(", ")})


def owner_of(name: str, module: str) -> str:
    """Return the owner of the plugin name, in words; empty if there is none, or if ``module`` belongs to it."""
    own = BUILT_IN.get(name)
    if own:
        return "" if own.replace("-", "_") == module.split(".")[0] else f"trainkit's own {own}"
    if name in ACCELERATE_TRACKERS:
        return "a tracker of accelerate"
    claims = [plugin for plugin in _claims() if plugin.name == name and plugin.state != BLOCKED]
    return "" if any(_is_of(plugin, module) for plugin in claims) else " and ".join(map(str, claims))


def _is_of(plugin: PluginInfo, module: str) -> bool:
    """Return whether ``module`` is in the plugin's package; an empty one is in any."""
    return not module or plugin.module.split(".")[0] == module.split(".")[0]


def is_imported(plugin: PluginInfo) -> bool:
    """Return whether the plugin's module is imported in this process."""
    return plugin.module in sys.modules
