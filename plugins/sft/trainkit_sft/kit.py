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


@torch.no_grad()
def noise_of_the_embeddings(trainer: Any) -> torch.Tensor:
    """Return what is added to the input of the first layer at real tokens in training, with a fixed seed. -> [N, D]."""
    batch, seen = trainer.store.experience.to(trainer.accelerator.device), list[torch.Tensor]()
    trainer.unwrapped.joins_rows = False  # as with noise
    handle = trainer.unwrapped.model.transformer.h[0].register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    with torch.random.fork_rng():
        for training in (False, True):
            torch.manual_seed(0)
            trainer.policy.train(training)
            trainer.loss(batch)
    handle.remove()
    return (seen[1] - seen[0])[batch.attention_mask]


def largest_noise(trainer: Any) -> float:
    """Return the largest element of the noise, times sqrt(L · D) for rows of L tokens, to two digits: α."""
    rows = trainer.store.experience.attention_mask
    noise = noise_of_the_embeddings(trainer)
    lengths = rows.sum(1).repeat_interleave(rows.sum(1)).unsqueeze(1)
    return round(float((noise.abs() * (lengths * noise.size(1)).sqrt()).max()) / 10, 2) * 10


EFFECTS: dict[str, Effect | list[Effect]] = {
    # of 106 tokens, 36 are those of prompts, and the first of each of 16 rows is never trained
    "train_on_prompts": Effect("weight", equals={False: 70, True: 90}),
    # rows of 64 tokens
    "packing": [Effect("rows", equals={False: 16, True: 2}), Effect("weight", same=(False, True))],
    "neftune_alpha": [
        Effect(difference_of_two_losses, rises=(0.0, 0.1, 10.0)),
        Effect(noise_of_the_embeddings, proportional=(0.0, 5.0, 10.0)),
        Effect(largest_noise, equals={10.0: 10.0}),
    ],
}


def cross_entropy(world: World) -> Tensor:
    """Return −log π, a mean over output tokens."""
    return -world.logprobs[world.mask].mean()


STRUCTURE = (Structure(surrogate="none", detached=(), gradient=cross_entropy),)
KIT = Declaration(effects=EFFECTS, structure=STRUCTURE)
