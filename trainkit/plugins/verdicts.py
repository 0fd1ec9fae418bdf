"""What test imports have found, kept for as long as neither the plugin nor what is installed has changed."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from trainkit.plugins.discovery import BROKEN, OK, PluginInfo
from trainkit.plugins.inspection import files_of


def remember(plugins: Iterable[PluginInfo]) -> None:
    """Keep which of the probed plugins are broken, and why; nothing, if the cache cannot be written."""
    found = {key: plugin.why for plugin in plugins if plugin.state in (OK, BROKEN) and (key := _key(plugin))}
    with suppress(OSError):
        _place().parent.mkdir(parents=True, exist_ok=True)
        building = _place().with_suffix(f".{os.getpid()}")
        building.write_text(json.dumps(found), encoding="utf-8")
        building.replace(_place())


def recalled(plugins: Iterable[PluginInfo]) -> list[PluginInfo]:
    """Return the plugins, in the state ``broken`` if the last test import has failed and nothing has changed since."""
    try:
        known = json.loads(_place().read_text(encoding="utf-8"))
        faults = {key: str(why) for key, why in known.items() if why}
    except (OSError, ValueError, AttributeError):
        faults = {}
    return [
        replace(plugin, state=BROKEN, why=faults[key])
        if faults and plugin.state == OK and (key := _key(plugin)) in faults
        else plugin
        for plugin in plugins
    ]


def _place() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trainkit" / "plugins.json"


def _key(plugin: PluginInfo) -> str:
    """Return a hash of the plugin's files, and of what their import depends on: Python and the installed packages."""
    digest = hashlib.sha256(f"{plugin} {sys.version}".encode())
    for place in sys.path:
        with suppress(OSError):
            digest.update(f"{place} {os.stat(place or '.').st_mtime_ns}".encode())  # changes with every installation
    for file in files_of(plugin.module):
        with suppress(OSError):
            digest.update(file.read_bytes())
    return digest.hexdigest()
