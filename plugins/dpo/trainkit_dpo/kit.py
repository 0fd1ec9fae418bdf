"""What the settings of DPO and its online forms do, and its structure: measured by the conformance kit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from trainkit.testing import Declaration, Effect, Structure


def mean_of_three(trainer: Any) -> float:
    """Return the mean loss of pairs whose log-ratios differ by 2, −1 and 0, with KL estimates of 0."""
    chosen, zeros = torch.tensor([2.0, -1.0, 0.0]), torch.zeros(3)
    pairs = trainer.store.experience.select(torch.arange(3))
    batch = type(pairs)(**{**pairs.parts(), "chosen_kl": zeros, "rejected_kl": zeros})
    return float(trainer.losses(chosen, zeros, batch).mean())


SMOOTHED = {"method.loss_type": "robust"}
NORMALISED = {"method.loss_type": "ipo"}
EFFECTS: dict[str, Effect | list[Effect]] = {
    # −log σ(βx), max(0, 1 − βx), (x − 5)² and 1 − σ(±βr), at β = 0.1
    "loss_type": Effect(
        mean_of_three, equals={"sigmoid": 0.678561, "hinge": 0.966667, "ipo": 70 / 3, "kto_pair": 0.495858}
    ),
    "beta": [
        Effect(mean_of_three, equals={0.1: 0.678561, 1.0: 0.711112}),
        Effect("credit of chosen", rises=(0.1, 0.5, 1.0)),
    ],
    "label_smoothing": [
        Effect(mean_of_three, equals={0.0: 0.678561, 0.1: 0.681894}),
        Effect("credit of chosen", falls=(0.0, 0.1, 0.3)),
        Effect("credit of chosen", rises=(0.1, 0.3), under=SMOOTHED),
    ],
    "ipo_length_normalize": Effect("credit of chosen", rises=(True, False), under=NORMALISED),
    "reference_free": Effect("size of ref_chosen", equals={True: 0.0}),
    "k": Effect("responses", equals={2: 2, 4: 4, 8: 8}),
}
OF_PAIRS = (Structure(surrogate="none", detached=()),)
OF_GROUPS = (Structure(scores="group", surrogate="none", detached=()),)
OFFLINE = Declaration(
    contexts={"ipo_length_normalize": NORMALISED},
    effects={name: effect for name, effect in EFFECTS.items() if name != "k"},
    structure=OF_PAIRS,
)
KIT = {
    "DPOTrainer": OFFLINE,
    # pairs and best responses are chosen within a group
    "OnlineDPOTrainer": replace(OFFLINE, effects=EFFECTS, structure=OF_GROUPS),
    "BestOfKTrainer": Declaration(effects={"k": EFFECTS["k"]}, structure=OF_GROUPS),
}
