"""The kit finds the bugs that systems before this one have shipped, planted again into plugins that have none."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import common_prompts
from mutants.bugs import BUGS
from mutants.planting import MISSED, Bug, PlantingError, examine, found_by, planted
from trainkit.plugins import available_trainers

KNOWN = {
    "the loss is averaged over each micro-batch": "means_of_means",
    "the critic's gradient grows with the number of micro-batches": "critic_per_micro_batch",
    "the divergence has no gradient": "kl_without_gradient",
    "the importance ratio is between temperatures": "ratio_between_temperatures",
    "whitening counts padding": "whitened_over_padding",
    "EOS is not trained where pad is EOS": "eos_unlearnt_online",
    "the score is one token late": "score_one_token_late",
    "only the first of K is trained": "first_of_k_trained",
    "the target network is never synced": "target_never_synced",
    "gradients are clipped at the first step only": "clipped_once",
    "the ratio's guard still steps": "guard_that_steps",
    "the optimizer's state is lost on resuming": "optimizer_forgotten",
    "the sampler's state is not saved": "sampler_forgotten",
    "the reference is in training mode": "reference_in_train_mode",
    "advantages are cut to integers": "advantages_of_integers",
    "margins are broadcast to B × B": "margins_broadcast",
    "responses are tokenised again": "retokenised",
    "an evaluation uses randomness of training": "evaluation_draws",
}
"""What every system has shipped, and the bug of the table that is it."""

BASES = {
    base: sorted({name for bug in BUGS if bug.base == base for name in bug.caught_by})
    for base in {bug.base for bug in BUGS}
}


FAIL = {"reference_skips_a_block"}
"""Bugs that end a pass over shared prompts with an error of transformers."""


def cases(found: Iterable[tuple[str, Any, str]]) -> list[Any]:
    """Cases of (name, what, base) with shared prompts, with separate rows if there are common prompts, and joined.

    Strangers' algorithms, which are not installed, are not run with separate rows.
    """

    def ways(base: str) -> list[str]:
        common = base in available_trainers() and common_prompts.exist(base)
        return ["shared", *(["separate"] if common else []), *(["joined"] if base != "ddpo" else [])]

    return [
        pytest.param(what, way, id=name, marks=pytest.mark.slow)
        if way == "shared"
        else pytest.param(what, way, id=f"{name}-{way}", marks=pytest.mark.weekly)
        for name, what, base in found
        for way in ways(base)
        if way == "separate" or name not in FAIL
    ]


@pytest.mark.parametrize(("base", "way"), cases((base, base, base) for base in sorted(BASES)))
def test_a_copy_without_a_bug_passes_the_checks_that_find_those_with_one(
    base: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    common_prompts.WAYS[way](monkeypatch)
    sound = Bug(f"none_{base}", "", "", base, ())
    results = examine(sound, tmp_path, tuple(BASES[base]))
    assert [result.check.name for result in results if result.outcome != "passed"] == []
    assert sorted(result.check.name for result in results) == BASES[base]


@pytest.mark.parametrize(("bug", "way"), cases((bug.name, bug, bug.base) for bug in BUGS))
def test_the_kit_finds_the_bug(bug: Bug, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    common_prompts.WAYS[way](monkeypatch)
    results = examine(bug, tmp_path, bug.caught_by)
    assert found_by(results) == [result.check.name for result in results], [result.seen for result in results]


def test_what_is_known_from_the_field_is_planted() -> None:
    assert {*KNOWN.values()} <= {bug.name for bug in BUGS}


def test_what_an_earlier_edition_missed_is_planted() -> None:
    assert {bug.missed for bug in BUGS} == {"", *MISSED}


def test_names_of_bugs_differ() -> None:
    assert len({bug.name for bug in BUGS}) == len(BUGS) >= 150


def test_each_bug_fits_its_base() -> None:
    for bug in BUGS:
        assert planted(bug) != planted(replace(bug, patch="", loop=""))


def test_a_bug_that_does_not_fit_its_base_any_more_is_told() -> None:
    ppo = next(bug for bug in BUGS if bug.base == "ppo")
    gone = replace(ppo, patch="-a line that was changed since")
    with pytest.raises(PlantingError, match=r"'a line that was changed since\\n' stands 0 times in the source of ppo"):
        planted(gone)
