"""Checks of a trainer class at its registration: missing and misspelt methods, `group` and `remembers`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from types import FunctionType
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
            {"samples", "prompts"},
            {"samples", "prompts", "reward_fn"},
        ),
    )
)
"""What an algorithm may declare as its `inputs`. An environment may take the place of a ``reward_fn``."""
SHORTEST, EDITS = 8, 2
"""A name with at least so many letters counts as a misspelling if it is at most so many edits from one of `METHODS`."""
CODE = (FunctionType, property, cached_property, classmethod, staticmethod)
"""The types of methods in a class."""


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
    unwritten = getattr(cls, "_unwritten", None)
    needed = ("get_arch", "make_experience", "loss")
    missing = (
        unwritten() if unwritten is not None else [arrow for arrow in needed if not callable(getattr(cls, arrow, None))]
    )
    if not missing:
        return ""
    arrows = " and ".join(f"{m} ({ARROWS[m]})" if m in ARROWS else m for m in missing)
    return f"it does not define {arrows}; write it in the class"


def wrong_inputs(inputs: tuple[str, ...]) -> str:
    """Return what is wrong with a declaration of `inputs`; empty if nothing is."""
    names = sorted({name for form in INPUTS for name in form})
    for name in inputs:
        if name not in names:
            return f"its inputs name {name!r}{suggest(str(name), names)}; known: {', '.join(names)}"
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


def _misspelt(cls: type) -> str:
    """Return which method of the class is named almost as one of `METHODS`, which the class does not have itself."""
    of_core = [base for base in cls.__mro__ if base.__module__.partition(".")[0] == "trainkit"]
    core_names = {name for base in of_core for name in vars(base)} | {*METHODS}
    defined = {name: base for base in cls.__mro__ if base not in of_core for name in vars(base)}
    for name, base in defined.items():
        if name in core_names or len(name) < SHORTEST or name.startswith("_") or not isinstance(vars(base)[name], CODE):
            continue
        distance, nearest = min((edits(name, method), method) for method in METHODS)
        if distance <= EDITS and nearest not in defined:
            return (
                f"{base.__qualname__}.{name} overrides nothing{suggest(name, [nearest])}. Rename it; if it is a method "
                f"of your own, give it a name that differs from {nearest!r} in more than {EDITS} letters"
            )
    return ""
