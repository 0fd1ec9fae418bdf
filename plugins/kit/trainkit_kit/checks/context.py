"""A check of context: what is around a response changes nothing that is learnt from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trainkit.data import Rollouts, Sequences
from trainkit_kit.checking import check
from trainkit_kit.checks.episodes import playing
from trainkit_kit.checks.fields import contexts, method_fields, other_values, trainer_with
from trainkit_kit.checks.losses import Learnt, learnt
from trainkit_kit.checks.structure import compares_groups, sized, structures
from trainkit_kit.checks.tools import Ids, credits_of, widened
from trainkit_kit.failures import require
from trainkit_kit.stand_in import (
    Response,
    can_stand_in,
    collect_given,
    learns_from_given,
    letters,
    moved,
    standing_in,
    varied,
)
from trainkit_kit.subjects import Bench, Subject

CLOSE = 1e-5
"""Largest difference that counts as rounding, in units of the largest derivative of any row."""
LENGTHS = (3, 6, 4, 5)
"""Numbers of tokens of responses; the first two say which response it is."""
Given = list[Response]


def reads_text(subject: Subject) -> bool:
    """Return whether the subject trains a language model on samples or scored responses of the usual form."""
    return subject.language and "samples" not in subject.declaration.arguments and learns_from_given(subject)


@check(where=reads_text)
def context_does_not_count(bench: Bench) -> None:
    """Check that what is learnt from a response does not depend on what is around it, with models that do not either.

    The outputs of all models are set to follow from the response alone. Then longer or other prompts, longer
    observations between turns, more padding, another order of responses and, unless scores of a whole collection
    count, other responses to other prompts change nothing, also under settings that are None by default. Lengths that
    count tokens of the prompt, and returns that are computed over the columns of an observation, do.
    Algorithms that sample more responses to make experience, and models that are none of trainkit's policies, pass.

    Causes: a length that counts ``attention_mask`` or ``lengths`` instead of ``response_mask``; positions in the row;
    a recursion over columns instead of the selected tokens; groups that are found by something else than their place.
    """
    if not can_stand_in(bench):
        return
    if bench.subject.online:
        _require_of_responses(bench)
    else:
        _require_of_samples(bench)


def require_same_learnt(one: Learnt, other: Learnt, what: str) -> None:
    """Fail unless the same is learnt from all responses, by their ids; ``what`` says how their context differs."""
    require(one, "the loss reads no rows")
    largest = max(float(values.abs().max()) for values in one.values() if values.numel())
    require(largest > 0, "nothing is learnt from responses with different scores: all derivatives of the loss are 0")
    for ids, values in one.items():
        found = other.get(ids)
        require(found is not None, f"with {what}, response {list(ids[1])} is not learnt from")
        assert found is not None, "just required"
        if not values.numel():
            continue  # a row that only fills the batch up
        at = int((values - found).abs().argmax())
        require(
            float((values - found).abs()[at]) <= CLOSE * largest,
            f"with {what}, something else is learnt from token {at % len(ids[1])} of response {list(ids[1])}: the "
            "derivative of the loss by an output of the model there, in units of the loss, is "
            f"{float(found[at]):.6g} instead of {float(values[at]):.6g}; "
            "lengths, positions or statistics count tokens that are not the policy's",
        )


def _alone(found: Learnt) -> Learnt:
    """Return what is learnt by responses, whatever their prompts; no two responses are equal."""
    return {((), ids[1]): values for ids, values in found.items()}


# ------------------------------------------------------------------------------------------------ sampled responses


def responses(trainer: Any, *, groups: int = 4, episodes: bool = False) -> Given:
    """Return groups of unequal responses with unequal scores, of which some have ended, or episodes of two turns."""
    size, tokens = trainer.samples_per_prompt, letters(trainer, 8)
    found: Given = []
    for row in range(max(groups * size, 8) // size * size):
        ended = row % 3 != 1
        rest = [(row * 3 + at * at) % 8 for at in range(LENGTHS[row % len(LENGTHS)] - 3)]
        ids = tuple(tokens[at] for at in (row % 8, row // 8 % 8, *rest))
        last = trainer.tokenizer.eos_token_id if ended else tokens[(row * 3 + 1) % len(tokens)]
        query = tuple(tokens[(row // size + at) % len(tokens)] for at in range(1 + row // size % 3))
        score = 1.7 * ((row * row * 5 + row * 3) % 13) / 13 - 0.6 + row / 50
        found.append(Response(query, (*ids, last), score, ended))
    if episodes:
        found = [replace(each, observations=((len(each.ids) // 2, tuple(tokens[2:4])),)) for each in found]
    return found


def _require_of_responses(bench: Bench) -> None:
    grouped = any(each.scores in ("row", "group") for each in structures(bench.subject, "scores") if not each.under)
    ways: dict[str, Callable[[Any, Given], Given]] = {
        "prompts of other lengths": _longer_prompts,
        "prompts of other text": _other_prompts,
        "groups and their responses in another order": _reordered,
        **({"other responses to other prompts": _other_groups} if grouped else {}),
    }
    _require_ways(bench, ways, episodes=False)
    last = dict([ways.popitem()])
    for settings in _switched_on(bench):
        _require_ways(bench.under(**settings), last, episodes=False)
    if bench.subject.plays:
        _require_ways(playing(bench), {"longer observations": _longer_observations}, episodes=True)


def _switched_on(bench: Bench) -> Iterator[dict[str, Any]]:
    """Yield settings of which each gives a value to one that is None by default, which other checks leave alone."""
    for name, field in method_fields(bench.subject).items():
        if getattr(bench.subject.tiny.method, name) is None:
            context = contexts(bench.subject).get(name, {})
            every = ({**context, f"method.{name}": value} for value in reversed(other_values(field, None)))
            yield from islice((each for each in every if trainer_with(bench, each) is not None), 1)


def _require_ways(bench: Bench, ways: dict[str, Callable[[Any, Given], Given]], *, episodes: bool) -> None:
    before = _learnt(bench, lambda _, given: given, episodes=episodes)
    for what, change in ways.items():
        after = _learnt(bench, change, episodes=episodes)
        kept = {ids: values for ids, values in before.items() if change is not _other_groups or ids in after}
        require_same_learnt(kept, after, what)
    wide = _learnt(bench, lambda _, given: given, episodes=episodes, padding=5)
    require_same_learnt(before, wide, "five more columns of padding")


def _learnt(bench: Bench, change: Callable[[Any, Given], Given], *, episodes: bool, padding: int = 0) -> Learnt:
    def wider(rollouts: Rollouts, scores: Tensor) -> tuple[Rollouts, Tensor]:
        if scores.dim() == 2:
            scores = F.pad(scores, (0, padding))
        rewards = None if rollouts.rewards is None else F.pad(rollouts.rewards, (0, padding))
        return replace(rollouts, sequences=widened(rollouts.sequences, padding), rewards=rewards), scores

    trainer = bench.trainer()
    with standing_in(trainer, moved):
        collect_given(trainer, change(trainer, responses(trainer, episodes=episodes)), wider if padding else None)
        return _alone(learnt(trainer))


def _longer_prompts(trainer: Any, given: Given) -> Given:
    size, tokens = trainer.samples_per_prompt, letters(trainer, 8)
    return [replace(x, query=(*x.query, *tokens[: 1 + 3 * (at // size % 3)])) for at, x in enumerate(given)]


def _other_prompts(trainer: Any, given: Given) -> Given:
    tokens = letters(trainer, 8)
    return [replace(x, query=tuple(tokens[(tokens.index(token) + 3) % 8] for token in x.query)) for x in given]


def _longer_observations(trainer: Any, given: Given) -> Given:
    tokens = letters(trainer, 8)
    return [
        replace(x, observations=tuple((after, (*ids, *tokens[: 1 + at % 4])) for after, ids in x.observations))
        for at, x in enumerate(given)
    ]


def _reordered(trainer: Any, given: Given) -> Given:
    size = trainer.samples_per_prompt
    groups = [given[start : start + size] for start in range(0, len(given), size)]
    return [each for group in groups[::-1] for each in [*group[1:], *group[:1]]]


def _other_groups(trainer: Any, given: Given) -> Given:
    size, token = trainer.samples_per_prompt, letters(trainer, 8)[5]
    longer = max(LENGTHS)  # than those of the first group, so that a statistic of lengths is another one
    others = [
        replace(x, ids=(token,) * (longer + at) + x.ids[-1:], score=2.0 * at - 1) for at, x in enumerate(given[size:])
    ]
    return [*given[:size], *others]


def groups_of_text(subject: Subject) -> bool:
    """Return whether the subject compares responses to a prompt by their scores."""
    return reads_text(subject) and compares_groups(subject)


@check(where=groups_of_text)
def mates_count_alike(bench: Bench) -> None:
    """Check that it makes no difference to a response which of two mates of unequal lengths has which of two scores.

    Mean, deviation, median, best and worst of a group stay the same. If scores are punished by length before they are
    compared, a deviation may change, and with it all advantages of the group by one factor. Where other groups change,
    too, scores are compared by the tokens of a whole collection, and the algorithm passes. If the credits of a group of
    short responses add up to 0, so do those of long ones: what all responses of a group have to pay takes part in their
    comparison.

    Causes: a baseline that weighs scores by the lengths of responses, such as a masked mean over the tokens of a group;
    scores that are compared with those of neighbours instead of all; a penalty that is subtracted from advantages
    instead of scores.
    """
    if not can_stand_in(bench):
        return
    bench = bench.in_one_turn().under(**sized(bench, len(LENGTHS)))
    given = responses(bench.trainer())
    if bench.trainer().samples_per_prompt != len(LENGTHS):
        return
    worst, one, other, best = sorted(range(len(LENGTHS)), key=lambda at: given[at].score)
    turned = list(given)
    turned[one], turned[other] = (replace(given[at], score=given[to].score) for at, to in ((one, other), (other, one)))
    before, after = _credits(bench, given), _credits(bench, turned)
    largest = max(float(credit.abs().max()) for credit in before.values() if credit.numel())
    ids = [(each.query, each.ids) for each in given]
    (mates, now), (rest, later) = (
        [torch.cat([found.get(ids[at], torch.zeros(len(ids[at][1]))) for at in rows]) for found in (before, after)]
        for rows in ([worst, best], range(len(LENGTHS), len(given)))
    )
    if float((rest - later).abs().max()) > CLOSE * largest:
        return
    factor = float(mates @ now / (mates @ mates)) if mates.any() else 1.0
    off = float((now - factor * mates).abs().max())
    require(
        off <= 10 * CLOSE * largest,
        f"if responses of {len(given[one].ids)} and {len(given[other].ids)} tokens exchange their scores, "
        f"{given[one].score:.3g} and {given[other].score:.3g}, the credits of the best and the worst of their group "
        f"change by up to {off:.4g}, of {largest:.4g}, and not by one factor: scores count by length or by place",
    )
    short, long = (_sums(bench, [replace(x, ids=x.ids[:1] * length + x.ids[-1:]) for x in given]) for length in (1, 5))
    require(
        short > 10 * CLOSE or long <= 10 * CLOSE,
        "the credits of the responses of a group add up to 0 if they have two tokens each, and if they have six, to "
        f"{long:.4g} times the largest one: what long responses pay is no part of the comparison",
    )


def _credits(bench: Bench, given: Given) -> dict[Ids, Tensor]:
    """Return what is learnt from given responses before the first update, with a policy that equals its reference."""
    trainer = bench.trainer()
    with standing_in(trainer, lambda name, _, before, token: varied(name, True, before, token)):
        batch = collect_given(trainer, given)
        return {ids: credit * float(batch.weight) for ids, credit in credits_of(trainer, batch).items()}


def _sums(bench: Bench, given: Given) -> float:
    """Return the largest sum of the credits of a group, in units of the largest credit of a response."""
    found = _credits(bench, given)
    size = bench.trainer().samples_per_prompt
    sums = torch.tensor([float(found.get((each.query, each.ids), torch.zeros(1)).sum()) for each in given])
    return float(sums.view(-1, size).sum(1).abs().max() / sums.abs().max())


# ---------------------------------------------------------------------------------------------- samples of a dataset


def _require_of_samples(bench: Bench) -> None:
    before = _learnt_from(bench, "", "")
    require_same_learnt(before, _learnt_from(bench, "gh", ""), "longer prompts")
    require_same_learnt(before, _learnt_from(bench, "", "gh"), "longer prompts between the outputs of a dialogue")
    require_same_learnt(before, _learnt_from(bench, "", "", adjacent), "no prompts between the outputs of a dialogue")


def _samples(bench: Bench, before: str, between: str) -> Sequence[Any]:
    """Return samples of two turns, or pairs, with something before the prompts of some, and between the turns."""
    alphabet, rest = "abcdefgh", "fdbhgcae"
    texts = [alphabet[at % 8] + alphabet[at // 8] + rest[: at * 3 % 4] for at in range(16)]
    prompts = [f"{before if at % 3 else ''}{'ab'[at % 2]}" for at in range(16)]
    if "pairs" in bench.subject.inputs:
        return [
            {"prompt": prompt, "chosen": f"a{text}", "rejected": f"b{text[:2]}{rest[: at % 4]}", "margin": at % 3 / 4}
            for at, (prompt, text) in enumerate(zip(prompts, texts, strict=True))
        ]
    return [
        [prompt, f"c{alphabet[at % 8]}", f"d{between * (at % 2)}", text]
        for at, (prompt, text) in enumerate(zip(prompts, texts, strict=True))
    ]


def adjacent(sequences: Sequences) -> Sequences:
    """Return sequences without what stands between the outputs of a row."""
    chosen = sequences.response_mask
    keep = sequences.attention_mask & (chosen | (chosen.cumsum(1) == 0) | (chosen.flip(1).cumsum(1).flip(1) == 0))
    ids = [row[kept].tolist() for row, kept in zip(sequences.input_ids, keep, strict=True)]
    masks = [row[kept].tolist() for row, kept in zip(chosen, keep, strict=True)]
    return Sequences.from_rows(ids, masks).to(chosen.device)


def _learnt_from(
    bench: Bench, before: str, between: str, change: Callable[[Sequences], Sequences] = lambda unchanged: unchanged
) -> Learnt:
    trainer = bench.trainer(arguments={"samples": _samples(bench, before, between)})
    honest = trainer.encode_samples
    trainer.encode_samples = lambda rows: change(honest(rows))
    with standing_in(trainer, moved):
        with torch.no_grad():
            trainer.collect()
        return _alone(learnt(trainer))
