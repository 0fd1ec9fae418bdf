"""Checks of corrections: what is learnt from rollouts that were sampled with other weights."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from trainkit_kit.checking import check
from trainkit_kit.checks.structure import structures
from trainkit_kit.checks.tools import Ids, credits_of, ids_of
from trainkit_kit.failures import require
from trainkit_kit.subjects import Bench, Subject

CAP = 4.0
"""The largest importance weight."""
Learnt = dict[Ids, Tensor]


def corrects(subject: Subject) -> bool:
    """Return whether a subject declares a correction."""
    return subject.samples_text and bool(subject.trainer_class.corrections)


@check(where=corrects)
def corrections_as_declared(bench: Bench) -> None:
    """Check that importance weights multiply what is learnt from a response, for the corrections that are declared.

    With rollouts of older weights, or of an engine with other numbers, an algorithm that ignores the weights learns
    from responses that the policy would no longer give, as if they were its own. Where the ratio of the loss is
    declared to be that of a response, so is the importance weight: the product of those of its tokens.

    Causes: `self.importance_weights(rollouts, policy)` is not called, or its result not used; the weights are
    multiplied before a statistic such as whitening, so that they change other rows; a `correction_level` that does not
    follow the ratio of the loss.
    """
    for structure in structures(bench.subject, "surrogate"):
        level = bench.trainer(**structure.under).correction_level
        require(
            structure.surrogate != "sequence" or level == "sequence",
            f"the loss has one ratio for a response, and importance weights are of the level {level!r}; override "
            "correction_level",
        )
    declared = bench.subject.trainer_class.corrections
    for correction in ("decoupled", "masked"):
        if correction in declared:
            _require_weights(bench, correction)
    if "sampler" in declared:
        usual, _ = learnt(bench, "sampler", 1.0)
        moved, changed = learnt(bench, "sampler", 1.1)
        require(
            any(not torch.allclose(usual[ids], moved[ids], rtol=1e-3) for ids in changed & usual.keys()),
            "with the correction 'sampler' what is learnt does not depend on the sampler's log-probabilities; the "
            "ratio of the loss should be that to what behaviour() returns",
        )


def _require_weights(bench: Bench, correction: str) -> None:
    usual, changed = learnt(bench, correction, 1.0)
    none, _ = learnt(bench, "masked", 3 * CAP)  # weights of 0
    require(
        any(not torch.allclose(none[ids], usual[ids], rtol=1e-3) for ids in changed & usual.keys()),
        "importance weights of 0 do not change what is learnt; multiply the advantages by importance_weights()",
    )
    beyond = CAP if correction == "decoupled" else 0.0
    for ratio, weight in ((0.5, 0.5), (2.0, 2.0), (3 * CAP, beyond)):
        found, _ = learnt(bench, correction, ratio)
        for ids, value in usual.items():
            expected = none[ids] + weight * (value - none[ids]) if ids in changed else value
            scale = float(value.abs().max()) + 1e-8
            require(
                torch.allclose(found[ids], expected, rtol=1e-3, atol=1e-3 * scale),
                f"with rollout.correction {correction!r}, where a token's probability is {ratio:g} times that of the "
                f"sampler, {float(found[ids].sum()):.4g} is learnt from a response, and should be "
                f"{float(expected.sum()):.4g}: the advantages, after whitening, times importance_weights",
            )


def learnt(bench: Bench, correction: str, ratio: float) -> tuple[Learnt, set[Ids]]:
    """Return what is learnt from each response if the policy's probabilities are ``ratio`` times the sampler's.

    The second value are the responses for which they are: the first half. The others have the ratio 1. With one ratio
    for a whole response, ``ratio`` is that of the response.
    """
    cap: dict[str, Any] = {} if correction == "sampler" else {"rollout__correction_cap": CAP}
    trainer = bench.trainer(rollout__correction=correction, **cap)
    rows = trainer.pipeline.take(0, trainer.collection_rows)
    rollouts, scores = trainer.sample_and_score([row for row in rows for _ in range(trainer.samples_per_prompt)])
    mask, half = rollouts.sequences.response_mask, len(rollouts) // 2
    shift = torch.full(mask.shape, math.log(ratio), device=mask.device)
    if trainer.correction_level == "sequence":
        shift = shift / mask.sum(1, keepdim=True)
    shift[half:] = 0
    with torch.no_grad():
        known: Any = trainer.unwrapped(rollouts.sequences).logprobs
        trainer.store.push(
            trainer.collector.experience(replace(rollouts, logprobs=known - shift * mask, hidden=None), scores)
        )
        trainer.collector.prepare()
    found = {ids: value.detach() for ids, value in credits_of(trainer, trainer.store.experience).items()}
    ids = ids_of(rollouts.sequences)
    return found, set(ids[:half]) - set(ids[half:])
