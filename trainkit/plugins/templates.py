"""New plugins, written from templates. Each template is itself a working plugin."""

from __future__ import annotations

import keyword
import re
import shutil
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from trainkit.errors import ConfigError, RegistryError
from trainkit.plugins.commands import GROUP as COMMANDS
from trainkit.plugins.discovery import BUILT_IN, CORE, GROUPS, NAMED_IN, RESERVED, TRAINER, discover
from trainkit.version import __version__

TEMPLATES = Path(__file__).parent / "_templates"
"""A directory for each kind, and what all kinds have."""
ALL = "pyproject.toml"
LONGEST = 64
"""The most characters of a plugin's name, of which names of files are made."""


class Kind(StrEnum):
    """The kind of a plugin."""

    TRAINER = "trainer"
    """An algorithm."""
    TRACKER = "tracker"
    """A tracker, which records the metrics of a run."""
    SAMPLER = "sampler"
    """A hook that provides the sampler of a run."""
    HOOKS = "hooks"
    """Hooks that a run calls."""
    ENGINE = "engine"
    """A generation engine."""
    SHARDING = "sharding"
    """A way to divide a model among processes."""
    COMMAND = "command"
    """A command of the command line."""


@dataclass(frozen=True)
class Names:
    """The names of a new plugin: ``my_algo`` in configurations, ``trainkit_my_algo`` as a module, ``trainkit-my-algo``
    for pip, ``MyAlgo`` in names of classes. Hyphens and underscores are equivalent, as for pip."""

    plugin: str
    """The name in configurations."""
    classes: str
    """The beginning of the names of classes."""

    @classmethod
    def of(cls, name: str) -> Names:
        """Return the names that follow from the one on the command line.

        Raises:
            ConfigError: Python, pip or a configuration cannot use them.
        """
        import yaml

        plugin = name.lower().replace("-", "_")
        if len(plugin) > LONGEST or not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", plugin):
            raise ConfigError(
                f"a plugin cannot be called {name!r}; use English letters, digits, and single hyphens or underscores "
                f"between them, beginning with a letter, at most {LONGEST} characters: my-algo"
            )
        for is_taken, by in (
            (plugin in RESERVED, "is a command of `trainkit config`"),
            (keyword.iskeyword(plugin), "is a keyword of Python"),
            ((value := yaml.safe_load(plugin)) != plugin, f"a configuration would read as {value!r}"),
        ):
            if is_taken:
                raise ConfigError(f"a plugin cannot be called {name!r}, which {by}; choose another name")
        if plugin.startswith("trainkit_"):
            raise ConfigError(
                f"given {name!r}; 'trainkit-' is put before the name automatically: "
                f"trainkit new-plugin {name[len('trainkit-') :]}"
            )
        return cls(plugin, "".join(part[:1].upper() + part[1:] for part in re.split("[-_]", name)))

    @property
    def distribution(self) -> str:
        """The name of the distribution, for pip."""
        return f"trainkit-{self.plugin.replace('_', '-')}"

    @property
    def module(self) -> str:
        """The name of the plugin's only module."""
        return f"trainkit_{self.plugin}"

    def _entry(self, kind: Kind) -> str:
        """Return the entry point: a module, or of a command what is typed and the function."""
        if kind == Kind.COMMAND:
            return f'{self.plugin.replace("_", "-")} = "{self.module}:{self.plugin}"'
        return f'{self.plugin} = "{self.module}"'

    def fill(self, text: str, kind: Kind) -> str:
        """Return the text or path of a template of a kind, with these names in place of the template's own."""
        written = {
            "new_plugin": self.plugin,
            "new-plugin": self.plugin.replace("_", "-"),
            "NewPlugin": self.classes,
            "trainkit-requirement": _requirement(),
            "template-kind": NAMED_IN.get(kind, ("a command",))[0].capitalize(),
            "template-group": GROUPS.get(kind, COMMANDS),
            'new_plugin = "trainkit_new_plugin"': self._entry(kind),
            ', "template-tests"': "" if kind == TRAINER else ', "trainkit-rloo"',
        }
        written = dict(sorted(written.items(), key=lambda pair: -len(pair[0])))  # the longest that fits
        return re.sub("|".join(map(re.escape, written)), lambda found: written[found[0]], text)


def new_plugin(name: str, kind: Kind, out: Path | None = None) -> tuple[Names, list[Path]]:
    """Write the directory of a new plugin; return the plugin's names and files.

    Args:
        name: its name.
        kind: its kind.
        out: the directory; by default ``trainkit-NAME`` in the working directory.

    Raises:
        ConfigError: the name cannot be used; the directory is not empty, or cannot be written.
        RegistryError: the name is taken.
    """
    names = Names.of(name)
    _check_free(names)
    target = out or Path(names.distribution)
    if _is_dir(target) and any(target.iterdir()):
        raise ConfigError(f"the directory {str(target)!r} is not empty; give another with --out, or remove it")
    root = TEMPLATES / kind
    found = sorted(path for path in root.rglob("*") if path.suffix in (".md", ".py"))
    texts = {str(path.relative_to(root)): path.read_text(encoding="utf-8") for path in found}
    texts[ALL] = (TEMPLATES / ALL).read_text(encoding="utf-8")
    files = {target / names.fill(path, kind): names.fill(text, kind) for path, text in texts.items()}
    _write(target, files)
    return names, list(files)


def _check_free(names: Names) -> None:
    """Raise a `RegistryError` if a plugin or distribution has the name, or it is one of trainkit's own."""
    if distribution := BUILT_IN.get(names.plugin):
        raise RegistryError(f"the name {names.plugin!r} belongs to trainkit's own {distribution}; choose another")
    if names.distribution == CORE:
        raise RegistryError(f"{CORE!r} is trainkit itself; choose another name than {names.plugin!r}")
    for plugin in discover():
        if names.plugin == plugin.name.replace("-", "_"):
            raise RegistryError(f"the name {names.plugin!r} is taken by the plugin {plugin}; choose another")
        if names.module == plugin.distribution.lower().replace("-", "_"):
            raise RegistryError(
                f"{names.distribution!r} is already installed, and holds the plugin {plugin}; choose another name"
            )


def _requirement() -> str:
    """Return the requirement of this version of trainkit and the later ones that are compatible with it.

    Removing something raises the minor number, and from 1.0 on the major number.
    """
    major, minor = (int(number) for number in __version__.split(".")[:2])
    return f"{CORE}>={major}.{minor},<{f'{major}.{minor + 1}' if major == 0 else major + 1}"


def _write(target: Path, files: dict[Path, str]) -> None:
    """Write all files into the directory, which is empty or does not exist; on an error, leave it as it was."""
    existed = _is_dir(target)
    try:
        target.mkdir(exist_ok=True)
        for path, text in files.items():
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
    except BaseException as error:
        _clear(target, keep=existed)
        if not isinstance(error, OSError):
            raise
        raise ConfigError(
            f"cannot write {str(error.filename or target)!r}: {error.strerror}; give another directory with --out"
        ) from error


def _is_dir(path: Path) -> bool:
    """Return whether there is a directory at ``path``; False if it is too long a path, which creating it explains."""
    try:
        return path.is_dir()
    except OSError:
        return False


def _clear(target: Path, *, keep: bool) -> None:
    """Remove the contents of the directory, and unless ``keep`` the directory too."""
    if not _is_dir(target):  # it does not exist, or is a file that was there before
        return
    for path in target.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    if not keep:
        target.rmdir()
