"""The faults of a configuration, in words."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticCustomError

from trainkit.config.entries import given_entry, settings_class
from trainkit.config.names import dotted
from trainkit.config.places import PYTHON, Places, nearest_place, place_of
from trainkit.errors import describe, suggest
from trainkit.plain import Key
from trainkit.plugins.registry import PARTS, get_part
from trainkit.security import MASK, is_secret

SHOWN, WIDTH = 20, 2000
"""How many faults an error message has, and how long each may be; a configuration may be somebody else's."""


@dataclass(frozen=True)
class Fault:
    """Something that is wrong in a configuration."""

    key: Key
    """The keys that lead to it."""
    message: str
    """What is wrong, what was given, and what is allowed."""
    path: str = ""
    """How the keys are shown; empty: joined by dots."""


def report(faults: list[Fault], places: Places) -> str:
    """Return one line for each of the first faults: the key, where it is set, and what is wrong."""
    lines = []
    for fault in faults[:SHOWN]:
        place = nearest_place(fault.key, places) or place_of(fault.key, places)
        where = f" ({place})" if place not in ("", PYTHON) else ""
        line = f"{fault.path or '.'.join(fault.key) or 'config'}{where}: {fault.message}"
        lines.append(line if len(line) <= WIDTH else f"{line[:WIDTH]}…")
    lines += [f"… and {len(faults) - SHOWN} more"] if len(faults) > SHOWN else []
    count = len(faults)
    return f"{count} fault{'s' if count > 1 else ''} in the config:\n" + "\n".join(f"  {line}" for line in lines)


def faults_of(error: ValidationError, data: Mapping[str, Any]) -> list[Fault]:
    """Return the faults that the validation of ``data`` has found."""
    found: list[Fault] = []
    for each in error.errors():
        loc = each["loc"]
        if len(found) >= SHOWN:  # counted, not shown
            found.append(Fault(tuple(map(str, loc)), each["msg"]))
            continue
        given = describe(MASK if any(map(is_secret, loc)) else each["input"])
        message = each["msg"].removeprefix("Value error, ").removeprefix("Input ")
        if each["type"] == "extra_forbidden":
            known = _fields_at(loc[:-1], data)
            near = _near(tuple(map(str, loc)), known, data)
            message = f"unknown field{near} (given {given}; known: {', '.join(known)})"
        elif each["type"] == "missing":
            message = "required, not given"
        elif each["type"] in ("literal_error", "enum"):
            choices = re.findall(r"'([^']*)'", str(each.get("ctx", {}).get("expected", "")))
            message = f"{message}{suggest(str(each['input']), choices)} (given {given})"
        elif each["type"] == "list_type":
            written = (
                f"; write [{each['input']}]" if isinstance(each["input"], str) and each["input"].isidentifier() else ""
            )
            message = f"should be a list{written} (given {given})"
        elif each["type"] in ("model_type", "dict_type") and isinstance(each["input"], str | int | float | list):
            message = f"should be a mapping, with a setting and its value in each line (given {given})"
        else:
            message = f"{message} (given {given})"
        found.append(Fault(tuple(map(str, loc)), message, ".".join(_parts(loc, data))))
    return found


def _near(key: Key, known: list[str], data: Mapping[str, Any]) -> str:
    """Return what an unknown field may have meant: a setting of another place or name, or the most similar field."""
    meant = dotted(key[-1], key[:-1])
    if any(path.startswith("method.") for path in meant):  # another framework's name for what this method may not have
        try:
            fields = _fields_at(("method",), data)
        except PydanticCustomError:  # there is no such method, which is reported
            fields = []
        meant = [path for path in meant if not path.startswith("method.") or path.split(".")[1] in fields]
    return f"; did you mean {' or '.join(meant)}?" if meant else suggest(key[-1], known)


def _parts(loc: tuple[int | str, ...], data: Mapping[str, Any]) -> list[str]:
    """Return the parts of the path to a fault; the index of settings in a list is followed by the plugin's name."""
    parts, at = [str(part) for part in loc], _settings_at(loc)
    if at and len(loc) > at:
        parts[at - 1] += f" ({_plugin_at(loc[:at], data)})"
    return parts


def _settings_at(loc: tuple[int | str, ...]) -> int:
    """Return how many parts of the path lead to the entry of a plugin; 0 if it leads to none."""
    return next((len(place) + 1 for place in (("plugins",), ("train", "trackers")) if loc[: len(place)] == place), 0)


def _plugin_at(loc: tuple[int | str, ...], data: Any) -> str:
    for part in loc:
        data = data[part]
    return given_entry(data)[1]


def _fields_at(loc: tuple[int | str, ...], data: Mapping[str, Any]) -> list[str]:
    from trainkit.config.tree import TRLConfig, method_class, sampling_class

    model: type[BaseModel] | None = TRLConfig
    if at := _settings_at(loc):
        model, loc = settings_class(_plugin_at(loc[:at], data), loc[0] == "train"), loc[at:]
    elif named := [part for part in PARTS if ".".join(map(str, loc[:2])) == part.key]:
        model, loc = get_part(named[0], _plugin_at(loc[:2], data)).settings, loc[2:]
    for part in loc:
        if part in ("method", "eval_kwargs"):
            method = data.get("method")
            model = method_class(method) if part == "method" else sampling_class(method)
            continue
        field = model.model_fields.get(str(part)) if model else None
        inner = [t for t in (field.annotation, *get_args(field.annotation)) if _is_model(t)] if field else []
        model = inner[0] if inner else None
    return list(model.model_fields) if model else []


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)
