"""Test imports of plugins, each in a separate process, so that an import cannot affect anything else."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from trainkit.errors import PluginError, TrainkitError
from trainkit.plugins.discovery import PluginInfo
from trainkit.plugins.guard import error_text, one_line
from trainkit.plugins.hooks import check_plugin

TIMEOUT = 120.0
"""Seconds that an import may take."""
AT_ONCE = 2
"""Number of processes at a time; each may need a gigabyte of memory."""


def probe(plugins: Iterable[PluginInfo], timeout: float = TIMEOUT) -> list[PluginInfo]:
    """Return the plugins, refused if their import fails or does not end, or they are not what their group says.

    Only those against which nothing is known are imported.
    """
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(lambda plugin: plugin if plugin.why else _probed(plugin, timeout), plugins))


def _probed(plugin: PluginInfo, timeout: float) -> PluginInfo:
    with tempfile.TemporaryDirectory() as directory:
        result = Path(directory) / "result.json"  # a file, as the plugin may print anything
        search = os.pathsep.join(place or os.getcwd() for place in sys.path)
        try:
            code = subprocess.run(
                [sys.executable, "-P", "-m", "trainkit.plugins.probe", plugin.name, plugin.kind, str(result)],
                env={**os.environ, "PYTHONPATH": search},
                timeout=timeout,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            return plugin.refused(f"its import did not end within {timeout:g} s")
        if not result.is_file():
            return plugin.refused(f"its import {_ended(code)}")
        fault = json.loads(result.read_text(encoding="utf-8"))
    return plugin.refused(fault) if fault else plugin


def _ended(code: int) -> str:
    if code >= 0:
        return f"ended the process with exit code {code}"
    try:
        return f"ended the process by {signal.Signals(-code).name}"
    except ValueError:
        return f"ended the process by signal {-code}"


def _main(name: str, kind: str, result: str) -> None:
    try:
        check_plugin(name, kind)
        fault = ""
    except TrainkitError as error:
        cause = error.__cause__
        fault = error_text(cause) if isinstance(error, PluginError) and cause else one_line(error)
    Path(result).write_text(json.dumps(fault), encoding="utf-8")
    os._exit(0)  # without waiting for threads that the plugin has started


if __name__ == "__main__":
    _main(*sys.argv[1:])
