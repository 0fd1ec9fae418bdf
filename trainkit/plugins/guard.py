"""What becomes of a hook that raises: the run stops and says whose it was, or goes on without an optional observer."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from weakref import WeakSet

import pluggy

from trainkit.errors import HookError, PluginError, describe

log = logging.getLogger(__name__)

PROVIDERS = frozenset({"make_sampler"})
"""Hooks whose answer the run is made with; every other one observes."""
LAST = "on_train_end"
"""The hook that all are told, also after one has failed: its errors are returned to who calls it, not raised."""

_FAILURES: WeakSet[HookError] = WeakSet()
"""Errors that say already whose they are: one of them in another hook is of a hook that this one has set off."""


@dataclass
class Watched:
    """A plugin's module or an object, and the errors of its hooks."""

    owner: str
    """Whose hooks they are, in words."""
    place: str
    """Where it would be declared optional, in words."""
    optional: bool
    """Whether the run goes on without it."""
    dismissed: bool = False
    """It was optional and failed, and is told nothing more."""

    def guard(self, impl: pluggy.HookImpl, hook: str) -> None:
        """Have the errors of one of its hooks go through `failed`.

        Raises:
            PluginError: it would wrap around the others' hooks instead of being one itself.
        """
        if impl.wrapper or impl.hookwrapper:
            raise PluginError(
                f"the hook {hook} of {self.owner} is a wrapper around those of others, and hooks of a run stand beside "
                "each other; mark it with @trainkit.hookimpl alone"
            )
        told = impl.function

        def guarded(trainer: Any, *args: object, **kwargs: object) -> object:
            if self.dismissed and hook not in PROVIDERS:
                return None
            try:
                answer = told(*args, **kwargs)
            except Exception as error:
                return self.failed(hook, trainer, error)
            return answer if hook in PROVIDERS else None

        impl.function = guarded  # type: ignore[misc]
        impl.argnames = ("trainer", *impl.argnames)  # type: ignore[misc]  # an error says the step

    def failed(self, hook: str, trainer: Any, error: Exception) -> HookError | None:
        """What follows from an error of a hook.

        Raises:
            HookError: unless it is optional, or the hook is the `LAST`, which gets the error back.
        """
        if isinstance(error, HookError) and error in _FAILURES:
            failure = error
        else:
            what = f"the hook {hook} of {self.owner} failed at step {trainer.progress.step}: {said(error)}"
            if self.optional and hook not in PROVIDERS:
                self.dismissed = True
                log.warning("%s. It is optional: it is told nothing more, and the run goes on", what, exc_info=error)
                return None
            failure = HookError(f"{what}. {self._way_out(hook)}")
            failure.__cause__ = error
            _FAILURES.add(failure)
        if hook == LAST:
            return failure
        raise failure

    def _way_out(self, hook: str) -> str:
        if hook in PROVIDERS:
            return "Repair it or leave it out; what a run is made with is never optional"
        return f"Repair it, leave it out, or write optional = True in {self.place}: runs then go on without it"


def one_line(text: object) -> str:
    """``text`` without line breaks, as a message quotes it."""
    return " ".join(str(text).split())


def said(error: BaseException) -> str:
    """The error in one line: its type, and what it says, if it says anything."""
    return f"{type(error).__name__}: {one_line(error)}" if str(error) else type(error).__name__


def watch(manager: pluggy.PluginManager, plugin: object, owner: str) -> None:
    """Guard the hooks of a registered module or object; ``owner`` is what it is in words.

    It is optional if it has an attribute ``optional`` that is True.

    Raises:
        PluginError: ``optional`` is no truth value, or one of the hooks is a wrapper.
    """
    optional = getattr(plugin, "optional", False)
    if not isinstance(optional, bool):
        raise PluginError(
            f"optional of {owner} says whether runs go on when one of its hooks fails; it should be True or False, and "
            f"is {describe(optional)}"
        )
    watched = Watched(owner, "its module" if isinstance(plugin, ModuleType) else "its class", optional)
    for caller in manager.get_hookcallers(plugin) or ():
        for impl in caller.get_hookimpls():
            if impl.plugin is plugin:
                watched.guard(impl, caller.name)
