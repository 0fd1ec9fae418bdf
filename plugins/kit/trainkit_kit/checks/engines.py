"""Checks of generation engines: they sample from the weights they were given, by the given seeds, and die loudly."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainkit.errors import EngineError
from trainkit.functional import penalise_repetition, truncate_logits
from trainkit.rollouts import Engine, Generated, Weights
from trainkit.testing.trainers import tiny_trainer
from trainkit_kit.checking import check
from trainkit_kit.checks.tools import require_close, require_same_weights, weights
from trainkit_kit.engines import MODEL, PATIENCE, Serving, changed_since, prompts, seeds_of, state_of_process
from trainkit_kit.failures import require
from trainkit_kit.launching import slowness
from trainkit_kit.subjects import Bench, Subject

TEMPERATURE = 0.7
"""A sampling temperature at which a wrong one shows."""
TIE = 1e-3
"""Logits that differ by less are equally likely the largest: an engine may round differently."""
CLOSING = 20.0
"""Seconds within which the processes of an engine end, on an idle machine."""
LIKELY = 1e-4
"""The smallest p-value of a χ² test that passes; a correct engine falls below it once in 10,000 versions of the kit."""


def _copies(subject: Subject) -> bool:
    return subject.engine_class.own_copy


def _has_processes(subject: Subject) -> bool:
    return subject.engine_class.pids is not Engine.pids


def _exact(subject: Subject) -> bool:
    return subject.engine_class.exact


# ---------------------------------------------------------------------------------------------------- one answer


@check(kind="engine")
def engine_answers(bench: Bench) -> None:
    """Check that every request gets a response within max_new_tokens, with a reason that is true and the version.

    What is sampled is trained unchanged. A lost EOS is never learnt, and a response that was cut for another reason
    than its length is taken for one that the policy ended.
    """
    serving = bench.subject.serving
    ended: set[str] = set()
    for room in (1, 5):
        ended |= {*serving.ask(prompts(32), max_new_tokens=room).reasons}
    require(ended == {"stop", "length"}, f"of 64 responses of up to five tokens, all end by {ended}")
    require(len(serving.ask(["a"], max_new_tokens=4).ids) == 1, "one request does not get one response")


@check(kind="engine")
def engine_stops(bench: Bench) -> None:
    """Check that a stop string of one token or of several, and a stop token, end a response and stay among its tokens.

    A response that goes on after its stop string is scored by text that the policy was told not to write.
    """
    serving = bench.subject.serving
    for stops in (["b"], ["c", "ef"]):
        request = serving.request(prompts(64), max_new_tokens=8, temperature=2.0, stop_sequences=stops)
        made = serving.answer(request, serving.engine.submit(request))
        eos = serving.served.eos
        found = sum(reason == "stop" and ids[-1] not in eos for ids, reason in zip(made.ids, made.reasons, strict=True))
        require(found, f"none of 64 responses ends at the stop strings {stops}, so stopping cannot be checked")
    request = serving.request(prompts(64), max_new_tokens=8, temperature=2.0, stop_token_ids=[0, 1], min_new_tokens=2)
    made = serving.answer(request, serving.engine.submit(request))
    found = sum(ids[-1] in (0, 1) for ids in made.ids)
    require(found, "none of 64 responses ends at the stop tokens [0, 1], so stopping cannot be checked")


@check(kind="engine")
def engine_greedy(bench: Bench) -> None:
    """Check that at temperature 0 the ids are those of trainkit's sampler, also with a repetition penalty.

    Evaluations may be greedy. A response in the place of another is scored for another prompt.
    """
    serving = bench.subject.serving
    for settings in ({"temperature": 0}, {"temperature": 0, "repetition_penalty": 1.5}):
        request = serving.request(prompts(8), **settings)
        made = serving.answer(request, serving.engine.submit(request))
        expected = serving.core.generate(request.queries, request.settings, request.seeds)
        for query, ids, own in zip(request.queries, made.ids, expected.ids, strict=True):
            at = next((at for at, pair in enumerate(zip(ids, own, strict=False)) if pair[0] != pair[1]), None)
            gap = 0.0 if at is None else _gap(serving, query, own, at, request.settings.repetition_penalty)
            require(
                gap < TIE,
                f"with {settings} the prompt {query} gets {ids}, and {own} by trainkit's sampler; where they differ, "
                f"the two largest logits are {gap:.3g} apart",
            )


def _gap(serving: Serving, query: list[int], ids: list[int], at: int, penalty: float) -> float:
    """Return by how much the largest logit of token ``at`` exceeds the second largest."""
    logits = serving.logits(query, ids)[0][at : at + 1]
    seen = torch.zeros_like(logits, dtype=torch.bool)
    seen[0, query + ids[:at]] = True
    first, second = penalise_repetition(logits, seen, penalty)[0].topk(2).values.tolist()
    return float(first - second)


@check(kind="engine")
def engine_logprobs(bench: Bench) -> None:
    """Check that log-probabilities, if given, are those of the returned ids, at the temperature, before truncation.

    An importance ratio between two distributions is not 1 before the first update, and the difference is learnt. An
    engine that cannot compute them returns None.
    """
    serving = bench.subject.serving
    cut: list[dict[str, Any]] = [
        {},
        {"top_p": 0.8},
        {"top_k": 3},
        {"min_p": 0.2},
        {"repetition_penalty": 1.5},
        {"min_new_tokens": 3},
    ]
    for settings in ({"temperature": 1.0}, *({"temperature": TEMPERATURE, **each} for each in cut)):
        request = serving.request(prompts(16), **settings)
        made = serving.answer(request, serving.engine.submit(request))
        _require_numbers(serving, request.queries, made, settings)


def _require_numbers(serving: Serving, queries: list[list[int]], made: Generated, settings: dict[str, Any]) -> None:
    temperature, expected = settings["temperature"], _numbers(serving, queries, made, settings["temperature"])
    for name, own in expected.items():
        given: Tensor | None = getattr(made, name)
        if given is None:
            continue
        off = float((given.float().cpu() - own).abs().max())
        if off < 1e-4:
            continue
        hint = _hint(serving, queries, made, settings, given) if name == "logprobs" else ""
        of = f"differ by up to {off:.3g} from the policy's at temperature {temperature}{hint}"
        require(False, f"{name} with {settings} {of}")


def _numbers(
    serving: Serving, queries: list[list[int]], made: Generated, temperature: float, **cut: Any
) -> dict[str, Tensor]:
    """Return log-probabilities [N], entropies [N] and hidden states [N, D] of the answer's tokens."""
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    for query, ids in zip(queries, made.ids, strict=True):
        logits, hidden = serving.logits(query, ids)
        odds = truncate_logits(logits / temperature, **cut).log_softmax(-1)
        chosen = odds.gather(-1, torch.tensor(ids, device=odds.device).unsqueeze(-1)).squeeze(-1)
        found.append((chosen, -(odds.exp() * odds).nan_to_num().sum(-1), hidden))
    return {
        name: torch.cat(parts).float().cpu()
        for name, parts in zip(("logprobs", "entropy", "hidden"), zip(*found, strict=True), strict=True)
    }


def _hint(serving: Serving, queries: list[list[int]], made: Generated, settings: dict[str, Any], given: Tensor) -> str:
    """Return which other distribution the log-probabilities are of, if it is one of those that engines often take."""
    cut = {name: value for name, value in settings.items() if name in ("top_p", "top_k", "min_p")}
    others = {
        "; they are those at temperature 1": _numbers(serving, queries, made, 1.0),
        "; they are those after truncation": _numbers(serving, queries, made, settings["temperature"], **cut),
    }
    for told, numbers in others.items():
        if torch.allclose(given.float().cpu(), numbers["logprobs"], rtol=0, atol=1e-4):
            return told
    return ""


@check(kind="engine", where=_exact)
def engine_equals_core(bench: Bench) -> None:
    """Check that ids and numbers are the bits of trainkit's sampler, for an engine that says so (`exact`).

    A run may then change between this engine and `local` without a difference.
    """
    serving = bench.subject.serving
    each: list[dict[str, Any]] = [{}, {"temperature": TEMPERATURE, "top_p": 0.8}, {"stop_sequences": ["ab"]}]
    for settings in each:
        request = serving.request(prompts(24), **settings)
        made = serving.answer(request, serving.engine.submit(request))
        own = serving.core.generate(request.queries, request.settings, request.seeds, serving.version)
        require(made.ids == own.ids, f"with {settings} the ids differ from those of trainkit's sampler")
        for name in ("logprobs", "entropy", "hidden"):
            given, expected = getattr(made, name), getattr(own, name)
            same = given is not None and torch.equal(given.cpu(), expected.cpu())
            require(same, f"with {settings} the {name} are not bit-equal to those of trainkit's sampler")


# -------------------------------------------------------------------------------------------- which random numbers


@check(kind="engine")
def engine_seeds(bench: Bench) -> None:
    """Check that equal seeds give equal ids, and a response depends on its own seed alone, not on the other rows.

    Otherwise the responses of a run depend on the number of processes and on `rollout.batch_size`, and a run that is
    resumed does not end as one that was not stopped.
    """
    serving = bench.subject.serving
    texts, seeds = ["ab", "c", "def"], [11, 1 << 62, 12]
    one = serving.ask(texts, seeds).ids
    require(serving.ask(texts, seeds).ids == one, "two calls with the same seeds give different ids")
    other = serving.ask(texts, [11, 5, 12]).ids
    require((one[0], one[2]) == (other[0], other[2]), "a row gets other ids if another row has another seed")
    require(serving.ask(texts[::-1], seeds[::-1]).ids[::-1] == one, "rows in another order get other ids")
    require(serving.ask(["def"], [12]).ids[0] == one[2], "a row gets other ids without the other rows")
    many = serving.ask(["ab"] * 20, seeds_of(20)).ids
    require(len({*map(tuple, many)}) > 1, "twenty different seeds give the same ids")


@check(kind="engine")
def engine_distribution(bench: Bench) -> None:
    """Check that the frequencies of 10,000 first tokens are the policy's probabilities at the sampling temperature.

    Seeds that are related, such as consecutive ones, must give random numbers that are not.
    """
    serving, count = bench.subject.serving, 10_000
    query = serving.trainer.text.encode("bc")
    expected = (serving.logits(query, [0])[0][0] / TEMPERATURE).softmax(-1).cpu() * count
    seeds = [5 + at for at in range(count)]
    made = serving.ask(["bc"] * count, seeds, temperature=TEMPERATURE, max_new_tokens=1)
    counts = torch.tensor([ids[0] for ids in made.ids]).bincount(minlength=len(expected)).double()
    likely = _p_value(counts, expected.double())
    require(
        likely > LIKELY,
        f"of {count} first tokens {counts.int().tolist()} are drawn, where {expected.round().int().tolist()} are "
        f"expected at temperature {TEMPERATURE} (χ² test, p = {likely:.2g})",
    )


def _p_value(counts: Tensor, expected: Tensor) -> float:
    """Return the p-value of a χ² test; tokens expected fewer than five times are counted as one."""
    often = expected >= 5
    counts = torch.cat([counts[often], counts[~often].sum().reshape(1)])
    expected = torch.cat([expected[often], expected[~often].sum().reshape(1)])
    used = expected > 0
    statistic = ((counts[used] - expected[used]) ** 2 / expected[used]).sum()
    degrees = torch.tensor(max(int(used.sum()) - 1, 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(degrees, statistic / 2))


@check(kind="engine")
def engine_truncates(bench: Bench) -> None:
    """Check that top_k, top_p and min_p exclude the tokens that they exclude in trainkit's sampler, and no others.

    They are computed from the logits at the sampling temperature, top_k first and min_p last.
    """
    serving = bench.subject.serving
    query = serving.trainer.text.encode("a")
    logits = serving.logits(query, [0])[0][:1] / TEMPERATURE
    cut: list[dict[str, Any]] = [{"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.3}, {"top_k": 4, "top_p": 0.8}]
    for settings in cut:
        allowed = {*truncate_logits(logits, **settings)[0].isfinite().nonzero().squeeze(-1).tolist()}
        made = serving.ask(["a"] * 400, temperature=TEMPERATURE, max_new_tokens=1, **settings)
        drawn = {ids[0] for ids in made.ids}
        require(
            drawn <= allowed, f"with {settings} the tokens {sorted(drawn - allowed)} are sampled; they are excluded"
        )
        require(drawn == allowed, f"with {settings} the tokens {sorted(allowed - drawn)} are never sampled")


# -------------------------------------------------------------------------------------------------- which weights


@check(kind="engine")
def engine_weights(bench: Bench) -> None:
    """Check that after `load` the responses are those of the new weights and have their version, and before it not.

    Old weights, or keys and values that were cached with them, are rollouts of another policy. An engine that has its
    own copy is not changed by training until it is told.
    """
    serving = bench.subject.serving
    first = serving.ask(prompts(8)).ids
    serving.push_away()
    if bench.subject.engine_class.own_copy:
        require(serving.ask(prompts(8)).ids == first, "the responses change when the model is trained, before `load`")
    for version in (serving.version + 1, 3):  # versions may fall: a run goes back to its best checkpoint
        serving.load(version)
        for temperature in (1.0, TEMPERATURE):
            request = serving.request(prompts(16), temperature=temperature)
            made = serving.answer(request, serving.engine.submit(request))
            _require_numbers(serving, request.queries, made, {"temperature": temperature})
        _require_likely(serving, version)
        serving.push_away()
    serving.load()


def _require_likely(serving: Serving, version: int) -> None:
    """Fail unless greedy ids are the likeliest of the weights; unlike log-probabilities, all engines have them."""
    request = serving.request(prompts(8), temperature=0)
    made = serving.answer(request, serving.engine.submit(request))
    for query, ids in zip(request.queries, made.ids, strict=True):
        logits = serving.logits(query, ids)[0].cpu()
        below = logits.max(-1).values - logits.gather(-1, torch.tensor(ids).unsqueeze(-1)).squeeze(-1)
        require(
            float(below.max()) < TIE,
            f"after weights of version {version} were loaded, a token at temperature 0 is {float(below.max()):.3g} "
            "below the likeliest one of these weights",
        )


@check(kind="engine", where=_copies)
def engine_refuses_weights(bench: Bench) -> None:
    """Check that weights with another shape, a missing or an unknown name are refused, and the old ones stay in use.

    Many engines keep old values for names that are missing, and fail much later if a shape is wrong.
    """
    serving = bench.subject.serving
    before, own = serving.ask(prompts(4)).ids, dict(serving.weights.tensors())
    name, tensor = next((name, tensor) for name, tensor in own.items() if tensor.dim() == 2)
    bad = {
        "another shape": {**own, name: tensor[:-1]},
        "a missing name": {key: value for key, value in own.items() if key != name},
        "an unknown name": {**own, "unknown.weight": tensor},
    }
    for what, tensors in bad.items():
        try:
            serving.engine.load(Weights(serving.version + 1, tensors.items))
        except EngineError:
            pass
        else:
            require(False, f"weights with {what} ({name}) are loaded without an EngineError")
        require(serving.ask(prompts(4)).ids == before, f"after weights with {what} were refused, other ids are sampled")


# ------------------------------------------------------------------------------------------------ beside the training


@check(kind="engine")
def engine_queues(bench: Bench) -> None:
    """Check that several requests may be under way, and each future has the answer to its own request.

    Collections that are made ahead submit the next request before the last one is answered.
    """
    serving = bench.subject.serving
    requests = [serving.request(prompts(4 + at), seeds_of(4 + at, 10 * at)) for at in range(3)]
    futures = [serving.engine.submit(request) for request in requests]
    found = [serving.answer(request, future).ids for request, future in zip(requests, futures, strict=True)]
    for request, ids in zip(requests, found, strict=True):
        again = serving.answer(request, serving.engine.submit(request)).ids
        require(again == ids, "a request gets other ids if others are under way")


@check(kind="engine")
def engine_leaves_the_process(bench: Bench) -> None:
    """Check that the engine changes neither torch's threads, precision and generator nor the environment.

    They belong to the training, whose numbers must not depend on what generates.
    """
    serving = bench.subject.serving
    before = state_of_process()
    serving.ask(prompts(4))
    serving.load()
    changed = [*serving.disturbed, *changed_since(before)]
    require(not changed, f"the engine changes {' and '.join(dict.fromkeys(changed))} in the training process")


@check(kind="engine")
def engine_trains(bench: Bench) -> None:
    """Check that a run with the engine ends; with the bits of a run with `local` if the engine is `exact`.

    The loop gives the engine new weights after every collection.
    """
    serving = bench.subject.serving
    ended = []
    for own in (True, False):
        changes: dict[str, Any] = {
            "model": bench.subject.model or MODEL,
            "train__total_steps": 4,
            "rollout__num_rollouts": 8,
        }
        changes["rollout__engine"] = serving.trainer.config.rollout.engine if own else "local"
        trainer: Any = tiny_trainer(bench.subject.trainer_name, bench.place(), optimizer__lr=0.01, **changes)
        if own and serving.engine.own_copy:
            trainer.sampling.engine = serving.engine  # which runs already
        trainer.learn()
        ended.append(trainer)
    require(ended[0].progress.step == 4, f"a run of 4 steps ends at step {ended[0].progress.step}")
    if serving.engine.exact:
        require_same_weights(
            weights(ended[0]), weights(ended[1]), "the weights of a run with the engine and with local"
        )
    elif (sampled := ended[0].generate(["a"] * 8)).logprobs is not None:
        mask = sampled.sequences.response_mask
        with torch.no_grad():
            policy = ended[0].unwrapped(sampled.sequences).logprobs
        what = "log-probabilities of the engine and of the policy after a run"
        require_close(policy[mask], sampled.logprobs[mask], what, rtol=0, atol=1e-4)
    serving.load()  # the checks that follow use the engine with the weights of `serving`


# ---------------------------------------------------------------------------------------------------------- the end


@check(kind="engine", where=_has_processes)
def engine_deaths(bench: Bench) -> None:
    """Check that the death of a process leads to the right answer or an EngineError, not to a wrong one or none.

    A process that is started again has its first weights, not the last ones, until it is given them again.
    """
    for idle, index in ((True, 0), (False, -1)):  # the first process before a request, the last one during a request
        serving = bench.subject.serving
        request = serving.request(prompts(64), max_new_tokens=40, temperature=2.0)
        expected = serving.answer(request, serving.engine.submit(request)).ids
        early = None if idle else serving.engine.submit(request)
        serving.push_away()  # the weights of the last `load` are no longer those of the model
        os.kill(serving.engine.pids[index], signal.SIGKILL)
        _require_same_or_error(bench.subject, request, expected, early)


def _require_same_or_error(subject: Subject, request: Any, expected: list[list[int]], early: Any) -> None:
    """Fail unless the answer is the expected one or an `EngineError`; start the engine again after an error."""
    limit = PATIENCE * slowness()
    serving, ended = subject.serving, time.monotonic() + limit
    try:
        made = serving.answer(request, serving.engine.submit(request) if early is None else early)
        again = serving.answer(request, serving.engine.submit(request))
    except EngineError:
        subject.stop()
        return
    finally:
        require(time.monotonic() < ended, f"after the death of a process the answer takes more than {limit:g} seconds")
    same = made.ids == again.ids == expected
    require(same, "after the death of a process other ids are sampled with the same seeds")
    serving.load()


@check(kind="engine", where=_has_processes)
def engine_closes(bench: Bench) -> None:
    """Check that no process of the engine is left after `close`.

    Processes that are left behind hold memory and accelerators.
    """
    serving = bench.subject.serving
    pids = serving.engine.pids
    require(pids, "the engine has no processes after it was started")
    bench.subject.stop()
    limit = CLOSING * slowness()
    ended = time.monotonic() + limit
    while (left := [pid for pid in pids if _alive(pid)]) and time.monotonic() < ended:
        time.sleep(0.1)
    require(not left, f"{len(left)} of {len(pids)} processes are alive {limit:g} seconds after close()")


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
        return state != "Z"
    except OSError:
        return False
