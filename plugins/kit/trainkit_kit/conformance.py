"""The conformance kit: checks of what a plugin must do right, each with the reason why it matters.

One line in a plugin's tests runs all checks; `parametrize_checks` makes one pytest case of each::

    def test_grpo():
        check_trainer("grpo")

    @parametrize_checks("grpo", expected_failures={"learns": "its gradient is zero by design"})
    def test_grpo_conforms(check):
        check()

The checks are in `trainkit_kit.checks`. They run the plugin as users do, in tiny real runs of
`trainkit.testing.trainers.tiny_trainer`.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import trainkit_kit.checks  # noqa: F401  (registers them)
from trainkit.errors import ConfigError, suggest
from trainkit.plugins import get_engine, get_sharding, get_trainer, is_registered
from trainkit.plugins.registry import ENGINES, SHARDINGS, available_parts
from trainkit_kit.checking import CHECKS, OF_VARIANTS, Check
from trainkit_kit.checks.effects import unproven_settings
from trainkit_kit.failures import CheckError, ConformanceError
from trainkit_kit.subjects import Kind, Subject

if TYPE_CHECKING:
    import pytest


Outcome = Literal["passed", "failed", "expected"]


def all_checks() -> dict[str, Check]:
    """Return all checks of the kit by name, in the order in which they run."""
    return dict(CHECKS)


def subjects_of(name: str | Mapping[str, Any], model: Mapping[str, Any] | None = None) -> list[Subject]:
    """Return the subjects of the plugin ``name``: a module may hold a trainer and hooks, each a subject of its own.

    An engine or a sharding may be a mapping with its name and settings; ``model`` is what an engine serves.

    Raises:
        RegistryError, PluginError: there is no such plugin, or it cannot be loaded.
    """
    entry = dict(name) if isinstance(name, Mapping) else {"name": name}
    key = str(entry["name"]).lower()
    if key in available_parts(SHARDINGS):
        get_sharding(key)
        return [Subject(key, "sharding", entry=entry)]
    if isinstance(name, Mapping) or key in available_parts(ENGINES):
        get_engine(key)
        return [Subject(key, "engine", entry=entry, model=model)]
    found = Subject(name.lower())
    hooks = found.hooks if found.installed else []
    kinds: list[Kind] = [] if hooks and not is_registered(name) else ["trainer"]
    kinds += ["observer"] if {*hooks} - {"make_sampler"} else []
    kinds += ["sampler"] if "make_sampler" in hooks else []
    if "trainer" in kinds:
        get_trainer(name)
    variants = found.declaration.variants if "trainer" in kinds else {}
    return [
        *(Subject(found.name, kind) for kind in kinds),
        *(Subject(found.name, "trainer", each) for each in variants),
    ]


def checks_for(subject: Subject) -> list[Check]:
    """Return the checks that apply to ``subject``; those of a variant have its name after an @."""
    found = [each for each in all_checks().values() if each.kind == subject.kind and each.where(subject)]
    if not subject.variant:
        return found
    return [replace(each, name=f"{each.name}@{subject.variant}") for each in found if each.name in OF_VARIANTS]


# ------------------------------------------------------------------------------------------------------------ running


@dataclass(frozen=True)
class Result:
    """The result of one check."""

    check: Check
    outcome: Outcome
    seconds: float
    seen: str = ""
    """What was seen, if the check failed; the given reason, if the failure was expected."""
    error: str = ""
    """Type of the plugin's exception, if the check failed by an exception and not by what it requires."""


@dataclass
class Report:
    """The results of all checks of a plugin."""

    name: str
    results: list[Result] = field(default_factory=list)
    unproven: str = ""
    """The settings of an algorithm whose effects are not declared, or not by a number, with the lines to write."""

    @property
    def failed(self) -> list[Result]:
        """Results of checks that failed and were not expected to."""
        return [result for result in self.results if result.outcome == "failed"]

    @property
    def seconds(self) -> float:
        """The time of all checks together."""
        return sum(result.seconds for result in self.results)

    def __str__(self) -> str:
        counts = [(word, sum(r.outcome == word for r in self.results)) for word in ("passed", "failed", "expected")]
        named = ", ".join(f"{number} {word}" for word, number in counts if number)
        lines = [f"{self.name}: {named or 'no checks'} in {self.seconds:.1f} s"]
        for result in self.failed:
            lines += ["", f"{result.check.name}: {result.seen}", f"  purpose: {result.check.proves}"]
            lines += [f"  matters: {result.check.matters}"]
            lines += [f"  usual causes: {result.check.causes}"] if result.check.causes else []
        return "\n".join([*lines, *(["", self.unproven] if self.unproven else [])])


def check_plugin(
    name: str | Mapping[str, Any],
    *,
    model: Mapping[str, Any] | None = None,
    expected_failures: Mapping[str, str] | None = None,
    only: Iterable[str] | None = None,
    tell: Callable[[Result], object] = lambda _: None,
) -> Report:
    """Run the kit's checks on the plugin ``name``: an algorithm, observer, sampler, generation engine or sharding.

    Args:
        name: the registered or installed name; of an engine or a sharding also a mapping with its name and settings.
        model: of an engine, fields of the config of the model that it serves; by default a Llama of two layers.
        expected_failures: names of checks that are expected to fail, each with the reason, besides those that the
            algorithm declares; if one passes, it fails.
        only: names of the checks to run; by default all that apply.
        tell: a function that is called with each result as soon as it is known.

    Raises:
        ConformanceError: checks failed; the message is the report.
        ConfigError: ``expected_failures`` or ``only`` name no check that applies.
        RegistryError, PluginError: there is no such plugin, or it cannot be loaded.
    """
    expected = {**_declared(name), **(expected_failures or {})}
    chosen = _chosen(name, expected, only, model)
    report = Report(name if isinstance(name, str) else name["name"])
    try:
        for subject, each in chosen:
            report.results.append(_run(each, subject, expected.get(each.name)))
            tell(report.results[-1])
    finally:
        for subject, _ in chosen:
            subject.stop()
    if only is None:
        trainers = dict.fromkeys(each for each, _ in chosen if each.kind == "trainer" and not each.variant)
        report.unproven = "\n".join(told for each in trainers if (told := unproven_settings(each)))
    if report.failed:
        raise ConformanceError(str(report))
    return report


def check_trainer(
    name: str,
    *,
    expected_failures: Mapping[str, str] | None = None,
    only: Iterable[str] | None = None,
    tell: Callable[[Result], object] = lambda _: None,
) -> Report:
    """Run `check_plugin` on a plugin that must hold a trainer."""
    get_trainer(name)
    return check_plugin(name, expected_failures=expected_failures, only=only, tell=tell)


def check_engine(
    name: str | Mapping[str, Any],
    *,
    model: Mapping[str, Any] | None = None,
    expected_failures: Mapping[str, str] | None = None,
    only: Iterable[str] | None = None,
    tell: Callable[[Result], object] = lambda _: None,
) -> Report:
    """Run `check_plugin` on a plugin that must be a generation engine."""
    get_engine(name if isinstance(name, str) else name["name"])
    return check_plugin(name, model=model, expected_failures=expected_failures, only=only, tell=tell)


def _declared(name: str | Mapping[str, Any]) -> dict[str, str]:
    """Return the checks that a trainer declares to be expected to fail, with the reasons."""
    trainers = [each for each in subjects_of(name) if each.kind == "trainer" and not each.variant]
    return {check: why for each in trainers for check, why in each.declaration.expected_failures.items()}


def _chosen(
    name: str | Mapping[str, Any],
    expected: Mapping[str, str],
    only: Iterable[str] | None = None,
    model: Mapping[str, Any] | None = None,
) -> list[tuple[Subject, Check]]:
    found = [(subject, each) for subject in subjects_of(name, model) for each in checks_for(subject)]
    known = [each.name for _, each in found]
    wanted = known if only is None else list(only)
    for given in (*expected, *wanted):
        if given not in known:
            why = "does not apply to" if given in all_checks() else "is no check"
            raise ConfigError(
                f"the check {given!r} {why}{f' {name!r}' if 'apply' in why else ''}{suggest(given, known)}; "
                f"those of {name!r} are {', '.join(known)}"
            )
    return [(subject, each) for subject, each in found if each.name in wanted]


def _run(each: Check, subject: Subject, reason: str | None) -> Result:
    started, seen, raised, failed = time.perf_counter(), "", "", False
    try:
        each.run(subject)
    except CheckError as error:
        seen, failed = str(error), True
    except (Exception, SystemExit) as error:  # whatever the plugin raises is a failure; the message names the place
        at = traceback.extract_tb(error.__traceback__)[-1]
        raised, failed = type(error).__name__, True
        seen = f"{raised}: {error} ({Path(at.filename).name}, line {at.lineno})"
    seconds = time.perf_counter() - started
    if reason is None:
        return Result(each, "failed" if failed else "passed", seconds, seen, raised)
    if failed:
        return Result(each, "expected", seconds, reason, raised)
    return Result(each, "failed", seconds, f"it passes now; remove it from expected_failures ({reason})")


@dataclass(frozen=True)
class Case:
    """One check of one plugin, as a callable."""

    check: Check
    subject: Subject

    def __call__(self) -> None:
        """Run the check; raises `CheckError`, or what the plugin raises."""
        try:
            self.check.run(self.subject)
        except CheckError as error:
            causes = f"\nusual causes: {self.check.causes}" if self.check.causes else ""
            raise CheckError(
                f"{error}\n\npurpose: {self.check.proves}\nmatters: {self.check.matters}{causes}"
            ) from None


def parametrize_checks(
    name: str | Mapping[str, Any],
    *,
    model: Mapping[str, Any] | None = None,
    expected_failures: Mapping[str, str] | None = None,
) -> pytest.MarkDecorator:
    """Return a decorator that makes one pytest case of each check; the test takes ``check`` and calls it.

    The arguments are those of `check_plugin`. The cases of an engine share one, which runs until the tests end.

    Raises:
        ConfigError, RegistryError, PluginError: as `check_plugin`, when the tests are collected.
    """
    import pytest

    expected = {**_declared(name), **(expected_failures or {})}
    cases = []
    for subject, each in _chosen(name, expected, model=model):
        reason = expected.get(each.name)
        marks = [] if reason is None else [pytest.mark.xfail(reason=reason, strict=True)]
        cases.append(pytest.param(Case(each, subject), id=each.name, marks=marks))
    return pytest.mark.parametrize("check", cases)
