"""Checks of what users meet first: settings, errors and docstrings."""

from __future__ import annotations

import inspect
import math
import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from typing import Any, Literal

from trainkit.config import TRLConfig
from trainkit.data.batches import BATCH_CLASSES
from trainkit.errors import ConfigError, DataError, NonFiniteError, RewardError, TrainkitError
from trainkit.plugins.registry import settings_alone as read_settings
from trainkit_kit.checking import check
from trainkit_kit.checks.fields import (
    Settings,
    bounds,
    contexts,
    is_number,
    kinds_of,
    method_fields,
    other_values,
    trainer_with,
)
from trainkit_kit.checks.tools import require_same_weights, weights
from trainkit_kit.checks.traces import Course
from trainkit_kit.failures import require
from trainkit_kit.subjects import Bench, Subject

# ----------------------------------------------------------------------------------------------------------- settings


@check()
def config_round_trip(bench: Bench) -> None:
    """Check that settings survive YAML, plain data, pickle and `evolve`, with defaults, descriptions and bounds.

    A run is resumed, shared and compared by its config.yaml. A setting that is lost there or not described is useless.

    Causes: a type that YAML has no word for; a validator that changes values; an attribute that is no field.
    """
    required = _required(bench.subject)
    config: TRLConfig[Any] = TRLConfig.from_dict({"method": {"name": bench.subject.name, **required}})
    for each in (config, *_changed(bench, config)):
        _require_round_trips(bench, each)
    for name, field in config.method.__class__.model_fields.items():
        require(field.description, f"method.{name} has no docstring below it, which is its help text")
        require(
            not field.is_required() or name in required,
            f"method.{name} has no default, and the declared arguments give no value for it",
        )
        if is_number(field):
            require(bounds(field), f"method.{name} is a number without bounds; write Field({field.default!r}, ge=...)")
    for section, values in config.method.section_defaults.items():
        chosen = getattr(config, section)
        default = type(chosen)(**values)  # whose parts may be sections, too
        for name, value in values.items():
            found = getattr(chosen, name)
            same = found == getattr(default, name)
            require(same, f"section_defaults has {section}.{name} = {value!r}, and the config has {found!r}")
    try:
        config.method.name = "other"
    except ConfigError:
        return
    require(False, "the method's settings can be assigned to; keep the config frozen, as MethodConfig is")


@check()
def settings_alone(bench: Bench) -> None:
    """Check that the settings in the submodule `config` of a package are those of the trainer, and import no torch.

    Configurations are checked with them before the algorithm is imported: two classes would be two opinions, and a
    mistyped setting should not take seconds to be told.

    Causes: a `config` module that imports torch, or a package whose `__init__` does.
    """
    alone = read_settings(bench.subject.name)
    if alone is None:  # a single module, whose settings are read by importing it
        return
    own = bench.subject.trainer_class.method_class
    require(alone is own, f"{alone.__module__} has the settings {alone}, and the trainer has {own}")
    script = f"import sys, {alone.__module__}; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True)
    require(
        done.returncode == 0,
        f"importing {alone.__module__} alone imports torch; let the package import its other modules lazily "
        "(trainkit.plugins.lazy_names)",
    )


def _required(subject: Subject) -> dict[str, Any]:
    """Return the values that the declared arguments give to the settings of the method that have no default."""
    fields = subject.trainer_class.method_class.model_fields
    given = subject.declaration.arguments.get("config", {}).get("method", {})
    return {name: value for name, value in given.items() if fields[name].is_required()}


def _changed(bench: Bench, config: TRLConfig[Any]) -> Iterator[TRLConfig[Any]]:
    """Yield the configuration with each field of the method at another allowed value."""
    for name, field in method_fields(bench.subject).items():
        for value in other_values(field, getattr(config.method, name)):
            try:
                yield config.update({f"method.{name}": value})
            except ConfigError:
                continue  # not every value of the type is allowed
            break


def _require_round_trips(bench: Bench, config: TRLConfig[Any]) -> None:
    path = bench.place().with_suffix(".yaml")
    config.save_yaml(path)
    for way, again in (
        ("YAML", TRLConfig.load_yaml(path)),
        ("plain data", TRLConfig.from_dict(config.to_dict())),
        ("pickle", pickle.loads(pickle.dumps(config))),
        ("evolve()", config.evolve()),
    ):
        require(
            again == config,
            f"the config changes through {way}: the method is {again.method!r}, and was {config.method!r}",
        )
        require(
            type(again.method) is type(config.method), f"{way} changes the class of the method to {type(again.method)}"
        )


@check()
def fields_have_effects(bench: Bench) -> None:
    """Check that changing any field of the method changes a run, not only the algorithm's metrics.

    Tuning a setting that has no effect, or that affects only a metric, is useless. Most such settings were disconnected
    by a later change that nobody noticed.

    Causes: a setting that is read once and not used; a condition that is never true in a short run, which a context can
    declare; a setting that only a metric reads.
    """
    courses: dict[str, Course] = {}
    for name, field in method_fields(bench.subject).items():
        known = contexts(bench.subject).get(name)
        tried = [known] if known is not None else [{"optimizer.lr": 0.03}, {}]
        require(
            any(_has_effect(bench, name, field, settings, courses) for settings in tried),
            f"the field {name!r} changes nothing but metrics in a run of twelve steps, whatever it is set to"
            f"{f' under {known}' if known else ''}; if it matters under other settings, declare these as contexts",
        )


def _has_effect(bench: Bench, name: str, field: Any, settings: Settings, courses: dict[str, Course]) -> bool:
    key, settings = f"method.{name}", {"train.total_steps": 12, "train.eval_interval": 3, **settings}
    values = [settings.pop(key)] if key in settings else None
    if repr(settings) not in courses:
        courses[repr(settings)] = Course(bench.trainer(**settings)).learn()
    usual = courses[repr(settings)]
    tried = other_values(field, getattr(usual.trainer.method, name)) if values is None else values
    changed = (trainer_with(bench, {**settings, key: value}) for value in tried)
    return any(Course(trainer, usual).learn().differs for trainer in changed if trainer is not None)


# ------------------------------------------------------------------------------------------------------------- errors


@check()
def errors_at_the_door(bench: Bench) -> None:
    """Check that what cannot be run is refused before training, with a message that names what is wrong.

    A misspelt setting that is ignored, a NaN that passes every comparison, or a missing reward function is otherwise
    found hours later, or never.

    Causes: `extra` allowed in the settings; numbers without bounds; checks by `assert`, or of values that NaN passes.
    """
    _unknown_field(bench.subject)
    for name, field in method_fields(bench.subject).items():
        for value in _wrong(field):
            _refused(bench.subject, name, value)
    _missing_inputs(bench)
    _scores_that_are_none(bench)
    _loss_that_is_none(bench)


def _message(kind: type[TrainkitError], call: Callable[[], object], what: str) -> str:
    """Return the message of the error that ``call`` must raise."""
    try:
        call()
    except kind as error:
        return str(error)
    require(False, f"{what} is not refused; raise a {kind.__name__} that names what is wrong")
    return ""


def _unknown_field(subject: Subject) -> None:
    known = next(iter(method_fields(subject)), "name")
    given = f"{known}x"
    text = _message(ConfigError, lambda: _configured(subject, given, 1), f"the unknown setting method.{given}")
    require(f"method.{given}" in text, f"the error about the unknown setting {given!r} does not name it: {text}")
    require(f"did you mean '{known}'" in text, f"the error about {given!r} does not suggest {known!r}: {text}")


def _configured(subject: Subject, field: str, value: Any) -> TRLConfig[Any]:
    return TRLConfig.from_dict({"method": {"name": subject.name, **_required(subject), field: value}})


def _wrong(field: Any) -> list[Any]:
    """Return values that a field must refuse by its type and its bounds."""
    kinds, limits = kinds_of(field), bounds(field)
    found: list[Any] = []
    if kinds <= {int, float, bool, str, Literal, type(None)}:
        found.append({"no": "setting"})
    if kinds & {int, float, bool, Literal} and str not in kinds:
        found.append("no such value")
    if is_number(field):
        found += [math.nan]
        found += [limits[name] - 1 for name in ("ge", "gt") if name in limits]
        found += [limits[name] for name in ("gt", "lt") if name in limits]
        found += [limits[name] + 1 for name in ("le", "lt") if name in limits]
    return found


def _refused(subject: Subject, name: str, value: Any) -> None:
    text = _message(ConfigError, lambda: _configured(subject, name, value), f"method.{name} = {value!r}")
    require(name in text, f"the error about method.{name} = {value!r} does not name the field: {text}")


def _missing_inputs(bench: Bench) -> None:
    data = "samples" if "samples" in bench.subject.inputs else "prompts"
    trainer = bench.trainer()
    trainer.pipeline = None
    text = _message(DataError, trainer.learn, f"learn() without {data}")
    require(data in text, f"the error about missing {data} does not name them: {text}")
    for paying in {"reward_fn", "environment"} & {*bench.subject.inputs}:
        trainer = bench.trainer()
        setattr(trainer, paying, None)
        text = _message(DataError, trainer.learn, f"learn() without {paying}")
        require(paying in text, f"the error about a missing {paying} does not name it: {text}")


def _scores_that_are_none(bench: Bench) -> None:
    """Fail unless a NaN among the scores, or one score too few, is an error while experience is made, with rewards."""
    if not bench.subject.rewarded:
        return
    for given, scores in (
        ("a score that is NaN", lambda prompts, **_: [math.nan] * len(prompts)),
        ("one score too few", lambda prompts, **_: [1.0] * (len(prompts) - 1)),
    ):
        trainer = bench.trainer()
        trainer.reward_fn = scores
        _message(RewardError, trainer.collect, given)


def _loss_that_is_none(bench: Bench) -> None:
    trainer = bench.collected()
    honest = trainer.loss

    def infinite(batch: Any) -> Any:
        loss, found = honest(batch)
        return loss * math.inf, found

    trainer.loss = infinite
    before = weights(trainer)
    _message(NonFiniteError, lambda: trainer.update(trainer.store.experience), "a loss that is not finite")
    require_same_weights(before, weights(trainer), "the weights before and after a loss that is not finite")
    require(not trainer.optimizer.state, "the optimizer has a state after a loss that is not finite")


# --------------------------------------------------------------------------------------------------------- docstrings

SHAPE = re.compile(r"\[(?:\]|[A-Z*][\w*]*(?: ?[+/·-] ?\w+)*(?:, ?[\w*+ ]+)*\])")
SOURCE = re.compile(r"\b(19|20)\d\d\b|\b\d{4}\.\d{4,5}\b|[Ee]quations? \(?\d")


@check()
def docstrings(bench: Bench) -> None:
    """Check that the plugin's docstrings say what it computes, with tensor shapes and a source.

    A reader compares a loss with its paper and a tensor with its shape; without them the code cannot be verified.

    Causes: a docstring that is written for the base class; a shape in words.
    """
    cls = bench.subject.trainer_class
    faults = [f"{what} has no docstring" for what, owner in _documented(bench.subject) if not _own_doc(owner)]
    faults += [
        f"method.{name} has no docstring below it"
        for name, field in method_fields(bench.subject).items()
        if not field.description
    ]
    texts = [_own_doc(owner) for what, owner in _documented(bench.subject) if what.startswith(("loss", "the batch"))]
    if not any(SHAPE.search(text) for text in texts) and not any(map(_says_shapes, _batches(bench.subject))):
        faults += [
            "no docstring of the loss or of a batch gives a shape; write it in brackets, as [B, T], and [] for a scalar"
        ]
    package = sys.modules[cls.__module__.split(".")[0]]
    sources = [_own_doc(owner) for owner in (package, sys.modules[cls.__module__], cls, cls.method_class)]
    if not any(SOURCE.search(text) for text in sources):
        faults += [
            "neither the module nor the trainer nor its config names a source: a paper with its year, an arXiv id, or "
            "the number of an equation"
        ]
    require(not faults, "; ".join(faults))


def _documented(subject: Subject) -> Iterator[tuple[str, Any]]:
    cls = subject.trainer_class
    yield f"the module {cls.__module__}", sys.modules[cls.__module__]
    yield f"the trainer {cls.__name__}", cls
    yield f"the config {cls.method_class.__name__}", cls.method_class
    for batch in _batches(subject):
        yield f"the batch {batch.__name__}", batch
    home = cls.__module__.split(".")[0]
    for name in ("loss", "make_experience", "experience"):
        function = getattr(cls, name)
        if function.__module__.split(".")[0] == home:
            yield f"{name} of {cls.__name__}", function


def _batches(subject: Subject) -> list[type]:
    """Return the batch classes that the plugin defines."""
    home = subject.trainer_class.__module__.split(".")[0]
    return [cls for cls in BATCH_CLASSES.values() if cls.__module__.split(".")[0] == home and is_dataclass(cls)]


def _own_doc(owner: Any) -> str:
    """Return the docstring written for ``owner`` itself, without the one that dataclasses generate."""
    text = inspect.cleandoc(vars(owner).get("__doc__") or "" if isinstance(owner, type) else owner.__doc__ or "")
    return "" if isinstance(owner, type) and text.startswith(f"{owner.__name__}(") else text


def _says_shapes(batch: type) -> bool:
    """Return whether a docstring below a field gives a shape."""
    return bool(SHAPE.search(inspect.getsource(batch)))
