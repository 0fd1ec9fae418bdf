"""Checks of samplers: rollouts are what was asked for, from the current policy, by the given seeds alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainkit.data import Rollouts, Sequences
from trainkit.rollouts import decode
from trainkit.testing.trainers import PROMPTS
from trainkit_kit.checking import check
from trainkit_kit.checks.tools import require_close
from trainkit_kit.checks.traces import require_resumes, seeded_generators
from trainkit_kit.failures import require
from trainkit_kit.subjects import Bench

TEMPERATURE = 0.5
MOVED: dict[str, Any] = {"rollout__temperature": TEMPERATURE, "optimizer__lr": 0.02}
"""A run that ends with a policy far from the initial one."""
LARGEST = 60.0
"""Bound on χ², to which 3 per degree of freedom are added; a correct sampler exceeds it once in 10⁹ cases."""


def _sampler(bench: Bench) -> Any:
    """Return a trainer after training that samples with the plugin's sampler."""
    trainer = bench.learnt(**MOVED)
    made = trainer.hooks.hook.make_sampler(trainer=trainer)
    require(made is not None, "make_sampler returns None for a trainer of a GPT-2, so there is no sampler to check")
    return trainer


def _draw(trainer: Any, prompts: list[str], *, seeds: list[int] | None = None, **settings: Any) -> Rollouts:
    rows = [{"prompt": prompt, "at": at} for at, prompt in enumerate(prompts)]
    trainer.models.build()
    trainer.unwrapped.eval()
    queries = [trainer.text.encode(prompt) for prompt in prompts]
    seeds = [7919 * (at + 1) for at in range(len(prompts))] if seeds is None else seeds
    found: Rollouts = trainer.sampler(rows, queries, trainer.settings(**settings), seeds, "train")
    return found


def _ids(rollouts: Rollouts) -> list[list[int]]:
    return [response.tolist() for response in rollouts.responses]


@check(kind="sampler")
def sampler_rollouts(bench: Bench) -> None:
    """Check that there is one response per prompt, in order, within max_new_tokens, with masks from lengths.

    What is sampled is trained unchanged: a lost EOS is never learnt, and a mask from token ids takes an EOS for
    padding.
    """
    trainer = bench.trainer()
    eos, prompts = trainer.tokenizer.eos_token_id, list(PROMPTS) * 4
    for room in (1, 5):
        found = _draw(trainer, prompts, max_new_tokens=room)
        require(found.prompts == prompts, "the prompts of the rollouts are not those that were asked for, in order")
        require(
            [row["at"] for row in found.rows] == list(range(len(prompts))), "the rows are not those that were given"
        )
        _require_masks(found.sequences)
        for ids, ended in zip(_ids(found), found.terminated.tolist(), strict=True):
            require(0 < len(ids) <= room, f"a response has {len(ids)} tokens where max_new_tokens is {room}")
            require(
                ended == (ids[-1] == eos), f"a response that ends in {ids[-1]} (EOS is {eos}) has terminated={ended}"
            )
            require(ended or len(ids) == room, f"a response stops after {len(ids)} of {room} tokens without EOS")
            require(eos not in ids[:-1], "a response continues after EOS")
        require(found.outputs == decode(trainer.tokenizer, _ids(found), True), "outputs are not the text of the tokens")
    require(bool(found.terminated.any()), "of 32 responses of up to five tokens none ends with EOS")


def _require_masks(sequences: Sequences) -> None:
    real, chosen = sequences.attention_mask, sequences.response_mask
    columns = torch.arange(real.size(1), device=real.device)
    require(
        bool((real == (columns < real.sum(1, keepdim=True))).all()), "the attention mask is not a prefix of each row"
    )
    starts = real.sum(1, keepdim=True) - chosen.sum(1, keepdim=True)
    expected = real & (columns >= starts)
    require(
        bool((chosen == expected).all()), "the response mask is not what follows the prompt, up to the last real token"
    )


@check(kind="sampler")
def sampler_stops(bench: Bench) -> None:
    """Check that a stop string ends a response, stays among its tokens, and is removed from its text.

    A reward function that sees text after the stop string scores what the user never gets.
    """
    trainer = bench.trainer()
    found = _draw(trainer, list(PROMPTS) * 4, max_new_tokens=8, stop_sequences=["b"])
    stop = trainer.tokenizer.convert_tokens_to_ids("b")
    require(
        any(stop in ids for ids in _ids(found)), "no response contains the stop string, so stopping cannot be checked"
    )
    for ids, output, ended in zip(_ids(found), found.outputs, found.terminated.tolist(), strict=True):
        require("b" not in output, f"the text {output!r} holds the stop string 'b'")
        require(stop not in ids[:-1], "a response continues after the stop string")
        require(ended or ids[-1] != stop, "a response that a stop string ended is not marked as terminated")


@check(kind="sampler")
def sampler_logprobs(bench: Bench) -> None:
    """Check that log-probabilities, if given, are the trained policy's at the sampling temperature, before top-k.

    An importance ratio between two distributions is not 1 before the first update, and the difference is learnt.
    """
    trainer = _sampler(bench)
    cut: list[dict[str, Any]] = [{}, {"top_k": 3}]
    for each in cut:
        found = _draw(trainer, list(PROMPTS), **each)
        if found.logprobs is not None:
            with torch.no_grad():
                policy = trainer.unwrapped(found.sequences).logprobs
            what = f"log-probabilities of the sampler and of the policy at temperature {TEMPERATURE}, {each}"
            require_close(policy, found.logprobs, what, rtol=0, atol=1e-3)


@check(kind="sampler")
def sampler_generators(bench: Bench) -> None:
    """Check that equal seeds give equal responses at every call, and global generators are not used.

    Otherwise a run can be neither repeated nor resumed.
    """
    trainer = _sampler(bench)
    draws = []
    for at in range(2):
        with seeded_generators(at) as touched:
            draws.append(_ids(_draw(trainer, list(PROMPTS))))
            require(not touched(), f"the sampler draws from the global generators of {', '.join(touched())}")
    require(draws[0] == draws[1], "two calls with the same seeds give different responses")


@check(kind="sampler")
def sampler_distribution(bench: Bench) -> None:
    """Check that the frequencies of first tokens are the trained policy's probabilities at the sampling temperature.

    A sampler with an old copy of the weights, or with another temperature, gives rollouts of another policy.
    """
    trainer, count = _sampler(bench), 2000
    with torch.no_grad():
        ids = torch.tensor([trainer.text.encode("a")], device=trainer.accelerator.device)
        logits = trainer.unwrapped.model(input_ids=ids).logits[0, -1].float()
    expected = (logits / TEMPERATURE).softmax(-1).cpu() * count
    found = torch.tensor([ids[0] for ids in _ids(_draw(trainer, ["a"] * count, max_new_tokens=1))])
    counts = found.bincount(minlength=len(expected)).float()
    statistic, degrees = _chi_square(counts, expected)
    require(
        statistic < LARGEST + 3 * degrees,
        f"of {count} first tokens {counts.int().tolist()} are drawn, where {expected.round().int().tolist()} are "
        f"expected at temperature {TEMPERATURE} (χ² = {statistic:.0f})",
    )


def _chi_square(counts: Tensor, expected: Tensor) -> tuple[float, int]:
    """Return χ² and its degrees of freedom; tokens expected fewer than five times are counted as one."""
    often = expected >= 5
    rest = torch.stack([counts[~often].sum(), expected[~often].sum()])
    terms = (counts[often] - expected[often]) ** 2 / expected[often]
    tail = (rest[0] - rest[1]) ** 2 / rest[1].clamp(min=1.0)
    return float(terms.sum() + tail), int(often.sum())


@check(kind="sampler")
def sampler_mask(bench: Bench) -> None:
    """Check that no token is sampled that the logit mask forbids.

    The trained policy gives such tokens the probability 0, so their log-probability is not finite.
    """
    trainer = bench.trainer(**MOVED)
    allowed = torch.ones(len(trainer.tokenizer), dtype=torch.bool)
    allowed[:4] = False
    trainer.logit_mask = allowed
    drawn = {token for ids in _ids(_draw(trainer, list(PROMPTS) * 4)) for token in ids}
    require(not drawn & {0, 1, 2, 3}, f"the tokens {sorted(drawn & {0, 1, 2, 3})} are sampled, which the mask forbids")


@check(kind="sampler")
def sampler_greedy(bench: Bench) -> None:
    """Check that at temperature 0 every token is the likeliest, and prompts get their own responses in any order.

    Evaluations may be greedy, and a response in the wrong place is scored for another prompt.
    """
    trainer = _sampler(bench)
    found = _draw(trainer, list(PROMPTS), temperature=0)
    for query, response in zip(found.queries, found.responses, strict=True):
        with torch.no_grad():
            logits = trainer.unwrapped.model(input_ids=torch.cat([query, response]).unsqueeze(0)).logits[0].float()
        logits = logits[len(query) - 1 : -1]
        best = logits.max(-1).values - logits.gather(-1, response.unsqueeze(-1)).squeeze(-1)
        require(
            float(best.max()) < 1e-3, f"a token at temperature 0 is {float(best.max()):.3g} below the likeliest one"
        )
    turned = _draw(trainer, list(PROMPTS)[::-1], temperature=0)
    require(_ids(turned)[::-1] == _ids(found), "prompts in another order get other responses at temperature 0")


@check(kind="sampler")
def sampler_seeds(bench: Bench) -> None:
    """Check that a response depends on its own seed alone: not on the other rows, their seeds or their order.

    Otherwise the responses of a run depend on the number of processes and on `rollout.batch_size`, and a single one
    cannot be sampled again.
    """
    trainer = _sampler(bench)
    prompts, seeds = ["ab", "c", "def"], [11, 1 << 62, 12]
    one = _ids(_draw(trainer, prompts, seeds=seeds))
    other = _ids(_draw(trainer, prompts, seeds=[11, 5, 12]))
    turned = _ids(_draw(trainer, prompts[::-1], seeds=seeds[::-1]))
    alone = _ids(_draw(trainer, ["def"], seeds=[12]))
    require((one[0], one[2]) == (other[0], other[2]), "a row gets another response if another row has another seed")
    require(turned[::-1] == one, "rows in another order get other responses")
    require(alone[0] == one[2], "a row gets another response without the other rows")
    many = {str(_ids(_draw(trainer, ["ab"], seeds=[seed]))) for seed in range(20)}
    require(len(many) > 1, "twenty different seeds give the same response")


@check(kind="sampler")
def sampler_resumes(bench: Bench) -> None:
    """Check that a run with this sampler ends bit-equal, whether or not it was stopped and resumed.

    A sampler with a state of its own is reset by every restart.
    """
    require_resumes(bench, 2, train__save_interval=1, train__batch_size=6)
