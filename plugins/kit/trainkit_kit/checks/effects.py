"""Checks of what settings do: the effects that an algorithm declares are measured."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from types import NoneType
from typing import Any

import torch
from torch import Tensor

from trainkit.data import Batch, Preferences, Rollouts, Sequences, TokenBatch
from trainkit.errors import suggest
from trainkit.functional import masked_mean
from trainkit.models import TokenOutputs
from trainkit.testing.declarations import QUANTITIES, Effect
from trainkit_kit.checking import check
from trainkit_kit.checks.fields import bounds, contexts, is_number, kinds_of, method_fields, other_values, trainer_with
from trainkit_kit.checks.losses import evaluated
from trainkit_kit.checks.tools import (
    apart,
    credits_of,
    flat_gradient,
    floats,
    for_loss,
    ids_of,
    most_changed,
    nudged,
    place_of,
    push_away,
    readings,
    rewarding,
    sequences_in,
    under_masks,
)
from trainkit_kit.checks.traces import metric_lines
from trainkit_kit.failures import CheckError, require
from trainkit_kit.subjects import Bench, Subject

CLOSE = 1e-4
"""Largest relative difference of numbers that are equal up to rounding."""
PARALLEL = 8
"""The least numbers of a gradient that are not a multiple of another by chance."""


def declares_effects(subject: Subject) -> bool:
    """Return whether the subject declares effects of its settings."""
    return bool(subject.declaration.effects)


def effects_of(subject: Subject) -> Iterator[tuple[str, Effect]]:
    """Yield the declared effects with the names of their settings."""
    for name, given in subject.declaration.effects.items():
        for effect in [given] if isinstance(given, Effect) else given:
            yield name, effect


DIRECTIONS, NUMBERS = {"rises", "falls"}, {"equals", "linear", "proportional"}
"""The ways of an `Effect` that say in which direction a quantity moves, and by how much."""


def unproven(subject: Subject) -> dict[str, str]:
    """Return the settings of a trainer whose effect is not declared, or only as a direction.

    The clip ranges that a `Structure` names are proven by `surrogate_is_pessimistic`.

    Returns:
        What is missing, by the name of the setting.
    """
    surrogates = (each for each in subject.declaration.structure if each.surrogate not in (None, "none"))
    measured = {name for each in surrogates for name in each.cliprange}
    ways: dict[str, set[str]] = {}
    for name, effect in effects_of(subject):
        ways.setdefault(name, set()).add(effect.way)
    found: dict[str, str] = {}
    for name in method_fields(subject):
        declared = ways.get(name, set())
        if not declared and name not in measured:
            found[name] = "nothing is declared"
        elif DIRECTIONS & declared and not NUMBERS & declared and name not in measured:
            found[name] = "only a direction is declared"
    return found


def unproven_settings(subject: Subject) -> str:
    """Return which settings are unproven, and the lines to write; empty: none is."""
    missing = unproven(subject)
    if not missing:
        return ""
    fields, cls = method_fields(subject), subject.trainer_class
    told = [f"unproven: {', '.join(f'method.{name} ({why})' for name, why in missing.items())}"]
    told += [f"  Write into {cls.__module__}, or into the module kit beside it, and correct the values:", ""]
    told += ["    from trainkit.testing import Declaration, Effect"]
    told += ["    KIT = Declaration(effects={"]
    told += [f'        "{name}": {_line(fields[name], getattr(subject.tiny.method, name))},' for name in missing]
    return "\n".join([*told, "    })"])


def _line(field: Any, value: Any) -> str:
    """Return an `Effect` of a setting to begin with: of a weight that of its term, of others that of a number."""
    if is_number(field) and float in kinds_of(field):
        return f'Effect("gradient", linear={tuple(_weights(field, value))})'
    values = [value, *other_values(field, value)][:2]
    return f'Effect("loss", equals={{{", ".join(f"{each!r}: ..." for each in values)}}})'


def _weights(field: Any, value: Any) -> list[float]:
    """Return three values of a weight whose squares are in equal steps, within the bounds of the setting."""
    limits = bounds(field)
    top = limits.get("le", limits.get("lt"))
    low = float(value) if isinstance(value, int | float) and value > 0 else 0.5
    if top is not None and low * 3**0.5 >= top:
        low = top / 2
    return [round(low * count**0.5, 4) for count in (1, 2, 3)]


def has_unproven_weights(subject: Subject) -> bool:
    """Return whether the effect of a setting that is a real number is not declared as a number."""
    return any(float in kinds_of(method_fields(subject)[name]) for name in unproven(subject))


@check(where=has_unproven_weights)
def weights_count_once(bench: Bench) -> None:
    """Check that no setting without a declared number changes the gradient by its square: a weight counts once.

    A weight that is applied to a term of the loss and again where the term is computed has the right direction, and the
    right size at 1. Declare what the setting does, by `equals`, `linear` or `proportional`, if its square is meant.

    Causes: a coefficient in the advantage and in the loss; a scale inside of a square.
    """
    for name in unproven(bench.subject):
        field = method_fields(bench.subject)[name]
        if not is_number(field) or float not in kinds_of(field):
            continue
        settings = contexts(bench.subject).get(name, {})
        values = _weights(field, getattr(bench.subject.tiny.method, name))
        if any(trainer_with(bench, {**settings, f"method.{name}": value}) is None for value in values):
            continue  # a rule of the settings forbids some of the values
        low, middle, high = (_gradient(bench, {**settings, f"method.{name}": value}) for value in values)
        squared, slack = (high - middle) - (middle - low), 1e-3 * float((high - low).norm())
        require(
            float(squared.norm()) > slack or slack <= 1e-7 * float(low.norm()),
            f"the gradient changes by the square of method.{name}: as much from {values[0]:g} to {values[1]:g} as to "
            f"{values[2]:g}",
        )


def has_numbers_or_none(subject: Subject) -> bool:
    """Return whether a setting is a real number or None."""
    return any({float, NoneType} <= kinds_of(field) for field in method_fields(subject).values())


@check(where=has_numbers_or_none)
def zero_is_a_number(bench: Bench) -> None:
    """Check that 0 is not taken for None, where a setting may be both and a millionth acts otherwise than None.

    A score of 0 for responses that have not ended, or a weight of 0, is a choice; None is another.

    Causes: a setting that is tested for its truth, as in `if self.method.score:` or `self.method.score or default`,
    instead of `is not None`.
    """
    for name, field in method_fields(bench.subject).items():
        if not {float, NoneType} <= kinds_of(field):
            continue
        settings = contexts(bench.subject).get(name, {})
        at = [{**settings, f"method.{name}": value} for value in (None, 0.0, 1e-6)]
        if any(trainer_with(bench, each) is None for each in at):
            continue
        none, zero, close = (_gradient(bench, each) for each in at)
        require(
            float((zero - none).norm()) > 1e-6 * float(none.norm())
            or float((zero - close).norm()) <= 1e-3 * float(close.norm()),
            f"the gradient with method.{name} = 0 is that with None, of the norm {float(none.norm()):.6g}, and with "
            f"0.000001 it has the norm {float(close.norm()):.6g}: 0 is taken for None",
        )


@check(where=declares_effects)
def effects_as_declared(bench: Bench) -> None:
    """Check that settings do what is declared: a quantity rises, falls, stays, follows the setting or has a value.

    That a setting changes something, which `fields_have_effects` checks, is also true of a wrong sign: of an entropy
    bonus that lowers the entropy, or of a penalty that is added. That a term grows with its weight is also true of a
    weight that is applied twice: twice the weight should be twice the term, and at 0, if the setting may be 0, nothing
    of the term should be left.

    Causes: a sign; a factor that is missing or applied twice; another setting in its place; a term that is detached, or
    that reads one tensor for another, such as a target for its network. Or the declaration is of another algorithm.
    """
    known, made = method_fields(bench.subject), _Collected(bench)
    for setting, effect in effects_of(bench.subject):
        require(
            setting in known, f"the declared effects name {setting!r}, which is no setting{suggest(setting, known)}"
        )
        values = _with_zero(bench, setting, effect)
        found = [_measured(bench, made, setting, value, effect) for value in values]
        try:
            _require_effect(setting, effect, values, found)
        except CheckError as error:
            told = _other_term(bench, made, setting, effect, found) + _place(bench, setting, effect, values)
            raise CheckError(f"{error}{told}") from None
        if effect.way == "linear" and str(effect.quantity).startswith("gradient"):
            _require_absent(bench, setting, effect, values)


def _settings(bench: Bench, setting: str, value: Any, effect: Effect) -> dict[str, Any]:
    """Return the settings under which an effect is measured."""
    return {**contexts(bench.subject).get(setting, {}), **effect.under, f"method.{setting}": value}


def _with_zero(bench: Bench, setting: str, effect: Effect) -> tuple[Any, ...]:
    """Return the values of an effect; of a weight with 0, if it may be 0."""
    values = effect.values
    if effect.way not in ("linear", "proportional") or 0 in values:
        return values
    allowed = trainer_with(bench, _settings(bench, setting, 0.0, effect)) is not None
    return (0.0, *values) if allowed else values


def _require_absent(bench: Bench, setting: str, effect: Effect, values: tuple[Any, ...]) -> None:
    """Fail if the gradient at 0 has a part of the setting's term: (w + ε) B is a line, too.

    A term has parameters, or with scores of 0 a gradient, to itself. There the rest of the gradient would be a multiple
    of it.
    """
    subject = bench.subject
    scored = "reward_fn" in subject.inputs and not subject.keeps
    probes = [bench, bench.under(arguments={"reward_fn": rewarding([0.0])})] if scored else [bench]
    for probe in probes if 0 in values else ():
        rest, full = (
            _gradients(_moved(probe, _settings(bench, setting, value, effect))) for value in (0.0, max(values))
        )
        for name, left in rest.items():
            term = full[name] - left
            size, own = float(left.norm()), float(term.norm())
            if left.numel() < PARALLEL or size <= 1e-5 * own or own <= 1e-2 * float(full[name].norm()):
                continue
            require(
                abs(float(torch.dot(left, term))) < (1 - 1e-6) * size * own,
                f"with method.{setting} = 0 its term is still there: the gradient of {name} is {size / own:.4g} times "
                f"that which method.{setting} = {max(values):g} adds{_with_scores(probe is not bench)}",
            )


def _with_scores(equal: bool) -> str:
    return ", if all scores are 0" if equal else ""


def _other_term(bench: Bench, made: _Collected, setting: str, effect: Effect, found: list[Tensor]) -> str:
    """Return which other setting's term is to blame if a value is wrong whatever ``setting`` is, in words."""
    if effect.way != "equals":
        return ""
    due = [float(each) for each in effect.equals.values()]
    if not all(_off(number, wanted) for number, wanted in zip(map(float, found), due, strict=True)):
        return ""
    for name, field in method_fields(bench.subject).items():
        without = replace(effect, under={**effect.under, f"method.{name}": 0.0})
        value = effect.values[0]
        if name == setting or not is_number(field):
            continue
        if trainer_with(bench, _settings(bench, setting, value, without)) is None:
            continue
        if not _off(float(_measured(bench, made, setting, value, without)), due[0]):
            return f". With method.{name} = 0 it is right: the fault is in the term of method.{name}"
    return f". It is wrong at all values, so the fault may be in a part that method.{setting} does not change"


def _off(number: float, due: float) -> bool:
    return abs(number - due) > CLOSE * abs(due) + 1e-6


def _place(bench: Bench, setting: str, effect: Effect, values: tuple[Any, ...]) -> str:
    """Return in which field, row and token a setting changes most, and from which token something else is learnt."""
    usual = getattr(bench.subject.tiny.method, setting)
    pair = [usual, *values][-2:] if len(values) < 2 else [values[0], values[-1]]
    trainers = [_moved(bench, _settings(bench, setting, value, effect)) for value in pair]
    one, other = (trainer.store.experience for trainer in trainers)
    told, worst = "", 1e-6
    if type(one) is type(other) and len(one) == len(other):
        fields = under_masks(other).flatten()
        tokens = under_masks(one).sequences.response_mask if isinstance(one, TokenBatch) else None
        for name, value in under_masks(one).flatten().items():
            if not value.is_floating_point() or name not in fields or value.shape != fields[name].shape:
                continue
            off = (value - fields[name]).abs() / value.abs().max().clamp(min=1e-6)
            if off.numel() and float(off.max()) > worst:
                worst, told = float(off.max()), f", the experience changes most in {name}{place_of(off, tokens)}"
    with suppress(Exception):  # a model without log-probabilities
        told += most_changed(*(credits_of(trainer, trainer.store.experience) for trainer in trainers))
    return f". From {pair[0]!r} to {pair[1]!r}{told}" if told else ""


def _require_effect(setting: str, effect: Effect, values: tuple[Any, ...], found: list[Tensor]) -> None:
    """Fail unless the quantity at the values of a setting does what is declared."""
    vectors = effect.way in ("same", "linear", "proportional")
    due = _due(effect, values, found)
    numbers = [float(each.norm() if each.dim() else each) for each in found]
    told = ", ".join(f"{value!r}: {number:.6g}" for value, number in zip(values, numbers, strict=True))
    size = "the norm of " if found[0].dim() else ""
    seen = f"method.{setting} gives {size}{effect.name} the values {told}{_means(effect)}; "
    slack = CLOSE * max(map(abs, numbers)) + 1e-9
    steps = [after - before for before, after in pairwise(numbers)]
    if effect.way == "rises":
        require(all(step > slack for step in steps), f"{seen}it is declared to rise")
    elif effect.way == "falls":
        require(all(step < -slack for step in steps), f"{seen}it is declared to fall")
    elif effect.way == "equals":
        told = ", ".join(f"{float(x):.6g}" for x in due)
        wrong = [_off(number, float(wanted)) for number, wanted in zip(numbers, due, strict=True)]
        require(not any(wrong), f"{seen}the declared ones are {told}")
    elif vectors:
        off = [float((one - other).abs().max()) for one, other in zip(found, due, strict=True)]
        largest = max(float(each.abs().max()) for each in found)
        at = max(range(len(off)), key=lambda index: off[index])
        moved = max(float((each - found[0]).abs().max()) for each in found)
        still = effect.way != "same" and moved <= CLOSE * largest
        require(not still, f"{seen}it is declared to be {effect.way}, and does not change")
        allowed = CLOSE * largest + 1e-9 if effect.way == "same" else 1e-3 * moved + 1e-5 * largest
        require(off[at] <= allowed, f"{seen}{_told_off(effect, values[at], off[at], float(due[at].abs().max()))}")
        left = found[values.index(0)] if effect.way == "proportional" and 0 in values else torch.zeros(())
        require(float(left.abs().max()) <= 1e-6 * largest, f"{seen}at 0 nothing of it should be left")


def _means(effect: Effect) -> str:
    """Return what a quantity that is a function measures: the first line of its docstring, in brackets."""
    text = (inspect.getdoc(effect.quantity) or "") if callable(effect.quantity) else ""
    return f" ({text.partition(chr(10))[0]})" if text else ""


def _told_off(effect: Effect, value: Any, off: float, size: float) -> str:
    """Return what is wrong about the quantity at one of the values of a setting."""
    if effect.way == "same":
        return "it is declared not to change"
    return (
        f"it is declared to be {effect.way}, and at {value!r} it is {off:.4g} away from that, of "
        f"{size:.4g}; a weight that is applied twice, or not to the whole term, looks like this"
    )


def _due(effect: Effect, values: tuple[Any, ...], found: list[Tensor]) -> list[Any]:
    """Return the quantity at each value, as declared; for rises and falls what was found."""
    if effect.way == "equals":
        return list(effect.equals.values())
    if effect.way == "same":
        return [found[0]] * len(found)
    if effect.way == "proportional":
        top = max(range(len(found)), key=lambda index: abs(values[index]))
        return [found[top] * (value / values[top]) for value in values]
    if effect.way == "linear":
        of = [index for index, value in enumerate(values) if value in effect.linear]
        low, high = (pick(of, key=lambda index: values[index]) for pick in (min, max))
        term = (found[high] - found[low]) / (values[high] - values[low])
        return [found[low] + term * (value - values[low]) for value in values]
    return list(found)


class _Collected:
    """The trainers with one collection whose experience is only read, kept for further effects of their settings."""

    def __init__(self, bench: Bench) -> None:
        self.bench, self.kept = bench, dict[str, Any]()

    def __call__(self, settings: dict[str, Any]) -> Any:
        key = repr(sorted(settings.items()))
        if key not in self.kept:
            self.kept[key] = self.bench.collected(**settings)
        return self.kept[key]


def _measured(bench: Bench, made: _Collected, setting: str, value: Any, effect: Effect) -> Tensor:
    """Return the quantity of an effect with the setting at ``value``, in float64. -> [] or [N]."""
    settings, measure = _settings(bench, setting, value, effect), effect.quantity
    found = measure(bench.collected(**settings)) if callable(measure) else _measure_of(measure, made)(bench, settings)
    return torch.as_tensor(found).detach().to("cpu", torch.float64)


Measure = Callable[[Bench, dict[str, Any]], float | Tensor]


def _measure_of(quantity: str, made: _Collected) -> Measure:
    """Return the function that measures a quantity of `QUANTITIES`."""
    if quantity in SIMPLE:
        return SIMPLE[quantity]
    if quantity.startswith("credit of "):
        which = quantity.removeprefix("credit of ")
        require(which in ROWS, f"there is no quantity {quantity!r}{suggest(quantity, QUANTITIES)}")
        return lambda _, settings: _credit(made(settings), ROWS[which])
    if quantity.startswith("gradient of "):
        return lambda bench, settings: _gradient(bench, settings, quantity.removeprefix("gradient of "))
    if quantity.startswith("metric "):
        return lambda bench, settings: _metric(bench, settings, quantity.removeprefix("metric "))
    if quantity.startswith("slope of "):
        return lambda bench, settings: _slope(bench, settings, quantity.removeprefix("slope of "))
    return lambda _, settings: _field(made(settings), quantity)


# ---------------------------------------------------------------------------------------------------------- quantities


def _loss(bench: Bench, settings: dict[str, Any]) -> Tensor:
    trainer = nudged(bench.collected(**settings))
    with torch.no_grad():
        loss: Tensor = trainer.loss(for_loss(trainer, trainer.store.experience))[0]
    return loss


def _collections(bench: Bench, settings: dict[str, Any]) -> int:
    trainer = bench.trainer(**{"train.total_steps": 12, **settings})
    honest, made = trainer.collector.fill, list[int]()

    def fill() -> None:
        made.append(1)
        honest()

    trainer.collector.fill = fill
    trainer.learn()
    return len(made)


def _responses(bench: Bench, settings: dict[str, Any]) -> float:
    rollouts = Rollouts.cat(bench.collected(**settings).collector.collection.rollouts)
    return len(rollouts.rows) / len({tuple(query.tolist()) for query in rollouts.queries})


def _rows(bench: Bench, settings: dict[str, Any]) -> int:
    return len(bench.collected(**settings).store.experience)


def _weight(bench: Bench, settings: dict[str, Any]) -> float:
    return float(bench.collected(**settings).store.experience.weight)


def _skipped(bench: Bench, settings: dict[str, Any]) -> float:
    trainer = bench.learnt(**{"train.total_steps": 12, "optimizer.lr": 0.03, **settings})
    return float(sum(line.get("train/skipped", 0.0) for line in metric_lines(trainer.run_dir, training=True)))


def _unclipped(bench: Bench, settings: dict[str, Any]) -> float:
    trainer = nudged(bench.collected(**settings), 0.05)
    credits_ = [credit for reading in readings(trainer, trainer.store.experience) for _, credit in reading.rows()]
    return float((torch.cat(credits_) != 0).float().mean())


def _unclipped_values(bench: Bench, settings: dict[str, Any]) -> float:
    trainer = nudged(bench.collected(**settings), 0.05)
    kept: list[Any] = []

    def note(_: Any, __: Any, outputs: Any) -> None:
        require(getattr(outputs, "values", None) is not None, "the policy gives no values")
        outputs.values.retain_grad()
        kept.append(outputs.values)

    batch = for_loss(trainer, trainer.store.experience)
    handle = trainer.policy.register_forward_hook(note)
    try:
        trainer.loss(batch)[0].backward()
    finally:
        handle.remove()
    return float(masked_mean((kept[0].grad != 0).float(), batch.sequences.response_mask))


def _rate(what: str) -> Measure:
    """Return a measure of how much a step raises an output of the policy."""

    def measure(bench: Bench, settings: dict[str, Any]) -> Tensor:
        trainer = bench.trainer(**{"rollout.num_rollouts": 64, **settings} if bench.subject.online else settings)
        trainer.models.build()  # the reference is made with it
        if what == "divergence":
            push_away(trainer.unwrapped, by=0.1)
        trainer.collect()
        batch = trainer.store.experience
        sequences = Sequences.cat(sequences_in(batch)).to(trainer.accelerator.device)
        trainer.loss(for_loss(trainer, batch))[0].backward()
        step = -flat_gradient(trainer.unwrapped)
        trainer.optimizer.zero_grad()
        extra = {"reference": trainer.reference} if what == "divergence" else {"entropy": what == "entropy"}
        outputs = trainer.policy(sequences, **extra)
        name = "logprobs" if what == "likelihood" else what
        values = outputs.head[name] if name in outputs.head else getattr(outputs, name)
        masked_mean(values, sequences.response_mask).backward()
        along: Tensor = flat_gradient(trainer.unwrapped) @ step
        trainer.optimizer.zero_grad()
        return along

    return measure


def _moved(bench: Bench, settings: dict[str, Any]) -> Any:
    """Return a trainer whose policy has left its reference, has sampled, and has moved again."""
    trainer = apart(bench.trainer(**settings))
    trainer.collect()
    return nudged(trainer)


def _gradient(bench: Bench, settings: dict[str, Any], part: str = "") -> Tensor:
    chosen = [grad for name, grad in _gradients(_moved(bench, settings)).items() if part in name]
    require(chosen, f"no trained parameter has {part!r} in its name")
    return torch.cat(chosen)


def _gradients(trainer: Any) -> dict[str, Tensor]:
    """Return the gradient of the loss on the collection by the names of trained parameters, flat, in float64."""
    trainer.loss(for_loss(trainer, trainer.store.experience))[0].backward()
    trained = [(name, p) for name, p in trainer.unwrapped.named_parameters() if p.requires_grad]
    return {name: (torch.zeros_like(p) if p.grad is None else p.grad).flatten().cpu().double() for name, p in trained}


def _metric(bench: Bench, settings: dict[str, Any], name: str) -> float:
    trainer = _moved(bench, settings)
    with torch.no_grad():
        found = floats(trainer.loss(for_loss(trainer, trainer.store.experience))[1])
    require(name in found, f"the loss has no metric {name!r}{suggest(name, found)}")
    return found[name]


def _slope(bench: Bench, settings: dict[str, Any], output: str) -> Tensor:
    """Return the loss's derivative by a number that is added to an output; 0 for one that the loss does not ask for."""
    trainer = _moved(bench, settings)
    found = evaluated(trainer, for_loss(trainer, trainer.store.experience))
    known = {*TokenOutputs._fields, "outputs", *(name for _, outputs in found.calls for name in outputs)} - {"head"}
    require(output in known, f"the policy has no output {output!r}{suggest(output, known)}")
    return torch.stack([each[output].sum() for each in found.slopes() if output in each] or [torch.zeros(())]).sum()


SIMPLE: dict[str, Measure] = {
    "loss": _loss,
    "gradient": _gradient,
    "collections": _collections,
    "responses": _responses,
    "rows": _rows,
    "weight": _weight,
    "skipped": _skipped,
    "unclipped": _unclipped,
    "unclipped values": _unclipped_values,
    "entropy": _rate("entropy"),
    "divergence": _rate("divergence"),
    "values": _rate("values"),
    "likelihood": _rate("likelihood"),
}


# -------------------------------------------------------------------------------------------------- credit and fields


def _ended(trainer: Any) -> dict[Any, bool]:
    """Return whether each sampled response has ended, by its ids."""
    rollouts = Rollouts.cat(trainer.collector.collection.rollouts)
    return dict(zip(ids_of(rollouts.sequences), rollouts.terminated.tolist(), strict=True))


def _terminated(trainer: Any) -> Callable[[Any], bool]:
    ended = _ended(trainer)
    return lambda ids: ended.get(ids, False)


def _truncated(trainer: Any) -> Callable[[Any], bool]:
    ended = _ended(trainer)
    return lambda ids: not ended.get(ids, True)


def _side(name: str) -> Callable[[Any], Callable[[Any], bool]]:
    def which(trainer: Any) -> Callable[[Any], bool]:
        batch = trainer.store.experience
        require(isinstance(batch, Preferences), f"the experience is a {type(batch).__name__}, which has no pairs")
        ids = {*ids_of(getattr(batch, name))}
        return lambda each: each in ids

    return which


def _labelled(wanted: bool) -> Callable[[Any], Callable[[Any], bool]]:
    def which(trainer: Any) -> Callable[[Any], bool]:
        rows = [row for row in trainer.pipeline.rows if row["label"] is wanted]
        ids = {*ids_of(trainer.encode_samples(rows))}
        return lambda each: each in ids

    return which


ROWS: dict[str, Callable[[Any], Callable[[Any], bool]]] = {
    "truncated": _truncated,
    "terminated": _terminated,
    "first tokens": lambda _: lambda __: True,
    "chosen": _side("chosen"),
    "rejected": _side("rejected"),
    "desirable": _labelled(True),
    "undesirable": _labelled(False),
}


def _credit(trainer: Any, rows: Callable[[Any], Callable[[Any], bool]]) -> Tensor:
    wanted, first = rows(trainer), rows is ROWS["first tokens"]
    credits_ = {ids: credit for ids, credit in credits_of(trainer, trainer.store.experience).items() if wanted(ids)}
    require(credits_, "no response of the tiny run is one of these")
    return torch.cat([credit[:1] if first else credit for credit in credits_.values()]).mean()


def _field(trainer: Any, quantity: str) -> Tensor:
    """Return the mean of a field of the experience, perhaps over some of its rows."""
    size = quantity.startswith("size of ")
    name, _, which = quantity.removeprefix("size of ").partition(" of ")
    batch: Batch = trainer.store.experience
    values = getattr(batch, name, None)
    parts = [key for key, value in batch.parts().items() if isinstance(value, Tensor)]
    known: Sequence[str] = [*QUANTITIES, *parts]
    require(
        isinstance(values, Tensor) and which in ("", "truncated", "terminated"),
        f"there is no quantity {quantity!r}{suggest(quantity, known)}; there are {', '.join(known)}",
    )
    assert isinstance(values, Tensor), "just required"
    values = values.abs().float() if size else values.float()
    rows = torch.ones(len(batch), dtype=torch.bool, device=values.device)
    if which:
        wanted = ROWS[which](trainer)
        rows = torch.tensor([wanted(ids) for ids in ids_of(sequences_in(batch)[0])], device=values.device)
        require(rows.any(), f"no row of the experience is {which}")
    if values.dim() < 2 or not isinstance(batch, TokenBatch):
        return values[rows].mean()
    return masked_mean(values[rows], batch.sequences.response_mask[rows])
