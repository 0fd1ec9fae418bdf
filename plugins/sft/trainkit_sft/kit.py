"""What the settings of SFT do, and its structure: measured by the conformance kit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainkit.testing import Declaration, Effect, Structure, World

DRAWS = 9
"""Losses of a batch that are compared."""


@torch.no_grad()
def difference_of_two_losses(trainer: Any) -> float:
    """Return how far the losses of one batch are apart in training mode, the mean over several draws of noise."""
    trainer.policy.train()
    batch = trainer.store.experience.to(trainer.accelerator.device)
    losses = [float(trainer.loss(batch)[0]) for _ in range(DRAWS)]
    return sum(abs(loss - losses[0]) for loss in losses) / DRAWS


EFFECTS: dict[str, Effect | list[Effect]] = {
    "train_on_prompts": Effect("weight", rises=(False, True)),
    "packing": [Effect("rows", falls=(False, True)), Effect("weight", same=(False, True))],
    "neftune_alpha": Effect(difference_of_two_losses, rises=(0.0, 0.1, 10.0)),
}


def cross_entropy(world: World) -> Tensor:
    """Return −log π, a mean over output tokens."""
    return -world.logprobs[world.mask].mean()


STRUCTURE = (Structure(surrogate="none", detached=(), gradient=cross_entropy),)
KIT = Declaration(effects=EFFECTS, structure=STRUCTURE)
