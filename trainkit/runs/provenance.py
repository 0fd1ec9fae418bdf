"""What a run is made by: trainkit, and its plugins with their distributions and versions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from trainkit.plugins import find_plugin

Maker = dict[str, str | None]
"""``name``, ``distribution`` and ``version``; the last two are None where no distribution provides it."""


def makers(method: str, installed: Iterable[str]) -> list[Maker]:
    """trainkit, the plugin of the ``method``, and the others among the ``installed`` ones that take part.

    A method that is not among them is registered by no distribution, but by a notebook or a script.
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
    """The distribution and its version."""
    return f"{maker['distribution']} {maker['version']}" if maker["distribution"] else "no distribution"


def changes(before: Sequence[Maker] | None, now: Sequence[Maker]) -> list[str]:
    """A line for each maker that is another now, or gone, or new."""
    if before is None:
        return ["the checkpoint does not say which plugins it was made by"]
    was, here = ({str(maker["name"]): said(maker) for maker in makers} for makers in (before, now))
    return [
        f"{'plugin ' * (name != 'trainkit')}{name}: "
        f"{was.get(name, 'not in that run')} -> {here.get(name, 'not in this run')}"
        for name in dict.fromkeys([*was, *here])
        if was.get(name) != here.get(name)
    ]
