"""The tables of other frameworks."""

from __future__ import annotations

import dis
import inspect
import sys
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.resources import files
from types import ModuleType
from typing import Any, Literal

import trainkit_migrate.training_arguments as training_arguments
from trainkit.errors import ConfigError, suggest

FRAMEWORKS = ("trlx", "trl", "trl_cli", "trl1", "async_rlhf", "ddpo_pytorch", "accelerate", "deepspeed", "axolotl")
"""The frameworks that have a table."""
Kind = Literal["mapped", "equivalent", "without effect", "refused"]
IMPORT_FROM = dis.opmap["IMPORT_FROM"]
"""The instruction of ``from module import name``."""
OTHERS: tuple[Kind, ...] = ("equivalent", "without effect", "refused")
"""What becomes of names that an adapter does not have."""


@dataclass(frozen=True)
class Setting:
    """What becomes of a field of another framework's configuration."""

    to: str | None = None
    """The setting of trainkit that takes the value; ends in ``.*`` if all fields below it are taken over."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """What values are called in trainkit, by what they are called there, where that differs. A value that is a list
    ``["refused", reason]`` has no counterpart."""
    convert: str | None = None
    """The function of the framework's module that gives settings of trainkit for the value."""
    part_of: str | None = None
    """The field by whose function it is read."""
    unused: str | None = None
    """Why the field has no effect in trainkit."""
    refused: str | None = None
    """What to write instead."""
    override: str | None = None
    """Which method of the trainer to override, and how; the adapters do so."""
    note: str | None = None
    """What is different in trainkit."""
    unless: tuple[Any, ...] = ()
    """Values to which `unused`, `refused`, `override` and `note` do not apply, besides None and what is empty."""

    @property
    def kind(self) -> Kind:
        """Whether the value is taken as it is or converted, or the field has no effect or is refused."""
        if self.refused:
            return "refused"
        if self.unused:
            return "without effect"
        return "equivalent" if self.convert or self.part_of or self.values or self.note or self.override else "mapped"


@dataclass(frozen=True)
class Name:
    """What becomes of a public name of another framework."""

    kind: Kind
    """Whether the adapter has it, trainkit has an equivalent, it may stay but does nothing, or it is refused."""
    text: str = ""
    """Where the adapter has it; the name, setting or command of trainkit; why it does nothing; what to do instead."""


@dataclass(frozen=True)
class Framework:
    """Another framework: its configuration and its public names."""

    title: str
    """The name of the framework."""
    version: str
    """The version that the table describes."""
    settings: Mapping[str, Setting]
    """The fields of its configuration by their dotted paths."""
    functions: ModuleType
    """The module with the functions that convert values; those of transformers' arguments are in one of their own."""
    package: str = ""
    """The package that its scripts import; empty if it is known by its configurations alone."""
    adapter: str = ""
    """The package of trainkit that scripts import instead; empty if there is none."""
    names: Mapping[str, Name] = field(default_factory=dict)
    """Its public names by their paths."""

    def function(self, name: str) -> Callable[..., Any]:
        """Return the function that converts a value: the framework's own, that of transformers' arguments, or one of
        another module, whose name stands in front of it.
        """
        module, _, name = name.rpartition(".")
        if module:
            return getattr(import_module(f"trainkit_migrate.{module}"), name)  # type: ignore[no-any-return]
        found: Callable[..., Any] = getattr(self.functions, name, None) or getattr(training_arguments, name)
        return found


@cache
def framework(name: str) -> Framework:
    """Return the table of a framework.

    Raises:
        ConfigError: there is no table of that name.
    """
    if name not in FRAMEWORKS:
        raise ConfigError(f"given {name!r}; frameworks with a table are {', '.join(FRAMEWORKS)}")
    data = _read(f"{name}.toml")
    settings = data.pop("settings")
    for path, section in data.pop("generation", {}).items():
        arguments = {f"{path}.{argument}": about for argument, about in _generation(section).items()}
        settings = {**settings, **arguments, **{key: settings[key] for key in arguments.keys() & settings.keys()}}
    common = dict[str, Any]()
    for file, classes in data.pop("shared", {}).items():
        for each in classes:
            common = {**common, **{path: about for path, about in _shared(file, each).items() if path not in common}}
    settings = {**common, **settings}  # what a class has of its own counts
    return Framework(
        settings={path: _setting(about) for path, about in settings.items()},
        functions=import_module(f"trainkit_migrate.{name}"),
        names=_names(name, data.get("package", ""), data.get("adapter", "")),
        **data,
    )


def _shared(file: str, cls: str) -> dict[str, dict[str, Any]]:
    """Return the fields of a table as those of a class."""
    at = f"{cls}." if cls else ""
    return {
        f"{at}{name}": {
            **about,
            **({"part_of": f"{at}{part}"} if "." not in (part := about.get("part_of", ".")) else {}),
        }
        for name, about in _read(f"{file}.toml").items()
    }


def _names(name: str, package: str, adapter: str) -> dict[str, Name]:
    """Return the public names of a framework; there are none if it has no table of them."""
    if not (files("trainkit_migrate") / f"{name}_names.toml").is_file():
        return {}
    data = _read(f"{name}_names.toml")
    found = {
        f"{path}.{each}": Name("mapped", f"{path}.{each}".replace(package, adapter, 1))
        for path, names in data.pop("mapped", {}).items()
        for each in names
    }
    for kind in OTHERS:
        found |= {path: Name(kind, text) for path, text in data.get(kind.replace(" ", "_"), {}).items()}
    return found


def instead(name: str, path: str) -> str:
    """Return what to use instead of a public name of a framework; empty if an adapter has it or there is none.

    Args:
        name: the framework.
        path: the dotted path of the name there.
    """
    found = framework(name).names.get(path)
    if found is None or found.kind == "mapped":
        return ""
    return f"its place has {found.text}" if found.kind == "equivalent" else found.text


def advice(name: str, module: str) -> list[str]:
    """Return what to use instead of a module of a framework: of itself, of modules above it, and of names in it.

    Args:
        name: the framework.
        module: the dotted path of the module there.
    """
    names = framework(name).names
    above = [path for path in names if module == path or module.startswith(f"{path}.")]
    paths = above or [path for path in names if path.startswith(f"{module}.")]
    return list(dict.fromkeys(filter(None, (instead(name, path) for path in paths))))


def absent(name: str, place: str) -> str:
    """Return what to do about a public name of a framework that an adapter lacks at a place.

    Args:
        name: the framework.
        place: the dotted path of the name there, which the framework need not have.
    """
    about, last = framework(name), place.rpartition(".")[2]
    alike = sorted((path for path in about.names if path.rpartition(".")[2] == last), key=len)
    if said := next(filter(None, (instead(name, path) for path in (place, *alike))), ""):
        return said
    for other in FRAMEWORKS:  # the same framework in other versions
        if other != name and framework(other).package == about.package and (said := instead(other, place)):
            return f"it is of {framework(other).title} {framework(other).version}: {said}"
    if alike:
        return f"it is at {about.names[alike[0]].text}"
    parent = place.rpartition(".")[0]
    near = suggest(last, [path.rpartition(".")[2] for path in about.names if path.rpartition(".")[0] == parent])
    has = f"the tables of names on the page Coming from {about.title} have what there is"
    return f"{near.removeprefix('; ')} {has[0].upper()}{has[1:]}" if near else has


def refusing(module: str) -> Callable[[str], Any]:
    """Return a ``__getattr__`` for a module of an adapter, which says what to use instead of names that it lacks.

    Args:
        module: the ``__name__`` of the module.
    """
    about = next(name for name in FRAMEWORKS if framework(name).adapter == module.partition(".")[0])
    place = module.replace(framework(about).adapter, framework(about).package, 1)

    def look_up(name: str) -> Any:
        if name.startswith("__"):  # such as __path__, for which Python looks by itself
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        caller = inspect.currentframe()
        caller = caller and caller.f_back
        # an AttributeError would become an ImportError without its message
        imported = caller is not None and caller.f_code.co_code[caller.f_lasti] == IMPORT_FROM
        error = ImportError if imported else AttributeError
        raise error(f"{module} has no {name!r}: {absent(about, f'{place}.{name}')}")

    return look_up


def refuse_modules(package: str) -> None:
    """Say what to use instead when a module is imported that an adapter lacks, as `refusing` does for names.

    Args:
        package: the adapter.
    """
    if not any(isinstance(finder, _Absent) and finder.package == package for finder in sys.meta_path):
        sys.meta_path.append(_Absent(package))


class _Absent(MetaPathFinder):
    """Raises an ImportError for modules that an adapter lacks; it is asked after all others."""

    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        """Find nothing."""
        if fullname.split(".")[0] != self.package:
            return
        about = next(name for name in FRAMEWORKS if framework(name).adapter == self.package)
        place = fullname.replace(self.package, framework(about).package, 1)
        if fullname.rpartition(".")[2].startswith("_"):  # such as __main__, for which Python looks by itself
            return
        said = advice(about, place) or [absent(about, place)]
        raise ModuleNotFoundError(f"No module named {fullname!r}: {'; '.join(said)}", name=fullname)


@cache
def generation() -> Framework:
    """Return the table of the arguments of `generate` of transformers; they are settings of the section ``rollout``."""
    settings = {argument: _setting(about) for argument, about in _generation("rollout").items()}
    return Framework("generate()", "transformers 5", settings, import_module("trainkit_migrate.trlx"))


def _generation(section: str) -> dict[str, dict[str, Any]]:
    """Return the arguments of `generate`, with settings of a section."""
    found = _read("generation.toml")
    return {
        name: {**about, **({"to": f"{section}.{about['to']}"} if "to" in about else {})}
        for name, about in found.items()
    }


def _setting(about: Mapping[str, Any]) -> Setting:
    return Setting(**{**about, "unless": tuple(about.get("unless", ()))})


def _read(name: str) -> dict[str, Any]:
    return tomllib.loads((files("trainkit_migrate") / name).read_text(encoding="utf-8"))
