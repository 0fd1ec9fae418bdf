"""Checks of what settings do: the effects that an algorithm declares are measured."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
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
    for_loss,
    ids_of,
    nudged,
    push_away,
    readings,
    sequences_in,
)
from trainkit_kit.checks.traces import metric_lines
from trainkit_kit.failures import require
from trainkit_kit.subjects import Bench, Subject

CLOSE = 1e-4
"""Largest relative difference of numbers that are equal up to rounding."""


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
    """Return the settings of a trainer whose effect is not declared, or not by a number where one exists.

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
    for name, field in method_fields(subject).items():
        declared = ways.get(name, set())
        if not declared and name not in measured:
            found[name] = "nothing is declared"
        elif is_number(field) and DIRECTIONS & declared and not NUMBERS & declared and name not in measured:
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
        values = _weights(field, getattr(bench.trainer().method, name))
        if any(trainer_with(bench, {**settings, f"method.{name}": value}) is None for value in values):
            continue  # a rule of the settings forbids some of the values
        low, middle, high = (_gradient(bench, {**settings, f"method.{name}": value}).double() for value in values)
        squared, slack = (high - middle) - (middle - low), 1e-3 * float((high - low).norm())
        require(
            float(squared.norm()) > slack or slack <= 1e-7 * float(low.norm()),
            f"the gradient changes by the square of method.{name}: as much from {values[0]:g} to {values[1]:g} as to "
            f"{values[2]:g}",
        )


@check(where=declares_effects)
def effects_as_declared(bench: Bench) -> None:
    """Check that settings do what is declared: a quantity rises, falls, stays, follows the setting or has a value.

    That a setting changes something, which `fields_have_effects` checks, is also true of a wrong sign: of an entropy
    bonus that lowers the entropy, or of a penalty that is added. That a term grows with its weight is also true of a
    weight that is applied twice: twice the weight should be twice the term.

    Causes: a sign; a factor that is missing or applied twice; another setting in its place; a term that is detached, or
    that reads one tensor for another, such as a target for its network. Or the declaration is of another algorithm.
    """
    known, made = method_fields(bench.subject), _Collected(bench)
    for setting, effect in effects_of(bench.subject):
        require(
            setting in known, f"the declared effects name {setting!r}, which is no setting{suggest(setting, known)}"
        )
        found = [_measured(bench, made, setting, value, effect) for value in effect.values]
        _require_effect(setting, effect, found)


def _require_effect(setting: str, effect: Effect, found: list[Tensor]) -> None:
    """Fail unless the quantity at the values of a setting does what is declared."""
    vectors = effect.way in ("same", "linear", "proportional")
    due = _due(effect, found)
    numbers = [float(each.norm() if each.dim() else each) for each in found]
    told = ", ".join(f"{value!r}: {number:.6g}" for value, number in zip(effect.values, numbers, strict=True))
    size = "the norm of " if found[0].dim() else ""
    seen = f"method.{setting} gives {size}{effect.name} the values {told}{_means(effect)}; "
    slack = CLOSE * max(map(abs, numbers)) + 1e-9
    steps = [after - before for before, after in pairwise(numbers)]
    if effect.way == "rises":
        require(all(step > slack for step in steps), f"{seen}it is declared to rise")
    elif effect.way == "falls":
        require(all(step < -slack for step in steps), f"{seen}it is declared to fall")
    elif effect.way == "equals":
        off = [abs(number - float(wanted)) for number, wanted in zip(numbers, due, strict=True)]
        told = ", ".join(f"{float(x):.6g}" for x in due)
        require(max(off) <= CLOSE * max(abs(float(x)) for x in due) + 1e-6, f"{seen}the declared ones are {told}")
    elif vectors:
        off = [float((one - other).abs().max()) for one, other in zip(found, due, strict=True)]
        largest = max(float(each.abs().max()) for each in found)
        at = max(range(len(off)), key=lambda index: off[index])
        moved = max(float((each - found[0]).abs().max()) for each in found)
        still = effect.way != "same" and moved <= CLOSE * largest
        require(not still, f"{seen}it is declared to be {effect.way}, and does not change")
        allowed = CLOSE * largest + 1e-9 if effect.way == "same" else 1e-3 * moved + 1e-5 * largest
        require(off[at] <= allowed, f"{seen}{_told_off(effect, at, off[at], float(due[at].abs().max()))}")


def _means(effect: Effect) -> str:
    """Return what a quantity that is a function measures: the first line of its docstring, in brackets."""
    text = (inspect.getdoc(effect.quantity) or "") if callable(effect.quantity) else ""
    return f" ({text.partition(chr(10))[0]})" if text else ""


def _told_off(effect: Effect, at: int, off: float, size: float) -> str:
    """Return what is wrong about the quantity at one of the values of a setting."""
    if effect.way == "same":
        return "it is declared not to change"
    return (
        f"it is declared to be {effect.way}, and at {effect.values[at]!r} it is {off:.4g} away from that, of "
        f"{size:.4g}; a weight that is applied twice, or not to the whole term, looks like this"
    )


def _due(effect: Effect, found: list[Tensor]) -> list[Any]:
    """Return the quantity at each value, as declared; for rises and falls what was found."""
    values = effect.values
    if effect.way == "equals":
        return list(effect.equals.values())
    if effect.way == "same":
        return [found[0]] * len(found)
    if effect.way == "proportional":
        top = max(range(len(found)), key=lambda index: abs(values[index]))
        return [found[top] * (value / values[top]) for value in values]
    if effect.way == "linear":
        low, high = (pick(range(len(found)), key=lambda index: values[index]) for pick in (min, max))
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
    settings = {**contexts(bench.subject).get(setting, {}), **effect.under, f"method.{setting}": value}
    measure = effect.quantity
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
    trainer = _moved(bench, settings)
    chosen = [p for name, p in trainer.unwrapped.named_parameters() if part in name and p.requires_grad]
    require(chosen, f"no trained parameter has {part!r} in its name")
    trainer.loss(for_loss(trainer, trainer.store.experience))[0].backward()
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten().cpu() for p in chosen])


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
