"""Commands of the command line that distributions bring. They are listed from metadata, and imported when called.

A distribution names its commands under the entry-point group ``trainkit.commands``: the command as it is typed, and
``module:name`` of a function or of an app of typer.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from importlib.metadata import Distribution, distributions
from operator import attrgetter
from typing import Any

from trainkit.plugins.discovery import canonical, disabled_by, entry_points_text, identity
from trainkit.plugins.guard import one_line

GROUP = "trainkit.commands"
"""The entry-point group."""
OWN = {
    "chat": ("trainkit-tools", "Print a model's answers to what is typed."),
    "compare": ("trainkit-report", "Compare two runs, or two groups of seeds."),
    "data": ("trainkit-tools", "Check datasets before training."),
    "doctor": ("trainkit-tools", "Print versions, devices, plugins and what is wrong with them."),
    "estimate": ("trainkit-tools", "Print the memory that a run needs on each device by phase."),
    "export": ("trainkit-tools", "Write a trained model for transformers, llama.cpp or Ollama."),
    "migrate": ("trainkit-migrate", "Print a configuration of another framework as one of trainkit."),
    "push": ("trainkit-tools", "Publish an exported model on the hub of Hugging Face."),
    "report": ("trainkit-report", "Write a page of HTML about runs."),
    "serve": ("trainkit-tools", "Serve a trained model by transformers or vLLM."),
    "sweep": ("trainkit-sweep", "Search settings with Optuna."),
    "watch": ("trainkit-report", "Serve a page about runs while they go on."),
}
"""trainkit's own commands that are not in the core, with their distributions and what `trainkit --help` says of them.
No other distribution may name a command so, whether they are installed or not."""


@dataclass(frozen=True)
class Command:
    """A command of an installed distribution, read without importing anything."""

    name: str
    """The command as it is typed."""
    target: str
    """``module:name`` of a function or an app of typer."""
    distribution: str
    """The distribution that brings it."""
    version: str
    """That distribution's version."""
    help: str
    """What it does, in one line; of a stranger's command, the summary of the distribution."""
    why: str = ""
    """Why it cannot be used; empty if it can."""

    def __str__(self) -> str:
        return f"{self.distribution} {self.version} ({self.target})"

    def load(self) -> Any:
        """Import and return what the entry point names, whatever it is."""
        module, _, names = self.target.partition(":")
        loaded = importlib.import_module(module)
        return attrgetter(names)(loaded) if names else loaded


def installed_commands(core: Collection[str]) -> list[Command]:
    """Return the commands of installed distributions, trainkit's own first, then by name.

    A name that belongs to the core or to a distribution of trainkit, or that two distributions have, cannot be used;
    it may appear twice.

    Args:
        core: the commands of the core.
    """
    order = list(OWN)
    claims = sorted(_claims(), key=lambda c: (order.index(c.name) if c.name in OWN else len(order), c.name, str(c)))
    return [command if command.why else replace(command, why=_refusal(command, claims, core)) for command in claims]


def _refusal(command: Command, claims: list[Command], core: Collection[str]) -> str:
    """Return why a command cannot be used; empty if it can."""
    if command.name in core:
        return f"{command} names it, but it is a command of trainkit itself; uninstall {command.distribution}"
    owner, _ = OWN.get(command.name, ("", ""))
    if owner and canonical(command.distribution) != owner:
        return f"{command} names it, but it belongs to trainkit's own {owner}; uninstall {command.distribution}"
    rivals = [other for other in claims if other.name == command.name and not other.why]
    if len(rivals) > 1 and not owner:
        return f"it is claimed twice: {'; '.join(map(str, rivals))}; uninstall or disable all but one"
    return ""


def _claims() -> Iterator[Command]:
    """Yield every installed command; of two copies of a distribution on the path the first is the one in use."""
    seen: set[str] = set()
    for distribution in distributions():
        if (
            f"[{GROUP}]" in entry_points_text(distribution)
            and (name := canonical(identity(distribution)[0])) not in seen
        ):
            seen.add(name)
            yield from _commands_of(distribution)


def _commands_of(distribution: Distribution) -> Iterator[Command]:
    name, version = identity(distribution)
    summary = str(distribution.metadata.json.get("summary", ""))
    try:
        entries = [(entry.name, entry.value) for entry in distribution.entry_points.select(group=GROUP)]
    except Exception as error:  # one malformed file must not hide all commands
        why = f"the entry points of {name} {version} cannot be read ({one_line(error)}); reinstall it"
        yield Command(canonical(name), "?", name, version, summary, why)
        return
    for entry, target in entries:
        owner, line = OWN.get(entry, ("", ""))
        if owner == canonical(name):
            yield Command(entry, target, name, version, line)
        else:
            by = disabled_by(entry, name)
            yield Command(entry, target, name, version, summary, f"{name} {version} is disabled by {by}" if by else "")
