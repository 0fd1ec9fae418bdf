"""What the settings of ILQL do, and its structure: measured by the conformance kit."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trainkit.testing import Declaration, Effect, Structure, nudged


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


@torch.no_grad()
def loss_by_its_formula(trainer: Any) -> float:
    """Return the loss divided by that of Snell et al. 2022, section 4.2, with heads whose outputs all differ."""
    nudged(trainer, 0.2)
    batch, method = trainer.store.experience.to(trainer.accelerator.device), trainer.method
    head = trainer.unwrapped.head
    mask, read = batch.sequences.response_mask, list[Tensor]()
    handle = head.register_forward_pre_hook(lambda _, given: read.append(given[0]))
    loss = trainer.loss(batch)[0]
    handle.remove()
    states, rows, tokens = read[0], mask.nonzero()[:, 0].tolist(), batch.sequences.input_ids[mask].unsqueeze(-1)
    v, rewards, logprobs = head.v(states), batch.rewards[mask], trainer.policy(batch.sequences).logprobs[mask]
    after = torch.stack([*v[1:], v.new_zeros(())])
    last = torch.tensor([one != other for one, other in zip(rows, [*rows[1:], -1], strict=True)], device=v.device)
    goal = rewards + method.gamma * after.masked_fill(last, 0.0)
    qs, targets = ([each(states) for each in group] for group in (head.q, head.target_q))
    target = torch.stack([each.gather(-1, tokens).squeeze(-1) for each in targets]).min(0).values
    u = target - v
    due = torch.where(u > 0, method.tau, 1 - method.tau) * u**2
    for q in qs:
        chosen = q.gather(-1, tokens).squeeze(-1)
        due = due + (chosen - goal) ** 2 + method.cql_scale * (q.exp().sum(-1).log() - chosen)
    due = due - method.awac_scale * (method.beta_awac * u).exp().clamp(max=method.awac_weight_max) * logprobs
    return float(loss / due.mean())


def language_model_weight(trainer: Any) -> float:
    """Return the mean weight of tokens in the language-model loss, with an advantage of 1."""
    return -float(slopes(trainer, -1.0, "logprobs").mean())


def heads(trainer: Any) -> int:
    """Return the number of Q heads."""
    return len(trainer.unwrapped.head.q)


def weights_of(module: Any) -> Tensor:
    """Return the parameters and buffers of a module as one vector."""
    return torch.cat([x.detach().flatten() for x in (*module.parameters(), *module.buffers())])


def share_of_the_distance(trainer: Any) -> float:
    """Return how far the targets of Q are from Q after `after_step`, relative to before."""
    head, distances = nudged(trainer).unwrapped.head, []
    trainer.progress.step = trainer.method.steps_for_target_q_sync
    for step in (lambda: None, trainer.after_step):
        step()
        distances.append(float((weights_of(head.target_q) - weights_of(head.q)).norm()))
    return distances[1] / distances[0]


def updates_of_targets(trainer: Any) -> int:
    """Return after how many of twelve steps the targets of Q have changed."""
    head, updates = nudged(trainer).unwrapped.head, 0
    for step in range(1, 13):
        trainer.progress.step, before = step, weights_of(head.target_q)
        trainer.after_step()
        updates += not torch.equal(before, weights_of(head.target_q))
    return updates


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
    "gamma": Effect(loss_by_its_formula, equals={0.0: 1.0, 0.5: 1.0, 0.9: 1.0}),
    "cql_scale": [
        Effect(loss_by_its_formula, equals={0.0: 1.0, 0.5: 1.0}, under=WEIGHTED),
        Effect("gradient", linear=(0.0, 0.5, 1.0)),
    ],
    "awac_scale": [
        Effect("gradient", linear=(0.0, 0.5, 1.0), under=WEIGHTED),
        Effect(language_model_weight, equals={0.5: 0.5, 2.0: 2.0}),
        Effect("gradient of head.v", same=(0.5, 2.0), under=WEIGHTED),
        Effect("gradient of head.q", same=(0.5, 2.0), under=WEIGHTED),
    ],
    "beta_awac": Effect(language_model_weight, equals={0.0: 1.0, 1.0: math.e, 2.0: math.e**2}),
    "awac_weight_max": Effect(
        language_model_weight, equals={1.0: 1.0, 5.0: 5.0, 20.0: math.e**2}, under={"method.beta_awac": 2.0}
    ),
    "two_qs": [
        Effect(heads, equals={False: 1, True: 2}),
        Effect(loss_by_its_formula, equals={False: 1.0, True: 1.0}, under=WEIGHTED),
    ],
    # of the distance, 1 − α is left after the first step
    "alpha": Effect(share_of_the_distance, equals={0.1: 0.9, 0.75: 0.25, 1.0: 0.0}),
    "steps_for_target_q_sync": Effect(updates_of_targets, equals={1: 12, 4: 3, 5: 2}),
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
