"""Configurations of other frameworks as configurations of trainkit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from trainkit.errors import ConfigError, describe, suggest
from trainkit_migrate.conversions import Context, RefusedError
from trainkit_migrate.tables import Framework, Setting, framework, generation

UNREADABLE = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError)
"""What conversions raise for a value of another type."""


@dataclass(frozen=True)
class Remark:
    """What is to be said about a field of the other configuration."""

    field: str
    """The dotted path of the field."""
    text: str
    """What is different, why it has no effect, or what to write instead."""

    def __str__(self) -> str:
        return f"{self.field}: {self.text}"


@dataclass
class Translation:
    """A configuration of another framework in terms of trainkit."""

    config: dict[str, Any] = field(default_factory=dict)
    """The sections of trainkit's configuration."""
    remarks: list[Remark] = field(default_factory=list)
    """Fields without effect, and those that mean something else in trainkit."""
    overrides: list[Remark] = field(default_factory=list)
    """Fields for which a method of the trainer is overridden, with the method."""
    refused: list[Remark] = field(default_factory=list)
    """Fields without counterpart, with what to write instead."""

    def accepted(self, what: str, say: Callable[[str], object]) -> dict[str, Any]:
        """Return the configuration, and say the remarks.

        Args:
            what: what was translated, for the message.
            say: called with each remark.

        Raises:
            ConfigError: a field has no counterpart in trainkit; says what to write instead.
        """
        if self.refused:
            raise ConfigError(f"{what} without counterpart:\n  " + "\n  ".join(map(str, self.refused)))
        for remark in self.remarks:
            say(str(remark))
        return self.config

    def set(self, path: str, value: Any) -> None:
        """Set the value at a dotted path of the configuration."""
        *sections, name = path.split(".")
        here = self.config
        for section in sections:
            here = here.setdefault(section, {})
        here[name] = value


def translate(name: str, given: Mapping[str, Any], *, processes: int = 1, rows: int | None = None) -> Translation:
    """Translate the configuration of another framework.

    Args:
        name: the framework, of `FRAMEWORKS`.
        given: the sections of its configuration as plain data.
        processes: how many processes train, by which sizes per process are multiplied.
        rows: how many rows the dataset has, from which lengths in epochs follow.

    Raises:
        ConfigError: there is no table of that framework.
    """
    about, found = framework(name), Translation()
    context = Context(given, processes, rows)
    _walk(about, given, "", context, found)
    try:
        for path, value in about.functions.implied(found.config, context).items():
            found.set(path, value)
    except UNREADABLE as error:
        if not found.refused:
            found.refused.append(Remark("the file", f"has a value that cannot be converted ({error}); see the others"))
    found.remarks += [Remark("not given", text) for text in context.remarks]
    theirs = {ours: name for name, ours in getattr(about.functions, "RENAMED", {}).items()}
    for said in (found.remarks, found.refused):
        said[:] = [Remark(theirs.get(each.field, each.field), each.text) for each in said]
    found.config.pop("eval", None)
    return found


def translate_sampling(given: Mapping[str, Any]) -> Translation:
    """Translate arguments of `generate` of transformers; the configuration of the result has sampling settings."""
    found = Translation()
    _walk(generation(), given, "", Context({}, 1), found)
    found.config = {name: value for section in found.config.values() for name, value in section.items()}
    return found


def _walk(about: Framework, given: Mapping[str, Any], at: str, context: Context, found: Translation) -> None:
    """Translate the fields below ``at``, in the order of the table, then report those that it does not have."""
    order = {path: place for place, path in enumerate(about.settings)}
    known = {f"{at}{key}": value for key, value in given.items()}
    for path in sorted(known, key=lambda path: order.get(path, len(order))):
        value = known[path]
        if setting := about.settings.get(path):
            _apply(about, path, setting, value, context, found)
        elif isinstance(value, Mapping) and any(key.startswith(f"{path}.") for key in order):
            _walk(about, value, f"{path}.", context, found)
        elif rest := about.settings.get(f"{at}*"):
            _apply(about, path, rest, value, context, found)
        elif value not in (None, {}, []):
            section = any(key.startswith(f"{path}.") for key in order)
            unknown = f"{about.title}, {about.version}, has no such field{suggest(path, order)}"
            found.refused.append(Remark(path, f"should be a mapping; given {describe(value)}" if section else unknown))


def _apply(about: Framework, path: str, setting: Setting, value: Any, context: Context, found: Translation) -> None:
    matters = value not in (None, {}, [], *setting.unless)
    if setting.refused:
        found.refused += [Remark(path, setting.refused)] if matters else []
    elif setting.unused:
        found.remarks += [Remark(path, f"has no effect: {setting.unused}")] if matters else []
    elif setting.override:
        found.overrides += [Remark(path, setting.override)] if matters else []
    else:
        try:
            for key, settled in _converted(about, path, setting, value, context).items():
                found.set(key, settled)
        except UNREADABLE as error:
            odd = f"given {describe(value)}, or a field that goes with it, which {about.title} does not have so"
            found.refused.append(Remark(path, str(error) if isinstance(error, RefusedError) else odd))
            context.remarks.clear()
            return
        said = [*context.remarks, *([setting.note] if setting.note and matters else [])]
        context.remarks.clear()
        found.remarks += [Remark(path, text) for text in said]


def _converted(about: Framework, path: str, setting: Setting, value: Any, context: Context) -> dict[str, Any]:
    if setting.part_of:
        return {}
    if setting.convert:
        return dict(about.function(setting.convert)(value, context))
    key = (setting.to or "").replace("*", path.rpartition(".")[2])
    if value is None and (".kwargs." in key or (setting.values and "none" not in setting.values)):  # it is not set
        return {}
    if not setting.values:
        return {key: value}
    word = str(value).lower()
    if word not in setting.values:
        raise RefusedError(f"given {describe(value)}; trainkit knows {', '.join(setting.values)}")
    settled = setting.values[word]
    if isinstance(settled, list):
        raise RefusedError(settled[1])
    return {key: settled}
