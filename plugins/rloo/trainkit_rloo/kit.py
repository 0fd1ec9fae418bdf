"""What the settings of RLOO do, and its structure: measured by the conformance kit."""

from __future__ import annotations

from typing import Any

import torch

from trainkit.testing import Declaration, Effect, Structure, nudged


@torch.no_grad()
def advantages_by_their_formula(trainer: Any) -> float:
    """Return 1 + the largest error of the advantages, R − the mean R of the others, R = score − β Σ k1.

    With a penalty per token, a token does not pay for those before it.
    """
    trainer.models.build()  # the reference is made with it
    nudged(trainer, 0.1)
    size = trainer.samples_per_prompt
    rollouts = trainer.sample([{"prompt": prompt} for prompt in "abcd" for _ in range(size)])
    scores = torch.arange(4.0 * size, device=rollouts.terminated.device) % 5
    x = trainer.experience(rollouts, scores)
    mask, found = x.sequences.response_mask, trainer.prepare_experience(x).advantages
    k1 = ((x.logprobs - x.ref_logprobs) * mask).double() * trainer.method.kl_coef
    groups = (scores - k1.sum(1)).view(-1, size)
    due = (groups - (groups.sum(1, keepdim=True) - groups) / (size - 1)).view(-1, 1).expand(mask.shape)
    if trainer.method.kl_level == "token":
        due = due + k1.cumsum(1) - k1
    return float(1 + (found - due)[mask].abs().max() / due[mask].abs().max())


@torch.no_grad()
def loss_by_its_formula(trainer: Any) -> float:
    """Return 1 + the error of the loss, relative to −min(Aρ, A clip(ρ)), ρ of responses or tokens, after a move."""
    reach, batch = trainer.method.cliprange, nudged(trainer, 0.05).store.experience.to(trainer.accelerator.device)
    mask = batch.sequences.response_mask
    log_ratio = (trainer.policy(batch.sequences).logprobs - batch.old_logprobs).double().masked_fill(~mask, 0.0)
    if trainer.method.ratio_level == "sequence":
        log_ratio, mask = log_ratio.sum(1), mask.any(1)
    ratio, advantages = log_ratio.exp(), batch.advantages
    due = -torch.minimum(ratio * advantages, ratio.clamp(1 - reach, 1 + reach) * advantages)[mask]
    return float(1 + (trainer.loss(batch)[0] - due.mean()) / due.abs().mean())


def truncated_score_of_5(trainer: Any) -> float:
    """Return the sum of the rewards of a truncated response whose two tokens have the rewards 3 and 2."""
    scores, terminated = torch.tensor([[3.0, 2.0]] * 2), torch.tensor([True, False])
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
    "kl_level": Effect(advantages_by_their_formula, equals={"sequence": 1.0, "token": 1.0}),
    "ratio_level": Effect(loss_by_its_formula, equals={"sequence": 1.0, "token": 1.0}),
    "cliprange": Effect(loss_by_its_formula, equals={0.01: 1.0, 0.1: 1.0, 10.0: 1.0}),
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
