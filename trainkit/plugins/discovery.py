"""Discovery of plugins by their entry points. What cannot be used is refused, and what a run names is imported.

A kind of plugin has an entry-point group of its own, so that nothing is imported to find out what a plugin is. A fault
of one plugin affects that plugin alone. The message names its distribution and version.
"""

from __future__ import annotations

import importlib
import os
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from trainkit.errors import PluginError, RegistryError, suggest
from trainkit.plugins.guard import error_text, one_line
from trainkit.version import __version__

if TYPE_CHECKING:
    from importlib.metadata import Distribution

TRAINER, ENGINE, SHARDING, SAMPLER, TRACKER, HOOKS = "trainer", "engine", "sharding", "sampler", "tracker", "hooks"
GROUPS = {
    TRAINER: "trainkit.trainers",
    ENGINE: "trainkit.engines",
    SHARDING: "trainkit.shardings",
    SAMPLER: "trainkit.samplers",
    TRACKER: "trainkit.trackers",
    HOOKS: "trainkit.hooks",
}
"""The entry-point group of each kind of plugin."""
NAMED_IN = {
    TRAINER: ("an algorithm", "method"),
    ENGINE: ("a generation engine", "rollout.engine"),
    SHARDING: ("a sharding", "train.sharding"),
    SAMPLER: ("a sampler", "plugins"),
    TRACKER: ("a tracker", "train.trackers"),
    HOOKS: ("a plugin with hooks", "plugins"),
}
"""What each kind is in words, and the setting that names one."""
UNKNOWN = "?"
"""The kind of a plugin that is in no group of a kind."""
OLD_GROUP = "trainkit"
"""The group of all kinds before each had its own."""
CORE = "trainkit-rl"
"""The distribution of trainkit itself."""
CHECKOUT = Path(__file__).parents[2]
"""The directory of the sources, if trainkit is imported from a checkout."""
BUILT_IN = {
    "bco": "trainkit-kto",
    "best_of_k": "trainkit-dpo",
    "cpo": "trainkit-orpo",
    "ddpo": "trainkit-ddpo",
    "distill": "trainkit-distill",
    "distill_offline": "trainkit-distill",
    "dpo": "trainkit-dpo",
    "early_stop": "trainkit-early-stop",
    "gkd": "trainkit-distill",
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
    "spin": "trainkit-dpo",
    "vllm": "trainkit-vllm",
    "xpo": "trainkit-dpo",
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

_disabled: list[tuple[str, str]] = []
"""(name, what disables it) of each name that `disabled` disables at present."""


@dataclass(frozen=True)
class PluginInfo:
    """One entry point of a plugin, read without importing anything."""

    name: str
    """The name that a configuration uses."""
    kind: str
    """``trainer``, ``engine``, ``sharding``, ``sampler``, ``tracker`` or ``hooks``, by its entry-point group; ``?`` if
    it is in none of theirs."""
    module: str
    """The module that holds the plugin."""
    distribution: str
    """The installed distribution that provides it."""
    version: str
    """That distribution's version."""
    why: str = ""
    """Why it cannot be used, in one line with distribution and version; empty if nothing is known against it."""
    disabled: bool = False
    """Whether the reason is that it is disabled, which is no fault of it."""

    def __str__(self) -> str:
        return f"{self.name} ({self.distribution} {self.version}, module {self.module})"

    def refused(self, reason: str, *, disabled: bool = False) -> PluginInfo:
        """Return the same plugin, which cannot be used for this reason."""
        return replace(self, why=f"{self.distribution} {self.version}: {reason}", disabled=disabled)


def discover() -> list[PluginInfo]:
    """Return every installed plugin, sorted by name; the same name may appear twice. Read metadata, import nothing."""
    claims = _claims()
    return [_judged(plugin, claims) for plugin in claims]


def find_plugin(name: str, registered: Iterable[str] = (), kinds: Sequence[str] = ()) -> PluginInfo:
    """Return the one usable plugin called ``name`` (case-insensitive).

    Args:
        name: its name.
        registered: further names for the error message.
        kinds: the kinds that it may have, which the message lists; all by default.

    Raises:
        RegistryError: there is none, it is of another kind, or its name is reserved for a built-in or claimed twice.
        PluginError: it is disabled, made for another version of trainkit, or in no group of a kind.
    """
    installed = discover()
    matching = [plugin for plugin in installed if plugin.name == name.lower()]
    if not matching:
        raise _absence(name, [p for p in installed if not kinds or p.kind in kinds], registered, kinds)
    fitting = [plugin for plugin in matching if not kinds or plugin.kind in (*kinds, UNKNOWN)] or matching
    usable = [plugin for plugin in fitting if not plugin.why]
    if not usable:
        raise _refusal(name.lower(), fitting)
    if kinds and usable[0].kind not in kinds:
        what, setting = NAMED_IN[usable[0].kind]
        raise RegistryError(f"{name.lower()!r} is {what}; name it in {setting}")
    return usable[0]


def _absence(
    name: str, installed: Sequence[PluginInfo], registered: Iterable[str], kinds: Sequence[str]
) -> RegistryError:
    """Return the error for a name that no installed plugin has; ``installed`` are those that it could be."""
    names = sorted({*registered, *(plugin.name for plugin in installed if not plugin.why)})
    distribution, near = BUILT_IN.get(name.lower()), suggest(CLASS_NAME.sub("", name.lower()), names)
    groups = " or ".join(repr(GROUPS[kind]) for kind in kinds or GROUPS)
    way = (
        f"It is in {distribution}: {how_to_install(distribution)}"
        if distribution
        else f"A plugin needs an entry point in the group {groups}"
    )
    return RegistryError(
        f"no plugin {name!r} is installed{near}; available: {', '.join(names) or 'none'}. {way}{of_old_group()}"
    )


def of_old_group() -> str:
    """Return what a message about an unknown name adds: which distributions have plugins of no kind, and why."""
    return "".join(f". {reason}" for reason in reasons(plugin for plugin in discover() if plugin.kind == UNKNOWN))


def reasons(plugins: Iterable[PluginInfo]) -> list[str]:
    """Return why plugins cannot be used, each reason once, after the names of those that it concerns."""
    names: dict[str, list[str]] = {}
    for plugin in plugins:
        if plugin.why:
            names.setdefault(plugin.why, []).append(plugin.name)
    return [f"{', '.join(dict.fromkeys(whose))}: {why}" for why, whose in names.items()]


def _refusal(name: str, claimants: Sequence[PluginInfo]) -> PluginError | RegistryError:
    """Return the error for a name all of whose claimants are unusable."""
    claims = [plugin for plugin in _claims() if plugin.name == name and not plugin.why]
    if claims and name not in {*BUILT_IN, *ACCELERATE_TRACKERS, *RESERVED}:
        return RegistryError(
            f"the plugin name {name!r} is claimed twice: {'; '.join(map(str, claims))}. Uninstall all but one, or "
            f"disable it by its distribution: {DISABLE}={claims[0].distribution}"
        )
    why = "; ".join(dict.fromkeys(plugin.why for plugin in claimants))
    return (RegistryError if claims else PluginError)(f"the plugin {name!r} cannot be used: {why}")


def find_installed(name: str, module: str = "") -> PluginInfo | None:
    """Return the one usable plugin called ``name``; None if no installed plugin of that name has ``module``.

    Raises:
        RegistryError, PluginError: as `find_plugin`.
    """
    return find_plugin(name) if is_installed(name, module) else None


def load_plugin(name: str, registered: Iterable[str] = (), kinds: Sequence[str] = ()) -> ModuleType:
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
    try:
        return _imported(plugin, module)
    except PluginError as error:
        cause = error.__cause__
        if isinstance(cause, ModuleNotFoundError) and cause.name == module:
            return None
        raise


def _imported(plugin: PluginInfo, module: str, name: str = "") -> ModuleType:
    """Import a module of ``plugin``, and the attribute ``name`` of it."""
    try:
        imported = importlib.import_module(module)
        if name:
            getattr(imported, name, None)
        return imported
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a plugin may even call sys.exit() at import; that must not affect other plugins
        raise PluginError(
            f"plugin {plugin} failed to import: {error_text(error)}. "
            f"Repair or uninstall the distribution {plugin.distribution!r}, or disable it; other plugins are not "
            "affected"
        ) from error


# ---------------------------------------------------------------------------------------------------- installed


def _claims() -> list[PluginInfo]:
    """Return every installed plugin, as its metadata describe it; the same name may appear twice."""
    by_distribution: dict[str, list[PluginInfo]] = {}
    for path in sys.path:
        for distribution, plugins in _read(path, _changed(path)):
            by_distribution.setdefault(distribution, plugins)  # of two copies on the path the first is the one in use
    claims = [plugin for plugins in by_distribution.values() for plugin in plugins]
    if _disabling() or LOAD in os.environ:
        claims = [_switched(plugin) for plugin in claims]
    return sorted(claims, key=lambda plugin: (plugin.name, plugin.distribution, plugin.kind))


def _switched(plugin: PluginInfo) -> PluginInfo:
    """Return ``plugin``, disabled if anything disables it."""
    by = disabled_by(plugin.name, plugin.distribution)
    return plugin.refused(f"disabled by {by}", disabled=True) if by else plugin


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

    with_plugins = [dist for dist in distributions(path=[path]) if f"[{OLD_GROUP}" in entry_points_text(dist)]
    named = [(dist, *identity(dist)) for dist in with_plugins]
    return [(canonical(name), list(_plugins_of(dist, name, version))) for dist, name, version in named]


def entry_points_text(dist: Distribution) -> str:
    """Return the file with the entry points of a distribution; empty if it cannot be read."""
    try:
        return dist.read_text("entry_points.txt") or ""
    except (OSError, ValueError):
        return ""


def identity(dist: Distribution) -> tuple[str, str]:
    """Return the name and the version of a distribution; question marks if they cannot be read."""
    try:
        return dist.name or "?", dist.version or "?"
    except Exception:  # missing or unreadable metadata; the error differs between versions
        return "?", "?"


def _plugins_of(dist: Distribution, name: str, version: str) -> Iterator[PluginInfo]:
    try:
        entries = [*dist.entry_points]
    except Exception as error:  # one malformed file must not hide all plugins
        broken = PluginInfo(canonical(name), UNKNOWN, "?", name, version)
        yield broken.refused(f"its entry points cannot be read ({one_line(error)}); reinstall it")
        return
    kinds = {group: kind for kind, group in GROUPS.items()}
    plugins = [PluginInfo(e.name.lower(), kinds[e.group], e.value, name, version) for e in entries if e.group in kinds]
    fault = _unfit(dist) if plugins else ""
    for plugin in plugins:
        reason = fault
        if not all(part.isidentifier() for part in plugin.module.split(".")):
            reason = (
                f"its entry point is {plugin.name} = {plugin.module!r}; the value must be a module, without a class"
            )
        yield plugin.refused(reason) if reason else plugin
    old = [PluginInfo(e.name.lower(), UNKNOWN, e.value, name, version) for e in entries if e.group == OLD_GROUP]
    yield from (plugin.refused(OF_OLD_GROUP) for plugin in old if plugin.name not in {other.name for other in plugins})


OF_OLD_GROUP = (
    f"its entry points are in the group {OLD_GROUP!r}, which is not read any more, as each kind of plugin has its own: "
    f'in pyproject.toml, write [project.entry-points."{GROUPS[TRAINER]}"] in place of '
    f"[project.entry-points.{OLD_GROUP}] for an algorithm, {', '.join(list(GROUPS.values())[1:-1])} or {GROUPS[HOOKS]} "
    "for the other kinds, and install it again"
)
"""What is wrong with a plugin that was written when all kinds had one group."""


def _unfit(dist: Distribution) -> str:
    """Return why the distribution does not fit this version of trainkit; empty if it does."""
    from packaging.requirements import Requirement

    ours = re.compile(r"trainkit([-_.]+rl)?\s*([\[(<>=!~;@]|$)", re.IGNORECASE)
    try:
        needed = [Requirement(line) for line in dist.requires or () if ours.match(line.strip())]
    except ValueError as error:
        return f"its requirement on trainkit cannot be read: {one_line(error)}"
    applying = [each for each in needed if each.marker is None or each.marker.evaluate({"extra": ""})]
    for each in applying:
        if canonical(each.name) != CORE:
            return f"it requires {each.name!r}, which is another project; write {CORE} in its dependencies"
        if not each.specifier.contains(__version__, prereleases=True):
            return f"it requires trainkit {each.specifier}, and this is trainkit {__version__}; install another version"
    return ""


def how_to_install(distribution: str) -> str:
    """Return the command that installs a distribution of trainkit: from the checkout that is in use, or an index."""
    folders = _in_checkout(distribution)
    return shlex.join(["pip", "install", *([part for folder in folders for part in ("-e", folder)] or [distribution])])


def _in_checkout(distribution: str) -> list[str]:
    """Return the folder of a distribution, after those of what it requires; none if trainkit is no checkout."""
    folder = CHECKOUT / "plugins" / distribution.removeprefix("trainkit-").replace("-", "_")
    if not (folder / "pyproject.toml").is_file():
        return []
    import tomllib  # only for a message

    project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = [re.split(r"[^\w-]", line)[0] for line in project.get("dependencies", ())]
    needed = [part for name in names if name.startswith("trainkit-") for part in _in_checkout(name)]
    return [*dict.fromkeys([*needed, str(folder)])]


def canonical(distribution: str) -> str:
    """Return the normalised name of a distribution, as installers compare it."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def _judged(plugin: PluginInfo, claims: Sequence[PluginInfo]) -> PluginInfo:
    """Return ``plugin``, refused if its name belongs to another."""
    owner = BUILT_IN.get(plugin.name)
    if plugin.why or (owner and canonical(plugin.distribution) == owner):
        return plugin
    for named, whose in (
        (owner, f"belongs to trainkit's own {owner}"),
        (plugin.name in RESERVED, "is a command of `trainkit config`"),
        (plugin.name in ACCELERATE_TRACKERS, "belongs to a tracker of accelerate"),
    ):
        if named:
            return plugin.refused(f"the name {plugin.name!r} {whose}; choose another")
    rivals = [
        other for other in claims
        if other.name == plugin.name and not other.why and other is not plugin
        and (other.distribution != plugin.distribution or other.kind == plugin.kind)
    ]  # fmt: skip
    if not rivals:
        return plugin
    others = ", ".join(f"{rival.distribution} {rival.version} (module {rival.module})" for rival in rivals)
    return plugin.refused(f"the name {plugin.name!r} is claimed by {others} too; uninstall or disable one of them")


# ----------------------------------------------------------------------------------------------------- disabled


@contextmanager
def disabled(names: Iterable[str], by: str) -> Iterator[None]:
    """Disable the plugins or distributions ``names`` inside the block; errors name ``by`` as the reason."""
    pairs = [(name.strip().lower(), by) for name in names]
    _disabled.extend(pairs)
    try:
        yield
    finally:
        for pair in pairs:
            _disabled.remove(pair)


def disabled_by(name: str, distribution: str | None = None) -> str:
    """Return what disables the plugin, an environment variable or an option; empty if nothing does."""
    foreign = distribution is not None and canonical(distribution) not in BUILT_IN.values()

    def is_meant(switched: str) -> bool:
        return switched == name.lower() or (distribution is not None and canonical(switched) == canonical(distribution))

    for switched, by in _disabling():
        if is_meant(switched) or (switched == ALL and foreign):
            return by
    return LOAD if LOAD in os.environ and foreign and not any(map(is_meant, _names(LOAD))) else ""


def _names(variable: str) -> list[str]:
    """Return the names in an environment variable."""
    return [name for part in os.environ.get(variable, "").split(",") if (name := part.strip().lower())]


def _disabling() -> list[tuple[str, str]]:
    return [*_disabled, *((name, DISABLE) for name in _names(DISABLE))]


def unknown_disabled(others: Iterable[str] = ()) -> list[tuple[str, str]]:
    """Return (by, message) for every name to disable or to load that is neither installed nor in ``others``."""
    named = [*_disabling(), *((name, LOAD) for name in _names(LOAD))]
    if not named:
        return []
    claims = _claims()
    names = {plugin.name for plugin in claims} | {name.lower() for name in others}
    homes = {canonical(plugin.distribution) for plugin in claims}
    return [
        (by, f"{by} names {name!r}, which is not an installed plugin or distribution{suggest(name, names | homes)}")
        for name, by in named
        if name not in names and canonical(name) not in homes and name != ALL
    ]


def without_disabled(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the plugins in ``names`` that are not disabled, and messages about those that are."""
    messages = [message for _, message in unknown_disabled(names)]
    gone = {name: by for name in names if (by := why_disabled(name))}
    messages += [f"the plugin {name!r} is disabled by {by}; the run goes on without it" for name, by in gone.items()]
    return [name for name in names if name not in gone], messages


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
    """Return the names of the usable installed plugins of a kind."""
    return sorted({plugin.name for plugin in discover() if plugin.kind == kind and not plugin.why})


def kinds_of(name: str) -> set[str]:
    """Return the kinds of the installed plugin called ``name``; if none of that name is usable, those of all."""
    plugins = [plugin for plugin in discover() if plugin.name == name.lower()]
    return {plugin.kind for plugin in plugins if not plugin.why} or {plugin.kind for plugin in plugins}


def owner_of(name: str, module: str) -> str:
    """Return the owner of the plugin name, in words; empty if there is none, or if ``module`` belongs to it."""
    distribution = BUILT_IN.get(name)
    if distribution:
        return "" if distribution.replace("-", "_") == module.split(".")[0] else f"trainkit's own {distribution}"
    if name in ACCELERATE_TRACKERS:
        return "a tracker of accelerate"
    claims = [plugin for plugin in _claims() if plugin.name == name and not plugin.why]
    return "" if any(_is_of(plugin, module) for plugin in claims) else " and ".join(map(str, claims))


def _is_of(plugin: PluginInfo, module: str) -> bool:
    """Return whether ``module`` is in the plugin's package; an empty one is in any."""
    return not module or plugin.module.split(".")[0] == module.split(".")[0]
