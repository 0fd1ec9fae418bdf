"""What the settings of reward modelling do, and its structure: measured by the conformance kit."""

from __future__ import annotations

from typing import Any

import torch

from trainkit.testing import Declaration, Effect, Structure, nudged


@torch.no_grad()
def loss_by_its_formula(trainer: Any) -> float:
    """Return the loss divided by the mean of log(1 + e^−(r_c − r_r − m)) + c (r_c + r_r)², with scores that differ."""
    batch = nudged(trainer, 0.3).store.experience.to(trainer.accelerator.device)
    chosen, rejected = (trainer.policy(side).double() for side in (batch.chosen, batch.rejected))
    due = (1 + (batch.margins - chosen + rejected).exp()).log() + trainer.method.center_coef * (chosen + rejected) ** 2
    return float(trainer.loss(batch)[0] / due.mean())


EFFECTS: dict[str, Effect | list[Effect]] = {
    "center_coef": [
        Effect("gradient", linear=(0.0, 0.1, 0.2)),
        Effect(loss_by_its_formula, equals={0.0: 1.0, 0.1: 1.0}),
    ],
}
STRUCTURE = (
    Structure(scores="row", surrogate="none", detached=()),
    Structure(detached=(), under={"method.center_coef": 0.1}),
)
KIT = Declaration(effects=EFFECTS, structure=STRUCTURE)
