"""Checks of credit: what scores change, which parameters get a gradient, and that the algorithm learns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from trainkit.data import Batch, Rollouts, Sequences
from trainkit.plugins import hookimpl
from trainkit.rollouts import decode
from trainkit.testing import Target, tiny_gpt2
from trainkit.testing.trainers import PROMPTS, SAMPLES
from trainkit.trainer.accelerate import AccelerateRLTrainer
from trainkit.trainer.base import BaseRLTrainer
from trainkit_kit.bandit import Bandit
from trainkit_kit.checking import check
from trainkit_kit.checks.fields import contexts
from trainkit_kit.checks.policy import LORA, SHARP, VOCABULARY, compares, samples_text
from trainkit_kit.checks.tools import (
    Ids,
    credits_of,
    flat_gradient,
    floats,
    for_loss,
    gradient,
    hashed,
    ids_of,
    push_away,
    require_close,
    require_same_experience,
    require_same_weights,
    rewarding,
    weights,
)
from trainkit_kit.failures import CheckError, require
from trainkit_kit.stand_in import noted_responses
from trainkit_kit.subjects import Bench, Subject


def rated(subject: Subject) -> bool:
    """Return whether the subject learns from scores of responses or rewards of samples."""
    return subject.rewarded or "rewards" in subject.inputs


def credited(subject: Subject) -> bool:
    """Return whether the subject learns from scores that a reward function gives to text that it samples."""
    return subject.samples_text and "reward_fn" in subject.inputs


def scored(bench: Bench, scores: Sequence[Any]) -> Any:
    """Return a trainer with one collection, whose responses or samples have some of ``scores``."""
    if bench.subject.online:
        return bench.collected(arguments={"reward_fn": rewarding(scores)})
    samples = bench.subject.declaration.arguments.get("samples", SAMPLES)
    return bench.collected(arguments={"rewards": list(islice(cycle(scores), len(samples)))})


# -------------------------------------------------------------------------------------------------- where scores go


@check(where=credited)
def credit_of_scores(bench: Bench) -> None:
    """Check that a higher score of a response gives its last token more credit, at any position in its group.

    Credit is how much the loss increases a token's log-probability. A score that is placed one token early or late, is
    truncated to an integer, or is given to a row that is not trained leaves the last token's credit unchanged.

    Causes: scores placed by column instead of the response mask (use `place_scores`); groups that are read by columns;
    advantages in the dtype of integer scores; rows that are dropped from the experience.
    """
    sampled = _sampled(bench)
    texts = _texts(bench, sampled)
    _require_rises(
        bench,
        sampled,
        _chosen(bench, sampled),
        "last",
        (0.05, 0.95),
        lambda given: _fractions({texts[index]: score for index, score in given.items()}),
    )


@check(where=credited)
def credit_of_dense_rewards(bench: Bench) -> None:
    """Check that a score is the same as a reward of the last token, and a token's reward raises its credit.

    A reward function may return a list of numbers per response. An algorithm that does not expect this takes rewards of
    tokens for scores of responses.

    Causes: scores [B, T] that are taken for scores [B] (use `per_response` or `place_scores`); rewards that are only
    read at the last token.
    """
    sampled, usual = _sampled(bench), _fractions({})
    texts = _texts(bench, sampled)
    tokens = {text: len(ids[1]) for text, ids in zip(texts, sampled, strict=True)}

    def dense(extra: dict[tuple[str, str], float]) -> Callable[..., list[list[float]]]:
        def reward(prompts: list[str], outputs: list[str], **_: Any) -> list[list[float]]:
            rows = []
            for text, score in zip(zip(prompts, outputs, strict=True), usual(prompts, outputs), strict=True):
                row = [0.0] * (tokens.get(text, 2) - 1) + [score]
                rows.append([row[0] + extra.get(text, 0.0), *row[1:]])
            return rows

        return reward

    one, other = (
        bench.collected(arguments={"reward_fn": reward}).store.experience.flatten() for reward in (usual, dense({}))
    )
    require(one.keys() == other.keys(), "scores and rewards per token make experience with other fields")
    for name, tensor in one.items():
        require_close(tensor.float(), other[name].float(), f"{name} of scores and of equal rewards for the last tokens")
    long = [index for index in _chosen(bench, sampled) if len(sampled[index][1]) > 1]
    _require_rises(
        bench,
        sampled,
        long,
        "first",
        (-1.0, 1.0),
        lambda given: dense({texts[index]: reward for index, reward in given.items()}),
    )


class _Made:
    """An observer that keeps the last collection."""

    experience: Batch

    @hookimpl
    def on_experience(self, experience: Batch) -> None:
        """Keep the experience."""
        self.experience = experience


@check(where=credited)
def given_responses(bench: Bench) -> None:
    """Check that `step` makes the same experience from given responses and scores as a run, and learns from it.

    The probabilities with which given responses were sampled are unknown: ``rollouts.logprobs`` and
    ``rollouts.entropy`` are None, and `behaviour` computes them with the policy.

    Causes: `rollouts.logprobs` used where `self.behaviour(rollouts)` should be; a `make_experience` that samples more
    than is trained on.
    """
    made, reward = _Made(), _fractions({})
    usual, trainer = (
        bench.trainer(arguments={"reward_fn": reward}),
        bench.trainer(callbacks=[made], arguments={"reward_fn": reward}),
    )
    given = _given(usual)
    usual.collect()
    rollouts = Rollouts.cat(given or usual.collector.collection.rollouts)
    _samples_further_as(rollouts, trainer)
    trainer.models.build()  # made before its weights are copied
    before = weights(trainer)
    trainer.step(rollouts.queries, rollouts.responses, reward(rollouts.prompts, rollouts.outputs))
    what = "experience of responses in a run and of the same responses given to step()"
    try:
        require_same_experience(usual.store.experience, made.experience, what)
    except CheckError as error:
        raise CheckError(f"{error}{_shape_of(bench.subject)}") from None
    after = weights(trainer)
    require(any(not torch.equal(before[name], after[name]) for name in before), "step() changes no weight")


def _given(trainer: Any) -> list[Rollouts]:
    """Return a list that is filled with what `experience` is given, which may sample further responses."""
    given: list[Rollouts] = []
    experience = trainer.experience

    def noted(rollouts: Rollouts, scores: Tensor) -> Any:
        given.append(rollouts)
        return experience(rollouts, scores)

    trainer.experience = noted
    return given


def _samples_further_as(run: Rollouts, trainer: Any) -> None:
    """Make `experience` sample what it samples in a run: given responses have no place in the stream of prompts."""
    experience = trainer.experience

    def placed(rollouts: Rollouts, scores: Tensor) -> Any:
        trainer.sampling.seeds([*run.rows], "train", trainer.collector.current.seen)  # the given ones are the first
        return experience(replace(rollouts, rows=run.rows), scores)

    trainer.experience = placed


def _shape_of(subject: Subject) -> str:
    """Return how to declare a trainer that makes experience of more than its responses and scores, in words."""
    cls = subject.trainer_class
    if cls.make_experience is AccelerateRLTrainer.make_experience:
        return ""
    return (
        f"; {cls.__name__} overrides make_experience: if it samples more than what is trained on, such as a greedy "
        "response for a baseline, step() is not given that. Then declare it, in the module of the trainer or in a "
        f'module kit beside it: KIT = Declaration(expected_failures={{"given_responses": "why"}})'
    )


def _sampled(bench: Bench) -> list[Ids]:
    """Return the responses of the first collection, with the scores of `_fractions`."""
    trainer = bench.collected(arguments={"reward_fn": _fractions({})})
    return [ids for rollouts in trainer.collector.collection.rollouts for ids in ids_of(rollouts.sequences)]


def _texts(bench: Bench, sampled: list[Ids]) -> list[tuple[str, str]]:
    """Return the prompts and responses as the reward function gets them."""
    tokenizer = bench.subject.tiny.tokenizer
    queries, responses = (decode(tokenizer, [list(ids[part]) for ids in sampled], True) for part in (0, 1))
    return list(zip(queries, responses, strict=True))


def _fractions(others: dict[tuple[str, str], float]) -> Callable[..., list[float]]:
    """Return a reward function with scores between 0.1 and 0.9 that follow from the text, or those of ``others``."""

    def reward(prompts: list[str], outputs: list[str], **_: Any) -> list[float]:
        return [
            others.get((prompt, output), 0.1 + 0.8 * hashed(prompt, output) / (1 << 32))
            for prompt, output in zip(prompts, outputs, strict=True)
        ]

    return reward


def _chosen(bench: Bench, sampled: list[Ids]) -> list[int]:
    """Return indices of responses with unique ids: one per position in a group, the shortest and the longest."""
    size = bench.subject.tiny.samples_per_prompt
    texts = _texts(bench, sampled)  # responses of other ids may have the same text
    alone = [index for index, text in enumerate(texts) if texts.count(text) == 1]
    by_length = sorted(alone, key=lambda index: len(sampled[index][1]))
    places = [next((index for index in alone if index % size == place), None) for place in range(size)]
    require(None not in places, f"too few of the {len(sampled)} responses to {len(PROMPTS)} prompts differ")
    return sorted({*(index for index in places if index is not None), by_length[0], by_length[-1], alone[-1]})


def _require_rises(
    bench: Bench,
    sampled: list[Ids],
    chosen: list[int],
    which: str,
    values: tuple[float, float],
    rewards: Callable[[dict[int, float]], Callable[..., Any]],
) -> None:
    """Fail unless the first or last token of each chosen response has more credit for the higher of two values.

    Responses of different groups are changed in one collection, every other one from the higher value to the lower, so
    that its mean stays.
    """
    size, at = bench.subject.tiny.samples_per_prompt, -1 if which == "last" else 0
    rest = list(chosen)
    while rest:
        together = list({index // size: index for index in rest}.values())
        rest = [index for index in rest if index not in together]
        found: dict[int, list[float]] = {index: [0.0, 0.0] for index in together}
        for turn in (0, 1):
            given = {index: (number + turn) % 2 for number, index in enumerate(together)}
            reward = rewards({index: values[high] for index, high in given.items()})
            trainer = bench.collected(arguments={"reward_fn": reward})
            credits_ = credits_of(trainer, trainer.store.experience)
            for index, high in given.items():
                if sampled[index] in credits_:
                    found[index][high] = float(credits_[sampled[index]][at])
        for index, pair in found.items():
            _require_rise(pair, which, index, sampled[index])


def _require_rise(found: list[float], which: str, index: int, ids: Ids) -> None:
    low, high = found
    if high - low > 1e-3 * max(abs(low), abs(high)):
        return
    if high == low == 0:
        why = "its row is not trained, or the token is masked"
    elif high < low:
        why = "a sign is wrong"
    else:
        why = "the score lands on another token or row, or is rounded"
    raise CheckError(
        f"the {which} token of response {index} of the collection, {ids[0]} → {ids[1]}, has the credit {high:.4g} for "
        f"a high score or reward, and {low:.4g} for a low one: {why}"
    )


@check(where=rated)
def integer_scores(bench: Bench) -> None:
    """Check that scores given as integers, booleans or NumPy numbers make the same experience as floats.

    Statistics computed in the type of the scores round advantages to integers.

    Causes: `torch.tensor(scores)` without a dtype; statistics before `to_float64`.
    """
    for given_floats, others in (
        ([1.0, 2.0, 4.0, 0.0, 1.0, 3.0, 7.0, 2.0], (int, np.int64, np.float64)),
        ([1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 0.0], (bool, np.bool_)),
    ):
        plain = scored(bench, given_floats * 2).store.experience.flatten()
        for kind in others:
            given = scored(bench, [kind(score) for score in given_floats * 2]).store.experience.flatten()
            for name, tensor in plain.items():
                require_close(
                    tensor.float(), given[name].float(), f"{name} of float and {kind.__name__} scores", rtol=0, atol=0
                )


# ------------------------------------------------------------------------------------------------- where gradients go


def draws_and_compares(subject: Subject) -> bool:
    """Return whether the subject samples text and uses a reference; one that keeps nothing of equal scores does not."""
    return samples_text(subject) and compares(subject) and not subject.keeps


@check(where=draws_and_compares)
def kl_pulls_back(bench: Bench) -> None:
    """Check that with equal scores a step moves the policy back towards its reference, or no step is made.

    No metric of a short run reveals a penalty without gradient, an estimate whose gradient is 0 on average, or a wrong
    sign.

    Causes: the log-probabilities of the policy and of the reference exchanged; an estimate computed from the stored
    log-probabilities instead of the current ones, which has no gradient; a penalty that is added to the reward.
    """
    trainer, sequences = _moved(bench, by=0.1)
    batch = trainer.store.experience
    if batch.weight == 0:
        _require_no_step(trainer, batch)
        return
    back = _gradient_of_kl(trainer, sequences)
    step = _gradient_by_policy(trainer, batch)
    require(step.any(), "the loss has no gradient although the policy has moved; all scores are equal")
    cosine = float(cosine_similarity(step, back, dim=0))
    require(cosine > 0.5, f"the cosine of the step's gradient and the gradient of the divergence is {cosine:.3f}")


@check(where=draws_and_compares)
def reported_kl(bench: Bench) -> None:
    """Check that the reported divergence from the reference is the exact one, up to the error of sampling.

    ``policy/kl_per_token`` is compared with the exact divergence over the vocabulary, ``policy/kl`` with that or its
    sum over a response, without and with an adapter. An estimate with the two policies exchanged has another mean, one
    with a reference that keeps its adapter is 0, and controllers depend on it.

    Causes: policy and reference exchanged in the estimate; a mean over responses where the name says per token; the
    squared log-ratio without its factor ½.
    """
    adapted: dict[str, Any] = {"model": tiny_gpt2(VOCABULARY, **SHARP), "model__peft_config": LORA}
    for changes in ({}, adapted):
        trainer, sequences = _moved(bench, by=0.3, **changes)
        with torch.no_grad():
            exact = trainer.policy(sequences, reference=trainer.reference).divergence
            _, found = trainer.loss(for_loss(trainer, trainer.store.experience))
        per_token = float(exact.sum() / sequences.response_mask.sum())
        require(per_token > 0, "the reference has moved with the policy")
        allowed = {"policy/kl_per_token": [per_token], "policy/kl": [per_token, float(exact.sum(1).mean())]}
        told = {
            name: value.compute() for name, value in {**trainer.recorder.pending, **found}.items() if name in allowed
        }
        for name, value in told.items():
            off = min(abs(value / true - 1) for true in allowed[name])
            under = " of a policy with an adapter" if changes else ""
            require(off < 0.15, f"{name}{under} is {value:.4g}, and the exact divergence is {allowed[name][-1]:.4g}")


def _moved(bench: Bench, by: float, **changes: Any) -> tuple[Any, Sequences]:
    """Return a trainer whose policy has moved, with a large collection of equal scores, and its responses."""
    size = bench.subject.tiny.samples_per_prompt
    count = 1024 // size * size
    trainer = bench.trainer(
        arguments={"reward_fn": rewarding([0.0])}, rollout__num_rollouts=count, rollout__batch_size=count, **changes
    )
    trainer.models.build()  # the reference is made with it
    push_away(trainer.unwrapped.model, by)
    trainer.collect()
    sequences = Sequences.cat([rollouts.sequences for rollouts in trainer.collector.collection.rollouts])
    return trainer, sequences.to(trainer.accelerator.device)


def _require_no_step(trainer: Any, batch: Batch) -> None:
    before = weights(trainer)
    trainer.update(batch)
    require_same_weights(before, weights(trainer), "weights before and after a step of weight 0")


def _gradient_of_kl(trainer: Any, sequences: Sequences) -> Tensor:
    trainer.optimizer.zero_grad()
    trainer.policy(sequences, reference=trainer.reference).divergence.sum().backward()
    return _taken(trainer)


def _gradient_by_policy(trainer: Any, batch: Batch) -> Tensor:
    """Return the gradient of the loss through the log-probabilities, without that through the values."""

    def without_values(_: Any, __: Any, outputs: Any) -> Any:
        return outputs if outputs.values is None else outputs._replace(values=outputs.values.detach())

    handle = trainer.policy.register_forward_hook(without_values)
    try:
        trainer.loss(for_loss(trainer, batch))[0].backward()
    finally:
        handle.remove()
    return _taken(trainer)


def _taken(trainer: Any) -> Tensor:
    """Return the flat gradient of the language model, and reset it."""
    flat = flat_gradient(trainer.unwrapped.model)
    trainer.optimizer.zero_grad()
    return flat


@check()
def gradient_reaches(bench: Bench) -> None:
    """Check that in a short run every trained parameter gets a gradient, and frozen parameters do not change.

    A head that no loss uses, or a part of the model behind a detach, silently keeps its initial weights. Layers that
    are frozen to save memory, and shared with the reference, must not change.

    Causes: a head whose output the loss does not use; a detach, or `torch.no_grad`, around a part of the loss;
    `requires_grad_` in `get_arch`.
    """
    trainer = bench.trainer()
    trainer.models.build()
    missing = {name for name, p in trainer.unwrapped.named_parameters() if p.requires_grad}
    require(missing, "the model has no trainable parameters")
    still = {_module_of(name) for name in missing}

    def arrived(name: str, grad: Tensor) -> None:
        missing.discard(name)
        if grad.any():  # one parameter per module is enough: a bias may cancel in a difference of scores
            still.discard(_module_of(name))

    for name, parameter in trainer.unwrapped.named_parameters():
        if parameter.requires_grad:
            parameter.register_hook(partial(arrived, name))
    trainer.learn()
    require(not missing, f"in a run no gradient reaches {', '.join(sorted(missing)[:3])}")
    require(not still, f"in a run the gradient is 0 in all parameters of {', '.join(sorted(still)[:3])}")
    if bench.subject.language:
        _require_frozen_stays(bench)


def _module_of(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def _require_frozen_stays(bench: Bench) -> None:
    trainer = bench.trainer(model__num_layers_unfrozen=1)
    before = weights(trainer)
    trainer.learn()
    moved = {name for name, tensor in weights(trainer).items() if not torch.equal(tensor, before[name])}
    below = [name for name in moved if ".h.0." in name or ".wte." in name or ".wpe." in name]
    require(not below, f"with num_layers_unfrozen 1 of 2 a run changes {', '.join(below[:3])}")
    require(
        any(".h.1." in name for name in moved), "with num_layers_unfrozen 1 of 2 a run does not change the upper layer"
    )


def keeps_state(subject: Subject) -> bool:
    """Return whether the subject declares state in `remembers`, or overrides `after_step`."""
    cls = subject.trainer_class
    return bool(cls.remembers) or cls.after_step is not BaseRLTrainer.after_step


@check(where=keeps_state)
def kept_state_moves(bench: Bench) -> None:
    """Check that a run changes what an algorithm keeps besides trained weights, e.g. target networks or statistics.

    With a target that is never synchronised an algorithm keeps learning from its initial state.

    Causes: an `after_step` whose condition is never true; statistics that are computed and not stored.
    """
    trainer = bench.trainer()
    trainer.models.build()
    before = _kept(trainer)
    require(
        before,
        "after_step is overridden, but there is neither a buffer nor anything in `remembers` that it could change",
    )
    trainer.learn()
    still = [name for name, value in _kept(trainer).items() if repr(value) == repr(before[name])]
    require(not still, f"a run does not change {', '.join(still[:3])}")


def _kept(trainer: Any) -> dict[str, Any]:
    """Return copies of the attributes in `remembers`, and of saved buffers outside the model itself."""
    own = {name for name, _ in trainer.unwrapped.named_buffers() if not name.startswith("model.")}
    state = trainer.unwrapped.state_dict()
    buffers = {name: state[name].tolist() for name in own & state.keys() if state[name].is_floating_point()}
    return buffers | {name: repr(getattr(trainer, name)) for name in type(trainer).remembers}


@check(where=lambda subject: bool(subject.declaration.targets))
def targets_follow(bench: Bench) -> None:
    """Check that each declared target follows its source at its rate, when it moves, and that it moves in a run.

    A rate and its decay exchanged, or a target that is moved twice, leaves a run that learns, from targets that are as
    old as those of another setting.

    Causes: `decay` where `1 - decay` should be; the arguments of `lerp` exchanged; an update in `loss`, which is called
    for each micro-batch; a source that is read before the step. Or `source` of the declaration is another quantity.
    """
    observed = _Targets(bench.subject.declaration.targets)
    bench.learnt(callbacks=[observed])
    require(not observed.astray, "; ".join(observed.astray.values()))
    still = observed.declared.keys() - observed.moved
    require(not still, f"a run does not move the target {', '.join(sorted(still))}")


class _Targets:
    """An observer of targets, which notes those that have moved, and how one moves otherwise than declared."""

    def __init__(self, declared: Mapping[str, Target]) -> None:
        self.declared, self.before = declared, dict[str, Tensor]()
        self.moved, self.astray = set[str](), dict[str, str]()

    @hookimpl
    def on_train_begin(self, trainer: Any) -> None:
        """Note where the targets begin."""
        self.before = {name: _float64(each.value(trainer)) for name, each in self.declared.items()}

    @hookimpl
    def on_experience(self, trainer: Any) -> None:
        """Compare targets that a collection moves."""
        self._compare(trainer)

    @hookimpl
    def on_step(self, trainer: Any) -> None:
        """Compare targets that a step moves."""
        self._compare(trainer)

    def _compare(self, trainer: Any) -> None:
        for name, target in self.declared.items():
            value, before = _float64(target.value(trainer)), self.before[name]
            if torch.equal(value, before):
                continue
            way, rate = _float64(target.source(trainer)) - before, target.rate(trainer.method)
            off, slack = (value - before - rate * way).norm(), 1e-4 * way.norm() + 1e-6 * before.norm()
            if off > slack:
                part = float(((value - before) * way).sum() / way.square().sum())
                told = f"moves by {part:.4g} of its distance to the source, and its rate is {rate:.4g}"
                self.astray.setdefault(name, f"the target {name} {told}")
            self.before[name] = value
            self.moved.add(name)


def _float64(value: float | Tensor) -> Tensor:
    return torch.as_tensor(value).detach().to("cpu", torch.float64, copy=True)


# --------------------------------------------------------------------------------------------------------- precision


@check()
def finite_at_extremes(bench: Bench) -> None:
    """Check that loss and gradient stay finite with equal or huge scores, one token, one response, a distant policy.

    A standard deviation of 0 or of one number, or an exponential of an advantage or a log-ratio, can give an infinity,
    and a single one ends a run hours after it began.

    Causes: a division by a standard deviation without ε; `exp` of a log-ratio or an advantage without a limit; the
    logarithm of a probability that can be 0 or 1; the mean of an empty selection.
    """
    for what, trainer in _extremes(bench):
        batch = trainer.store.experience
        require(len(batch) > 0, f"with {what} the experience is empty")
        for name, tensor in batch.flatten().items():
            require(not tensor.is_floating_point() or tensor.isfinite().all(), f"with {what} {name} is not finite")
        with torch.no_grad():
            loss = float(trainer.loss(for_loss(trainer, batch))[0])
        require(np.isfinite(loss), f"with {what} the loss is {loss}{_not_finite_terms(trainer, batch)}")
        require(gradient(trainer, batch).isfinite().all(), f"with {what} the gradient is not finite")


@torch.no_grad()
def _not_finite_terms(trainer: Any, batch: Batch) -> str:
    """Return the metrics of the loss that are not finite, in words."""
    _, found = trainer.loss(for_loss(trainer, batch))
    names = [name for name, value in floats(found).items() if not np.isfinite(value)]
    return f"; so are the metrics {', '.join(names)}" if names else ""


def _extremes(bench: Bench) -> Iterator[tuple[str, Any]]:
    subject = bench.subject
    if rated(subject) and not subject.keeps:
        yield "equal scores", scored(bench, [1.0])
    if rated(subject):
        yield "scores of ±1e6", scored(bench, [1e6, -1e6, -1e6])
    if subject.online:
        few = {"rollout__num_rollouts": bench.subject.tiny.samples_per_prompt}
        yield "the smallest collection", bench.collected(**few)
        if subject.language:
            yield "responses of one token", bench.collected(rollout__max_new_tokens=1)
            yield "a collection of one token per response", bench.collected(**few, rollout__max_new_tokens=1)
    for settings in ({}, *contexts(subject).values()):
        far = bench.collected(**settings)
        push_away(far.unwrapped, by=1.0)
        yield f"a policy far from the one that sampled{f' under {settings}' if settings else ''}", far


@check(where=lambda subject: subject.language)
def bf16_autocast(bench: Bench) -> None:
    """Check that under bf16 autocast the loss and the direction of its gradient are those of float32, up to rounding.

    Heads of the wrong dtype, and sums, ratios or log-probabilities that are computed in 16 bits, show only in runs with
    mixed precision.

    Causes: a head that casts to the dtype of its input; log-probabilities or sums in 16 bits; weights cast by
    `get_arch`.
    """
    exact, rounded = bench.collected(), bench.trainer(train__mixed_precision="bf16")
    batch = exact.store.experience
    one, other = _measured(exact, batch), _measured(rounded, _of_same_responses(rounded, exact))
    require(
        abs(one[0] - other[0]) <= 2e-3 * (abs(one[0]) + 1), f"the loss is {one[0]:.5g}, and under bf16 {other[0]:.5g}"
    )
    kinds = {name: p.dtype for name, p in exact.unwrapped.named_parameters()}
    cast = [name for name, p in rounded.unwrapped.named_parameters() if p.dtype != kinds[name]]
    require(not cast, f"under bf16 autocast the weights have another dtype: {', '.join(cast[:3])}")
    cosine = float(cosine_similarity(one[1], other[1], dim=0))
    require(cosine > 0.98, f"the cosine of the gradients in float32 and under bf16 is {cosine:.3f}")


def _of_same_responses(rounded: Any, exact: Any) -> Batch:
    """Return the experience that ``rounded`` makes of the responses of ``exact``, or else that of ``exact``.

    It is that of ``exact`` if more is sampled to make experience, which is sampled differently in another precision.
    With log-probabilities at sampling in another precision, a ratio that should be 1 could leave a small clip range.
    """
    batch: Batch = exact.store.experience
    if not exact.online or type(exact).make_experience is not AccelerateRLTrainer.make_experience:
        return batch
    parts = [replace(part, logprobs=None, entropy=None) for part in exact.collector.collection.rollouts]
    rounded.sample = lambda *_, **__: parts.pop(0)
    more = noted_responses(rounded)
    rounded.collect()
    made: Batch = rounded.store.experience
    return batch if more or exact.forks else made


def _measured(trainer: Any, batch: Batch) -> tuple[float, Tensor]:
    trainer.models.build()
    policy = trainer.policy
    with torch.no_grad(), trainer.accelerator.autocast():
        prepared = for_loss(trainer, batch)
    loss, _ = trainer.updater.measure(prepared)
    loss.backward()
    flat = torch.cat([p.grad.flatten().float() for p in policy.parameters() if p.grad is not None])
    trainer.optimizer.zero_grad()
    return float(loss.detach()), flat


# ---------------------------------------------------------------------------------------------------------- learning


@check()
def learns(bench: Bench) -> None:
    """Check that the algorithm learns a small problem whose solution is known.

    Every part can be right while the whole learns nothing, or the opposite: a wrong sign, a step that is not made, a
    comparison with the wrong row.

    Causes: a sign of the loss or of the advantage; a loss of the wrong rows; a learning rate or a weight that is 0; a
    step that `judge` always skips.
    """
    subject = bench.subject
    if credited(subject) or subject.needs_environment:
        _finds_rewards(bench)
    elif subject.samples_text:
        _loss_falls(bench)
    elif subject.language and "pairs" in subject.inputs:
        _prefers_the_chosen(bench)
    elif not subject.writes_text:
        _improves(bench)
    elif {"rewards", "labels"} & {*subject.inputs}:
        _samples_the_better(bench)
    elif subject.chooses_reference:  # such as a teacher, which it comes closer to, and not to the samples
        _loss_falls(bench)
    else:
        _imitates(bench)


RUN: dict[str, Any] = {
    "optimizer__lr": 1e-2,
    "train__batch_size": 32,
    "rollout__num_rollouts": 64,
    "rollout__batch_size": 64,
}


def _finds_rewards(bench: Bench) -> None:
    bandit = Bandit()
    # an algorithm that keeps nothing of equally good responses ends where it has learnt the bandit
    changes = {**RUN, "rollout__max_new_tokens": 1, "train__total_steps": 20 if bench.subject.keeps else 60}
    arguments = bandit.arguments
    if bench.subject.needs_environment:
        arguments |= {"environment": bandit.environment, "reward_fn": None}
    trainer = bench.trainer(arguments=arguments, **changes)
    before = _expected(bandit, trainer)
    trainer.learn()
    after, best = _expected(bandit, trainer), float(bandit.rewards.max(1).values.mean())
    seen = f"the expected reward goes from {before:.3f} to {after:.3f} in {trainer.progress.step} steps; "
    require(after - before > 0.3 * (best - before), f"{seen}the best is {best:.3f}")


def _expected(bandit: Bandit, trainer: Any) -> float:
    """Return the exact mean reward of the policy."""
    trainer.models.build()
    return float((bandit.logprobs(trainer.unwrapped.model).exp() * bandit.rewards).sum(1).mean())


STEPS = (200, 1000)
"""Steps of a run, and of a longer one if the first has not learnt enough: some algorithms are slow."""


def _samples_the_better(bench: Bench) -> None:
    bandit = Bandit()
    samples = [(prompt, response) for prompt in bandit.prompts for response in bandit.responses]
    good = (bandit.rewards > bandit.rewards.median(1, keepdim=True).values).flatten().double()
    arguments = {
        "tokenizer": bandit.tokenizer,
        "samples": samples,
        "rewards": good.tolist(),
        "prompts": list(bandit.prompts),
    }
    shares, usual = list[float](), float(good.mean())
    for steps in STEPS:
        trainer = bench.learnt(arguments=arguments, **RUN, train__total_steps=steps)
        shares.append(_share_of_good(bandit, trainer, good.view(bandit.rewards.shape)))
        if shares[-1] > usual + 0.1:
            return
    told = " and ".join(f"{share:.0%} after {steps} steps" for share, steps in zip(shares, STEPS, strict=True))
    raise CheckError(f"{usual:.0%} of the samples are good, and of the generated responses {told}")


def _share_of_good(bandit: Bandit, trainer: Any, good: Tensor) -> float:
    """Return the share of good responses among the generated responses of the bandit."""
    rollouts = trainer.generate(list(bandit.prompts) * 64, max_new_tokens=1)
    pairs = [(p, o) for p, o in zip(rollouts.prompts, rollouts.outputs, strict=True) if o in bandit.responses]
    require(pairs, "no generated response is among the samples")
    return sum(float(good[bandit.prompts.index(p), bandit.responses.index(o)]) for p, o in pairs) / len(pairs)


def _prefers_the_chosen(bench: Bench) -> None:
    trainer = bench.trainer(optimizer__lr=1e-2, train__total_steps=40)
    before = _margins(trainer)
    trainer.learn()
    share = float((_margins(trainer) > before).float().mean())
    require(share >= 0.9, f"a run increases the margin of only {share:.0%} of its own pairs")


@torch.no_grad()
def _margins(trainer: Any) -> Tensor:
    """Return the margin of each pair: of log-likelihoods, or of scores if the model gives scores."""
    trainer.models.build()
    answer = trainer.policy(trainer.encode_preferences(trainer.pipeline.rows).both)
    chosen, rejected = (answer if isinstance(answer, Tensor) else answer.logprobs.sum(1)).chunk(2)
    return chosen - rejected


def _imitates(bench: Bench) -> None:
    trainer = bench.trainer(optimizer__lr=1e-2, train__total_steps=40)
    before = _likelihood(trainer)
    trainer.learn()
    after = _likelihood(trainer)
    require(after > 0.7 * before, f"the mean log-likelihood of the samples goes from {before:.4g} to {after:.4g}")


@torch.no_grad()
def _likelihood(trainer: Any) -> float:
    trainer.models.build()
    sequences = trainer.encode_samples(trainer.read_samples(SAMPLES))
    return float(trainer.policy(sequences).logprobs.sum(1).mean())


def _improves(bench: Bench) -> None:
    trainer = bench.trainer(optimizer__lr=1e-2, train__total_steps=40)
    measure = "eval/reward" if bench.subject.online else "eval/loss/total"
    before = trainer.evaluate()[measure]
    trainer.learn()
    after = trainer.evaluate()[measure]
    better = after > before if bench.subject.online else after < before
    require(better, f"{measure} goes from {before:.4g} to {after:.4g}")


def _loss_falls(bench: Bench) -> None:
    """Fail unless a run lowers the loss on its first collection, for algorithms without rewards.

    The loss on later collections may be relative to them, as that of self-play is.
    """
    run: dict[str, Any] = {"optimizer__lr": 1e-2, "train__total_steps": 40}
    first = bench.collected(**run)
    batch = first.store.experience
    before, after = (
        float(trainer.loss(for_loss(trainer, batch))[0].detach()) for trainer in (first, bench.learnt(**run))
    )
    require(after < before, f"in a run the loss on its first collection goes from {before:.4g} to {after:.4g}")
