"""What the settings of GRPO do, and its structure: measured by the conformance kit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from trainkit.testing import Declaration, Effect, Structure, World, nudged

ALONE = {"method.kl_coef": 0.0}
"""The surrogate alone: the KL penalty has a gradient at clipped tokens, too."""
BY_RESPONSE = {**ALONE, "method.average": "responses"}


@torch.no_grad()
def advantage_of_the_best(trainer: Any) -> float:
    """Return the advantage of the score 3 in the group 0, 0, 0, 3, beside a group with the scores 0, 2, 0, 2."""
    rollouts = trainer.sample([{"prompt": prompt} for prompt in "aaaabbbb"])
    scores = torch.tensor([0.0, 0, 0, 3, 0, 2, 0, 2], device=rollouts.terminated.device)
    return float(trainer.prepare_experience(trainer.experience(rollouts, scores)).advantages[3])


def credit_for_an_advantage_of_1(trainer: Any) -> float:
    """Return N / |A| times the credit of the first token of a response, one of N, before the first update."""
    batch = trainer.store.experience.to(trainer.accelerator.device)
    kept: list[Any] = []
    handle = trainer.policy.register_forward_hook(lambda *given: kept.append(given[2].logprobs))
    try:
        loss, _ = trainer.loss(batch)
    finally:
        handle.remove()
    (slopes,) = torch.autograd.grad(loss, kept[0])
    row = int(batch.advantages.abs().argmax())
    first = int(batch.sequences.response_mask[row].int().argmax())
    return float(-slopes[row, first] * len(batch) / batch.advantages[row])


@torch.no_grad()
def loss_by_its_formula(trainer: Any) -> float:
    """Return 1 + the error of the loss, relative to the terms of Shao et al. 2024, equations 3 and 4, after a move.

    CISPO has A clip(ρ) log π instead of the minimum; at the level of responses, ρ is the geometric mean.
    """
    method, batch = trainer.method, nudged(trainer, 0.05).store.experience.to(trainer.accelerator.device)
    mask, advantages = batch.sequences.response_mask, batch.advantages.double().unsqueeze(1)
    logprobs = trainer.policy(batch.sequences).logprobs.double()
    log_ratio, high = (logprobs - batch.old_logprobs) * mask, method.cliprange_high or method.cliprange
    if method.ratio_level == "sequence":
        log_ratio = (log_ratio.sum(1) / mask.sum(1)).unsqueeze(1)
    ratio = log_ratio.exp().expand(mask.shape)
    near = ratio.clamp(1 - method.cliprange, 1 + high) * advantages
    surrogate = near * logprobs if method.surrogate == "cispo" else torch.minimum(ratio * advantages, near)
    to_reference = (batch.ref_logprobs - logprobs) * mask
    each = (surrogate - method.kl_coef * (to_reference.exp() - to_reference - 1)) * mask
    mean = each.sum() / mask.sum() if method.average == "tokens" else (each.sum(1) / mask.sum(1)).mean()
    return float(1 + (trainer.loss(batch)[0] + mean) / each[mask].abs().mean())


def groups_without_a_difference(trainer: Any) -> float:
    """Return 1 if a group of the collection has equal scores, which make its advantages 0, and 0 if none has."""
    groups = trainer.store.experience.advantages.view(-1, trainer.samples_per_prompt)
    return float((groups == 0).all(1).any())


def kept_of_three_groups(trainer: Any) -> float:
    """Return how many groups are kept, of one with equal scores, one with near ones and one with negative ones."""
    size = trainer.samples_per_prompt
    scores = torch.tensor([[1.0] * size, [1.0] * (size - 1) + [1.01], [-2.0] * (size - 1) + [-5.0]])
    return float(trainer.keep(None, scores.flatten()).sum() / size)


def kept_by_named_rewards(trainer: Any) -> float:
    """Return how many of two groups are kept, the first with other rewards and one score, less twice the second."""
    size = trainer.samples_per_prompt
    judged = [{"reward": float(at < 1)} for at in range(2 * size)]
    scores = torch.tensor([0.0] * size + [1.0] * (size - 1) + [2.0])
    first, second = trainer.keep(SimpleNamespace(judged=judged), scores).view(2, size).all(1).tolist()
    return float(first - 2 * second)


EFFECTS: dict[str, Effect | list[Effect]] = {
    "group_size": Effect("responses", equals={2: 2, 4: 4, 8: 8}),
    # twelve steps, two of them in a pass
    "grpo_epochs": Effect("collections", equals={1: 6, 2: 3, 3: 2}),
    "kl_coef": [
        Effect("divergence", falls=(0.01, 0.1, 1.0)),
        Effect("gradient", linear=(0.0, 0.5, 1.0)),
        Effect(loss_by_its_formula, equals={0.0: 1.0, 0.5: 1.0, 1.0: 1.0}),
        Effect(loss_by_its_formula, equals={0.5: 1.0}, under={"method.average": "responses"}),
    ],
    # of one reward, the weight is divided by its own scale; of several, the tests have numbers
    "reward_weights": Effect("size of advantages", same=({"reward": 0.1}, {"reward": 1.0}, {"reward": 2.0})),
    # 9/4, and divided by the deviations 3/2 of the group and sqrt(87/56) of all eight
    "scale": Effect(advantage_of_the_best, equals={"none": 2.25, "group": 1.5, "batch": 1.805166}),
    "average": [
        Effect("weight", falls=("tokens", "responses")),
        Effect("weight", same=("responses", "constant")),
        Effect(credit_for_an_advantage_of_1, equals={"constant": 1 / 6}, under=ALONE),
    ],
    "surrogate": Effect(loss_by_its_formula, equals={"clip": 1.0, "cispo": 1.0}, under={"method.cliprange": 0.05}),
    "ratio_level": Effect(
        loss_by_its_formula, equals={"token": 1.0, "sequence": 1.0}, under={**BY_RESPONSE, "method.cliprange": 0.05}
    ),
    "cliprange": Effect("unclipped", rises=(0.01, 0.1, 1.0), under=ALONE),
    "cliprange_high": Effect("unclipped", rises=(0.01, 0.1, 1.0), under={**ALONE, "method.cliprange": 0.01}),
    "dynamic_sampling": [
        Effect(groups_without_a_difference, equals={False: 1.0, True: 0.0}, under={"rollout.num_rollouts": 64}),
        Effect(kept_of_three_groups, equals={True: 2.0}),
        Effect(kept_by_named_rewards, equals={True: 1.0}, under={"method.reward_weights": {"reward": 1.0}}),
    ],
}


def grpo_of_the_paper(world: World) -> Tensor:
    """Return −A log π + β k3, A = (r − mean) / std of the group (Shao et al. 2024, equation 3), or of all responses.

    It is a mean over tokens (Yu et al. 2025), or over responses of their means over tokens.
    """
    groups = world.scores.view(-1, world.method.group_size)
    spread = groups.std(1, keepdim=True) if world.method.scale == "group" else groups.std()
    advantages = (groups - groups.mean(1, keepdim=True)) / spread.clamp(min=1e-6)
    log_ratio = world.ref_logprobs - world.logprobs
    k3 = log_ratio.exp() - 1 - log_ratio
    losses = (world.method.kl_coef * k3 - advantages.view(-1, 1) * world.logprobs) * world.mask
    loss: Tensor = losses.sum() / world.mask.sum()
    return loss if world.method.average == "tokens" else (losses.sum(1) / world.mask.sum(1)).mean()


RANGE = ("cliprange", "cliprange_high")
STRUCTURE = (
    Structure(scores="group", surrogate="token", cliprange=RANGE, detached=(), under=ALONE),
    Structure(scores="collection", under={"method.scale": "batch"}),
    Structure(gradient="policy", under={**ALONE, "method.scale": "none"}),
    Structure(gradient=grpo_of_the_paper, penalty="kl_coef", under={"method.average": "responses"}),
    Structure(gradient=grpo_of_the_paper, under={"method.scale": "batch"}),
    Structure(
        gradient=grpo_of_the_paper,
        penalty="kl_coef",
        unbiased=("policy/kl", "policy/kl_per_token", "policy/entropy"),
        non_negative=("policy/kl_per_token",),
    ),
    Structure(detached=(), under={"method.kl_coef": 0.04}),
    Structure(surrogate="token", cliprange=RANGE, under={**BY_RESPONSE, "method.cliprange_high": 0.4}),
    Structure(surrogate="cispo", cliprange=RANGE, detached=("logprobs",), under={**ALONE, "method.surrogate": "cispo"}),
    Structure(
        surrogate="cispo",
        cliprange=RANGE,
        under={**ALONE, "method.surrogate": "cispo", "method.cliprange": 0.1, "method.cliprange_high": 0.4},
    ),
    Structure(surrogate="sequence_mean", cliprange=RANGE, under={**BY_RESPONSE, "method.ratio_level": "sequence"}),
)
KIT = Declaration(
    contexts={
        "ratio_level": {"method.average": "responses"},
        "dynamic_sampling": {"rollout.max_new_tokens": 1},
        "reward_weights": {"method.reward_weights": {"reward": 1.0}, "method.scale": "group"},
    },
    variants={"kl": {"method.kl_coef": 0.04, "method.average": "responses"}, "batch": {"method.scale": "batch"}},
    effects=EFFECTS,
    structure=STRUCTURE,
)
