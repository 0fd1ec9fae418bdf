"""The provenance of a run: trainkit, the plugins and the libraries that it was made with, and their versions."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from trainkit.plugins import PluginInfo
from trainkit.plugins.discovery import CORE, find_installed
from trainkit.version import __version__

LIBRARIES = (
    "torch", "transformers", "accelerate", "datasets", "peft", "tokenizers", "safetensors", "pydantic", "pluggy",
    "tensorboard", "vllm", "ray", "deepspeed", "diffusers",
)  # fmt: skip
"""Libraries that decide what a run computes and writes, as far as they are installed."""
Maker = dict[str, str | None]
"""``name``, ``distribution`` and ``version``; the last two are None if no distribution provides the plugin."""


def makers(method: str, named: Iterable[str]) -> list[Maker]:
    """Return the provenance of a run: trainkit, the plugin of the ``method``, and the plugins ``named`` in it.

    A method that is not among ``named`` is registered by a notebook or a script, not by a distribution; so is a plugin
    that is not installed.
    """
    makers_of: list[Maker] = [{"name": "trainkit", "distribution": CORE, "version": __version__}]
    plugins: dict[str, PluginInfo | None] = {name: find_installed(name) for name in map(str.lower, named)}
    if method not in plugins:
        plugins = {method: None, **plugins}
    for name, plugin in plugins.items():
        distribution, version = (plugin.distribution, plugin.version) if plugin else (None, None)
        makers_of.append({"name": name, "distribution": distribution, "version": version})
    return makers_of


@cache  # reading them takes milliseconds
def library_versions() -> dict[str, str]:
    """Return the versions of Python and of the installed `LIBRARIES`."""
    versions = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def said(maker: Maker) -> str:
    """Return the distribution and its version as text."""
    return f"{maker['distribution']} {maker['version']}" if maker["distribution"] else "no distribution"


def changes(before: Sequence[Maker] | None, now: Sequence[Maker]) -> list[str]:
    """Return a line for trainkit and each plugin whose version has changed, and for each plugin added or removed."""
    if before is None:
        return ["the checkpoint does not record which plugins it was made with"]
    was, here = ({str(maker["name"]): said(maker) for maker in makers} for makers in (before, now))
    return [
        f"{'plugin ' * (name != 'trainkit')}{name}: "
        f"{was.get(name, 'not in that run')} -> {here.get(name, 'not in this run')}"
        for name in dict.fromkeys([*was, *here])
        if was.get(name) != here.get(name)
    ]
