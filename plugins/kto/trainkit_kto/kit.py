"""What the settings of KTO and BCO do, and their structure: measured by the conformance kit."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from trainkit.testing import Declaration, Effect, Structure, World, nudged


@torch.no_grad()
def loss_with_a_kl_of_10(trainer: Any) -> float:
    """Return the loss before the first update, at β = 0.1, if mismatched outputs have become likelier by 10 nats."""
    batch = trainer.store.experience
    if batch.mismatched is not None:
        batch = replace(batch, mismatched_ref_logps=batch.mismatched_ref_logps - 10.0)
    trainer.models.build()  # moves the model to the device
    return float(trainer.loss(trainer.prepare_step(batch).to(trainer.accelerator.device))[0])


@torch.no_grad()
def loss_by_its_formula(trainer: Any) -> float:
    """Return the loss divided by the mean of λ(1 − σ(±β(r − z))), z = max(0, mean r of mismatched samples)."""
    method, batch = trainer.method, trainer.store.experience.to(trainer.accelerator.device)
    nudged(trainer, 0.3)

    def ratios(sequences: Any, reference: Any) -> Any:
        return (trainer.policy(sequences).logprobs * sequences.response_mask).sum(1).double() - reference

    r, z = ratios(batch.own, batch.ref_logps), torch.zeros((), dtype=torch.float64)
    if method.reference_point == "mismatched":
        z = ratios(batch.mismatched, batch.mismatched_ref_logps).mean().clamp(min=0)
    good, bad = ((1 + (sign * method.beta * (r - z)).exp()) ** -1 for sign in (1, -1))
    due = torch.where(batch.desirable, method.desirable_weight * good, method.undesirable_weight * bad)
    return float(trainer.loss(trainer.prepare_step(batch))[0] / due.mean())


def shift_of_a_late_label(trainer: Any) -> float:
    """Return δ after a step with desirable samples alone, of the reward 4, and one with undesirable ones, of 2."""
    for rewards in ({"desirable": 4.0, "undesirable": math.nan}, {"desirable": math.nan, "undesirable": 2.0}):
        trainer.judge({f"rewards/{label}": reward for label, reward in rewards.items()})
        trainer.progress.step += 1
    return float(trainer.shift)


EFFECTS: dict[str, Effect | list[Effect]] = {
    "beta": Effect(loss_by_its_formula, equals={0.1: 1.0, 1.0: 1.0}, under={"method.desirable_weight": 1.25}),
    "desirable_weight": [
        Effect("credit of desirable", proportional=(0.5, 1.0, 2.0)),
        Effect("credit of undesirable", same=(0.5, 1.0, 2.0)),
    ],
    "undesirable_weight": [
        Effect("credit of desirable", same=(0.5, 1.0, 2.0)),
        Effect("credit of undesirable", proportional=(0.5, 1.0, 2.0)),
    ],
    "reference_point": [
        # of 16 samples 6 are desirable, with the loss σ(1), and the others have σ(−1)
        Effect(loss_with_a_kl_of_10, equals={"mismatched": 0.442235, "zero": 0.5}),
        Effect(loss_by_its_formula, equals={"mismatched": 1.0, "zero": 1.0}),
    ],
}


def kto_of_the_paper(world: World) -> Tensor:
    """Return λ (1 − σ(±β (r − z))), r = log π − log π_ref (Ethayarajh et al. 2024, equation 7).

    z is 0, or the mean of r over mismatched outputs, if it is positive, without gradient. Each output is mismatched
    once, and the policy of the world reads no prompts, so it is the mean over all.
    """
    method, rewards, good = world.method, (world.logprobs - world.ref_logprobs).sum(1), world.scores == 1
    point = rewards.detach().mean().clamp(min=0) * (method.reference_point == "mismatched")
    weights = torch.where(good, method.desirable_weight, method.undesirable_weight)
    margins = method.beta * (rewards - point)
    return (weights * (1 - torch.where(good, margins, -margins).sigmoid())).mean()


def bco_of_the_paper(world: World) -> Tensor:
    """Return −log σ(±β log(π / π_ref)): δ is 0 before the first update."""
    rewards = world.method.beta * (world.logprobs - world.ref_logprobs).sum(1)
    return -torch.where(world.scores == 1, rewards.sigmoid(), 1 - rewards.sigmoid()).log().mean()


# no baseline: a label counts in its own sample, and the reference point is a number
OF_ROWS = Structure(scores="row", surrogate="none", detached=())
STRUCTURE = (
    OF_ROWS,
    Structure(gradient=kto_of_the_paper, under={"method.reference_point": "zero", "method.beta": 0.5}),
    Structure(gradient=kto_of_the_paper, under={"method.beta": 0.5, "method.desirable_weight": 1.25}),
)
KIT = {
    "KTOTrainer": Declaration(effects=EFFECTS, structure=STRUCTURE),
    "BCOTrainer": Declaration(
        effects={
            "beta": [
                Effect("credit of desirable", proportional=(0.05, 0.1, 0.2)),
                Effect(shift_of_a_late_label, equals={0.1: 3.0}),
            ]
        },
        structure=(replace(OF_ROWS, gradient=bco_of_the_paper),),
    ),
}
