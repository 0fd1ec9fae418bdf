"""Entries of the configuration that name a plugin, with or without its settings."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, SerializeAsAny
from pydantic_core import PydanticCustomError

from trainkit.config.base import Plain, PluginConfig
from trainkit.config.names import known_values
from trainkit.config.trackers import TRACKERS
from trainkit.errors import RegistryError, suggest
from trainkit.plugins import get_hooks
from trainkit.plugins.discovery import (
    ACCELERATE_TRACKERS,
    TRACKER,
    TRAINER,
    kinds_of,
    of_kind,
    of_old_group,
    why_disabled,
)
from trainkit.plugins.hooks import entry_name
from trainkit.plugins.registry import ENGINES, SHARDINGS, Part, get_part, is_known

MOST = 32
"""How many plugins a run may name; finding one takes milliseconds."""


class _Unread(PluginConfig):
    """Settings of a disabled plugin, which are kept as they were given."""

    model_config = ConfigDict(extra="allow")


def _of_hooks(value: Any) -> str | PluginConfig:
    return _entry(value, tracker=False)


def _of_tracker(value: Any) -> str | PluginConfig:
    return _entry(value, tracker=True)


def _of_part(part: Part, value: Any) -> str | PluginConfig:
    """Return the name of an engine or a sharding, or its validated settings if it has settings."""
    fields, name = given_entry(value, f"the name of {part.label}")
    try:
        settings = None if name.lower() in part.own else get_part(part, name).settings
    except RegistryError as error:
        meant = [each for each in known_values().get(name.lower(), []) if each in part.own or is_known(each)]
        raise _refused(f"{error}; elsewhere {' or '.join(meant)} is called so" if meant else str(error)) from error
    if settings is None:
        if fields:
            raise _refused(f"{name!r} has no settings; remove {', '.join(map(repr, fields))}")
        return name.lower()
    entry: PluginConfig = settings.model_validate({**fields, "name": name.lower()})
    return entry


HooksEntry = Annotated[str | SerializeAsAny[PluginConfig], BeforeValidator(_of_hooks)]
"""A plugin with hooks: its name, or its settings if it has settings."""
TrackerEntry = Annotated[str | SerializeAsAny[PluginConfig], BeforeValidator(_of_tracker)]
"""A tracker: its name, or its settings if it has settings."""
EngineEntry = Annotated[str | SerializeAsAny[PluginConfig], BeforeValidator(partial(_of_part, ENGINES))]
"""A generation engine: its name, or its settings if it has settings."""
ShardingEntry = Annotated[str | SerializeAsAny[PluginConfig], BeforeValidator(partial(_of_part, SHARDINGS))]
"""A way to divide the model: its name, or its settings if it has settings."""


def _entry(value: Any, *, tracker: bool) -> str | PluginConfig:
    """Return the name of a plugin, or its validated settings if it has settings."""
    fields, name = given_entry(value)
    if why_disabled(name):  # a run does without it
        return _Unread(name=name, **fields) if fields else name
    if tracker and name in ACCELERATE_TRACKERS and not fields:
        return name
    settings = settings_class(name, tracker)
    if settings is None:
        if fields:
            raise _refused(f"{name!r} has no settings; remove {', '.join(map(repr, fields))}")
        return name
    entry: PluginConfig = settings.model_validate({**fields, "name": name.lower()})
    return entry


def settings_class(name: str, tracker: bool) -> type[PluginConfig] | None:
    """Return the class of the settings of a tracker, or of other hooks; None if it has none."""
    if tracker and name in ACCELERATE_TRACKERS:
        return TRACKERS.get(name)
    if tracker and not is_known(name):
        trackers = sorted({*ACCELERATE_TRACKERS, *of_kind(TRACKER)})
        raise _refused(
            f"there is no tracker {name!r}{suggest(name, trackers)}; known: {', '.join(trackers)}{of_old_group()}"
        )
    if tracker and kinds_of(name) == {TRAINER}:
        raise _refused(f"{name!r} is an algorithm; name it in method")
    try:
        hooks = get_hooks(name)
    except RegistryError as error:
        raise _refused(str(error)) from error
    if tracker != (hooks is not None and hooks.tracker):
        is_one, place = ("no", "plugins") if tracker else ("a", "train.trackers")
        raise _refused(f"{name!r} is {is_one} tracker; name it in {place}")
    return hooks.settings if hooks else None


def given_entry(value: Any, what: str = "a plugin's name") -> tuple[Plain, str]:
    """Return the settings that an entry gives, without the name, and the name."""
    if isinstance(value, PluginConfig):
        value = value.model_dump()
    fields = dict(value) if isinstance(value, Mapping) else {"name": value}
    name = fields.pop("name", None)
    if not isinstance(name, str):
        raise _refused(f"should be {what}, or a mapping with its 'name' and settings{as_named(value)}")
    return fields, name


def as_named(value: Any) -> str:
    """Return what to write instead of a name with settings below it; empty if nothing of the kind was given."""
    fields = list(value.items()) if isinstance(value, Mapping) else []
    nested = len(fields) == 1 and (fields[0][1] is None or isinstance(fields[0][1], Mapping))
    return f"; write name: {fields[0][0]}, with the settings beside it" if nested else ""


def _refused(reason: str) -> PydanticCustomError:
    return PydanticCustomError("plugin", "{reason}", {"reason": reason})


def named_once(entries: list[str | PluginConfig]) -> list[str | PluginConfig]:
    """Return the entries without repetitions.

    Raises:
        ValueError: a plugin is named twice with different settings.
    """
    by_name: dict[str, str | PluginConfig] = {}
    for entry in entries:
        name = entry_name(entry)
        if by_name.setdefault(name, entry) != entry and not isinstance(entry, str):
            raise ValueError(f"{name!r} is named twice with different settings; name it once")
    return list(by_name.values())
