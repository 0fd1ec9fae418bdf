"""The registry of method configurations."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, Self

from trainkit.errors import ConfigError, describe, suggest
from trainkit_migrate import framework
from trainkit_trlx.overrides import own_class, remembered

_METHODS: dict[str, Any] = {}


def checked(cls: Any, section: str, given: Any) -> Mapping[str, Any]:
    """Return the fields of a section, if they are those of its class.

    Raises:
        ConfigError: they are no mapping, or a field does not exist or is missing.
    """
    if not isinstance(given, Mapping):
        raise ConfigError(f"{section} should be a mapping of settings; given {describe(given)}")
    known = {about.name: about for about in fields(cls)}
    check_known(cls, section, given)
    needed = [name for name, about in known.items() if about.default is MISSING and about.default_factory is MISSING]
    if missing := [name for name in needed if name not in given]:
        raise ConfigError(
            f"{section} lacks {', '.join(missing)}; add them, or begin with a configuration of "
            "data.default_configs and change it with evolve"
        )
    return given


def check_known(cls: Any, section: str, given: Mapping[str, Any]) -> None:
    """Raise a `ConfigError` if a class of settings lacks one of these fields."""
    known = [about.name for about in fields(cls)]
    for name in given:
        if name not in known:
            about = framework("trlx").settings.get(f"{section}.{name}")
            reason = f": {about.refused}" if about is not None and about.refused else ""
            raise ConfigError(
                f"{section}.{name} is no setting{reason or suggest(str(name), known)}; {section} has {', '.join(known)}"
            )


def check_arguments(cls: Any, section: str, given: Mapping[str, Any]) -> None:
    """Raise a `ConfigError` if the constructor of a class of settings does not take one of these arguments."""
    taken = inspect.signature(cls.__init__).parameters
    if not any(each.kind is each.VAR_KEYWORD for each in taken.values()):
        check_known(cls, section, {name: value for name, value in given.items() if name not in taken})


def register_method(name: Any) -> Any:
    """Register a `MethodConfig` under its class name, or under a given one: ``@register_method("Name")``."""
    return registering(name, _METHODS, __name__)


def registering(name: Any, registry: dict[str, Any], module: str) -> Any:
    """Register a class in lower case, as an attribute of a module too; with a name, return what registers a class."""

    def register(cls: Any, key: str) -> Any:
        if own_class(cls) is cls:
            remembered(cls)
        registry[key.lower()] = cls
        setattr(sys.modules[module], key.lower(), cls)
        return cls

    return (lambda cls: register(cls, name)) if isinstance(name, str) else register(name, name.__name__)


def registered(name: str, registry: Mapping[str, Any], setting: str, what: str) -> Any:
    """Return the class of a name, whatever its case.

    Raises:
        ConfigError: there is none; names the setting.
    """
    if name.lower() in registry:
        return registry[name.lower()]
    raise ConfigError(
        f"{setting} is {name!r}, which is no registered {what}{suggest(name.lower(), registry)}; known are "
        f"{', '.join(sorted(registry))}"
    )


@dataclass
@register_method
class MethodConfig:
    """Base class of the settings of an algorithm. Trainers call the functions that a class of one's own replaces."""

    name: str

    def __init_subclass__(cls) -> None:
        """Refuse what earlier versions of trlX called.

        Raises:
            ConfigError: the class has it; says what to do instead.
        """
        if "heads" in vars(cls):
            raise ConfigError(
                f"{cls.__name__}.heads would not be called, as in trlX since 0.4: derive the trainer from "
                "AccelerateRLTrainer, whose get_arch returns a model with heads of its own"
            )

    def __new__(cls, *_: Any, **given: Any) -> Self:
        """Refuse fields that the class does not have."""
        check_arguments(cls, "method", given)
        return super().__new__(cls)

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Self:
        """Return the settings with these fields.

        Raises:
            ConfigError: a field does not exist, or one is missing.
        """
        return cls(**checked(cls, "method", config))


def get_method(name: str) -> type[MethodConfig]:
    """Return the class of a registered method.

    Raises:
        ConfigError: there is no method of this name.
    """
    found: type[MethodConfig] = registered(name, _METHODS, "method.name", "method")
    return found
