"""What the settings of PPO do, and its structure: measured by the conformance kit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from trainkit.functional import masked_mean
from trainkit.testing import Declaration, Effect, Structure

MOVED = {"optimizer.lr": 0.03, "method.ratio_threshold": None}
STEERED = {"optimizer.lr": 0.03, "train.total_steps": 10, "method.ppo_epochs": 1}


def kl_coef_at_the_end(trainer: Any) -> float:
    """Return β at the end of a run."""
    trainer.learn()
    coef: float = trainer.kl.coef
    return coef


def returns_of(*, terminated: bool) -> Callable[[Any], float]:
    """Return a function that computes the mean return of terminated or truncated responses without scores, if V = 1."""

    def mean_return(trainer: Any) -> float:
        with torch.no_grad():
            trainer.unwrapped.value_head.summary.bias.fill_(1.0)
            rollouts = trainer.sample([{"prompt": prompt} for prompt in "abcdefgh" * 4])
            scores = torch.zeros(len(rollouts.prompts), device=rollouts.terminated.device)
            batch = trainer.prepare_experience(trainer.experience(rollouts, scores))
        rows = rollouts.terminated == terminated
        return float(masked_mean(batch.returns[rows], batch.sequences.response_mask[rows]))

    return mean_return


EFFECTS: dict[str, Effect | list[Effect]] = {
    "ppo_epochs": Effect("collections", falls=(1, 4)),
    "gamma": Effect("size of returns", rises=(0.5, 1.0)),
    "lam": Effect("returns", rises=(0.5, 1.0)),
    "cliprange": Effect("unclipped", rises=(0.01, 1.0)),
    "cliprange_value": Effect("unclipped values", rises=(1e-4, 10.0)),
    "vf_coef": Effect("gradient of value_head", rises=(0.1, 2.0)),
    "ent_coef": Effect("entropy", rises=(0.0, 1.0)),
    "init_kl_coef": Effect("divergence", falls=(0.01, 1.0)),
    "target": Effect(kl_coef_at_the_end, falls=(1e-6, 10.0), under={**STEERED, "method.horizon": 50}),
    "horizon": Effect(kl_coef_at_the_end, rises=(20, 10_000), under={**STEERED, "method.target": 10.0}),
    "scale_reward": [
        Effect("size of returns", falls=("none", "running")),
        Effect("size of returns", falls=("none", "ref")),
    ],
    "cliprange_reward": Effect("size of returns", rises=(0.1, 1.0, None)),
    "missing_eos_penalty": [
        Effect("returns of truncated", falls=(None, 2.0)),
        Effect("returns of terminated", same=(None, 2.0)),
    ],
    "bootstrap_truncated": [
        Effect(returns_of(terminated=False), rises=(False, True)),
        Effect(returns_of(terminated=True), same=(False, True)),
    ],
    "target_kl": Effect("skipped", falls=(1e-6, None), under=MOVED),
    "ratio_threshold": Effect("skipped", falls=(1.0001, None), under=MOVED),
}
STRUCTURE = (
    Structure(scores="collection", surrogate="token", detached=(), whitened=("advantages",), unscaled=("returns",)),
    Structure(discount=("gamma", "lam"), under={"method.bootstrap_truncated": True}),
    Structure(gradient="policy", penalty="init_kl_coef", under={"method.lam": 1.0}),
    Structure(unbiased=("policy/kl", "policy/kl_per_token", "policy/entropy"), non_negative=("policy/kl_per_token",)),
)
KIT = Declaration(
    contexts={"horizon": {"method.target": 0.01, "method.horizon": 50}},
    variants={"scaled": {"method.scale_reward": "running", "method.bootstrap_truncated": True}},
    effects=EFFECTS,
    structure=STRUCTURE,
)
