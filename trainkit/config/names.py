"""The names of settings as people write them: in another section, in another framework, as options."""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from trainkit.errors import suggest
from trainkit.plain import Key


def dotted(name: str, section: Key = ()) -> list[str]:
    """Return the dotted paths of the settings that are meant by a name of another section or framework.

    Args:
        name: what was given, such as ``learning_rate``, ``lr`` or ``--learning-rate``.
        section: the section that it was given in, which does not have it.
    """
    plain = name.lstrip("-").replace("-", "_")
    if plain in {path for paths in setting_paths().values() for path in paths}:
        return [plain]
    if plain in _table()["methods"]:
        return [f"method.{plain}"]
    if peer := known_names().get(plain):
        return [peer]
    return [path for path in setting_paths().get(plain, []) if path != ".".join((*section, plain))]


def note(name: str) -> str:
    """Return what to do instead of a setting of another framework that trainkit does not have; empty if unknown."""
    return str(_table()["notes"].get(name.lstrip("-").replace("-", "_"), ""))


def near_value(given: object, choices: list[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the choice that is meant or nearest; empty if none is."""
    meant = [value for value in known_values().get(str(given).lower().removeprefix("torch."), []) if value in choices]
    return f"; did you mean {meant[0]!r}?" if meant else suggest(str(given), choices)


@cache
def setting_paths() -> dict[str, list[str]]:
    """Return the dotted paths of trainkit's own settings, by their last names."""
    from trainkit.config.tree import TRLConfig

    keys: dict[str, list[str]] = {}
    for section, about in TRLConfig.model_fields.items():
        for name in getattr(about.annotation, "model_fields", {}):
            keys.setdefault(name, []).append(f"{section}.{name}")
    return keys


def known_names() -> dict[str, str]:
    """Return settings of trainkit by the names that they have in other frameworks."""
    return {name: to for name, to in _table().items() if isinstance(to, str)}


def known_values() -> dict[str, list[str]]:
    """Return what other frameworks call values of trainkit, in small letters, with the values that may be meant."""
    return dict(_table()["values"])


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads((Path(__file__).parent / "names.toml").read_text(encoding="utf-8"))
