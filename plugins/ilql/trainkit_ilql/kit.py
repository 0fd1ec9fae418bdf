"""What the settings of ILQL do, and its structure: measured by the conformance kit."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trainkit.testing import Declaration, Effect, Structure


def with_values_of(value: float) -> Callable[[Any], tuple[Any, Any]]:
    """Return a function that sets V to ``value`` in all states, and returns the trainer's policy and its batch."""

    def set_values(trainer: Any) -> tuple[Any, Any]:
        policy, batch = trainer.policy, trainer.store.experience.to(trainer.accelerator.device)
        with torch.no_grad():
            trainer.unwrapped.head.v.summary.bias.fill_(value)
        return policy, batch

    return set_values


def slopes(trainer: Any, value: float, name: str) -> Tensor:
    """Return the loss's derivative by an output of the policy [B, T], with V = ``value`` and Q = 0."""
    policy, batch = with_values_of(value)(trainer)
    kept: list[Tensor] = []

    def note(_: Any, __: Any, outputs: Any) -> None:
        kept.append(outputs.head[name] if name in outputs.head else getattr(outputs, name))
        kept[-1].retain_grad()

    handle = policy.register_forward_hook(note)
    try:
        trainer.loss(batch)[0].backward()
    finally:
        handle.remove()
    trainer.optimizer.zero_grad()
    found = kept[0].grad
    assert found is not None, "the loss depends on it"
    weighted: Tensor = found[batch.sequences.response_mask] * batch.weight
    return weighted


def pull_on_values(trainer: Any) -> float:
    """Return the loss's mean derivative by V, with V = 1 and Q̂ = 0: 2 (1 − τ)."""
    return float(slopes(trainer, 1.0, "values").mean())


def pull_on_low_values(trainer: Any) -> float:
    """Return the loss's mean derivative by V, with V = −1 and Q̂ = 0: −2 τ."""
    return float(slopes(trainer, -1.0, "values").mean())


def pull_on_q(trainer: Any) -> float:
    """Return how much the loss raises Q on average, with V = 1."""
    return -float(slopes(trainer, 1.0, "q0").mean())


def language_model_weight(trainer: Any) -> float:
    """Return the mean weight of tokens in the language-model loss, with an advantage of 1."""
    return -float(slopes(trainer, -1.0, "logprobs").mean())


def heads(trainer: Any) -> int:
    """Return the number of Q heads."""
    return len(trainer.unwrapped.head.q)


def distance_of_targets(trainer: Any) -> float:
    """Return the distance of the target Q from Q after a run."""
    trainer.learn()
    head = trainer.unwrapped.head
    pairs = zip(head.target_q.buffers(), head.q.parameters(), strict=True)
    return float(torch.stack([(target - own.detach()).norm() for target, own in pairs]).norm())


TREE = {"ab": 1.0, "ac": -2.0, "bca": 3.0, "bcb": 0.5, "bd": 0.0, "c": 2.5}
"""Outputs to one prompt, and their rewards: all that the dataset knows."""


def expectile(values: Tensor, tau: float) -> Tensor:
    """Return the τ-expectile of values [N], by iteration: the mean with weights τ above it, and 1 − τ below. -> []."""
    found = values.mean()
    for _ in range(200):
        weights = torch.where(values > found, tau, 1 - tau)
        found = (weights * values).sum() / weights.sum()
    return found


def solved(responses: list[tuple[int, ...]], rewards: list[float], gamma: float, tau: float) -> dict[Any, float]:
    """Return Q of every prefix of the responses, and V of every prefix before a token as that of (prefix, None)."""
    known: dict[Any, float] = {}
    for length in range(max(map(len, responses)), 0, -1):
        for ids, reward in zip(responses, rewards, strict=True):
            if len(ids) >= length:
                known[ids[:length]] = reward if len(ids) == length else gamma * known[ids[:length], None]
        for state in {ids[: length - 1] for ids in responses if len(ids) >= length}:
            passing = [known[ids[:length]] for ids in responses if len(ids) >= length and ids[: length - 1] == state]
            known[state, None] = float(expectile(torch.tensor(passing, dtype=torch.float64), tau))
    return known


def pull_at_the_fixed_point(trainer: Any) -> float:
    """Return the largest derivative of the losses of Q and V by Q or V of a state, where both are solutions.

    V is the τ-expectile of Q over the dataset, and Q = r + γ V(s') (Snell et al. 2022, section 4.2), so it is 0.
    """
    trainer.add_samples([("a", output) for output in TREE], list(TREE.values()))
    batch = trainer.make_experience(trainer.pipeline.rows).to(trainer.accelerator.device)
    sequences, mask = batch.sequences, batch.sequences.response_mask
    responses = [tuple(response.tolist()) for response in sequences.responses]
    rewards = batch.rewards.sum(1).tolist()
    known = solved(responses, rewards, trainer.method.gamma, trainer.method.tau)
    places = [(ids[: at + 1], (ids[:at], None)) for ids in responses for at in range(len(ids))]
    q, v = (
        sequences.place(torch.tensor([known[place[of]] for place in places], dtype=torch.float64)).requires_grad_()
        for of in (0, 1)
    )

    def solution(_: Any, __: Any, outputs: Any) -> Any:
        head = {**outputs.head, "values": v, "target_q": q.detach()}
        return outputs._replace(head={**head, **{name: q for name in head if name in ("q0", "q1")}})

    trainer.models.build()  # moves the model to the device
    handle = trainer.policy.register_forward_hook(solution)
    try:
        loss, _ = trainer.loss(batch)
    finally:
        handle.remove()
    pulls: dict[Any, float] = {}
    for of, slopes in enumerate(torch.autograd.grad(loss, (q, v))):
        for place, slope in zip(places, slopes[mask].tolist(), strict=True):
            pulls[of, place[of]] = pulls.get((of, place[of]), 0.0) + slope
    return max(map(abs, pulls.values()))


WEIGHTED = {"method.beta_awac": 1.0}
EFFECTS: dict[str, Effect | list[Effect]] = {
    "tau": [
        Effect(pull_on_values, equals={0.5: 1.0, 0.9: 0.2}),
        Effect(pull_on_low_values, equals={0.5: -1.0, 0.9: -1.8}),
        Effect(pull_at_the_fixed_point, equals={0.5: 0.0, 0.7: 0.0, 0.9: 0.0}, under={"method.gamma": 0.8}),
    ],
    "gamma": Effect(pull_on_q, rises=(0.0, 0.5, 1.0)),
    "cql_scale": Effect("loss", rises=(0.0, 0.1, 1.0)),
    "awac_scale": [
        Effect(language_model_weight, equals={0.5: 0.5, 2.0: 2.0}),
        Effect("gradient of head.v", same=(0.5, 2.0), under=WEIGHTED),
        Effect("gradient of head.q", same=(0.5, 2.0), under=WEIGHTED),
    ],
    "beta_awac": Effect(language_model_weight, equals={0.0: 1.0, 1.0: math.e, 2.0: math.e**2}),
    "awac_weight_max": Effect(
        language_model_weight, equals={1.0: 1.0, 5.0: 5.0, 20.0: math.e**2}, under={"method.beta_awac": 2.0}
    ),
    "two_qs": Effect(heads, equals={False: 1, True: 2}),
    "alpha": Effect(distance_of_targets, falls=(0.01, 0.5, 1.0)),
    "steps_for_target_q_sync": Effect(distance_of_targets, rises=(1, 4, 10), under={"method.alpha": 1.0}),
}
STRUCTURE = (
    # rewards are normalised over the dataset; the target of Q and the weights of tokens are detached from V
    Structure(scores="collection", surrogate="none", detached=("values",)),
    Structure(detached=("values",), under=WEIGHTED),
)
WEIGHTY = {"method.beta_awac": 100.0, "method.alpha": 1.0, "optimizer.lr": 0.03}
KIT = Declaration(
    arguments={"config": {"method": {"alpha": 0.1}}},  # at which the targets change within a few steps
    contexts={"awac_weight_max": {**WEIGHTY, "method.awac_weight_max": 4.0}},
    variants={"awac": WEIGHTED},
    effects=EFFECTS,
    structure=STRUCTURE,
)
