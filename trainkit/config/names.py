"""The names of settings as people write them: in another section, in another framework, as options."""

from __future__ import annotations

from functools import cache

from trainkit.migrating import known_names
from trainkit.plain import Key


def dotted(name: str, section: Key = ()) -> list[str]:
    """Return the dotted paths of the settings that are meant by a name of another section or framework.

    Args:
        name: what was given, such as ``learning_rate``, ``lr`` or ``--learning-rate``.
        section: the section that it was given in, which does not have it.
    """
    plain = name.lstrip("-").replace("-", "_")
    if plain in {path for paths in settings().values() for path in paths}:
        return [plain]
    if peer := known_names().get(plain):
        return [peer]
    return [path for path in settings().get(plain, []) if path != ".".join((*section, plain))]


@cache
def settings() -> dict[str, list[str]]:
    """Return the dotted paths of trainkit's own settings, by their last names."""
    from trainkit.config.tree import TRLConfig

    found: dict[str, list[str]] = {}
    for section, about in TRLConfig.model_fields.items():
        for name in getattr(about.annotation, "model_fields", {}):
            found.setdefault(name, []).append(f"{section}.{name}")
    return found
