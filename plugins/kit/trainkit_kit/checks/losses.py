"""Checks of a loss as a function of the policy's outputs: whose scores count, what is clipped, what is detached."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainkit.data import Batch, Rollouts, Sequences
from trainkit.errors import suggest
from trainkit.models import TokenOutputs
from trainkit.testing.trainers import PAIRS
from trainkit_kit.checking import check
from trainkit_kit.checks.structure import declared, fractions, raised, structures
from trainkit_kit.checks.tools import Ids, as_it_was, for_loss, ids_of, nudged, require_finite
from trainkit_kit.failures import require
from trainkit_kit.subjects import Bench, Subject

STEP = 1e-5
"""The distance over which a derivative is measured, in float64."""


@dataclass(frozen=True)
class Evaluation:
    """A loss in float64, with the policy's outputs that it was computed from, as leaves of its graph."""

    loss: Tensor
    calls: list[tuple[Any, dict[str, Tensor]]]
    """What the policy was called with, and its outputs by name, for each call."""

    def slopes(self) -> list[dict[str, Tensor]]:
        """Return the derivatives of the loss by the outputs of each call; 0 for outputs that it does not use."""
        leaves = [leaf for _, outputs in self.calls for leaf in outputs.values()]
        found = iter(torch.autograd.grad(self.loss, leaves, materialize_grads=True))
        return [{name: next(found) for name in outputs} for _, outputs in self.calls]


def evaluated(trainer: Any, prepared: Batch, moved: Callable[[int, str, Tensor], Tensor] | None = None) -> Evaluation:
    """Return the loss on a prepared batch, computed in float64 from the policy's outputs.

    Args:
        trainer: the trainer.
        prepared: the batch, as the loss gets it.
        moved: changes an output, given the index of the call, the output's name and the output.
    """
    calls: list[tuple[Any, dict[str, Tensor]]] = []

    def replaced(_: Any, positional: tuple[Any, ...], named: dict[str, Any], outputs: Any) -> Any:
        leaves: dict[str, Tensor] = {}

        def leaf(name: str, x: Any) -> Any:
            if not isinstance(x, Tensor) or not x.requires_grad:
                return x
            wide = x.detach().double()
            leaves[name] = (wide if moved is None else moved(len(calls), name, wide)).requires_grad_()
            return leaves[name]

        found = leaf("outputs", outputs)
        if isinstance(outputs, TokenOutputs):
            head = {name: leaf(name, x) for name, x in outputs.head.items()}
            parts = {name: leaf(name, x) for name, x in outputs._asdict().items() if name != "head"}
            found = outputs._replace(**parts, head=head)
        calls.append((positional[0] if positional else named.get("sequences"), leaves))
        return found

    handle = trainer.policy.register_forward_hook(replaced, with_kwargs=True)
    try:
        with as_it_was(trainer):
            loss, _ = trainer.loss(prepared)
    finally:
        handle.remove()
    require(calls, "the loss does not call trainer.policy")
    require_finite(loss)
    return Evaluation(loss, calls)


# -------------------------------------------------------------------------------------------------------- the gradient


@check(where=declared("detached"))
def gradient_is_that_of_the_loss(bench: Bench) -> None:
    """Check that the gradient is the derivative of the loss, except through outputs that are declared as detached.

    A term that is detached by mistake is in the loss and in its metrics, and nothing is learnt from it. A weight that
    should be detached, and is not, is learnt instead of what it weighs.

    Causes: `.detach()` on a term instead of its weight; `torch.no_grad` around a part of the loss; targets that are not
    detached.
    """
    for structure in structures(bench.subject, "detached"):
        assert structure.detached is not None, "structures() has selected it"
        trainer = nudged(bench.collected(**structure.under), 0.003)
        prepared = for_loss(trainer, trainer.store.experience)
        usual = evaluated(trainer, prepared)
        slopes, names = usual.slopes(), sorted({name for _, outputs in usual.calls for name in outputs})
        moving = any(slope.any() for each in slopes for slope in each.values())
        require(moving, "after a small change of the policy the loss has no gradient, so it cannot be checked")
        for name in structure.detached:
            require(name in names, f"the policy has no output {name!r} with a gradient{suggest(name, names)}")
        for name in names:
            _require_derivative(trainer, prepared, slopes, name, detached=name in structure.detached)


def _require_derivative(
    trainer: Any, prepared: Batch, slopes: list[dict[str, Tensor]], name: str, *, detached: bool
) -> None:
    """Fail unless the gradient by an output is the derivative of the loss, or if it is and should not be."""
    draws = torch.Generator().manual_seed(2)
    calls = [call for call, each in enumerate(slopes) if name in each]
    along = {call: torch.randn(slopes[call][name].shape, generator=draws).to(slopes[call][name]) for call in calls}

    def loss_at(step: float) -> float:
        def moved(call: int, of: str, x: Tensor) -> Tensor:
            return x + step * along[call] if of == name else x

        return float(evaluated(trainer, prepared, moved).loss.detach())

    parts = torch.cat([(slopes[call][name] * along[call]).flatten() for call in calls])
    by_gradient, size = float(parts.sum()), float(parts.norm())
    derivative = (loss_at(STEP) - loss_at(-STEP)) / (2 * STEP)
    alike = abs(by_gradient - derivative) <= 1e-3 * max(size, abs(derivative)) + 1e-9
    what = f"if the policy's {name} change in a random direction, the loss changes by {derivative:.6g} per unit"
    require(
        alike or detached,
        f"{what}, and by its gradient it should change by {by_gradient:.6g}: a part of the loss is detached",
    )
    require(
        not alike or not detached, f"{what}, as its gradient says; a part of the loss is declared to be detached there"
    )


# --------------------------------------------------------------------------------------------------------- no clipping


def clips_nothing(subject: Subject) -> bool:
    """Return whether a subject declares that it clips nothing."""
    return any(each.surrogate == "none" for each in structures(subject, "surrogate"))


@check(where=clips_nothing)
def nothing_is_clipped(bench: Bench) -> None:
    """Check that no output of the policy loses its gradient when the policy moves, where no surrogate is declared.

    A loss that is clipped or clamped stops to learn from a row as soon as the policy is far enough from where it was.

    Causes: `clamp` of log-ratios, margins or weights; `relu` of a difference; a mask computed from the current policy.
    """
    for structure in structures(bench.subject, "surrogate"):
        if structure.surrogate != "none":
            continue
        trainer = bench.collected(**structure.under)
        batch = trainer.store.experience
        before = evaluated(trainer, for_loss(trainer, batch)).slopes()
        for size in (0.03, 0.1, 0.3):
            nudged(trainer, size)
            after = evaluated(trainer, for_loss(trainer, batch)).slopes()
            for one, other in zip(before, after, strict=True):
                for name in one:
                    lost = (one[name] != 0) & (other[name] == 0)
                    require(
                        not lost.any(),
                        f"after the policy has moved, the loss has no gradient at {int(lost.sum())} of "
                        f"{int((one[name] != 0).sum())} {name} at which it had one; something is clipped",
                    )


# ------------------------------------------------------------------------------------------------- whose scores count


Learnt = dict[Ids, Tensor]
"""What is learnt from each row: the derivatives of the loss by the policy's outputs at its response tokens."""
Change = tuple[Learnt, Learnt, set[Ids]]
"""What is learnt before and after the score of one row was changed, and the ids of this row."""


def compares_texts(subject: Subject) -> bool:
    """Return whether a subject learns from texts with scores or labels, and declares whose scores count."""
    return subject.language and not subject.needs_environment and bool(structures(subject, "scores"))


@check(where=compares_texts)
def scores_count_where_declared(bench: Bench) -> None:
    """Check whose scores, rewards, labels or margins count in a row: its own, those of its group, or all.

    A comparison with rows of other prompts, or one that is missing, changes how much is learnt from each row, and often
    not in which direction.

    Causes: a statistic over the collection where one of the group is meant, or the reverse; groups of the wrong size; a
    baseline that is computed and not subtracted.
    """
    for structure in structures(bench.subject, "scores"):
        before, after, own = (_by_sampling if bench.subject.online else _by_dataset)(bench, structure.under)
        changed, prompts = _changed(before, after), {ids[0] for ids in own}
        told = "if the score of one row is raised"
        require(changed & own, f"{told}, what is learnt from it does not change")
        mates = {ids for ids in changed - own if ids[0] in prompts}
        others = {ids for ids in changed - own if ids[0] not in prompts}
        if structure.scores == "collection":
            require(others, f"{told}, nothing changes in rows of other prompts; those of a collection should change")
            continue
        wrong = others | (mates if structure.scores == "row" else set())
        kept = "other rows" if structure.scores == "row" else "rows of other groups"
        require(not wrong, f"{told}, what is learnt from {len(wrong)} {kept} changes, such as {sorted(wrong)[:1]}")
        require(mates or structure.scores == "row", f"{told}, nothing changes in the other responses of its group")


def _changed(before: Learnt, after: Learnt) -> set[Ids]:
    """Return the rows from which something else is learnt; from a row that is not there, nothing is."""
    rows = {ids: values for ids, values in (before | after).items() if values.numel()}
    require(rows, "the loss reads no rows")
    pairs = {ids: [side.get(ids, torch.zeros_like(rows[ids])) for side in (before, after)] for ids in rows}
    largest = max(float(values.abs().max()) for pair in pairs.values() for values in pair)
    return {ids for ids, (one, other) in pairs.items() if (one - other).abs().max() > 1e-6 * largest}


def _by_sampling(bench: Bench, under: Mapping[str, Any]) -> Change:
    """Return what is learnt with the scores of a collection, and if its lowest score is raised by one."""
    trainer = bench.collected(**under, arguments={"reward_fn": fractions})
    rollouts = Rollouts.cat(trainer.collector.collection.rollouts)
    texts = list(zip(rollouts.prompts, rollouts.outputs, strict=True))
    scores = fractions(rollouts.prompts, rollouts.outputs)
    once = [index for index, text in enumerate(texts) if texts.count(text) == 1]
    require(once, "all responses of the tiny run occur more than once")
    at = min(once, key=lambda index: scores[index])
    other = bench.collected(**under, arguments={"reward_fn": raised(texts[at])})
    return learnt(trainer), learnt(other), {ids_of(rollouts.sequences)[at]}


def _by_dataset(bench: Bench, under: Mapping[str, Any]) -> Change:
    """Return what is learnt from a dataset, and if the margin, the label or the reward of its second sample differs."""
    trainer = bench.collected(**under)
    rows, at = trainer.pipeline.rows, 1
    if "pairs" in bench.subject.inputs:
        pairs = trainer.encode_preferences(rows)
        own = {ids_of(side)[at] for side in (pairs.chosen, pairs.rejected)}
        # from 0.25; as integers, both are 0
        samples = [{**pair, "margin": 0.75} if index == at else pair for index, pair in enumerate(PAIRS)]
        arguments: dict[str, Any] = {"samples": samples}
    else:
        own = {ids_of(trainer.encode_samples(rows))[at]}
        name = "label" if "labels" in bench.subject.inputs else "reward"
        values = [row[name] for row in rows]
        values[at] = not values[at] if name == "label" else values[at] + 1.0
        arguments = {"rewards": values}
    return learnt(trainer), learnt(bench.collected(**under, arguments=arguments)), own


def rated_samples(subject: Subject) -> bool:
    """Return whether the subject learns from samples of text with rewards or labels."""
    return subject.language and not subject.online and bool({"rewards", "labels"} & {*subject.inputs})


@check(where=rated_samples)
def rewards_reach_the_end(bench: Bench) -> None:
    """Check that the reward or the label of a sample changes what is learnt from the last token of its output.

    A reward is that of the whole output, so that it counts for all tokens alike, or first of all for the last one.

    Causes: rewards placed at the first token, at the prompt's last, or in the last column; a mask that leaves out EOS.
    """
    before, after, own = _by_dataset(bench, {})
    for ids in own & before.keys():
        one, other = (found[ids].view(-1, len(ids[1]))[:, -1] for found in (before, after))
        require(
            float((one - other).abs().max()) > 1e-6 * float(before[ids].abs().max()),
            f"if the reward or the label of {ids[0]} → {ids[1]} changes, what is learnt from its last token does not",
        )


def learnt(trainer: Any) -> Learnt:
    """Return the derivatives of the loss by all outputs of the policy for each row, in units of the loss."""
    batch = trainer.store.experience
    found = evaluated(trainer, for_loss(trainer, batch))
    rows: Learnt = {}
    for (sequences, _), slopes in zip(found.calls, found.slopes(), strict=True):
        assert isinstance(sequences, Sequences), "a policy of language is called with them"
        mask = sequences.response_mask
        for row, ids in enumerate(ids_of(sequences)):
            parts = [x[row][mask[row]] if x.dim() > 1 else x[row].view(1) for x in slopes.values()]
            values = torch.cat(parts) * float(batch.weight)
            rows[ids] = rows[ids] + values if ids in rows else values
    return rows
