"""What the settings of DPO and its online forms do, and its structure: measured by the conformance kit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trainkit.testing import Declaration, Effect, Structure, World, nudged


def mean_of_three(trainer: Any) -> float:
    """Return the mean loss of pairs whose log-ratios differ by 2, −1 and 0, with KL estimates of 0."""
    chosen, zeros = torch.tensor([2.0, -1.0, 0.0]), torch.zeros(3)
    pairs = trainer.store.experience.select(torch.arange(3))
    batch = type(pairs)(**{**pairs.parts(), "chosen_kl": zeros, "rejected_kl": zeros, "beside": torch.zeros(3, 2)})
    return float(trainer.losses(chosen, zeros, batch).mean())


@torch.no_grad()
def loss_of_ipo_by_its_formula(trainer: Any) -> float:
    """Return the loss divided by the mean of (r_c − r_r − 1/2β)², r a sum over tokens, or a mean over them."""
    batch = nudged(trainer, 0.1).store.experience.to(trainer.accelerator.device)
    sides = []
    for side in (batch.chosen, batch.rejected):
        logps = trainer.policy(side).logprobs.double() - trainer.reference(side).logprobs
        length = side.response_mask.sum(1) if trainer.method.ipo_length_normalize else 1
        sides.append(logps.masked_fill(~side.response_mask, 0.0).sum(1) / length)
    due = (sides[0] - sides[1] - 1 / (2 * trainer.method.beta)) ** 2
    return float(trainer.loss(batch)[0] / due[batch.decided].mean())


@torch.no_grad()
def loss_of_xpo_by_its_formula(trainer: Any) -> float:
    """Return the loss divided by the mean of −log σ(s β x), or 0 for s = 0, + α log π(y_ref), with every sign s."""
    batch = nudged(trainer, 0.1).store.experience.to(trainer.accelerator.device)
    batch = replace(batch, sign=torch.arange(len(batch)).to(batch.sign) % 3 - 1)
    own, other = (
        trainer.policy(side).logprobs.double().masked_fill(~side.response_mask, 0.0).sum(1)
        for side in (batch.own, batch.other)
    )
    ratios = own - batch.ref_own - other + batch.ref_other
    preferred = -(batch.sign * trainer.method.beta * ratios).sigmoid().log()
    due = preferred.masked_fill(batch.sign == 0, 0.0) + trainer.method.alpha * other
    return float(trainer.loss(batch)[0] / due.mean())


SMOOTHED = {"method.loss_type": "robust"}
NORMALISED = {"method.loss_type": "ipo"}
EFFECTS: dict[str, Effect | list[Effect]] = {
    # by the equations of the README, with ε of 0 or 0.1, at β = 0.1
    "loss_type": [
        Effect(
            mean_of_three,
            equals={
                "sigmoid": 0.678561,
                "hinge": 0.966667,
                "ipo": 70 / 3,
                "kto_pair": 0.495858,
                "sigmoid_norm": 0.678561,
                "nca_pair": 1.381082,
                "bco_pair": 1.371708,
                "sppo_hard": 48.333333,
                "apo_zero": 0.991715,
                "apo_down": 1.0,
                "discopop": 0.816246,
                "aot": 0.678561,
                "aot_unpaired": 0.685854,
            },
        ),
        Effect(mean_of_three, equals={"robust": 0.674394, "exo_pair": 0.494696}, under={"method.label_smoothing": 0.1}),
    ],
    "beta": [
        Effect(mean_of_three, equals={0.1: 0.678561, 1.0: 0.711112}),
        Effect("credit of chosen", rises=(0.1, 0.5, 1.0)),
    ],
    "label_smoothing": [
        Effect(mean_of_three, equals={0.0: 0.678561, 0.1: 0.681894}),
        Effect("credit of chosen", falls=(0.0, 0.1, 0.3)),
        Effect("credit of chosen", rises=(0.1, 0.3), under=SMOOTHED),
    ],
    "ipo_length_normalize": Effect(loss_of_ipo_by_its_formula, equals={True: 1.0, False: 1.0}, under=NORMALISED),
    "reference_free": Effect("size of ref_chosen", equals={True: 0.0}),
    "k": Effect("responses", equals={2: 2, 4: 4, 8: 8}),
}


def margins_of(world: World) -> Tensor:
    """Return log π − log π_ref of the chosen less that of the rejected outputs. [B]."""
    chosen, rejected = (world.logprobs - world.ref_logprobs).sum(1).chunk(2)
    return chosen - rejected


def pairs_of_the_papers(world: World) -> Tensor:
    """Return the loss of pairs, x = r_c − r_r.

    −(1 − ε) log σ(βx) − ε log σ(−βx) is that of Rafailov et al. 2023, equation 7, with smoothed labels; the robust one
    of Chowdhury, Kini, Natarajan 2024 has a minus before its second term, and is divided by 1 − 2ε. (x − 1/2β)² is that
    of Azar et al. 2023, equation 17, and max(0, 1 − βx) that of Liu et al. 2023. Those of each side are of the papers
    that `trainkit_dpo.losses` names.
    """
    method, x = world.method, margins_of(world)
    up, down = (method.beta * (world.logprobs - world.ref_logprobs).sum(1)).chunk(2)
    right = torch.sigmoid(method.beta * x)
    smoothing, likely, unlikely = method.label_smoothing, F.logsigmoid(method.beta * x), F.logsigmoid(-method.beta * x)
    losses: dict[str, Tensor] = {
        "sigmoid": -(1 - smoothing) * likely - smoothing * unlikely,
        "robust": (-(1 - smoothing) * likely + smoothing * unlikely) / (1 - 2 * smoothing),
        "hinge": (1 - method.beta * x).clamp(min=0),
        "ipo": (x - 1 / (2 * method.beta)) ** 2,
        "nca_pair": -up.sigmoid().log() - ((1 - up.sigmoid()) * (1 - down.sigmoid())).log() / 2,
        "bco_pair": -(up.sigmoid() * (1 - down.sigmoid())).log(),
        "sppo_hard": ((up - 0.5) ** 2 + (down + 0.5) ** 2) / method.beta**2,
        "apo_zero": 1 - up.sigmoid() + down.sigmoid(),
        "apo_down": 1 + up.sigmoid() - right,
        "discopop": right.log() * ((20 * method.beta * x).sigmoid() - 1)
        + (20 * method.beta * x).sigmoid() / (method.beta * x).exp(),
    }
    if method.loss_type == "exo_pair":
        losses["exo_pair"] = right * (right / (1 - smoothing)).log() + (1 - right) * ((1 - right) / smoothing).log()
    return losses[method.loss_type].mean()


def pairs_in_order(world: World) -> Tensor:
    """Return the loss `sigmoid` of differences in sorted order, as Melnyk et al. 2024 have it.

    For pairs, those of the margins of the policy and of the reference; without pairs, those of r_c and r_r.
    """
    method, (c, r) = world.method, (world.logprobs - world.ref_logprobs).sum(1).chunk(2)
    if method.loss_type == "aot":
        c, r = (x[0] - x[1] for x in (each.sum(1).chunk(2) for each in (world.logprobs, world.ref_logprobs)))
    x = method.beta * (c.sort().values - r.sort().values)
    loss: Tensor = -((1 - method.label_smoothing) * F.logsigmoid(x) + method.label_smoothing * F.logsigmoid(-x)).mean()
    return loss


def kto_of_pairs(world: World) -> Tensor:
    """Return half of 1 − σ(β(r_c − z_r)) + 1 − σ(β(z_c − r_r)), z the mean of r if it is positive, without gradient."""
    ratios = (world.logprobs - world.ref_logprobs).sum(1).chunk(2)
    (chosen, z_chosen), (rejected, z_rejected) = ((r, r.detach().mean().clamp(min=0)) for r in ratios)
    margins = world.method.beta * torch.stack([chosen - z_rejected, z_chosen - rejected])
    loss: Tensor = (1 - margins.sigmoid()).mean()
    return loss


def best_and_worst_of(world: World) -> tuple[Tensor, Tensor, Tensor]:
    """Return the rows of the best and the worst response of each group, and whether their scores differ. [B / k] ×3."""
    groups = world.scores.view(-1, world.method.k)
    first = torch.arange(0, len(world.scores), world.method.k)
    return first + groups.argmax(1), first + groups.argmin(1), groups.amax(1) > groups.amin(1)


def dpo_on_best_and_worst(world: World) -> Tensor:
    """Return the loss of DPO on the best and the worst response of each group, a mean over groups with both."""
    best, worst, decided = best_and_worst_of(world)
    ratios = (world.logprobs - world.ref_logprobs).sum(1)
    return -F.logsigmoid(world.method.beta * (ratios[best] - ratios[worst]))[decided].mean()


def likelihood_of_the_best(world: World) -> Tensor:
    """Return −log π of the best response of each group, a mean over groups with a worse one."""
    best, _, decided = best_and_worst_of(world)
    return -world.logprobs.sum(1)[best][decided].mean()


OF_PAIRS = (
    Structure(surrogate="none", detached=(), gradient=pairs_of_the_papers),
    Structure(gradient=pairs_of_the_papers, under={**NORMALISED, "method.ipo_length_normalize": False}),
    Structure(gradient=pairs_of_the_papers, under={"method.label_smoothing": 0.1, "method.beta": 0.3}),
    Structure(gradient=pairs_of_the_papers, under={**SMOOTHED, "method.label_smoothing": 0.2}),
    Structure(gradient=pairs_of_the_papers, under={"method.loss_type": "hinge", "method.beta": 0.3}),
    Structure(gradient=pairs_of_the_papers, under={"method.loss_type": "exo_pair", "method.label_smoothing": 0.2}),
    *(
        Structure(gradient=pairs_of_the_papers, under={"method.loss_type": loss, "method.beta": 0.3})
        for loss in ("nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down", "discopop")
    ),
    Structure(gradient=kto_of_pairs, under={"method.loss_type": "kto_pair"}),
    Structure(gradient=pairs_in_order, under={"method.loss_type": "aot", "method.label_smoothing": 0.2}),
    Structure(gradient=pairs_in_order, under={"method.loss_type": "aot_unpaired", "method.beta": 0.3}),
)
ESTIMATES = Structure(unbiased=("policy/kl", "policy/kl_per_token"), non_negative=("policy/kl_per_token",))
OF_GROUPS = Structure(scores="group", surrogate="none", detached=())
OFFLINE = Declaration(
    contexts={"ipo_length_normalize": NORMALISED},
    effects={name: effect for name, effect in EFFECTS.items() if name != "k"},
    structure=OF_PAIRS,
)
KIT = {
    "DPOTrainer": OFFLINE,
    # pairs and best responses are chosen within a group
    "OnlineDPOTrainer": replace(
        OFFLINE, effects=EFFECTS, structure=(replace(OF_GROUPS, gradient=dpo_on_best_and_worst), ESTIMATES)
    ),
    "BestOfKTrainer": Declaration(
        effects={"k": EFFECTS["k"]}, structure=(replace(OF_GROUPS, gradient=likelihood_of_the_best),)
    ),
    "XPOTrainer": Declaration(
        effects={
            "beta": Effect(loss_of_xpo_by_its_formula, equals={0.1: 1.0, 1.0: 1.0}),
            "alpha": [
                Effect("gradient", linear=(0.0, 0.05, 0.1)),
                Effect(loss_of_xpo_by_its_formula, equals={0.0: 1.0, 0.1: 1.0}),
            ],
        },
        structure=(OF_GROUPS,),  # a score is compared with that of the reference
        expected_failures={
            "kl_pulls_back": "without a preference, the bonus pushes the policy away from its reference",
        },
    ),
    "SPINTrainer": Declaration(
        effects={"beta": Effect("credit of chosen", proportional=(0.1, 0.2, 1.0))},
        structure=(Structure(surrogate="none", detached=()),),
    ),
}
