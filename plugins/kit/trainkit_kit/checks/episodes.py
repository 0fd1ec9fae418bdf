"""Checks of episodes: what an environment said is not trained on, and its rewards are credited to their turns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from trainkit.data import Rollouts, Sequences
from trainkit.rollouts import Turn
from trainkit.testing.trainers import Letters
from trainkit_kit.checking import check
from trainkit_kit.checks.exactness import accumulation, micro_batches
from trainkit_kit.checks.resume import resume_every_step
from trainkit_kit.checks.rows import batch_mates, mask_law, padding_amount, padding_side
from trainkit_kit.checks.tools import credits_of, hashed, ids_of, sequences_in, weighted
from trainkit_kit.failures import require
from trainkit_kit.subjects import Bench, Subject


def plays(subject: Subject) -> bool:
    """Return whether the subject learns from environments."""
    return subject.plays


def keeps(subject: Subject) -> bool:
    """Return whether the subject chooses what it trains on."""
    return subject.keeps


def playing(bench: Bench, environment: Callable[..., Any] = Letters) -> Bench:
    """Return a bench whose trainers learn from an environment alone."""
    arguments = {"environment": environment, "reward_fn": None}
    return bench.under(arguments=arguments, rollout__max_new_tokens=4)


def paying(others: dict[tuple[str, int], float]) -> Callable[..., Any]:
    """Return an environment whose rewards follow from output and turn, or are those of ``others``."""

    class Paying(Letters):
        def step(self, output: str) -> Turn:
            turn = super().step(output)
            fraction = 0.1 + 0.8 * hashed(str(self.turn), output) / (1 << 32)
            return Turn(turn.observation, others.get((output, self.turn), fraction), turn.done)

    return Paying


@check(where=plays)
def episodes_are_whole(bench: Bench) -> None:
    """Check that what is trained on are the tokens of the episodes, and of these only what the policy has sampled.

    An algorithm that takes episodes apart into prompts and responses drops the environment's tokens, and then trains
    on another text than was sampled; one that takes everything after the prompt for the response trains on the
    environment's tokens.

    Causes: `rollouts.queries` and `rollouts.responses` put together again; a response mask made from lengths.
    """
    trainer = playing(bench).collected()
    played = {_signed(row) for part in trainer.collector.collection.rollouts for row in _rows(part.sequences)}
    held = [row for sequences in sequences_in(weighted(trainer.store.experience)) for row in _rows(sequences)]
    require(held, "the experience has no sequences")
    for row in held:
        require(_signed(row) in played, f"a row of the experience is no episode: {_signed(row)}")
    holes = [sum(token < 0 for token in _signed(row)[len(row[0]) :]) for row in held]
    require(any(holes), "no row of the experience has tokens of the environment")


def _rows(sequences: Sequences) -> list[tuple[list[int], list[int], list[bool]]]:
    """Return the prompt, all ids and which of them are response tokens, for each row."""
    found = []
    for ids, real, chosen, query in zip(
        sequences.input_ids, sequences.attention_mask, sequences.response_mask, sequences.queries, strict=True
    ):
        found.append((query.tolist(), ids[real].tolist(), chosen[real].tolist()))
    return found


def _signed(row: tuple[list[int], list[int], list[bool]]) -> tuple[int, ...]:
    """Return the ids of a row, those that were not sampled as ~id."""
    return tuple(token if chosen else ~token for token, chosen in zip(row[1], row[2], strict=True))


@check(where=plays)
def turn_rewards(bench: Bench) -> None:
    """Check that a higher reward of a turn gives the last token of that turn's output more credit.

    Rewards of turns that are all placed at the end of an episode, or lost, teach the first turn nothing of its own.

    Causes: `per_response` of scores [B, T] in an algorithm with advantages per token; only the last reward read.
    """
    usual = playing(bench, paying({})).collected()
    rollouts = Rollouts.cat(usual.collector.collection.rollouts)
    assert rollouts.turns is not None, "they were played with an environment"
    outputs = [[turn["output"] for turn in turns] for turns in rollouts.turns]
    for number in (0, 1):
        firsts = [row[number] for row in outputs]
        at = next((i for i, text in enumerate(firsts) if firsts.count(text) == 1), None)
        require(at is not None, f"no output of turn {number + 1} occurs once, so its reward cannot be changed alone")
        assert at is not None, "just required"
        ids, place = ids_of(rollouts.sequences)[at], _last_of_turn(rollouts, at, number)
        found: list[float] = []
        for reward in (-5.0, 5.0):
            trainer = playing(bench, paying({(firsts[at], number + 1): reward})).collected()
            credits_ = credits_of(trainer, trainer.store.experience)
            found.append(float(credits_[ids][place]) if ids in credits_ else 0.0)
        require(
            found[1] - found[0] > 1e-3 * max(map(abs, found)),
            f"the last token of turn {number + 1} has the credit {found[1]:.4g} for a high reward of the turn, and "
            f"{found[0]:.4g} for a low one",
        )


def _last_of_turn(rollouts: Rollouts, row: int, number: int) -> int:
    """Return the index of the last token of a turn's output among the response tokens of a row."""
    mask = rollouts.sequences.response_mask[row]
    ends = mask & ~torch.cat([mask[1:], mask.new_zeros(1)])
    return int(mask[: int(ends.nonzero()[number]) + 1].sum()) - 1


@check(where=plays)
def episodes_keep_the_laws(bench: Bench) -> None:
    """Check that masks, padding and micro-batches change nothing where response masks have holes.

    Code that counts from the first response token, or that takes the response for one piece, fails on rows with holes
    only.

    Causes: positions counted from the first response token; `gae` or `cumsum` over columns instead of selected tokens.
    """
    for law in (mask_law, padding_amount, padding_side, batch_mates, micro_batches, accumulation):
        law(playing(bench))


@check(where=plays)
def episodes_resume(bench: Bench) -> None:
    """Check that a run with an environment ends bit-equal, whether or not it was stopped and resumed at any step.

    What is remembered about episodes must survive a restart.

    Causes: state of environments, or of an algorithm, that is not saved; seeds drawn when an episode begins.
    """
    resume_every_step(playing(bench))


@check(where=keeps)
def keep_chooses(bench: Bench) -> None:
    """Check that `keep` decides by its arguments alone, in any order, and that only what it keeps is trained on.

    It is called on parts of a collection, whose size is chosen by memory, and on every process on its own rows. It runs
    no model. Whether a group is kept does not depend on which of its responses comes first.

    Causes: a `keep` that reads an attribute, draws random numbers, or calls a model; rows that are kept and not
    trained.
    """
    trainer = bench.trainer()
    honest, kept, calls = trainer.keep, set[Any](), list[int]()

    def keep(rollouts: Rollouts, scores: torch.Tensor) -> torch.Tensor:
        before = len(calls)
        found: torch.Tensor = honest(rollouts, scores)
        require(len(calls) == before, "keep runs the model")
        require(torch.equal(found, honest(rollouts, scores)), "keep returns something else for the same arguments")
        order = torch.arange(len(scores)).view(-1, trainer.samples_per_prompt).roll(1, 1).flatten().to(scores.device)
        turned = honest(rollouts.select(order.tolist()), scores[order])
        require(torch.equal(found[order], turned), "keep returns something else if a prompt's responses change places")
        kept.update(ids for ids, good in zip(ids_of(rollouts.sequences), found.tolist(), strict=True) if good)
        return found

    trainer.keep = keep
    trainer.models.build()
    trainer.policy.register_forward_hook(lambda *_: calls.append(1))
    trainer.unwrapped.register_forward_hook(lambda *_: calls.append(1))
    trainer.collect()
    trained = {ids for sequences in sequences_in(trainer.store.experience) for ids in ids_of(sequences)}
    require(trained <= kept, f"{len(trained - kept)} rows are trained on that keep did not keep")
