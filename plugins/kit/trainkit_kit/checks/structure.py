"""Checks of an algorithm's structure: groups, pairs, labels, the reference, and what is declared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from trainkit.data import Batch, Preferences, Rollouts, Sequences
from trainkit.errors import suggest
from trainkit.functional import masked_sum
from trainkit.plugins import hookimpl
from trainkit.testing import tiny_gpt2
from trainkit.testing.declarations import Structure
from trainkit.testing.trainers import PAIRS, PROMPTS
from trainkit_kit.checking import check
from trainkit_kit.checks.fields import trainer_with
from trainkit_kit.checks.policy import SHARP, VOCABULARY
from trainkit_kit.checks.tools import (
    Ids,
    Reading,
    credits_of,
    hashed,
    ids_of,
    nudged,
    readings,
    require_close,
    summed,
)
from trainkit_kit.failures import require
from trainkit_kit.subjects import Bench, Subject

SIZES = (2, 3, 4)
"""Numbers of responses to a prompt: with two, the second-best is the worst."""


def compares_groups(subject: Subject) -> bool:
    """Return whether the subject compares the responses to a prompt by scores of a reward function."""
    return subject.samples_text and bool(subject.trainer_class.group) and "reward_fn" in subject.inputs


def fractions(prompts: list[str], outputs: list[str], **_: Any) -> list[float]:
    """Return scores between 0.1 and 0.9 that follow from the text."""
    return [0.1 + 0.8 * hashed(*each) / (1 << 32) for each in zip(prompts, outputs, strict=True)]


def scaled(factor: float, shift: float) -> Callable[..., list[float]]:
    """Return a reward function that multiplies the scores of `fractions` and adds to them."""

    def reward(prompts: list[str], outputs: list[str], **_: Any) -> list[float]:
        return [factor * score + shift for score in fractions(prompts, outputs)]

    return reward


def sized(bench: Bench, size: int) -> dict[str, Any]:
    """Return settings with which a prompt has ``size`` responses; its usual number if the setting refuses ``size``."""
    cls = bench.subject.trainer_class
    require(cls.group, "the structure declares a baseline of a group, and the class has no `group`")
    if trainer_with(bench, {f"method.{cls.group}": size, "rollout.num_rollouts": 8 * size}) is None:
        size = bench.subject.tiny.samples_per_prompt
    return {f"method.{cls.group}": size, "rollout.num_rollouts": 8 * size, "rollout.batch_size": 5}


# -------------------------------------------------------------------------------------------------------------- groups


@check(where=compares_groups)
def credit_follows_scores(bench: Bench) -> None:
    """Check that within a group a better response has no less credit, and the best more than the worst.

    Groups have 2, 3 and 4 responses of one token each; scores are fractions, negative, of both signs or large. Code
    that pairs the best with the second-best, reads a group by columns instead of rows, or compares with zero instead of
    the group, passes if all groups have two responses and all scores are positive.

    Causes: `argsort` used in the place of `argmax`; `view(k, -1)` instead of `view(-1, k)`; a baseline of 0 or of
    another group; advantages that are clipped on one side.
    """
    for size, (factor, shift) in zip((*SIZES, 4), ((1, 0), (1, -5), (300, 0), (1, -0.5)), strict=True):
        settings = sized(bench, size)
        trainer = bench.collected(
            **settings,
            arguments={"reward_fn": scaled(factor, shift)},
            rollout__max_new_tokens=1,
            model=tiny_gpt2(VOCABULARY, n_positions=64),
        )
        credits_ = credits_of(trainer, trainer.store.experience)
        for group in _groups(trainer):
            _require_order(group, credits_, strict=(factor, shift) in ((1, 0), (1, -0.5)))


def _groups(trainer: Any) -> list[list[tuple[float, Ids]]]:
    """Return the scores and ids of the responses to each prompt of a collection, in the order of the scores."""
    rollouts, size = Rollouts.cat(trainer.collector.collection.rollouts), trainer.samples_per_prompt
    scores = trainer.reward_fn(prompts=rollouts.prompts, outputs=rollouts.outputs)
    rows = list(zip(scores, ids_of(rollouts.sequences), strict=True))
    return [sorted(rows[start : start + size]) for start in range(0, len(rows), size)]


def _require_order(group: list[tuple[float, Ids]], credits_: dict[Ids, Tensor], *, strict: bool) -> None:
    often = [ids for _, ids in group]
    rows = [(score, float(credits_.get(ids, torch.zeros(1)).sum()) / often.count(ids)) for score, ids in group]
    slack = 1e-4 * max(abs(credit) for _, credit in rows)
    told = ", ".join(f"{score:.4g}: {credit:.4g}" for score, credit in rows)
    seen = f"in a group of {len(group)}, responses with the scores have the credit {told}"
    falls = any(one[0] < other[0] and one[1] > other[1] + slack for one, other in combinations(rows, 2))
    require(not falls, f"{seen}; a better response should not have less")
    if strict and len({*often}) == len(group):  # large scores may be clipped to one
        require(rows[-1][1] - rows[0][1] > slack, f"{seen}; the best should have more than the worst")


def compares_by_place(subject: Subject) -> bool:
    """Return whether the subject compares responses by their place; one whose rows vary may pool those to a prompt."""
    return compares_groups(subject) and not subject.trainer_class.rows_vary


@check(where=compares_by_place)
def prompts_may_repeat(bench: Bench) -> None:
    """Check that two groups of responses to one prompt are compared like groups of responses to two prompts.

    A prompt can occur twice in a collection: datasets repeat prompts, and an epoch can end within a collection. Code
    that finds the groups by the text of their prompts merges these two.

    Causes: groups found by the text or the ids of their prompts; a dict by prompt that a later group overwrites.
    """
    settings = sized(bench, 3)
    trainer = bench.trainer(**{**settings, "rollout.max_new_tokens": 3}, arguments={"reward_fn": fractions})
    size = trainer.samples_per_prompt
    trainer.collect()
    rollouts = Rollouts.cat(trainer.collector.collection.rollouts)
    scores = fractions(rollouts.prompts, rollouts.outputs)[: 2 * size]
    queries, responses = rollouts.queries[: 2 * size], rollouts.responses[: 2 * size]
    found = []
    for others in (queries[size:], [queries[0]] * size):
        made = _Kept()
        bench.trainer(**settings, callbacks=[made]).step([*queries[:size], *others], responses, scores)
        found.append(credits_of(bench.collected(**settings), made.experience))
    ids = ids_of(rollouts.sequences)
    group, also = (
        ids[:size],
        {response for _, response in ids[size : 2 * size]},
    )  # the credits of equal ids are added up
    what = "the credit of a group's responses if the other group of the step has another prompt, and if it has the same"
    for each in (each for each in group if group.count(each) == 1 and each[1] not in also):
        one, other = (credits_.get(each, torch.zeros(len(each[1]))) for credits_ in found)
        require_close(one, other, what, rtol=1e-3, atol=1e-6)


class _Kept:
    """An observer that keeps the last experience."""

    experience: Batch

    @hookimpl
    def on_experience(self, experience: Batch) -> None:
        """Keep the experience."""
        self.experience = experience


# ------------------------------------------------------------------------------------------------- pairs and labels


def has_pairs(subject: Subject) -> bool:
    """Return whether the subject learns from pairs of a dataset."""
    return "pairs" in subject.inputs


def may_have_pairs(subject: Subject) -> bool:
    """Return whether the subject learns from pairs of a dataset, or may make pairs of what it samples."""
    return has_pairs(subject) or subject.samples_text


@check(where=may_have_pairs)
def sides_of_pairs(bench: Bench) -> None:
    """Check that the loss raises the chosen side of every pair and lowers the rejected one, whichever is longer.

    Sides that are sorted by length, or padded apart and then confused, are exchanged in some of the pairs. An online
    algorithm passes unless its experience is pairs (`Preferences`).

    Causes: `chunk` of a batch that was sorted in between; chosen and rejected exchanged in the reference; a margin with
    the wrong sign.
    """
    trainer = bench.collected()
    if not has_pairs(bench.subject) and not isinstance(trainer.store.experience, Preferences):
        return
    pairs = trainer.store.experience
    if has_pairs(bench.subject):
        pairs = trainer.encode_preferences(trainer.pipeline.rows)
    pull, sides = _pull(readings(trainer, trainer.store.experience)), (ids_of(pairs.chosen), ids_of(pairs.rejected))
    for one, other in zip(*sides, strict=True):
        if one in sides[1] or other in sides[0]:
            continue  # the chosen side of one pair, and the rejected one of another
        gap = len(other[1]) - len(one[1])
        what = "as long as" if gap == 0 else f"{abs(gap)} tokens {'longer' if gap > 0 else 'shorter'} than"
        require(
            pull.get(one, 0) >= 0 >= pull.get(other, 0),
            f"in a pair whose rejected side is {what} the chosen one, the loss raises the chosen side by "
            f"{pull.get(one, 0):.4g} and the rejected one by {pull.get(other, 0):.4g}",
        )
    whole = [sum(pull.get(ids, 0.0) for ids in side) for side in sides]  # a pair may have its margin already
    require(whole[0] > 0 > whole[1], f"the loss raises chosen sides by {whole[0]:.4g}, rejected ones by {whole[1]:.4g}")
    if has_pairs(bench.subject):
        _require_margins_pull(bench)


def _require_margins_pull(bench: Bench) -> None:
    """Fail if a larger margin of a pair makes the loss raise its chosen side less."""
    pulls = []
    for margin in (0.0, 1.0):
        trainer = bench.trainer(arguments={"samples": [{**pair, "margin": margin} for pair in PAIRS]})
        trainer.collect()
        found, pairs = (
            _pull(readings(trainer, trainer.store.experience)),
            trainer.encode_preferences(trainer.pipeline.rows),
        )
        pulls.append(sum(found.get(ids, 0.0) for ids in {*ids_of(pairs.chosen)}))
    require(
        pulls[1] >= pulls[0] * (1 - 1e-4),
        f"the loss raises the chosen sides of pairs with the margin 0 by {pulls[0]:.4g}, and with the margin 1 by "
        f"{pulls[1]:.4g}; a larger margin should be more to reach, and not less",
    )


def _pull(read: list[Reading]) -> dict[Ids, float]:
    """Return how much the loss raises the log-probability, or the score, of each row."""
    return summed(pair for reading in read for pair in reading.pulls())


def has_labels(subject: Subject) -> bool:
    """Return whether the subject learns from samples that are labelled as good or bad."""
    return "labels" in subject.inputs


@check(where=has_labels)
def labels_decide(bench: Bench) -> None:
    """Check that the loss raises samples whose label is true and lowers the others; one in three is true.

    With as many good samples as bad ones, exchanged labels or weights can pass for noise.

    Causes: labels compared as `label == 1` after a cast; `torch.where` with its branches exchanged; a reference point
    with the wrong sign.
    """
    trainer = bench.collected()
    pull = _pull(readings(trainer, trainer.store.experience))
    rows = trainer.pipeline.rows
    for ids, row in zip(ids_of(trainer.encode_samples(rows)), rows, strict=True):
        found = pull.get(ids, 0.0)
        require(
            found > 0 if row["label"] else found <= 0,
            f"the loss raises the log-probability of a sample whose label is {row['label']} by {found:.4g}",
        )


# ------------------------------------------------------------------------------------------------------- the reference


def has_reference(subject: Subject) -> bool:
    """Return whether the subject compares a policy over tokens with a reference."""
    return subject.writes_text and subject.needs_reference


@check(where=has_reference)
def reference_counts_in_every_row(bench: Bench) -> None:
    """Check that what is learnt from each row depends on the reference's log-probabilities of that row.

    If the policy itself takes the place of the reference in some of the rows, or on one side of pairs, the divergence
    from the reference is not limited there, and its metric is only somewhat too small. Algorithms that use nothing
    but divergences over the vocabulary pass.

    Causes: the policy's own log-probabilities in the place of the reference's, on one side or in some rows; a
    difference that is detached from both.
    """
    usual, trained = _with_reference(bench, {})
    if usual is None:
        return
    for ids in trained:
        changed, _ = _with_reference(bench, {ids: 0.5})
        assert changed is not None, "it was asked before"
        differ = changed.keys() ^ usual.keys() or any(not torch.equal(changed[each], usual[each]) for each in usual)
        require(differ, f"the reference's log-probabilities of {ids[0]} → {ids[1]} have no effect on what is learnt")


def _with_reference(bench: Bench, shifts: Mapping[Ids, float]) -> tuple[dict[Ids, Tensor] | None, list[Ids]]:
    """Return the credits if the reference's log-probabilities of some rows are higher by a number of nats.

    Also return some of the rows, with unique ids, that the loss reads; the credits are None if the reference computes
    no log-probabilities.
    """
    trainer = bench.trainer(arguments={"reward_fn": fractions} if bench.subject.rewarded else {})
    trainer.models.build()  # the reference is made with it
    with _shifted(trainer, shifts) as asked:
        trainer.collect()
        nudged(trainer)
        credits_ = credits_of(trainer, trainer.store.experience)
    rows = sorted(credits_, key=lambda ids: hashed(str(ids), ""))[:6]
    return (credits_ if asked else None), rows


@contextmanager
def _shifted(trainer: Any, shifts: Mapping[Ids, float], tokens: slice = slice(None)) -> Iterator[list[int]]:
    """Add to the reference's log-probabilities of some rows, or of some of their tokens, within the context."""
    asked: list[int] = []

    def change(_: Any, positional: tuple[Any, ...], named: dict[str, Any], outputs: Any) -> Any:
        asked.append(1)
        sequences = positional[0] if positional else named["sequences"]
        logprobs = outputs.logprobs.clone()
        for row, ids in enumerate(ids_of(sequences)):
            if ids in shifts:
                places = sequences.response_mask[row].nonzero()[tokens, 0]
                logprobs[row, places] += shifts[ids]
        return outputs._replace(logprobs=logprobs)

    handle = trainer.reference.policy.register_forward_hook(change, with_kwargs=True)
    try:
        yield asked
    finally:
        handle.remove()


# ------------------------------------------------------------------------------------------------ declared structure


def structures(subject: Subject, part: str) -> list[Structure]:
    """Return the declared structures that say something about a part."""
    return [each for each in subject.declaration.structure if getattr(each, part) is not None]


def declared(part: str) -> Callable[[Subject], bool]:
    """Return whether a subject declares a part of its structure."""
    return lambda subject: bool(structures(subject, part))


def clips(subject: Subject) -> bool:
    """Return whether a subject declares a clipped surrogate."""
    return any(each.surrogate != "none" for each in structures(subject, "surrogate"))


def may_clip(subject: Subject) -> bool:
    """Return whether the subject declares a clipped surrogate, or learns from scores and declares nothing about it."""
    open_ = subject.writes_text and scored_by_a_function(subject) and not structures(subject, "surrogate")
    return clips(subject) or open_


def has_a_baseline(subject: Subject) -> bool:
    """Return whether the subject declares the baseline of a group, or without groups the policy gradient."""
    alone = not subject.trainer_class.group and scored_by_a_function(subject)
    by_policy = any(each.gradient == "policy" for each in structures(subject, "gradient"))
    return declared("baseline")(subject) or (alone and by_policy)


@check(where=has_a_baseline)
def own_score_left_out(bench: Bench) -> None:
    """Check that a score that is higher by one raises its own advantage by one: it has no part in its own baseline.

    A baseline that includes the own score scales every advantage by (k − 1)/k: the direction stays right, and the size
    of a step depends on k. So does a running mean that is updated before it is subtracted. Advantages that are whitened
    or scaled have a size of their own, and pass.

    Causes: the mean of the whole group as baseline (use `leave_one_out`); a running baseline that has the scores of its
    own collection already; groups that are read by columns; a division by the standard deviation.
    """
    for structure in structures(bench.subject, "gradient"):
        if structure.gradient == "policy" and not bench.subject.trainer_class.group:
            _require_same_rise(bench, structure.under)
    for structure in structures(bench.subject, "baseline"):
        rises: dict[int, float] = {}
        for size in SIZES:
            # with one token, it makes no difference what the loss divides a response by
            settings = {**sized(bench, size), **structure.under, "rollout.max_new_tokens": 1}
            sampled = bench.collected(**settings, arguments={"reward_fn": fractions})
            rollouts, size = Rollouts.cat(sampled.collector.collection.rollouts), sampled.samples_per_prompt
            at = _alone(rollouts)
            changes = _changes(bench, settings, sampled, raised((rollouts.prompts[at], rollouts.outputs[at])))
            ids = ids_of(rollouts.sequences)
            rises[size] = changes[ids[at]]
            for mate in _mates(ids, at, size):
                require(
                    abs(changes[mate] * (size - 1) + rises[size]) < 1e-3 * abs(rises[size]),
                    f"in groups of {size}, a score that is higher by 1 raises its own advantage by {rises[size]:.4f} "
                    f"and changes that of another response by {changes[mate]:.4f}; it should be "
                    f"{-rises[size] / (size - 1):.4f}",
                )
        first = next(iter(rises.values()))
        told = ", ".join(f"{rise:.4f} in groups of {size}" for size, rise in rises.items())
        require(
            all(abs(rise - first) < 1e-3 * abs(first) for rise in rises.values()) and first > 0,
            f"a score that is higher by 1 raises its own advantage by {told}; a baseline of which the own score is no "
            "part gives the same in all",
        )


def _require_same_rise(bench: Bench, under: Mapping[str, Any]) -> None:
    """Fail if a score raises its own advantage by more in a larger collection; what is no line in the score passes."""
    rises: dict[int, float] = {}
    for count in (4, 8):
        settings = {**under, "rollout.num_rollouts": count, "rollout.max_new_tokens": 1}
        sampled = bench.collected(**settings, arguments={"reward_fn": fractions})
        rollouts = Rollouts.cat(sampled.collector.collection.rollouts)
        at = _alone(rollouts)
        own, ids = (rollouts.prompts[at], rollouts.outputs[at]), ids_of(rollouts.sequences)[at]
        once, twice = (_changes(bench, settings, sampled, raised(own, by))[ids] for by in (1.0, 2.0))
        if abs(twice - 2 * once) > 1e-3 * abs(twice):
            return
        rises[count] = once
    few, many = rises.values()
    require(
        abs(many - few) <= 1e-3 * abs(many),
        "a score that is higher by 1 raises its own advantage by "
        f"{' and '.join(f'{rise:.4f} in collections of {count}' for count, rise in rises.items())}: the baseline has a "
        "part of the own score; subtract what it was before the collection",
    )


def _changes(bench: Bench, settings: Mapping[str, Any], usual: Any, reward: Callable[..., Any]) -> dict[Ids, float]:
    """Return by how much the mean advantage of each row differs from ``usual`` with another reward function."""
    other = bench.collected(**settings, arguments={"reward_fn": reward})
    before, after = _advantages(usual), _advantages(other)
    return {ids: float((after[ids] - before[ids]).mean()) for ids in before.keys() & after.keys()}


def _mates(ids: list[Ids], at: int, size: int) -> list[Ids]:
    """Return the other responses of a group whose ids occur once in it."""
    group = ids[at - at % size : at - at % size + size]
    return [each for each in group if each != ids[at] and group.count(each) == 1]


def _alone(rollouts: Rollouts) -> int:
    """Return the index of a response whose text occurs once."""
    texts = list(zip(rollouts.prompts, rollouts.outputs, strict=True))
    found = next((index for index, text in enumerate(texts) if texts.count(text) == 1), None)
    require(found is not None, f"all responses to {len(PROMPTS)} prompts occur more than once")
    assert found is not None, "just required"
    return found


def raised(own: tuple[str, str], by: float = 1.0) -> Callable[..., list[float]]:
    """Return a reward function that gives the scores of `fractions`, and more to a prompt with its response."""

    def reward(prompts: list[str], outputs: list[str], **_: Any) -> list[float]:
        texts = zip(prompts, outputs, strict=True)
        return [score + by * (text == own) for text, score in zip(texts, fractions(prompts, outputs), strict=True)]

    return reward


def _advantages(trainer: Any) -> dict[Ids, Tensor]:
    """Return the advantages of the tokens of each row: their credit before the first update, in units of the loss."""
    batch = trainer.store.experience
    return {ids: credit * float(batch.weight) for ids, credit in credits_of(trainer, batch).items()}


def scored_by_a_function(subject: Subject) -> bool:
    """Return whether the subject learns from scores that a reward function gives to text that it samples."""
    return subject.samples_text and "reward_fn" in subject.inputs


@check(where=scored_by_a_function)
def constant_in_scores(bench: Bench) -> None:
    """Check that one more in all scores changes no advantage by more than one more in its own score.

    A baseline is subtracted, and takes back some of what all scores have in common, or all of it. One that is added
    leaves the expected gradient as it is, and makes it so noisy that a short run may learn all the same.

    Causes: a baseline with the wrong sign; a score that is counted twice, in the reward and in its baseline; a mean of
    the group that is divided by another number than that of its responses.
    """
    usual = bench.collected(arguments={"reward_fn": fractions})
    before = _means_of_advantages(usual)
    after = _means_of_advantages(bench.collected(arguments={"reward_fn": scaled(1, 1.0)}))
    rollouts = Rollouts.cat(usual.collector.collection.rollouts)
    texts = list(zip(rollouts.prompts, rollouts.outputs, strict=True))
    alone = {ids: text for ids, text in zip(ids_of(rollouts.sequences), texts, strict=True) if texts.count(text) == 1}
    changes = {ids: after[ids] - before[ids] for ids in alone if ids in before and ids in after}
    size = max((abs(value) for value in before.values()), default=0.0)
    ids = max(changes, key=lambda each: abs(changes[each]), default=None)
    if ids is None or abs(changes[ids]) <= 1e-3 * size:
        return
    own = _means_of_advantages(bench.collected(arguments={"reward_fn": raised(alone[ids])})).get(ids, 0.0) - before[ids]
    require(
        abs(changes[ids]) <= 1.05 * abs(own) + 1e-3 * size,
        f"if all scores rise by 1, the mean advantage of the response {ids[0]} → {ids[1]} changes by "
        f"{changes[ids]:.4g}; if its own score does alone, by {own:.4g}",
    )


def _means_of_advantages(trainer: Any) -> dict[Ids, float]:
    return {ids: float(values.mean()) for ids, values in _advantages(trainer).items() if values.numel()}


@check(where=may_clip)
def surrogate_is_pessimistic(bench: Bench) -> None:
    """Check that after an update the credit of a token is ρA, or 0 where ρ has left the clip range in A's direction.

    With clipped weights (CISPO) it is clip(ρ)A, and with tokens that are masked outside the range, 0. Otherwise, where
    ρ has left the range against A's direction, the gradient must bring it back: max(−Aρ, −A clip(ρ)). A surrogate that
    is only clipped, a ratio of the policy to itself, and a range that is not used all train in the first step on a
    collection, where ρ is 1, as they should. Where nothing is declared, there need only be a gradient that brings ρ
    back, from between ½ and 2; a mask on both sides is declared as such.

    Causes: the clipped term alone, without the maximum; a ratio of the policy to itself; a clip range that is not the
    setting's; a ratio per token where one per response is declared, or the reverse.
    """
    if not structures(bench.subject, "surrogate"):
        _require_way_back(bench)
    for structure in structures(bench.subject, "surrogate"):
        if structure.surrogate == "none":
            continue
        trainer = bench.collected(
            model=tiny_gpt2(VOCABULARY, **SHARP), arguments={"reward_fn": fractions}, **structure.under
        )
        batch = trainer.store.experience
        before = readings(trainer, batch)[0]
        old, mask = _logprobs(trainer, before.sequences), before.sequences.response_mask
        low, high = (_reach(trainer, name) for name in structure.cliprange)
        seen = set[str]()
        for size in (0.003, 0.01, 0.03, 0.1):  # ratios of responses move faster than those of tokens
            nudged(trainer, size)
            after = readings(trainer, batch)[0]
            ratio = _ratio(_logprobs(trainer, before.sequences) - old, mask, structure.surrogate)
            seen |= _require_surrogate(before, after, ratio, (1 - low, 1 + high), structure.surrogate)
        missing = [where for where in PLACES if where not in seen]
        require(not missing, f"no ratio of the tiny run is {' or '.join(missing)}, so the surrogate cannot be checked")


def _require_way_back(bench: Bench) -> None:
    """Fail if the loss has no gradient at a token whose ratio has moved against its advantage, as the response has."""
    trainer = bench.collected(model=tiny_gpt2(VOCABULARY, **SHARP), arguments={"reward_fn": fractions})
    batch = trainer.store.experience
    before = readings(trainer, batch)[0]
    if before.slopes is None or before.slopes.dim() != 2:
        return
    old, mask, advantage = _logprobs(trainer, before.sequences), before.sequences.response_mask, -before.slopes
    for size in (0.01, 0.03, 0.1):
        after = readings(nudged(trainer, size), batch)[0]
        moved = (_logprobs(trainer, before.sequences) - old).masked_fill(~mask, 0.0)
        wrong = (advantage * moved < 0) & (advantage * moved.sum(1, keepdim=True) < 0) & (moved.exp().log2().abs() < 1)
        lost = wrong & (after.slopes == 0)
        require(
            not lost.any(),
            f"after the policy has moved, the loss has no gradient at {int(lost.sum())} tokens whose ratio, such as "
            f"{float(moved[lost][:1].exp().sum()):.4g}, has moved against their advantage, so it never moves back: the "
            "clipped term alone, without the minimum of both. If tokens outside a range should have no gradient, "
            "declare it: Structure(surrogate='masked', cliprange=(...))",
        )


def _reach(trainer: Any, name: str) -> float:
    """Return how far the ratio may go; a range that is None is that of the setting ``cliprange``."""
    known = type(trainer.method).model_fields
    require(name in known, f"the structure names the clip range {name!r}, which is no setting{suggest(name, known)}")
    value = getattr(trainer.method, name)
    return float(trainer.method.cliprange if value is None else value)


@torch.no_grad()
def _logprobs(trainer: Any, sequences: Sequences) -> Tensor:
    found: Tensor = trainer.policy(sequences).logprobs
    return found


def _ratio(log_ratio: Tensor, mask: Tensor, level: str | None) -> Tensor:
    """Return the importance ratio of each token, [B, T] -> [B, T]."""
    if level in ("token", "cispo", "masked"):
        return log_ratio.exp()
    sums = masked_sum(log_ratio, mask, dim=1)
    return (sums / mask.sum(1) if level == "sequence_mean" else sums).exp().unsqueeze(1).expand_as(log_ratio)


PLACES = (
    "outside the range in the direction of its advantage",
    "outside the range against the direction of its advantage",
    "in the range",
)


def _require_surrogate(
    before: Reading, after: Reading, ratio: Tensor, bounds: tuple[float, float], kind: str | None
) -> set[str]:
    """Fail unless the credit of every token is that of the surrogate; return where ratios are."""
    assert before.slopes is not None, "the loss reads log-probabilities"
    assert after.slopes is not None, "the loss reads log-probabilities"
    mask, advantage, found = before.sequences.response_mask, -before.slopes, -after.slopes
    left = mask & ((advantage > 0) & (ratio > bounds[1]) | (advantage < 0) & (ratio < bounds[0]))
    back = mask & ((advantage > 0) & (ratio < bounds[0]) | (advantage < 0) & (ratio > bounds[1]))
    lost = left | back if kind == "masked" else left
    due = advantage * ratio.clamp(*bounds) if kind == "cispo" else (advantage * ratio).masked_fill(lost, 0.0)
    places = dict(zip(PLACES, (left, back, mask & ~left & ~back), strict=True))
    for where, tokens in places.items():
        at = int(((found - due).abs() * tokens).argmax())
        one, other, unit, rho = (float(values.flatten()[at]) for values in (found, due, advantage, ratio))
        require(
            abs(one - other) <= 1e-3 * float(due.abs().max()) or not tokens.any(),
            f"the ratio of a token is {rho:.4g}, {where}, [{bounds[0]:.3g}, {bounds[1]:.3g}]; its credit is {one:.4g}, "
            f"and should be {other:.4g}: its credit before the update was {unit:.4g}",
        )
    return {where for where, tokens in places.items() if tokens.any()}


@check(where=declared("whitened"))
def whitened_once(bench: Bench) -> None:
    """Check that the fields declared as whitened have mean 0 and standard deviation 1 over a collection's tokens.

    Whitening over a minibatch, over rows, or not at all changes the size of every step.

    Causes: `whiten` with another mask, over a minibatch, or of rows instead of tokens; advantages that are changed
    after they were whitened.
    """
    for structure in structures(bench.subject, "whitened"):
        batch = bench.collected(arguments={"reward_fn": fractions}, **structure.under).store.experience
        for name in structure.whitened or ():
            values = getattr(batch, name)
            values = values if values.dim() == 1 else values[batch.sequences.response_mask]
            mean, std = float(values.mean()), float(values.std())
            biased = float(values.std(correction=0))
            require(
                abs(mean) < 1e-4 and min(abs(std - 1), abs(biased - 1)) < 1e-3,
                f"{name} has the mean {mean:.4g} and the standard deviation {std:.4g} over the tokens of a collection",
            )


@check(where=declared("unscaled"))
def fields_keep_the_scale_of_scores(bench: Bench) -> None:
    """Check that the fields declared as unscaled rise at a response's last token by as much as all scores.

    Returns that are whitened, like advantages, are targets in another unit than the critic's values.

    Causes: `whiten` of returns; rewards that are scaled or clipped before the returns are computed.
    """
    for structure in structures(bench.subject, "unscaled"):
        trainers = [
            bench.collected(arguments={"reward_fn": scaled(1, shift)}, **structure.under) for shift in (0.0, 3.0)
        ]
        batches = [trainer.store.experience for trainer in trainers]
        mask = batches[0].sequences.response_mask
        last = mask & (mask.flip(1).cumsum(1).flip(1) == 1)
        for name in structure.unscaled or ():
            rise = float((getattr(batches[1], name) - getattr(batches[0], name))[last].mean())
            require(abs(rise - 3) < 1e-3, f"if all scores rise by 3, {name} of last tokens rises by {rise:.4g}")


@check(where=declared("kl"))
def kl_penalty_counts_where_declared(bench: Bench) -> None:
    """Check in which advantages the KL penalty of one token counts: its row's, and with the other sign its group's.

    A penalty that counts from the next token on, that all tokens of a response pay although only later ones should, or
    that the baseline lacks, is a penalty still, and lowers the divergence.

    Causes: a cumulative sum that includes or leaves out the token itself; a baseline of scores without penalties; a
    penalty that is counted twice.
    """
    for structure in structures(bench.subject, "kl"):
        require("kl_coef" in bench.subject.method_fields, "the structure declares kl, and there is no setting kl_coef")
        grouped = bool(bench.subject.trainer_class.group)
        settings = {**(sized(bench, 3) if grouped else {}), **structure.under}
        trainer = bench.collected(**settings, arguments={"reward_fn": fractions})
        rollouts, size = Rollouts.cat(trainer.collector.collection.rollouts), trainer.samples_per_prompt
        ids = ids_of(rollouts.sequences)
        at = next((i for i in range(len(ids)) if len(ids[i][1]) > 2 and ids.count(ids[i]) == 1), None)
        require(at is not None, "no response of the tiny run has three tokens")
        assert at is not None, "just required"
        shifted = bench.trainer(**settings, arguments={"reward_fn": fractions})
        shifted.models.build()  # the reference is made with it
        with _shifted(shifted, {ids[at]: 1.0}, slice(1, 2)):
            shifted.collect()
        before, after, beta = _advantages(trainer), _advantages(shifted), trainer.method.kl_coef
        by_score = _changes(bench, settings, trainer, raised((rollouts.prompts[at], rollouts.outputs[at])))
        _require_kl(after[ids[at]] - before[ids[at]], beta * by_score[ids[at]], structure.kl)
        for mate in _mates(ids, at, size):
            found, due = float((after[mate] - before[mate]).mean()), beta * by_score[mate]
            require(
                abs(found - due) < 1e-3 * beta,
                f"if the KL of a token falls by 1, the advantage of another response of its group changes by "
                f"{found:.4g}; with the KL penalty in the baseline it should change by {due:.4g}",
            )


def _require_kl(change: Tensor, whole: float, kl: str | None) -> None:
    """Fail unless the advantages of a response change as declared when the KL of its second token falls by 1."""
    due = torch.full_like(change, whole)
    if kl == "token":
        due[2:] = 0
    told, wanted = ([round(x, 5) for x in values.tolist()] for values in (change, due))
    require(
        bool(((change - due).abs() < 1e-3 * abs(whole)).all()),
        f"if the KL of the second token of a response falls by 1, the advantages of its tokens change by {told}, and "
        f"should change by {wanted}",
    )
