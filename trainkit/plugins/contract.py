"""Checks of a trainer class at its registration: missing and misspelt methods, `group` and `remembers`."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from functools import cached_property
from types import CodeType
from typing import Any

from trainkit.errors import describe, edits, suggest

ARROWS = {
    "get_arch": "configuration → model",
    "make_experience": "rows → experience",
    "experience": "scored rollouts → experience",
    "loss": "experience → loss and metrics",
}
"""The methods that an algorithm implements, and the input and output of each."""
METHODS = (
    *ARROWS, "inputs_for", "keep", "keeps", "needs_reference", "passes", "reference_makes_experience",
    "samples_per_prompt", "experience_rows", "prepare_experience", "prepare_step", "judge", "steer", "after_step",
    "state_dict", "load_state_dict", "write_model", "export_fault", "model_card", "evaluation", "fit_prompts",
    "compared", "read_samples", "check_samples", "arrange", "default_prompts", "make_reference",
)  # fmt: skip
"""The methods and properties that a trainer class may define."""
INPUTS = tuple(
    map(
        frozenset,
        (
            {"prompts"},
            {"prompts", "reward_fn"},
            {"prompts", "environment"},
            {"samples"},
            {"samples", "rewards"},
            {"samples", "labels"},
            {"samples", "pairs"},
        ),
    )
)
"""What an algorithm may declare as its `inputs`. An environment may take the place of a ``reward_fn``."""
SHORTEST, EDITS = 8, 2
"""A name with at least so many letters counts as a misspelling if it is at most so many edits from one of `METHODS`."""


def fault(cls: type, settings: Mapping[str, Any]) -> str:
    """Return what is wrong with a trainer class whose method has ``settings``, by name; empty if nothing is."""
    return (
        _misspelt(cls)
        or _missing(cls)
        or wrong_inputs(_inputs(cls))
        or _wrong_group(cls, settings)
        or _wrong_memory(cls)
    )


def _missing(cls: type) -> str:
    told = getattr(cls, "_unwritten", None)
    needed = ("get_arch", "make_experience", "loss")
    missing = told() if told is not None else [arrow for arrow in needed if not callable(getattr(cls, arrow, None))]
    if not missing:
        return ""
    arrows = " and ".join(f"{m} ({ARROWS[m]})" if m in ARROWS else m for m in missing)
    return f"it does not define {arrows}; write it in the class"


def wrong_inputs(inputs: tuple[str, ...]) -> str:
    """Return what is wrong with a declaration of `inputs`; empty if nothing is."""
    known = sorted({name for form in INPUTS for name in form})
    for name in inputs:
        if name not in known:
            return f"its inputs name {name!r}{suggest(str(name), known)}; known: {', '.join(known)}"
    if frozenset(inputs) not in INPUTS:
        forms = ", ".join(" + ".join(sorted(form)) for form in INPUTS)
        return f"its inputs are {tuple(inputs)!r}, which is no combination that can be trained on; give one of: {forms}"
    return ""


def _inputs(cls: type) -> tuple[str, ...]:
    return tuple(getattr(cls, "inputs", ("samples",)))


def _wrong_group(cls: type, settings: Mapping[str, Any]) -> str:
    group = getattr(cls, "group", "")
    if isinstance(group, str) and (not group or group in settings):
        return ""
    return (
        f"group is {describe(group)}{suggest(str(group), settings)}; it names the setting of the method with the "
        f"number of responses to each prompt, one of {', '.join(settings)}"
    )


def _wrong_memory(cls: type) -> str:
    remembers = getattr(cls, "remembers", {})
    if not isinstance(remembers, Mapping):
        return (
            f"remembers is {describe(remembers)}; it is a dict of the attributes to save, each with a function that "
            "returns its initial value, such as {'seen': list}"
        )
    for name, first in remembers.items():
        if not callable(first):
            return (
                f"remembers has {describe(first)} for {name!r}; give a function that returns the initial value, such "
                "as list, or lambda: 0.0"
            )
    return ""


# ----------------------------------------------------------------------------------------------- misspelt methods


def _misspelt(cls: type) -> str:
    """Return which method of the class is named almost as one of `METHODS` and is called by none of the others."""
    own = [base for base in cls.__mro__ if not _of_trainkit(base)]
    known = {name for base in cls.__mro__ if _of_trainkit(base) for name in vars(base)} | set(METHODS)
    codes = {(base, name): list(_codes(value)) for base in own for name, value in vars(base).items()}
    used = {name for each in codes.values() for code in each for name in _names(code)}
    for (base, name), code in codes.items():
        if not code or name.startswith("_") or len(name) < SHORTEST or name in known | used:
            continue
        distance, nearest = min((edits(name, method), method) for method in METHODS)
        if distance <= EDITS:
            return (
                f"{base.__qualname__}.{name} overrides nothing, and the class does not call it"
                f"{suggest(name, [nearest])}. Rename it; if it is a method of your own, give it a name that differs "
                f"from {nearest!r} in more than {EDITS} letters"
            )
    return ""


def _of_trainkit(cls: type) -> bool:
    return cls.__module__.partition(".")[0] == "trainkit"


def _codes(value: Any) -> Iterator[CodeType]:
    """Yield the code of a function, method or property, without its decorators; nothing for other attributes."""
    parts: tuple[Any, ...] = (value,)
    if isinstance(value, property):
        parts = (value.fget, value.fset)
    elif isinstance(value, cached_property):
        parts = (value.func,)
    elif isinstance(value, staticmethod | classmethod):
        parts = (value.__func__,)
    for part in parts:
        if callable(part) and inspect.isfunction(function := inspect.unwrap(part)):
            yield function.__code__


def _names(code: CodeType) -> Iterator[str]:
    """Yield the attributes and global names that the code uses, those of functions within it included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
