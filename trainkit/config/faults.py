"""The faults of a configuration, in words."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticCustomError

from trainkit.config.entries import given_entry, settings_class
from trainkit.config.names import dotted, near_value, note
from trainkit.config.places import PYTHON, Places, nearest_place, place_of, value_at
from trainkit.errors import describe, suggest
from trainkit.plain import Key
from trainkit.plugins.registry import PARTS, available_trainers, get_part
from trainkit.security import MASK, is_secret

FIRST = {
    "model": "model_path",
    "tokenizer": "tokenizer_path",
    "optimizer": "name",
    "scheduler": "name",
    "peft_config": "peft_type",
}
"""The setting that is meant by a text alone in place of a section."""
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
    faults: list[Fault] = []
    listed: set[Key] = set()  # the sections whose fields a message has listed
    of_method = cache(lambda: _method_fields(data))  # which takes some hundredths of a second
    for each in error.errors():
        loc = each["loc"]
        key = tuple(map(str, loc))
        if len(faults) >= SHOWN:  # counted, not shown
            faults.append(Fault(key, each["msg"]))
            continue
        if each["type"] == "extra_forbidden":
            fields = _fields_at(loc[:-1], data)
            again = key[:-1] in listed
            listed.add(key[:-1])
            allowed = "as above" if again else ", ".join(fields)
            message = f"unknown field{_near(key, fields, of_method)} (given {_given(each)}; known: {allowed})"
        elif each["type"] == "missing":
            message = "required, not given"
            if key == ("method",):
                message += f"; name an algorithm: {', '.join(available_trainers())}"
        else:
            set_there = each["type"] == "value_error" and isinstance(each["input"], Mapping)  # without other defaults
            value = value_at(data, key) if set_there else ...
            message = f"{_said(each, key)} (given {_given(each if value is ... else {**each, 'input': value})})"
        faults.append(Fault(key, message, ".".join(_parts(loc, data))))
    return faults


def _given(each: Mapping[str, Any]) -> str:
    return describe(MASK if any(map(is_secret, each["loc"])) else each["input"])


def _said(each: Mapping[str, Any], key: Key) -> str:
    """Return what is wrong with a value, and what to write instead where that is known."""
    value, kind = each["input"], each["type"]
    message = str(each["msg"]).removeprefix("Value error, ").removeprefix("Input ")
    if any(map(is_secret, key)):
        return message
    if kind in ("literal_error", "enum"):
        choices = re.findall(r"'([^']*)'", str(each.get("ctx", {}).get("expected", "")))
        return message + near_value(value, choices)
    if kind == "list_type":
        return f"should be a list{_as_list(value)}"
    if kind in ("model_type", "dict_type") and isinstance(value, str | int | float | list):
        return f"should be a mapping, with a setting and its value in each line{_as_mapping(value, key)}"
    if kind == "string_pattern_mismatch" and key[-1:] == ("push_to_hub",):
        return "should be the id of a repository, owner/name"
    return message


def _as_list(value: Any) -> str:
    """Return what to write for something that should be a list."""
    if isinstance(value, Mapping):
        return "; write '- ' before its first line, and indent the others" if "name" in value else ""
    if value is None or str(value).lower() in ("none", "no", "off"):
        return "; write [] for none"
    if not isinstance(value, str):
        return ""
    return f"; write [{value if value.isidentifier() else json.dumps(value)}]"


def _as_mapping(value: Any, key: Key) -> str:
    """Return what to write for something that should be a mapping."""
    if isinstance(value, list) and all(isinstance(item, Mapping) for item in value):
        return ", and without '- '"
    if not isinstance(value, str):
        return ""
    if joined := re.fullmatch(r"(\w+)(:|\s*=\s*)(\S.*)", value):
        return f"; write a colon and a space: {joined[1]}: {joined[3]}" if not is_secret(joined[1]) else ""
    first = FIRST.get(key[-1])
    return f"; write {{{first}: {value}}}" if first and "\n" not in value else ""


def _method_fields(data: Mapping[str, Any]) -> list[str]:
    try:
        return _fields_at(("method",), data)
    except PydanticCustomError:  # there is no such method, which is reported
        return []


def _near(key: Key, known: list[str], of_method: Callable[[], list[str]]) -> str:
    """Return what an unknown field may have meant: a setting of another place or name, or the most similar field."""
    name, meant, fields = key[-1], dotted(key[-1], key[:-1]), of_method()
    # another framework's name for what this method may not have
    meant = [path for path in meant if not path.startswith("method.") or path.split(".")[1] in fields]
    if key[0] != "method" and name in fields:
        meant = [f"method.{name}"]
    if meant:
        return f"; did you mean {' or '.join(meant)}?"
    if key[0] == "data":
        return "; data are not part of a configuration: give --samples or --prompts"
    return f"; {hint}" if (hint := note(name)) else suggest(name, known)


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
