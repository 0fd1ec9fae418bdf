"""Small files in the user's cache directory, which hold what takes long to find out."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any


def read_cache(name: str) -> dict[str, Any]:
    """Return the mapping in the cache file ``name``; an empty one if there is none that can be read."""
    try:
        found = json.loads(_place(name).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def write_cache(name: str, mapping: dict[str, Any]) -> None:
    """Write a mapping to the cache file ``name``; do nothing if that fails."""
    place = _place(name)
    building = place.with_suffix(f".{os.getpid()}")
    with suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        building.write_text(json.dumps(mapping), encoding="utf-8")
        building.replace(place)


def _place(name: str) -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trainkit" / f"{name}.json"
