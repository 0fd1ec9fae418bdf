"""Checks of samplers: rollouts are what was asked for, drawn from the policy as it is now, with the generator alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainkit.data import Rollouts, Sequences
from trainkit.rollouts import decode
from trainkit.testing.checks.tools import require_close, require_same_weights, weights
from trainkit.testing.checks.traces import metric_lines, require_same_lines, seeded_generators
from trainkit.testing.conformance import Bench, check, require
from trainkit.testing.trainers import PROMPTS

TEMPERATURE = 0.5
MOVED: dict[str, Any] = {"rollout__temperature": TEMPERATURE, "optimizer__lr": 0.02}
"""A run whose policy is, in the end, far from the one that it began with."""
LARGEST = 60.0
"""Of χ²/degree; a true sampler of ten tokens is above it in one case out of 10⁹."""


def _sampler(bench: Bench) -> Any:
    """A trainer that has trained, and samples by the plugin's sampler."""
    trainer = bench.learnt(**MOVED)
    made = trainer.hooks.hook.make_sampler(trainer=trainer)
    require(made is not None, "make_sampler returns None for a trainer of a GPT-2, so there is nothing to check")
    return trainer


def _draw(
    trainer: Any, prompts: list[str], *, seed: int = 0, seeds: list[int | None] | None = None, **settings: Any
) -> Rollouts:
    rows = [{"prompt": prompt, "at": at} for at, prompt in enumerate(prompts)]
    if seeds is not None:
        rows = [row if given is None else {**row, "seed": given} for row, given in zip(rows, seeds, strict=True)]
    trainer.unwrapped.eval()
    generator = torch.Generator(trainer.accelerator.device).manual_seed(seed)
    queries = [trainer.encode(prompt) for prompt in prompts]
    found: Rollouts = trainer.sampler(rows, queries, trainer.settings(**settings), generator)
    return found


def _ids(rollouts: Rollouts) -> list[list[int]]:
    return [response.tolist() for response in rollouts.responses]


@check(kind="sampler")
def sampler_rollouts(bench: Bench) -> None:
    """There is one response to each prompt, in their order, of at most so many tokens; masks follow from lengths.

    What is sampled is trained as it is: a lost EOS is never learnt, a mask by token ids takes an EOS for padding
    (S-09, S-15).
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
            require(eos not in ids[:-1], "a response goes on behind EOS")
        require(found.outputs == decode(trainer.tokenizer, _ids(found), True), "outputs are not the text of the tokens")
    require(bool(found.terminated.any()), "of 32 responses of up to five letters none ends by EOS")


def _require_masks(sequences: Sequences) -> None:
    real, chosen = sequences.attention_mask, sequences.response_mask
    columns = torch.arange(real.size(1), device=real.device)
    require(bool((real == (columns < real.sum(1, keepdim=True))).all()), "real tokens are no prefix of their rows")
    starts = real.sum(1, keepdim=True) - chosen.sum(1, keepdim=True)
    expected = real & (columns >= starts)
    require(bool((chosen == expected).all()), "a response is not what follows the prompt, up to the last real token")


@check(kind="sampler")
def sampler_stops(bench: Bench) -> None:
    """A stop string ends a response, counts among its tokens, and is cut from its text.

    A reward function that sees what stands behind the stop scores what the user never gets.
    """
    trainer = bench.trainer()
    found = _draw(trainer, list(PROMPTS) * 4, max_new_tokens=8, stop_sequences=["b"])
    stop = trainer.tokenizer.convert_tokens_to_ids("b")
    require(any(stop in ids for ids in _ids(found)), "no response holds the stop string")
    for ids, output, ended in zip(_ids(found), found.outputs, found.terminated.tolist(), strict=True):
        require("b" not in output, f"the text {output!r} holds the stop string 'b'")
        require(stop not in ids[:-1], "a response goes on behind the stop string")
        require(ended or ids[-1] != stop, "a response that a stop string ended is not marked as terminated")


@check(kind="sampler")
def sampler_logprobs(bench: Bench) -> None:
    """Log-probabilities are those of the trained policy at the sampling temperature, whatever is cut; or None.

    An importance ratio between two distributions is not 1 before the first update, and trains on the difference
    (S-08, F-02).
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
def sampler_generator(bench: Bench) -> None:
    """Equal generators draw equal responses, others draw others, and the global ones are neither used nor moved.

    Only so is a run the same twice, and after a restart.
    """
    trainer = _sampler(bench)
    draws = []
    for at, seed in enumerate((1, 1, 2)):
        with seeded_generators(at) as touched:
            draws.append(_ids(_draw(trainer, list(PROMPTS), seed=seed)))
            require(not touched(), f"the sampler draws from the global generators of {', '.join(touched())}")
    require(draws[0] == draws[1], "two generators in one state draw different responses")
    require(draws[0] != draws[2], "generators with different seeds draw the same responses")


@check(kind="sampler")
def sampler_distribution(bench: Bench) -> None:
    """First tokens occur as often as the trained policy says at the sampling temperature, and under the logit mask.

    A sampler with an old copy of the weights, or a temperature of its own, gives rollouts of another policy.
    """
    trainer, count = _sampler(bench), 2000
    with torch.no_grad():
        ids = torch.tensor([trainer.encode("a")], device=trainer.accelerator.device)
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
    """χ² and its degrees of freedom, tokens that are expected less than five times counting as one."""
    often = expected >= 5
    rest = torch.stack([counts[~often].sum(), expected[~often].sum()])
    terms = (counts[often] - expected[often]) ** 2 / expected[often]
    tail = (rest[0] - rest[1]) ** 2 / rest[1].clamp(min=1.0)
    return float(terms.sum() + tail), int(often.sum())


@check(kind="sampler")
def sampler_mask(bench: Bench) -> None:
    """No token is drawn that the logit mask forbids.

    Tokens that the policy is trained to give no probability have a ratio of infinity.
    """
    trainer = bench.trainer(**MOVED)
    allowed = torch.ones(len(trainer.tokenizer), dtype=torch.bool)
    allowed[:4] = False
    trainer.logit_mask = allowed
    drawn = {token for ids in _ids(_draw(trainer, list(PROMPTS) * 4)) for token in ids}
    require(not drawn & {0, 1, 2, 3}, f"the tokens {sorted(drawn & {0, 1, 2, 3})} are drawn, which the mask forbids")


@check(kind="sampler")
def sampler_greedy(bench: Bench) -> None:
    """At temperature 0 every token is the likeliest, and each prompt gets its own response, in whatever order.

    Evaluations are greedy; and responses that change places are scored for another prompt.
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
    """The response of a row with a ``seed`` follows from it alone, not from the generator or from other rows.

    Without it a single response out of a run cannot be drawn again.
    """
    trainer = _sampler(bench)
    seeds: list[int | None] = [11, None, 12]
    one = _ids(_draw(trainer, ["ab", "c", "def"], seed=1, seeds=seeds))
    other = _ids(_draw(trainer, ["ab", "c", "def"], seed=2, seeds=seeds))
    alone = _ids(_draw(trainer, ["def"], seed=3, seeds=[12]))
    require((one[0], one[2]) == (other[0], other[2]), "rows with seeds get other responses from another generator")
    require(alone[0] == one[2], "a row with a seed gets another response without the other rows")
    many = {str(_ids(_draw(trainer, ["ab"], seeds=[seed]))) for seed in range(20)}
    require(len(many) > 1, "twenty seeds give one and the same response")


@check(kind="sampler")
def sampler_resumes(bench: Bench) -> None:
    """A run that samples by it ends bit-equal whether or not it was stopped and resumed.

    A sampler with a state of its own starts anew after a restart.
    """
    changes: dict[str, Any] = {"train__save_interval": 1, "train__batch_size": 6}
    straight, place = bench.learnt(**changes), bench.place()
    bench.learnt(place, **changes, train__total_steps=2)
    resumed = bench.learnt(place, **changes, train__resume="auto")
    require_same_weights(weights(straight), weights(resumed), "the weights of a resumed run and of one in one go")
    lines = [metric_lines(each.run_dir, training=True) for each in (straight, resumed)]
    require_same_lines(lines[0], lines[1], "a resumed run and one in one go")
