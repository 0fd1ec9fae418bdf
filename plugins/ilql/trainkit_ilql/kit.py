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


WEIGHTED = {"method.beta_awac": 1.0}
EFFECTS: dict[str, Effect | list[Effect]] = {
    "tau": [
        Effect(pull_on_values, equals={0.5: 1.0, 0.9: 0.2}),
        Effect(pull_on_low_values, equals={0.5: -1.0, 0.9: -1.8}),
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
