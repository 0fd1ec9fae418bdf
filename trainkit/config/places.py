"""Where the values of a configuration come from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from trainkit.errors import printable
from trainkit.plain import Key

Places = Mapping[Key, str]
"""A file with its line, or one of the words below, by the keys of what is set there."""
DEFAULT, METHOD, PYTHON, COMMAND_LINE = "default", "method", "Python", "command line"


def leaves(data: Any, key: Key = ()) -> Iterator[Key]:
    """Yield the keys of the values that are set, those of lists as a whole."""
    if not isinstance(data, Mapping) or not data:
        yield key
        return
    for name, value in data.items():
        yield from leaves(value, (*key, str(name)))


def place_of(key: Key, places: Places) -> str:
    """Return where the value is set, or the first part of it that is; empty if nothing of it is."""
    if key in places:
        return places[key]
    if key[-1:] == ("name",) and key[:-1] in places:  # `method: ppo`
        return places[key[:-1]]
    return next((place for other, place in places.items() if other[: len(key)] == key), "")


def nearest_place(key: Key, places: Places) -> str:
    """Return where the value or, if it is not set by itself, what it is in is set; empty if that is unknown."""
    return next((places[key[:end]] for end in range(len(key), 0, -1) if key[:end] in places), "")


def differences(first: Any, second: Any, key: Key = ()) -> Iterator[tuple[str, Any, Any]]:
    """Yield the dotted path and both values of each setting in which two configurations differ; ``...``: not set."""
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        for name in dict.fromkeys([*first, *second]):
            yield from differences(first.get(name, ...), second.get(name, ...), (*key, str(name)))
    elif first != second:
        yield ".".join(key), first, second


def value_at(data: Any, key: Key) -> Any:
    """Return the value to which the keys lead; ``...`` if there is none."""
    for name in key:
        if isinstance(data, list | tuple) and name.isdigit() and int(name) < len(data):
            data = data[int(name)]
        elif isinstance(data, Mapping):
            data = data.get(name, ...)
        else:
            return ...
    return data


def with_comment(text: str, comment: str) -> str:
    """Return YAML with a comment at the end of its line, or before it if it has several."""
    comment = printable(comment)
    if text.count("\n") == 1:
        return f"{text[:-1]}  # {comment}\n"
    return f"{text[: len(text) - len(text.lstrip(' '))]}# {comment}\n{text}"
