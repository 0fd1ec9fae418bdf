"""What test imports have found, kept for as long as neither the plugin nor what is installed has changed."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace

from trainkit.plugins.cache import read_cache, write_cache
from trainkit.plugins.discovery import BROKEN, OK, PluginInfo
from trainkit.plugins.inspection import files_of


def remember(plugins: Iterable[PluginInfo]) -> None:
    """Keep which of the probed plugins are broken, and why; nothing, if the cache cannot be written."""
    write_cache("plugins", {_key(plugin): plugin.why for plugin in plugins if plugin.state in (OK, BROKEN)})


def recalled(plugins: Iterable[PluginInfo]) -> list[PluginInfo]:
    """Return the plugins, in the state ``broken`` if the last test import has failed and nothing has changed since."""
    faults = {key: str(why) for key, why in read_cache("plugins").items() if why}
    return [
        replace(plugin, state=BROKEN, why=faults[key])
        if faults and plugin.state == OK and (key := _key(plugin)) in faults
        else plugin
        for plugin in plugins
    ]


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
