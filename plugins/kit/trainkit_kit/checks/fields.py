"""A method's settings: their types and bounds, and the other values that each may take."""

from __future__ import annotations

from collections.abc import Iterator
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from trainkit.errors import TrainkitError
from trainkit_kit.subjects import Bench, Subject

Settings = dict[str, Any]


def method_fields(subject: Subject) -> dict[str, Any]:
    """Return the fields of the subject's method by name, without ``name``."""
    return {name: field for name, field in subject.trainer_class.method_class.model_fields.items() if name != "name"}


def kinds_of(field: Any) -> set[Any]:
    """Return the types in a field's annotation; a literal counts as `Literal`, and `choices` returns its values."""
    return set(_leaves(field.annotation))


def _leaves(annotation: Any) -> Iterator[Any]:
    if get_origin(annotation) is Literal:
        yield Literal
    elif get_origin(annotation) in (list, dict, tuple, set) or not get_args(annotation):
        yield get_origin(annotation) or annotation
    else:
        for part in get_args(annotation):
            if isinstance(part, type) or get_args(part):
                yield from _leaves(part)


def choices(annotation: Any) -> list[Any]:
    """Return the values of a field's literals."""
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [value for part in get_args(annotation) for value in choices(part)]


def is_number(field: Any) -> bool:
    """Return whether a field holds numbers, and no booleans."""
    return bool(kinds_of(field) & {int, float}) and bool not in kinds_of(field)


def bounds(field: Any) -> dict[str, float]:
    """Return the bounds of a field by pydantic's names: ``ge``, ``gt``, ``le``, ``lt``."""
    marks = [*field.metadata, *_marks(field.annotation)]
    found: dict[str, float] = {}
    for mark in marks:
        for name in ("ge", "gt", "le", "lt"):
            value = getattr(mark, name, None)
            if isinstance(value, int | float) and not isinstance(value, bool):
                found[name] = value
    return found


def _marks(annotation: Any) -> list[Any]:
    own = list(getattr(annotation, "__metadata__", ()))
    inner = [mark for each in own for mark in getattr(each, "metadata", ())]  # of a Field(...) within Annotated
    return [*own, *inner, *(mark for part in get_args(annotation) for mark in _marks(part))]


def other_values(field: Any, value: Any) -> list[Any]:
    """Return values of a field's type other than ``value``, the most useful first; not all need be allowed."""
    kinds, limits = kinds_of(field), bounds(field)
    low = limits.get("ge", limits.get("gt", 0))
    at = low if value is None else value
    found: list[Any] = list(choices(field.annotation))
    if bool in kinds:
        found += [True, False]
    elif float in kinds:
        found += [low + (at - low) / 1000, at + 0.01, low + (at - low) / 2, at + 1]
    elif int in kinds:
        found += [at + 1, low, 2 * at, at // 2, 1]
    if str in kinds:
        found += [f"{value or ''}a"]
    if NoneType in kinds:
        found.append(None)
    return [each for index, each in enumerate(found) if each != value and each not in found[:index]]


def trainer_with(bench: Bench, settings: Settings) -> Any | None:
    """Return a tiny trainer with ``settings``, by dotted path; None if they are refused."""
    try:
        return bench.trainer(**settings)
    except TrainkitError:
        return None


def contexts(subject: Subject) -> dict[str, Settings]:
    """Return the declared contexts: settings, by field, under which the field has an effect."""
    return {name: dict(settings) for name, settings in subject.declaration.contexts.items()}


def variants(bench: Bench) -> Iterator[Settings]:
    """Yield settings to run the algorithm with: none, its contexts, and each switch at another value.

    A switch is a setting with named values, a boolean, or a setting that may be None.
    """
    yield {}
    yield from contexts(bench.subject).values()
    method = bench.subject.tiny.method
    for name, field in method_fields(bench.subject).items():
        kinds = kinds_of(field)
        if not kinds & {Literal, bool, NoneType}:
            continue
        values = other_values(field, getattr(method, name))
        named = [value for value in values if value in choices(field.annotation) or isinstance(value, bool)]
        for value in named or values[:1] + ([None] if None in values else []):
            settings = {f"method.{name}": value}
            if trainer_with(bench, settings) is not None:
                yield settings
