"""What the settings of RLOO do, and its structure: measured by the conformance kit."""

from __future__ import annotations

from typing import Any

import torch

from trainkit.testing import Declaration, Effect, Structure


@torch.no_grad()
def spread_within_responses(trainer: Any) -> float:
    """Return how far the advantages of a response's tokens are apart, with a policy that has left the reference."""
    trainer.models.build()  # the reference is made with it
    draws = torch.Generator().manual_seed(0)
    for parameter in trainer.unwrapped.parameters():
        parameter.add_(0.1 * torch.randn(parameter.shape, generator=draws).to(parameter))
    rollouts = trainer.sample([{"prompt": prompt} for prompt in "abcd" for _ in range(trainer.samples_per_prompt)])
    scores = torch.zeros(len(rollouts.prompts), device=rollouts.terminated.device)
    batch = trainer.prepare_experience(trainer.experience(rollouts, scores))
    mask = batch.sequences.response_mask
    highest = batch.advantages.masked_fill(~mask, -torch.inf).amax(1)
    lowest = batch.advantages.masked_fill(~mask, torch.inf).amin(1)
    return float((highest - lowest).mean())


def truncated_score_of_5(trainer: Any) -> float:
    """Return the sum of the rewards of a truncated response of two tokens with the score 5."""
    scores, terminated = torch.tensor([5.0, 5.0]), torch.tensor([True, False])
    return float(trainer.scored(scores, terminated, torch.tensor([[True, True]] * 2))[1].sum())


TOKENS = {"method.ratio_level": "token"}
EFFECTS: dict[str, Effect | list[Effect]] = {
    "rloo_k": Effect("responses", equals={2: 2, 4: 4, 8: 8}),
    # twelve steps, two of them in a pass
    "rloo_epochs": Effect("collections", equals={1: 6, 2: 3, 3: 2}),
    "kl_coef": [
        Effect("divergence", falls=(0.01, 0.1, 1.0)),
        Effect("gradient", linear=(0.0, 0.5, 1.0), under={"method.cliprange": 10.0}),
    ],
    "kl_level": Effect(spread_within_responses, rises=("sequence", "token")),
    "ratio_level": Effect("weight", rises=("sequence", "token")),
    "cliprange": Effect("unclipped", rises=(0.01, 0.1, 10.0)),
    "missing_eos_penalty": [
        Effect(truncated_score_of_5, equals={None: 5.0, 0.5: 4.5, 2.0: 3.0}),
        Effect("credit of truncated", falls=(None, 0.5, 2.0)),
    ],
    "missing_eos_score": [
        Effect(truncated_score_of_5, equals={None: 5.0, -1.0: -1.0, 2.0: 2.0}),
        Effect("credit of truncated", rises=(-5.0, -1.0, 0.0)),
    ],
}
STRUCTURE = (
    Structure(scores="group", baseline="leave_one_out", surrogate="sequence", detached=(), kl="response"),
    Structure(baseline="leave_one_out", surrogate="token", kl="response", under=TOKENS),
    Structure(kl="token", under={**TOKENS, "method.kl_level": "token"}),
    Structure(gradient="policy", penalty="kl_coef"),
    Structure(gradient="policy", penalty="kl_coef", under=TOKENS),
    Structure(unbiased=("policy/kl", "policy/kl_per_token", "policy/entropy"), non_negative=("policy/kl_per_token",)),
    Structure(gradient="policy", penalty="kl_coef", under={**TOKENS, "method.kl_level": "token"}),
)
KIT = Declaration(
    contexts={"kl_level": TOKENS},
    variants={"token": {**TOKENS, "method.kl_level": "token"}},
    effects=EFFECTS,
    structure=STRUCTURE,
)
