"""Beginning a plugin: a directory from a template, which is a working plugin itself."""

from __future__ import annotations

import keyword
import re
import shutil
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from trainkit.errors import ConfigError, RegistryError
from trainkit.plugins.discovery import BUILT_IN, discover

TEMPLATES = Path(__file__).parent / "_templates"


class Kind(StrEnum):
    """What a plugin is for."""

    TRAINER = "trainer"
    """An algorithm."""
    TRACKER = "tracker"
    """Hooks that observe a run."""
    SAMPLER = "sampler"
    """A hook that gives a run its sampler."""


@dataclass(frozen=True)
class Names:
    """What a new plugin is called: ``my_algo`` in configurations, and from this ``trainkit_my_algo`` in Python,
    ``trainkit-my-algo`` to pip, ``MyAlgo`` in classes. Hyphens and underscores are one, as they are to pip."""

    plugin: str
    """What a configuration writes."""
    classes: str
    """What names of classes begin with."""

    @classmethod
    def of(cls, given: str) -> Names:
        """The names that follow from the one on the command line.

        Raises:
            ConfigError: Python or pip could not use them.
        """
        import yaml

        plugin = given.lower().replace("-", "_")
        if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", plugin):
            raise ConfigError(
                f"a plugin cannot be called {given!r}; use English letters, digits, and single hyphens or underscores "
                "between them, beginning with a letter: my-algo"
            )
        if keyword.iskeyword(plugin):
            raise ConfigError(f"a plugin cannot be called {given!r}, which is a keyword of Python; choose another name")
        if (read := yaml.safe_load(plugin)) != plugin:
            raise ConfigError(
                f"a plugin cannot be called {given!r}, which a configuration would read as {read!r}; "
                "choose another name"
            )
        if plugin.startswith("trainkit_"):
            raise ConfigError(
                f"given {given!r}; 'trainkit-' is put before the name by itself: "
                f"trainkit new-plugin {given[len('trainkit-') :]}"
            )
        return cls(plugin, "".join(part[:1].upper() + part[1:] for part in re.split("[-_]", given)))

    @property
    def distribution(self) -> str:
        """What pip calls it."""
        return f"trainkit-{self.plugin.replace('_', '-')}"

    @property
    def module(self) -> str:
        """Its one module."""
        return f"trainkit_{self.plugin}"

    def fill(self, text: str) -> str:
        """A template's text, or path, under these names instead of its own."""
        written = {
            "new_plugin": self.plugin,
            "new-plugin": self.plugin.replace("_", "-"),
            "NewPlugin": self.classes,
            "trainkit-requirement": _requirement(),
        }
        return re.sub("|".join(written), lambda found: written[found[0]], text)


def new_plugin(given: str, kind: Kind, out: Path | None = None) -> tuple[Names, list[Path]]:
    """Write the directory of a new plugin: what it is called, and its files.

    Args:
        given: its name.
        kind: what it is for.
        out: the directory; ``trainkit-NAME``, here, without it.

    Raises:
        ConfigError: it cannot be called so; the directory is not empty, or cannot be written.
        RegistryError: the name is taken.
    """
    names = Names.of(given)
    _check_free(names)
    target = out or Path(names.distribution)
    if target.is_dir() and any(target.iterdir()):
        raise ConfigError(f"the directory {str(target)!r} is not empty; give another with --out, or remove it")
    root = TEMPLATES / kind
    found = sorted(path for path in root.rglob("*") if path.suffix in (".md", ".py", ".toml"))
    files = {
        target / names.fill(str(path.relative_to(root))): names.fill(path.read_text(encoding="utf-8")) for path in found
    }
    _write(target, files)
    return names, list(files)


def _check_free(names: Names) -> None:
    """Raise a `RegistryError` if a plugin or a distribution is called so, or the name is one of trainkit's own."""
    if own := BUILT_IN.get(names.plugin):
        raise RegistryError(f"the name {names.plugin!r} belongs to trainkit's own {own}; choose another")
    for plugin in discover():
        if names.plugin == plugin.name.replace("-", "_"):
            raise RegistryError(f"the name {names.plugin!r} is taken by the plugin {plugin}; choose another")
        if names.module == plugin.distribution.lower().replace("-", "_"):
            raise RegistryError(
                f"{names.distribution!r} is already installed, and holds the plugin {plugin}; choose another name"
            )


def _requirement() -> str:
    """This trainkit and what will be compatible with it: the minor number changes when something is taken away."""
    from trainkit import __version__

    major, minor = (int(number) for number in __version__.split(".")[:2])
    return f"trainkit>={major}.{minor},<{f'{major}.{minor + 1}' if major == 0 else major + 1}"


def _write(target: Path, files: dict[Path, str]) -> None:
    """Write all files into the directory, which is empty or not there, or leave it as it was."""
    existed = target.is_dir()
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


def _clear(target: Path, *, keep: bool) -> None:
    """Remove the directory, or what is in it."""
    if not target.is_dir():  # there was nothing to remove, or a file that is not ours
        return
    for path in target.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    if not keep:
        target.rmdir()
