"""The provenance of a run: the distributions and versions of trainkit and of the plugins that it was made with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from trainkit.plugins import find_plugin

Maker = dict[str, str | None]
"""``name``, ``distribution`` and ``version``; the last two are None if no distribution provides the plugin."""


def makers(method: str, installed: Iterable[str]) -> list[Maker]:
    """Return the provenance of a run: trainkit, the plugin of the ``method``, and the ``installed`` plugins it uses.

    A method that is not among ``installed`` is registered by a notebook or a script, not by a distribution.
    """
    from trainkit import __version__

    found: list[Maker] = [{"name": "trainkit", "distribution": "trainkit", "version": __version__}]
    plugins = [find_plugin(name) for name in dict.fromkeys(name.lower() for name in installed)]
    if method not in [plugin.name for plugin in plugins]:
        found.append({"name": method, "distribution": None, "version": None})
    for plugin in plugins:
        found.append({"name": plugin.name, "distribution": plugin.distribution, "version": plugin.version})
    return found


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
