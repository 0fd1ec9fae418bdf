"""What the settings of ORPO and CPO do, and their structure: measured by the conformance kit."""

from __future__ import annotations

from typing import Any

import torch

from trainkit.testing import Declaration, Effect, Structure, nudged


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
STRUCTURE = (Structure(surrogate="none", detached=()),)
KIT = {
    "ORPOTrainer": Declaration(effects={"beta": OF_ORPO}, structure=STRUCTURE),
    # the log-probabilities of SimPO are means, and its loss has no likelihood
    "CPOTrainer": Declaration(
        contexts={"simpo_gamma": SIMPO}, variants={"simpo": SIMPO}, effects=EFFECTS, structure=STRUCTURE
    ),
}
