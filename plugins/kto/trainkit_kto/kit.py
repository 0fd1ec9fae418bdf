"""What the settings of KTO do, and its structure: measured by the conformance kit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from trainkit.testing import Declaration, Effect, Structure


@torch.no_grad()
def loss_with_a_kl_of_10(trainer: Any) -> float:
    """Return the loss before the first update, at β = 0.1, if mismatched outputs have become likelier by 10 nats."""
    batch = trainer.store.experience
    if batch.mismatched is not None:
        batch = replace(batch, mismatched_ref_logps=batch.mismatched_ref_logps - 10.0)
    trainer.models.build()  # moves the model to the device
    return float(trainer.loss(trainer.prepare_step(batch).to(trainer.accelerator.device))[0])


EFFECTS: dict[str, Effect | list[Effect]] = {
    "beta": [
        Effect("credit of desirable", rises=(0.1, 0.5, 1.0)),
        Effect("credit of undesirable", falls=(0.1, 0.5, 1.0)),
    ],
    "desirable_weight": [
        Effect("credit of desirable", rises=(0.5, 1.0, 2.0)),
        Effect("credit of undesirable", same=(0.5, 1.0, 2.0)),
    ],
    "undesirable_weight": [
        Effect("credit of desirable", same=(0.5, 1.0, 2.0)),
        Effect("credit of undesirable", falls=(0.5, 1.0, 2.0)),
    ],
    # of 16 samples 6 are desirable, with the loss σ(1), and the others have σ(−1)
    "reference_point": Effect(loss_with_a_kl_of_10, equals={"mismatched": 0.442235, "zero": 0.5}),
}
# no baseline: a label counts in its own sample, and the reference point is a number
KIT = Declaration(effects=EFFECTS, structure=(Structure(scores="row", surrogate="none", detached=()),))
