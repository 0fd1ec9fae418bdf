"""What the settings of ORPO and CPO do, and their structure: measured by the conformance kit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trainkit.testing import Declaration, Effect, Structure, World, nudged


def mean_of_three(trainer: Any) -> float:
    """Return the mean loss of pairs whose log-probabilities differ by 2, −1 and 0."""
    return float(trainer.losses(torch.tensor([2.0, -1.0, 0.0])).mean())


@torch.no_grad()
def loss_of_orpo_by_its_formula(trainer: Any) -> float:
    """Return the loss divided by −mean log p_c per token + λ mean −log σ(log odds_c − log odds_r)."""
    batch = nudged(trainer, 0.1).store.experience.to(trainer.accelerator.device)
    sides = []
    for side in (batch.chosen, batch.rejected):
        logprobs = (trainer.policy(side).logprobs * side.response_mask).sum(1).double() / side.response_mask.sum(1)
        sides.append((logprobs, logprobs - (1 - logprobs.exp()).log()))
    odds = (1 + (sides[1][1] - sides[0][1]).exp()).log().mean()
    return float((trainer.loss(batch)[0] + sides[0][0].mean()) / odds / trainer.method.beta)


SIMPO = {"method.loss_type": "simpo"}
EFFECTS: dict[str, Effect | list[Effect]] = {
    # −log σ(βx), max(0, 1 − βx), (x − 5)² and −log σ(βx − ½), at β = 0.1
    "loss_type": Effect(
        mean_of_three, equals={"sigmoid": 0.678561, "hinge": 0.966667, "ipo": 70 / 3, "simpo": 0.955307}
    ),
    "beta": [
        # −log σ(βx) of 2, −1 and 0
        Effect(mean_of_three, equals={0.1: 0.678561, 1.0: 0.711112}),
        Effect("credit of rejected", falls=(0.1, 0.5, 1.0)),
    ],
    "label_smoothing": [
        Effect(mean_of_three, equals={0.0: 0.678561, 0.1: 0.681894}),
        Effect("credit of rejected", rises=(0.0, 0.1, 0.3)),
        Effect("credit of rejected", rises=(0.0, 0.1, 0.3), under=SIMPO),
    ],
    "simpo_gamma": [
        Effect(mean_of_three, equals={0.0: 0.678561, 0.5: 0.955307}),
        Effect("credit of chosen", rises=(0.0, 0.5, 2.0)),
    ],
    "cpo_alpha": [
        Effect("credit of chosen", linear=(0.0, 0.5, 1.0)),
        Effect("gradient", linear=(0.0, 0.5, 1.0)),
        Effect("credit of rejected", same=(0.0, 0.5, 1.0)),
        Effect("credit of chosen", same=(None, 1.0)),
        Effect("credit of chosen", same=(None, 0.0), under=SIMPO),
    ],
}
OF_ORPO = [
    Effect("gradient", linear=(0.1, 0.5, 1.0)),
    Effect(loss_of_orpo_by_its_formula, equals={0.1: 1.0, 1.0: 1.0}),
]


def means_of(world: World) -> tuple[Tensor, Tensor]:
    """Return the mean log-probabilities of the tokens of chosen and of rejected outputs. [B] ×2."""
    chosen, rejected = (world.logprobs.sum(1) / world.mask.sum(1)).chunk(2)
    return chosen, rejected


def orpo_of_the_paper(world: World) -> Tensor:
    """Return −log p_c − λ log σ(log odds_c − log odds_r) (Hong, Lee, Thorne 2024, equations 6 and 7)."""
    chosen, rejected = means_of(world)
    odds = [p - torch.log1p(-p.exp()) for p in (chosen, rejected)]
    loss: Tensor = (-chosen - world.method.beta * F.logsigmoid(odds[0] - odds[1])).mean()
    return loss


def cpo_of_the_papers(world: World) -> Tensor:
    """Return f(log π_c − log π_r) − log p_c, the last a mean over tokens (Xu et al. 2024, equation 5).

    f(x) = −log σ(βx), or max(0, 1 − βx). SimPO has −log σ(βx − γ) of means over tokens, and no likelihood (Meng, Xia,
    Chen 2024, equation 6), the form of IPO (x − 1/2β)² of means.
    """
    method, (chosen, rejected) = world.method, means_of(world)
    sums = world.logprobs.sum(1).chunk(2)
    whole, mean = sums[0] - sums[1], chosen - rejected
    losses: dict[str, Tensor] = {
        "sigmoid": -F.logsigmoid(method.beta * whole) - chosen,
        "hinge": (1 - method.beta * whole).clamp(min=0) - chosen,
        "ipo": (mean - 1 / (2 * method.beta)) ** 2 - chosen,
        "simpo": -F.logsigmoid(method.beta * mean - method.simpo_gamma),
    }
    return losses[method.loss_type].mean()


STRUCTURE = Structure(surrogate="none", detached=())
OF_CPO = (
    replace(STRUCTURE, gradient=cpo_of_the_papers),
    *(Structure(gradient=cpo_of_the_papers, under={"method.loss_type": kind}) for kind in ("hinge", "ipo", "simpo")),
)
KIT = {
    "ORPOTrainer": Declaration(effects={"beta": OF_ORPO}, structure=(replace(STRUCTURE, gradient=orpo_of_the_paper),)),
    # the log-probabilities of SimPO are means, and its loss has no likelihood
    "CPOTrainer": Declaration(
        contexts={"simpo_gamma": SIMPO}, variants={"simpo": SIMPO}, effects=EFFECTS, structure=OF_CPO
    ),
}
