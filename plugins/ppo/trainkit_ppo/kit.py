"""What the settings of PPO do, and its structure: measured by the conformance kit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from trainkit import Verdict
from trainkit.functional import masked_mean, masked_sum
from trainkit.testing import Declaration, Effect, Structure, nudged

MOVED = {"optimizer.lr": 0.03, "method.ratio_threshold": None}
DISCOUNTED = {"method.gamma": 0.9, "method.lam": 1.0}
STEERED = {"optimizer.lr": 0.03, "train.total_steps": 10, "method.ppo_epochs": 1}


def kl_coef_at_the_end(trainer: Any) -> float:
    """Return β at the end of a run."""
    trainer.learn()
    coef: float = trainer.kl.coef
    return coef


def kl_coef_after_a_kl_of(trainer: Any) -> float:
    """Return β = 1 after a collection of `horizon` responses whose KL is by the share `target` above its target."""
    _, x = moved_rollouts(trainer)
    mean = masked_sum(x.logprobs - x.ref_logprobs, x.sequences.response_mask, dim=1).mean()
    trainer.kl = type(trainer.kl)(1.0, float(mean) / (1 + trainer.method.target), len(x))
    trainer.prepare_experience(x)
    return float(trainer.kl.coef)


def moved_rollouts(trainer: Any) -> tuple[Any, Any]:
    """Return rollouts of a policy that has left its reference, with values that differ, and their experience."""
    trainer.models.build()  # the reference is made with it
    nudged(trainer, 0.1)
    rollouts = trainer.sample([{"prompt": prompt} for prompt in "abcdefgh" * 2])
    scores = torch.arange(16.0, device=rollouts.terminated.device) / 4 - 1
    return rollouts, trainer.experience(rollouts, scores)


def first_of_three(trainer: Any) -> float:
    """Return the first of the scores 2, 4 and 6, of which the deviation is 2, after they are scaled by it alone."""
    trainer.moments, trainer.ref_std = type(trainer.moments)(), 0.0  # as if there had been no scores before
    scores = torch.tensor([[2.0], [4.0], [6.0]], device=trainer.parallel.device)
    return float(trainer.scaled(scores, torch.ones_like(scores, dtype=torch.bool))[0, 0])


@torch.no_grad()
def estimates_by_their_sums(trainer: Any) -> float:
    """Return 1 + the largest error of the returns, relative to V_t + Σ_l (γλ)^l (r + γV' − V), Schulman et al. 2015.

    Less than that if the advantages are not these sums, with their own λ, but for a shift and a factor. Scores are
    divided by their deviation if they are scaled, and the KL penalty is not.
    """
    _, x = moved_rollouts(trainer)
    trainer.moments, std = type(trainer.moments)(), masked_sum(x.scores, x.sequences.response_mask, dim=1).std()
    scale = 1.0 if trainer.method.scale_reward == "none" else float(std)
    gamma, beta, mask = trainer.method.gamma, trainer.kl.coef, x.sequences.response_mask
    batch, due, gains = trainer.prepare_experience(x), list[float](), list[float]()
    for row, keep in enumerate(mask):
        names = (x.scores / scale - beta * (x.logprobs - x.ref_logprobs), x.values)
        rewards, values = (each[row][keep].tolist() for each in names)
        after, alpha, lam = [*values[1:], 0.0], trainer.method.lam_length, trainer.method.lam
        own = lam if alpha is None else max(1 - 1 / (alpha * len(values)), 0.0)
        deltas = [r + gamma * v - here for r, v, here in zip(rewards, after, values, strict=True)]
        for t in range(len(deltas)):
            due.append(values[t] + sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, len(deltas))))
            gains.append(sum((gamma * own) ** (k - t) * deltas[k] for k in range(t, len(deltas))))
    found, wanted = batch.returns[mask], torch.tensor(due).to(batch.returns)
    error = float((found - wanted).abs().max() / wanted.abs().max())
    likeness = torch.corrcoef(torch.stack([batch.advantages[mask].double().cpu(), torch.tensor(gains).double()]))[0, 1]
    return error + float(likeness)


@torch.no_grad()
def loss_by_its_formula(trainer: Any) -> float:
    """Return 1 + the error of the loss, relative to the terms of Schulman et al. 2017, equation 9, after a move."""
    method, batch = trainer.method, nudged(trainer, 0.05).store.experience.to(trainer.accelerator.device)
    mask = batch.sequences.response_mask
    new = trainer.policy(batch.sequences, entropy=True)
    ratio, error = (new.logprobs - batch.old_logprobs).exp(), new.values - batch.returns
    surrogate = torch.minimum(ratio * batch.advantages, ratio.clamp(*near(1.0, method.cliprange)) * batch.advantages)
    near_old = torch.clamp(new.values, *near(batch.old_values, method.cliprange_value)) - batch.returns
    value = 0.5 * torch.maximum(error**2, near_old**2)
    due = (-surrogate + method.vf_coef * value - method.ent_coef * new.entropy)[mask].double()
    return float(1 + (trainer.loss(batch)[0] - due.mean()) / due.abs().mean())


def near(x: Any, reach: float) -> tuple[Any, Any]:
    """Return x − reach and x + reach."""
    return x - reach, x + reach


def largest_score(trainer: Any) -> float:
    """Return what scores of 5 and −5 are scaled to, the larger one."""
    scores = torch.tensor([[0.0, 5.0], [-5.0, 0.0]])
    return float(trainer.scaled(scores, torch.ones(2, 2, dtype=torch.bool)).abs().max())


def lost_by_truncation(trainer: Any) -> float:
    """Return the mean difference of the scores of truncated responses from those that were given."""
    rollouts, x = moved_rollouts(trainer)
    given = torch.arange(16.0, device=rollouts.terminated.device) / 4 - 1
    return float((x.scores.sum(1) - given)[~rollouts.terminated].mean())


def largest_kl_of_a_step(trainer: Any) -> float:
    """Return the largest KL from the old policy, of 0, 0.1, ..., 9.9, at which a step is made."""
    return max(k / 10 for k in range(100) if at(trainer, k / 10, 1.0) is Verdict.STEP)


def largest_ratio_of_a_step(trainer: Any) -> float:
    """Return the largest mean ratio, of 1, 1.1, ..., 10.9, at which a step is made."""
    return max(1 + k / 10 for k in range(100) if at(trainer, 0.0, 1 + k / 10) is Verdict.STEP)


def at(trainer: Any, kl: float, ratio: float) -> Verdict:
    """Return the verdict on a step with this KL from the old policy and this mean ratio."""
    verdict: Verdict = trainer.judge({"policy/approx_kl": kl, "policy/ratio": ratio})
    return verdict


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
    # twelve steps, two of them in a pass
    "ppo_epochs": Effect("collections", equals={1: 6, 2: 3, 3: 2}),
    "gamma": Effect(estimates_by_their_sums, equals={0.5: 1.0, 1.0: 1.0}),
    "lam": Effect(estimates_by_their_sums, equals={0.0: 1.0, 0.5: 1.0, 1.0: 1.0}, under={"method.gamma": 0.9}),
    "lam_length": Effect(estimates_by_their_sums, equals={None: 1.0, 0.2: 1.0, 0.5: 1.0, 3.0: 1.0}),
    "cliprange": Effect(loss_by_its_formula, equals={0.01: 1.0, 0.2: 1.0}),
    "cliprange_value": [
        Effect(loss_by_its_formula, equals={1e-3: 1.0, 0.1: 1.0, 10.0: 1.0}),
        Effect("unclipped values", rises=(1e-4, 10.0)),
    ],
    "vf_coef": [
        Effect("slope of values", proportional=(0.0, 0.1, 2.0)),
        Effect(loss_by_its_formula, equals={0.0: 1.0, 0.1: 1.0, 2.0: 1.0}),
        Effect("metric loss/policy", same=(0.1, 2.0)),
        Effect("metric loss/value", same=(0.1, 2.0)),
    ],
    "ent_coef": [
        Effect("slope of entropy", equals={0.0: 0.0, 0.1: -0.1, 1.0: -1.0}),
        Effect("entropy", rises=(0.0, 1.0)),
    ],
    "init_kl_coef": [
        Effect("divergence", falls=(0.01, 1.0)),
        Effect(estimates_by_their_sums, equals={0.0: 1.0, 0.5: 1.0}),
    ],
    # β (1 ± 0.2 · 16 / horizon) after each of five collections; the KL of the first one is 0
    "target": [
        Effect(
            kl_coef_at_the_end,
            equals={1e-6: 0.05 * 0.936 * 1.064**4, 10.0: 0.05 * 0.936**5},
            under={**STEERED, "method.horizon": 50},
        ),
        Effect(kl_coef_after_a_kl_of, equals={0.05: 1.05, 0.1: 1.1, 0.5: 1.2}),
    ],
    "horizon": Effect(
        kl_coef_at_the_end,
        equals={20: 0.05 * 0.84**5, 10_000: 0.05 * 0.99968**5},
        under={**STEERED, "method.target": 10.0},
    ),
    "scale_reward": [
        Effect("size of returns", falls=("none", "running")),
        Effect("size of returns", falls=("none", "ref")),
        Effect(first_of_three, equals={"none": 2.0, "running": 1.0, "ref": 1.0}),
        Effect(estimates_by_their_sums, equals={"none": 1.0, "running": 1.0}, under={"method.init_kl_coef": 0.5}),
    ],
    "cliprange_reward": Effect(largest_score, equals={0.1: 0.1, 2.0: 2.0, None: 5.0}),
    "missing_eos_penalty": [
        Effect(lost_by_truncation, equals={None: 0.0, 0.5: -0.5, 2.0: -2.0}),
        Effect("returns of truncated", falls=(None, 2.0)),
        Effect("returns of terminated", same=(None, 2.0)),
    ],
    "bootstrap_truncated": [
        # V = 1 behind the sixth token is worth γ, ..., γ⁶ at the tokens
        Effect(returns_of(terminated=False), equals={False: 0.0, True: 0.7028385}, under=DISCOUNTED),
        Effect(returns_of(terminated=True), equals={False: 0.0, True: 0.0}, under=DISCOUNTED),
    ],
    "target_kl": [
        Effect(largest_kl_of_a_step, equals={1.0: 1.5, 2.0: 3.0, None: 9.9}),
        Effect("skipped", falls=(1e-6, None), under=MOVED),
    ],
    "ratio_threshold": [
        Effect(largest_ratio_of_a_step, equals={2.0: 2.0, 5.0: 5.0, None: 10.9}),
        Effect("skipped", falls=(1.0001, None), under=MOVED),
    ],
}
STRUCTURE = (
    Structure(scores="collection", surrogate="token", detached=(), whitened=("advantages",), unscaled=("returns",)),
    Structure(discount=("gamma", "lam"), under={"method.bootstrap_truncated": True}),
    Structure(gradient="policy", penalty="init_kl_coef", under={"method.lam": 1.0}),
    Structure(unbiased=("policy/kl", "policy/kl_per_token", "policy/entropy"), non_negative=("policy/kl_per_token",)),
)
KIT = Declaration(
    contexts={"horizon": {"method.target": 0.01, "method.horizon": 50}},
    variants={
        "scaled": {
            "method.scale_reward": "running",
            "method.bootstrap_truncated": True,
            "method.target": 0.01,
            "method.horizon": 50,
        }
    },
    effects=EFFECTS,
    structure=STRUCTURE,
)
