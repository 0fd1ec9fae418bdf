"""Errors of hooks: the run stops and names the owner of the hook, or continues without an optional observer."""

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
"""Hooks whose return value the run uses; all others observe."""
LAST = "on_train_end"
"""The hook that is called on all observers, even after one has failed: its errors are returned, not raised."""

_FAILURES: WeakSet[HookError] = WeakSet()
"""Errors that already name the owner of a hook. They pass unchanged through a hook that triggered the failed one."""


@dataclass
class Watched:
    """A plugin's module or an object, whose hooks may fail."""

    owner: str
    """The plugin or object, in words."""
    place: str
    """Where ``optional`` is to be written, in words."""
    optional: bool
    """Whether a run continues without it if one of its hooks fails."""
    dismissed: bool = False
    """Whether it is optional and has failed. Then its observing hooks are not called again."""

    def guard(self, impl: pluggy.HookImpl, hook: str) -> None:
        """Wrap one of its hooks, so that `failed` handles the hook's errors.

        Raises:
            PluginError: the hook is a wrapper around the hooks of others.
        """
        if impl.wrapper or impl.hookwrapper:
            raise PluginError(
                f"the hook {hook} of {self.owner} is a wrapper around those of others, which trainkit does not "
                "support; mark it with @trainkit.hookimpl, without wrapper or hookwrapper"
            )
        function = impl.function

        def guarded(trainer: Any, *args: object, **kwargs: object) -> object:
            if self.dismissed and hook not in PROVIDERS:
                return None
            try:
                answer = function(*args, **kwargs)
            except Exception as error:
                return self.failed(hook, trainer, error)
            return answer if hook in PROVIDERS else None

        impl.function = guarded  # type: ignore[misc]
        impl.argnames = ("trainer", *impl.argnames)  # type: ignore[misc]  # an error names the step

    def failed(self, hook: str, trainer: Any, error: Exception) -> HookError | None:
        """Handle an error of a hook: log it if the observer is optional, return it if the hook is `LAST`, or raise it.

        Raises:
            HookError: names the hook, its owner and the step; the error is its cause.
        """
        if isinstance(error, HookError) and error in _FAILURES:
            failure = error
        else:
            what = f"the hook {hook} of {self.owner} failed at step {trainer.progress.step}: {error_text(error)}"
            if self.optional and hook not in PROVIDERS:
                self.dismissed = True
                log.warning("%s. It is optional: the run goes on and does not call it again", what, exc_info=error)
                return None
            failure = HookError(f"{what}. {self._way_out(hook)}")
            failure.__cause__ = error
            _FAILURES.add(failure)
        if hook == LAST:
            return failure
        raise failure

    def _way_out(self, hook: str) -> str:
        if hook in PROVIDERS:
            return "Repair it or remove it; a hook that a run depends on is never optional"
        return f"Repair it, remove it, or write optional = True in {self.place}: runs then go on without it"


def one_line(text: object) -> str:
    """Return ``text`` without line breaks, as messages quote it."""
    return " ".join(str(text).split())


def error_text(error: BaseException) -> str:
    """Return the error in one line: its type, and its message if it has one."""
    return f"{type(error).__name__}: {one_line(error)}" if str(error) else type(error).__name__


def watch(manager: pluggy.PluginManager, plugin: object, owner: str) -> None:
    """Guard the hooks of a registered module or object; ``owner`` describes it in words.

    It is optional if it has an attribute ``optional`` that is True.

    Raises:
        PluginError: ``optional`` is not a bool, or one of the hooks is a wrapper.
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
