"""The conformance kit: checks of what a plugin must do right, each with the reason why it matters.

One line in a plugin's tests runs all checks; `parametrize_checks` makes one pytest case of each::

    def test_grpo():
        check_trainer("grpo")

    @parametrize_checks("grpo", expected_failures={"learns": "its gradient is zero by design"})
    def test_grpo_conforms(check):
        check()

The checks are in `trainkit.testing.checks`. They run the plugin as users do, in tiny real runs of
`trainkit.testing.trainers.tiny_trainer`.
"""

from __future__ import annotations

import inspect
import io
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from pydantic import TypeAdapter

from trainkit.config import EngineEntry, ModelConfig
from trainkit.errors import ConfigError, suggest
from trainkit.models.loading import load_model_config
from trainkit.plugins import discover, get_engine, get_hooks, get_sharding, get_trainer, is_registered, load_plugin
from trainkit.plugins.registry import ENGINES, SHARDINGS, HookClass, available_parts, hooks_of
from trainkit.rollouts import Engine
from trainkit.rollouts.engines import engine_class
from trainkit.testing import tiny_gpt2
from trainkit.testing.trainers import tiny_trainer
from trainkit.trainer.accelerate import AccelerateRLTrainer

if TYPE_CHECKING:
    import pytest

    from trainkit.testing.engines import Serving

Kind = Literal["trainer", "observer", "sampler", "engine", "sharding"]
PARTS = ("engine", "sharding")
"""Kinds of plugins of which a run has one; they may be given with settings."""
Outcome = Literal["passed", "failed", "expected"]


class CheckError(AssertionError):
    """A check failed; the message is what was seen."""


class ConformanceError(AssertionError):
    """A plugin failed checks that it was not expected to fail; the message is the report."""


def require(condition: object, seen: str) -> None:
    """Fail the check unless ``condition`` is true; ``seen`` is the message. Works under ``python -O`` too."""
    if not condition:
        raise CheckError(seen)


# ---------------------------------------------------------------------------------------------------- what is checked


@dataclass(frozen=True)
class Subject:
    """A plugin to check, with the properties that decide which checks apply."""

    name: str
    kind: Kind = "trainer"
    variant: str = ""
    """The name of the variant in `tiny_variants` whose settings all its trainers have; empty: the defaults."""
    entry: Any = None
    """Of an engine or a sharding, what a run has in `rollout.engine` or `train.sharding`: its name, or a mapping with
    its settings."""
    model: Mapping[str, Any] | None = None
    """Of an engine, fields of the config of the model that it serves; None: `trainkit.testing.engines.MODEL`."""

    @cached_property
    def engine_class(self) -> type[Engine]:
        """The class of the engine."""
        return engine_class(TypeAdapter(EngineEntry).validate_python(self.entry))

    @cached_property
    def serving(self) -> Serving:
        """The running engine, which the checks share; starting one may take a minute."""
        from trainkit.testing.engines import Serving

        return Serving(self.entry, self.model)

    def stop(self) -> None:
        """Stop the engine, if it runs; it is started again when it is next used."""
        if (running := vars(self).pop("serving", None)) is not None:
            running.close()

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The settings of the variant, by dotted path."""
        return dict(self.trainer_class.tiny_variants()[self.variant]) if self.variant else {}

    @cached_property
    def tiny(self) -> Any:
        """A tiny trainer of the subject, which has not made its model."""
        return tiny_trainer(self.name, Path("unused"), **self.settings)

    @property
    def inputs(self) -> tuple[str, ...]:
        """What the trainer learns from, with the settings of the variant."""
        inputs: tuple[str, ...] = self.tiny.inputs if self.variant else self.trainer_class.inputs
        return inputs

    @cached_property
    def module(self) -> ModuleType | None:
        """The installed plugin's module; None for a trainer that was registered in another way."""
        return load_plugin(self.name) if self.installed else None

    @cached_property
    def hook_class(self) -> HookClass | None:
        """The class with hooks that is registered as the plugin's name; None if its module has the hooks."""
        return get_hooks(self.name) if self.installed else None

    @property
    def hooks(self) -> list[str]:
        """The hooks that the plugin implements, in a registered class or in its module."""
        return hooks_of(self.module if self.hook_class is None else self.hook_class.made)

    @property
    def tracker(self) -> bool:
        """Whether the plugin is a tracker, whose hooks are called on the main process only."""
        return self.hook_class is not None and self.hook_class.tracker

    def hooks_in(self, trainer: Any) -> Any:
        """Return the object or module with the plugin's hooks in the run of ``trainer``."""
        return self.module if self.hook_class is None else trainer.hooks.made[self.name]

    @cached_property
    def trainer_name(self) -> str:
        """The trainer that the checks run: the plugin's, or the kit's if the plugin has only hooks."""
        if self.kind not in PARTS and (self.kind == "trainer" or is_registered(self.name)):
            return self.name
        from trainkit.testing import reinforce

        return reinforce.registered()

    @cached_property
    def trainer_class(self) -> Any:
        """The trainer's class."""
        return get_trainer(self.trainer_name)

    @property
    def online(self) -> bool:
        """Whether the trainer learns from what it samples."""
        return "prompts" in self.inputs

    @property
    def rewarded(self) -> bool:
        """Whether the trainer learns from the rewards of what it samples."""
        return bool({"reward_fn", "environment"} & {*self.inputs})

    @cached_property
    def keeps(self) -> bool:
        """Whether the trainer chooses what it trains on, with a method `keep`."""
        overridden = self.language and self.trainer_class.keep is not AccelerateRLTrainer.keep
        return overridden and bool(self.tiny.keeps)

    @property
    def plays(self) -> bool:
        """Whether the trainer can learn from environments: its model reads an episode as one text."""
        return self.causal and self.samples_text and self.rewarded

    @property
    def needs_environment(self) -> bool:
        """Whether the trainer learns only with an environment."""
        return "environment" in self.inputs

    @property
    def language(self) -> bool:
        """Whether the trainer trains language models."""
        return issubclass(self.trainer_class, AccelerateRLTrainer)

    @cached_property
    def causal(self) -> bool:
        """Whether it trains language models, and its tiny model reads prompt and response as one text."""
        if not self.language:
            return False
        path = self.trainer_class.tiny_arguments().get("model_path", tiny_gpt2(8))
        return not load_model_config(ModelConfig(model_path=path)).is_encoder_decoder

    @property
    def installed(self) -> bool:
        """Whether it is a plugin of an installed distribution, so that another process finds it, too."""
        return any(plugin.name == self.name for plugin in discover())

    @property
    def method_fields(self) -> set[str]:
        """Names of the method's settings."""
        return set(self.trainer_class.method_class.model_fields)

    @property
    def samples_text(self) -> bool:
        """Whether the trainer learns from text that it samples."""
        return self.online and self.language

    @property
    def writes_text(self) -> bool:
        """Whether the trained model is a policy over tokens."""
        return self.language and self.trainer_class.generates

    @cached_property
    def needs_reference(self) -> bool:
        """Whether the trainer uses a reference."""
        return bool(self.tiny.needs_reference)

    @cached_property
    def chooses_reference(self) -> bool:
        """Whether its settings name another reference than the model before the first update."""
        return self.tiny.chosen_reference is not None


class Bench:
    """What a check works with: tiny real trainers of the subject, each with its own run directory.

    Args:
        subject: the plugin.
        folder: where the run directories are.
        **usual: changes of `tiny_trainer` that all trainers have, unless a check gives others.
    """

    def __init__(self, subject: Subject, folder: Path, **usual: Any) -> None:
        self.subject, self.folder, self.usual = subject, folder, {**subject.settings, **usual}
        self._places = count()

    def under(self, **usual: Any) -> Bench:
        """Return a bench whose trainers have further changes; checks can be run on it under another condition."""
        return Bench(self.subject, self.place(), **{**self.usual, **usual})

    def in_one_turn(self) -> Bench:
        """Return a bench whose trainers sample one response per prompt, also those that need an environment."""
        return self.under(rollout__max_turns=1) if self.subject.needs_environment else self

    def place(self) -> Path:
        """Return the path of a new directory, which does not exist yet."""
        return self.folder / f"run-{next(self._places)}"

    def trainer(self, run_dir: Path | None = None, **changes: Any) -> Any:
        """Return a tiny trainer of the subject with its hooks; ``changes`` are those of `tiny_trainer`."""
        name = self.subject.trainer_name
        key = "train__trackers" if self.subject.tracker else "plugins"
        hooked: dict[str, Any] = {} if name == self.subject.name else {key: [self.subject.name]}
        arguments = {**self.usual.get("arguments", {}), **changes.get("arguments", {})}
        merged = {**hooked, **self.usual, **changes, **({"arguments": arguments} if arguments else {})}
        return tiny_trainer(name, run_dir or self.place(), **merged)

    def collected(self, **changes: Any) -> Any:
        """Return a tiny trainer that has made one collection of experience and no step."""
        trainer = self.trainer(**changes)
        trainer.collect()
        return trainer

    def learnt(self, run_dir: Path | None = None, **changes: Any) -> Any:
        """Return a tiny trainer after its run."""
        trainer = self.trainer(run_dir, **changes)
        trainer.learn()
        return trainer


# ------------------------------------------------------------------------------------------------------------ checks

Condition = Callable[[Subject], bool]


@dataclass(frozen=True)
class Check:
    """One thing that a plugin must do right."""

    name: str
    proves: str
    """What the check verifies, in a sentence."""
    matters: str
    """Why it matters: what goes wrong in a plugin that fails."""
    kind: Kind
    function: Callable[[Bench], None]
    where: Condition

    def run(self, subject: Subject, folder: Path | None = None) -> None:
        """Run the check on ``subject``, without printing what the plugin prints.

        Raises:
            CheckError: the check failed. Other exceptions of the plugin are passed on.
        """
        with tempfile.TemporaryDirectory() as made, redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            bench = Bench(subject, folder or Path(made))
            try:
                self.function(bench)
            except CheckError as error:
                from trainkit.testing.checks.repeating import difference_at_start

                if subject.kind not in PARTS and (told := difference_at_start(bench)):
                    raise CheckError(f"{told}. Checks that compare trainers fail by it, as this one: {error}") from None
                raise


_CHECKS: dict[str, Check] = {}

OF_VARIANTS = {
    "accumulation", "batch_mates", "credit_follows_scores", "credit_of_scores", "first_update", "keep_chooses",
    "kl_pulls_back", "labels_decide", "mask_law", "metric_totals", "micro_batches", "padding_amount",
    "prompts_may_repeat", "reference_counts_in_every_row", "reference_is_frozen", "reported_kl", "sides_of_pairs",
    "two_processes", "weight_counts",
}  # fmt: skip
"""Checks that are also run for the variants that an algorithm declares: those of what is learnt in a step."""


def check(
    *, kind: Kind = "trainer", where: Condition = lambda _: True
) -> Callable[[Callable[[Bench], None]], Callable[[Bench], None]]:
    """Make a check of a function; its docstring says what it verifies and, in the paragraphs below, why it matters."""

    def register(function: Callable[[Bench], None]) -> Callable[[Bench], None]:
        proves, _, matters = (inspect.getdoc(function) or "").partition("\n\n")
        name = function.__name__
        _CHECKS[name] = Check(name, " ".join(proves.split()), " ".join(matters.split()), kind, function, where)
        return function

    return register


def all_checks() -> dict[str, Check]:
    """Return all checks of the kit by name, in the order in which they run."""
    import trainkit.testing.checks  # noqa: F401  (registers them)

    return dict(_CHECKS)


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
    variants = found.trainer_class.tiny_variants() if "trainer" in kinds else {}
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
        return "\n".join(lines)


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
        expected_failures: names of checks that are expected to fail, each with the reason; if one passes, it fails.
        only: names of the checks to run; by default all that apply.
        tell: a function that is called with each result as soon as it is known.

    Raises:
        ConformanceError: checks failed; the message is the report.
        ConfigError: ``expected_failures`` or ``only`` name no check that applies.
        RegistryError, PluginError: there is no such plugin, or it cannot be loaded.
    """
    chosen, expected = _chosen(name, expected_failures or {}, only, model), dict(expected_failures or {})
    report = Report(name if isinstance(name, str) else name["name"])
    try:
        for subject, each in chosen:
            report.results.append(_run(each, subject, expected.get(each.name)))
            tell(report.results[-1])
    finally:
        for subject, _ in chosen:
            subject.stop()
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
            raise CheckError(f"{error}\n\npurpose: {self.check.proves}\nmatters: {self.check.matters}") from None


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

    expected = dict(expected_failures or {})
    cases = []
    for subject, each in _chosen(name, expected, model=model):
        reason = expected.get(each.name)
        marks = [] if reason is None else [pytest.mark.xfail(reason=reason, strict=True)]
        cases.append(pytest.param(Case(each, subject), id=each.name, marks=marks))
    return pytest.mark.parametrize("check", cases)
