"""Methods of TRL's trainers that a script overrides in a subclass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, ClassVar, Self

from trainkit.errors import ConfigError, suggest
from trainkit_migrate import framework, instead

ADAPTER = __name__.partition(".")[0]


class Advising(type):
    """A class that says what to use instead of attributes of TRL's class that it lacks."""

    absent: Mapping[str, str] = {}
    not_called: Mapping[str, str] = {}

    def __getattr__(cls, name: str) -> Any:
        raise lacking(cls, name, _said(cls, name))


class Advised(metaclass=Advising):
    """What says so of its objects too."""

    def __getattr__(self, name: str) -> Any:
        raise lacking(type(self), name)


class Overridable(metaclass=Advising):
    """A trainer whose methods can be overridden, in a subclass, a class or an object: they are called, or refused.

    Raises:
        ConfigError: a method is overridden that trainkit does not call; says what to do instead.
    """

    not_called: ClassVar[Mapping[str, str]] = {}
    """Methods of TRL that trainkit does not call, and what to do instead of overriding them."""

    absent: ClassVar[Mapping[str, str]] = {}
    """Attributes of TRL that there are not, and what to use instead."""

    kept: ClassVar[tuple[str, ...]] = ()
    """Attributes that cannot be set, because they are read when the trainer is made."""

    settings: ClassVar[str] = "config"
    """The attribute with the settings, which are read when the trainer is made."""

    followed: ClassVar[tuple[str, ...]] = ()
    """Settings that may be changed after that."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._refuse_foreign()

    def __new__(cls, *_: Any, **__: Any) -> Self:
        """Make an object, unless a script has set a method of the class that is not called."""
        cls._refuse_foreign()
        return super().__new__(cls)

    @classmethod
    def _refuse_foreign(cls) -> None:
        for name in cls.not_called:
            if _is_foreign(cls, name):
                cls._refuse(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.not_called:
            self._refuse(name)
        made = "trainer" in vars(self)
        if made and name in self.kept:
            raise ConfigError(f"{name} is read when {type(self).__name__} is made; give it to the constructor")
        if made and (said := self._instead(name)):
            raise ConfigError(f"{name} of {type(self).__name__} would not be used; {said}")
        if isinstance(own := getattr(type(self), name, None), property) and own.fset is None:
            raise ConfigError(f"{name} of {type(self).__name__} cannot be set; give its constructor what it is made of")
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        own = vars(self).get("trainer")
        said = _said(type(self), name)
        there = own is not None and not name.startswith("_") and hasattr(own, name)
        raise lacking(type(self), name, said or (f"trainer.trainer.{name} is it" if there else ""))

    def _instead(self, name: str) -> str:
        """Return what to do instead of setting an attribute of TRL; empty if there is none, or nothing to be said."""
        return "" if hasattr(type(self), name) else self.absent.get(name) or in_table(type(self), name)

    def keep_settings(self) -> None:
        """Remember the settings as they are read."""
        self._read = dict(vars(getattr(self, self.settings)))

    def check_settings(self) -> None:
        """Refuse settings that have been changed since they were read.

        Raises:
            ConfigError: one has been changed.
        """
        given = getattr(self, self.settings)
        for each in fields(given):
            read, now = (values.get(each.name) for values in (self._read, vars(given)))
            if each.name not in self.followed and now is not read and now != read:
                raise ConfigError(
                    f"{self.settings}.{each.name} was {read!r} when {type(self).__name__} was made, which read it, and "
                    f"is {now!r}; set it before"
                )

    @classmethod
    def _refuse(cls, name: str) -> None:
        raise ConfigError(f"{cls.__name__} overrides {name}, which trainkit does not call; {cls.not_called[name]}")

    def overrides(self, *names: str) -> bool:
        """Return whether a script has overridden one of these methods."""
        return bool(overridden(self, *names))


def overridden(made: Any, *names: str) -> list[str]:
    """Return which of these methods of an object are a script's."""
    return [name for name in names if name in vars(made) or _is_foreign(type(made), name)]


def _said(cls: Any, name: str) -> str:
    """Return what a class of trainers says of an attribute that it lacks; empty if it says nothing."""
    return "" if name.startswith("__") else cls.absent.get(name) or cls.not_called.get(name) or ""


def lacking(cls: type, name: str, said: str = "") -> AttributeError:
    """Return the error for an attribute of TRL's class that the adapter's lacks, with what to use instead.

    Args:
        cls: the class.
        name: the attribute.
        said: what to use instead; empty: what the table of names says.
    """
    told = said or in_table(cls, name) or _nearest(cls, name)
    return AttributeError(f"{cls.__name__} has no attribute {name!r}: {told}")


def in_table(cls: type, name: str) -> str:
    """Return what the table of names says to use instead of an attribute of TRL's class; empty if it has none."""
    ours = (each for each in cls.__mro__ if each.__module__.partition(".")[0] == ADAPTER)
    paths = (f"{each.__module__}.{each.__qualname__}.{name}".replace(ADAPTER, "trl", 1) for each in ours)
    return next(filter(None, (instead("trl", path) for path in paths)), "")


def _nearest(cls: type, name: str) -> str:
    """Return what there is in the place of an attribute that no table has."""
    if name.startswith("_"):
        return "private names of TRL are not there; read the public ones, or override a method"
    theirs = {path.rpartition(".")[2] for path in framework("trl").names if f".{cls.__name__}." in path}
    has = sorted(each for each in dir(cls) if not each.startswith("_"))
    return suggest(name, has).removeprefix("; ") or f"it has {', '.join(each for each in has if each in theirs)}"


def _is_foreign(cls: type, name: str) -> bool:
    """Return whether a class has a method that is not of the adapter, nor of trainkit, or has been set on its class."""
    owner = next((each for each in cls.__mro__ if name in vars(each)), None)
    if owner is None:
        return False
    given = vars(owner)[name]
    given = getattr(given, "__func__", given)  # of a static method or a class method
    homes = (owner.__module__, given.__module__ if callable(given) else ADAPTER)
    return any(home.partition(".")[0] not in (ADAPTER, "trainkit") for home in homes)
