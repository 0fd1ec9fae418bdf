"""Checks of estimates: of the KL from a reference, and of the entropy, against what they estimate."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainkit.errors import suggest
from trainkit.metrics import Metrics, merge
from trainkit.testing.declarations import Effect, Structure
from trainkit_kit.checking import check
from trainkit_kit.checks.structure import structures
from trainkit_kit.checks.tools import floats, for_loss
from trainkit_kit.checks.world import Enumerated, gradient_by, settings_of
from trainkit_kit.failures import require
from trainkit_kit.stand_in import collect_given, learns_from_given
from trainkit_kit.subjects import Bench, Subject
from trainkit_kit.tables import State, tabular

CLOSE = 1e-4
"""Largest relative difference of numbers that are equal up to rounding."""


def _of(subject: Subject) -> list[tuple[str, float]]:
    """Return the settings that raise the entropy, by what is declared, each with its largest declared value."""
    return [
        (name, max(value for value in effect.values if value is not None))
        for name, given in subject.declaration.effects.items()
        for effect in ([given] if isinstance(given, Effect) else given)
        if effect.quantity == "entropy" and effect.rises
    ]


def has_bonus(subject: Subject) -> bool:
    """Return whether the subject samples text, and declares a setting that raises the entropy."""
    return subject.causal and subject.samples_text and learns_from_given(subject) and bool(_of(subject))


@check(where=has_bonus)
def entropy_of_states(bench: Bench) -> None:
    """Check that without advantages, the gradient of an entropy bonus in a state is that of the state's entropy.

    It cannot depend on the token that was sampled there. −log π of this token has the entropy as its mean, and its
    gradient the mean 0, so that it changes nothing but noise.

    Causes: ``-logprobs`` instead of ``entropy``; a weight of the bonus that depends on the advantage or the ratio.
    """
    for name, value in _of(bench.subject):
        collection, seen = Enumerated(bench, {f"method.{name}": value}, 2, 2, equal=True), dict[State, Seen]()
        trainer, table = collection.trainer, collection.table
        with tabular(trainer, table, collection.reference):
            batch = collect_given(trainer, collection.given)
            for ids in collection.every:
                row = next(at for at, each in enumerate(collection.given) if each.ids == ids)
                found = -gradient_by(trainer, table, batch.select(torch.tensor([row]))) * len(ids)
                for at, token in enumerate(ids):
                    here = table.place(ids[:at])
                    _require_entropy(found[here], table.logits[here], ids[:at], token)
                    _require_same(seen.setdefault(ids[:at], (token, found[here])), (token, found[here]), ids[:at])


Seen = tuple[int, Tensor]
"""A token that was sampled in a state, and the gradient by the logits of the state."""


def _require_same(one: Seen, other: Seen, state: State) -> None:
    """Fail unless the gradient in a state is the same whichever token was sampled."""
    require(
        torch.allclose(one[1], other[1], rtol=0, atol=CLOSE * float(one[1].abs().max())),
        f"with advantages of 0, the gradient by the logits of the state after {list(state)} is {_told(one[1])} if "
        f"token {one[0]} was sampled, and {_told(other[1])} if token {other[0]} was; the entropy does not depend on it",
    )


def _require_entropy(found: Tensor, logits: Tensor, state: State, token: int) -> None:
    """Fail unless a gradient by the logits of a state has the direction of the gradient of its entropy."""
    leaf = logits.detach().clone().requires_grad_()
    logs = leaf.log_softmax(-1)
    (due,) = torch.autograd.grad(-(logs.exp() * logs).sum(), leaf)
    factor = float((found * due).sum() / (due * due).sum())
    require(
        factor > 0 and torch.allclose(found, factor * due, rtol=0, atol=10 * CLOSE * float(found.abs().max())),
        f"with advantages of 0, the loss changes the logits of the state after {list(state)}, where token {token} was "
        f"sampled, in the direction {_told(found)}; the gradient of its entropy is {_told(due)}",
    )


def _told(values: Tensor) -> str:
    return "[" + ", ".join(f"{value:.3g}" for value in values.tolist()) + "]"


# ------------------------------------------------------------------------------------------------ estimates of the KL


def declares_estimates(subject: Subject) -> bool:
    """Return whether the subject declares what its metrics estimate."""
    return (
        subject.causal
        and subject.samples_text
        and learns_from_given(subject)
        and any(structures(subject, part) for part in ("unbiased", "non_negative"))
    )


@check(where=declares_estimates)
def estimates_as_declared(bench: Bench) -> None:
    """Check estimates of the KL and the entropy against their closed forms, exactly, and that they are not negative.

    The collection has every response as often as it is likely, so that the mean of an unbiased estimate is what it
    estimates. The square of a log-ratio, a mean of means over responses of unequal lengths, and an estimate with the
    policies exchanged are close to it in runs, and not equal.

    Causes: k1 or k2 instead of k3; a mean of the responses' means; a sum over tokens where a mean is meant.
    """
    for structure in bench.subject.declaration.structure:
        if structure.unbiased is None and structure.non_negative is None:
            continue
        collection = Enumerated(bench, settings_of(bench.subject, structure), 2, 2)
        found, due = _metrics(collection, None), _exact(collection)
        for name in structure.unbiased or ():
            _require_known(name, found)
            exact = due["entropy" if "entropy" in name else "per token" if "per_token" in name else "response"]
            require(
                abs(found[name] - exact) <= CLOSE * abs(exact),
                f"{name} is {found[name]:.6g} over all responses as often as they are likely, and exactly {exact:.6g}",
            )
        _require_non_negative(collection, structure)


def _require_non_negative(collection: Enumerated, structure: Structure) -> None:
    for ids in collection.every if structure.non_negative else ():
        found = _metrics(collection, ids)
        for name in structure.non_negative or ():
            _require_known(name, found)
            require(
                found[name] >= -CLOSE, f"{name} of the response {list(ids)} alone is {found[name]:.6g}, and negative"
            )


def _require_known(name: str, found: dict[str, float]) -> None:
    require(name in found, f"the structure names the metric {name!r}, which is not there{suggest(name, found)}")


def _metrics(collection: Enumerated, only: tuple[int, ...] | None) -> dict[str, float]:
    """Return the metrics of a collection of everything, or of one response, and of its loss before an update."""
    trainer: Any = collection.trainer
    trainer.store.clear()
    trainer.recorder.take()
    given = collection.given
    if only is not None:
        given = [each for each in given if each.ids == only][:1] * trainer.samples_per_prompt
    with tabular(trainer, collection.table, collection.reference), torch.no_grad():
        batch = collect_given(trainer, given)
        _, of_loss = trainer.loss(for_loss(trainer, batch))
    recorded: Metrics = merge(trainer.recorder.take(), of_loss)
    return floats(recorded)


@torch.no_grad()
def _exact(collection: Enumerated) -> dict[str, float]:
    world = collection.world()
    divergences = (world.policy.exp() * (world.policy - world.reference)).sum(-1) * world.mask  # [B, T]
    entropies = -(world.policy.exp() * world.policy).sum(-1) * world.mask
    tokens = float(world.mask.sum())
    return {
        "response": float(divergences.sum(1).mean()),
        "per token": float(divergences.sum()) / tokens,
        "entropy": float(entropies.sum()) / tokens,
    }
