"""What the settings of ORPO and CPO do, and their structure: measured by the conformance kit."""

from __future__ import annotations

from typing import Any

import torch

from trainkit.testing import Declaration, Effect, Structure


def mean_of_three(trainer: Any) -> float:
    """Return the mean loss of pairs whose log-probabilities differ by 2, −1 and 0."""
    return float(trainer.losses(torch.tensor([2.0, -1.0, 0.0])).mean())


SIMPO = {"method.loss_type": "simpo"}
EFFECTS: dict[str, Effect | list[Effect]] = {
    # −log σ(βx), max(0, 1 − βx), (x − 5)² and −log σ(βx − ½), at β = 0.1
    "loss_type": Effect(
        mean_of_three, equals={"sigmoid": 0.678561, "hinge": 0.966667, "ipo": 70 / 3, "simpo": 0.955307}
    ),
    "beta": [
        Effect("credit of rejected", falls=(0.1, 0.5, 1.0)),
        Effect("credit of chosen", rises=(0.1, 0.5, 1.0)),
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
        Effect("credit of chosen", rises=(0.0, 0.5, 1.0)),
        Effect("credit of rejected", same=(0.0, 0.5, 1.0)),
        Effect("credit of chosen", same=(None, 1.0)),
        Effect("credit of chosen", same=(None, 0.0), under=SIMPO),
    ],
}
STRUCTURE = (Structure(surrogate="none", detached=()),)
KIT = {
    "ORPOTrainer": Declaration(effects={"beta": EFFECTS["beta"]}, structure=STRUCTURE),
    # the log-probabilities of SimPO are means, and its loss has no likelihood
    "CPOTrainer": Declaration(
        contexts={"simpo_gamma": SIMPO}, variants={"simpo": SIMPO}, effects=EFFECTS, structure=STRUCTURE
    ),
}
