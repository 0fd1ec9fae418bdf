"""What functions that convert values get and raise; each framework has a module of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Settings = dict[str, Any]
"""Settings of trainkit by their dotted paths."""


class RefusedError(ValueError):
    """A value without counterpart; the message says what to write instead."""


@dataclass(frozen=True)
class Context:
    """What a conversion may look at besides the value."""

    given: Mapping[str, Any]
    """The whole configuration."""
    processes: int
    """How many processes train."""
    rows: int | None = None
    """How many rows the dataset has, if that is known."""
    remarks: list[str] = field(default_factory=list)
    """What conversions have to say about their values."""

    def get(self, path: str, default: Any = None) -> Any:
        """Return the value at a dotted path of the configuration; ``default`` if it is not set or None."""
        here: Any = self.given
        for part in path.split("."):
            here = here.get(part) if isinstance(here, Mapping) else None
        return default if here is None else here


def missing(usual: Settings, config: Settings) -> Settings:
    """Return the settings that the sections of a configuration do not have."""
    parts = {path: path.partition(".") for path in usual}
    return {path: usual[path] for path, (section, _, name) in parts.items() if name not in config.get(section, {})}


def stop_tokens(value: Any, context: Context) -> dict[str, Any]:
    """Return the tokens that end a response besides EOS; none for an id that no token has, which meant no end."""
    ids = [int(token) for token in (value if isinstance(value, list | tuple) else [] if value is None else [value])]
    if any(token < 0 for token in ids):
        context.remarks.append(
            "no token has this id; responses still end at EOS. For responses of a fixed length, set "
            "min_new_tokens to max_new_tokens"
        )
    found = [token for token in ids if token >= 0]
    return {"rollout.stop_token_ids": found} if found else {}
