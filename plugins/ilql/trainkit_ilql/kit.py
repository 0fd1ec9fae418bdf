"""What the settings of ILQL do, and its structure: measured by the conformance kit."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trainkit.testing import Declaration, Effect, Structure, Target, World, nudged


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


@torch.no_grad()
def steering_by_its_formula(trainer: Any) -> float:
    """Return 1 + the error of what is added to logits, relative to min Q̂ − V, with heads whose outputs all differ."""
    trainer.models.build()
    head = nudged(trainer, 0.2).unwrapped.head
    states = torch.linspace(-1, 1, 5 * head.q[0].hidden.in_features, device=trainer.accelerator.device).view(5, -1)
    targets = [each(states) for each in head.target_q]
    due = torch.stack(targets).min(0).values - head.v(states).unsqueeze(-1)
    found = trainer.steer(torch.zeros_like(due), states, trainer.settings(beta=1.0))
    return float(1 + (found - due).abs().max() / due.abs().max())


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
    """Return the sum of the numbers, of 1 to 12, of the steps after which the targets of Q have changed."""
    head, updates = nudged(trainer).unwrapped.head, 0
    for step in range(1, 13):
        trainer.progress.step, before = step, weights_of(head.target_q)
        trainer.after_step()
        updates += 0 if torch.equal(before, weights_of(head.target_q)) else step
    return updates


WEIGHTED = {"method.beta_awac": 1.0}
EFFECTS: dict[str, Effect | list[Effect]] = {
    "tau": [
        Effect(pull_on_values, equals={0.5: 1.0, 0.9: 0.2}),
        Effect(pull_on_low_values, equals={0.5: -1.0, 0.9: -1.8}),
    ],
    "gamma": Effect(loss_by_its_formula, equals={0.0: 1.0, 0.5: 1.0, 0.9: 1.0}),
    "cql_scale": [
        Effect(loss_by_its_formula, equals={0.0: 1.0, 0.5: 1.0}, under=WEIGHTED),
        Effect("gradient", linear=(0.0, 0.5, 1.0)),
        Effect("metric loss/q", same=(0.5, 2.0)),
        Effect("metric loss/cql", same=(0.5, 2.0)),
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
        Effect(steering_by_its_formula, equals={False: 1.0, True: 1.0}),
        Effect(loss_by_its_formula, equals={False: 1.0, True: 1.0}, under=WEIGHTED),
    ],
    # of the distance, 1 − α is left after the first step
    "alpha": Effect(share_of_the_distance, equals={0.1: 0.9, 0.75: 0.25, 1.0: 0.0}),
    "steps_for_target_q_sync": Effect(updates_of_targets, equals={1: 78, 4: 24, 5: 15}),
}


def ilql_of_the_paper(world: World) -> Tensor:
    """Return Σ (Q − r − γ V')² + |τ − 1(u < 0)| u² + c CQL − a min(e^βu, w) log π, u = Q̂ − V, a mean over tokens.

    It is 0 in Q and V where V is the τ-expectile of Q, and Q = r + γ V' (Snell et al. 2022, section 4.2). Rewards are
    normalised over the dataset, and given for the last token.
    """
    method, mask, head = world.method, world.mask, world.head
    last = mask & ~F.pad(mask[:, 1:], (0, 1))
    rewards = ((world.scores - world.scores.mean()) / world.scores.std()).unsqueeze(1) * last
    after = F.pad(head["values"][:, 1:], (0, 1)) * ~last
    goal, u = (rewards + method.gamma * after).detach(), head["target_q"].detach() - head["values"]
    losses = torch.where(u < 0, 1 - method.tau, method.tau) * u**2 + method.cql_scale * head["cql"]
    losses = losses + sum((head[name] - goal) ** 2 for name in ("q0", "q1") if name in head)
    weights = (method.beta_awac * u.detach()).exp().clamp(max=method.awac_weight_max)
    loss: Tensor = (losses - method.awac_scale * weights * world.logprobs)[mask].mean()
    return loss


STRUCTURE = (
    # rewards are normalised over the dataset; the target of Q and the weights of tokens are detached from V
    Structure(scores="collection", surrogate="none", detached=("values",)),
    Structure(detached=("values",), under=WEIGHTED),
    Structure(gradient=ilql_of_the_paper, under={**WEIGHTED, "method.gamma": 0.8, "method.tau": 0.9}),
)
WEIGHTY = {"method.beta_awac": 100.0, "method.alpha": 1.0, "optimizer.lr": 0.03}
KIT = Declaration(
    arguments={"config": {"method": {"alpha": 0.1}}},  # at which the targets change within a few steps
    contexts={"awac_weight_max": {**WEIGHTY, "method.awac_weight_max": 4.0}},
    variants={"awac": WEIGHTED},
    effects=EFFECTS,
    structure=STRUCTURE,
    targets={
        "target_q": Target(
            lambda trainer: weights_of(trainer.unwrapped.head.target_q),
            lambda trainer: weights_of(trainer.unwrapped.head.q),
            lambda method: method.alpha,
        )
    },
)
