"""Every loss, advantage and estimator of trainkit beside its closed form in NumPy, in float64.

A `Form` computes the same twice from drawn columns [B, T], a mask [B, T] and two numbers a and b in (0, 1): by the
function of trainkit, and by its formula. The whole losses of algorithms are those of their trainers, with a policy that
answers what was drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

import trainkit_dpo as dpo
import trainkit_ilql as ilql
from test_functional import gae_of_row, log_softmax
from trainkit import default_config, functional, get_trainer
from trainkit.data import Preferences, Sequences
from trainkit.metrics import RunningMoments
from trainkit_ddpo.advantages import PerPromptStatTracker, standardise
from trainkit_ddpo.ddim import ddim_mean, ddim_sigma, gaussian_logprob
from trainkit_grpo import GRPOBatch, GRPORollouts
from trainkit_kto import KTOBatch, LabelledBatch, kto_loss
from trainkit_orpo import log_odds, simpo_loss
from trainkit_ppo import PPOBatch, PPORollouts
from trainkit_reward import RewardBatch, preference_loss
from trainkit_rloo import RLOOBatch, RLOORollouts, RLOORows

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Form:
    """A function of trainkit and its closed form: both of (mask, a, b, *columns)."""

    columns: int
    found: Callable[..., Any]
    closed: Callable[..., Any]
    learnt: int | None = None
    """How many of the columns, the first ones, have a gradient; None: all."""


FORMS: dict[str, Form] = {}


def form(
    name: str, columns: int, found: Callable[..., Any], learnt: int | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated NumPy function as the closed form of ``found``."""

    def register(closed: Callable[..., Any]) -> Callable[..., Any]:
        FORMS[name] = Form(columns, found, closed, learnt)
        return closed

    return register


# ------------------------------------------------------------------------------------------------------ in NumPy


def mean(x: Array, m: Array) -> float:
    return float(x[m].sum() / m.sum()) if m.any() else 0.0


def log_sigmoid(x: Array) -> Array:
    return -np.logaddexp(0, -x)


def sigmoid(x: Array) -> Array:
    return np.exp(log_sigmoid(x))


def k3(logprobs: Array, ref: Array) -> Array:
    return np.exp(ref - logprobs) - 1 - (ref - logprobs)


def divergence(p: Array, q: Array) -> Array:
    return (np.exp(p) * (p - q)).sum(-1)


def surrogate(ratio: Array, advantages: Array, low: float, high: float) -> Array:
    return -np.minimum(advantages * ratio, advantages * np.clip(ratio, 1 - low, 1 + high))


def value_errors(values: Array, old: Array, returns: Array, cliprange: float) -> Array:
    clipped = np.clip(values, old - cliprange, old + cliprange)
    return 0.5 * np.maximum((values - returns) ** 2, (clipped - returns) ** 2)


def at_the_end(scores: Array, m: Array) -> Array:
    """Scores [B] at the last selected token of each row."""
    placed = np.zeros(m.shape)
    for row, keep in enumerate(m):
        if keep.any():
            placed[row, np.flatnonzero(keep)[-1]] = scores[row]
    return placed


def advantages_of(values: Array, rewards: Array, m: Array, gamma: float, lam: float, bootstrap: Array) -> Array:
    """The sum of the definition of GAE over the selected tokens of each row, with a last value of ``bootstrap``."""
    found = np.zeros(m.shape)
    for row, keep in enumerate(m):
        paid = rewards[row, keep]
        paid[-1] += gamma * bootstrap[row]
        found[row, keep] = gae_of_row(values[row, keep], paid, gamma, lam)
    return found


def whitened(x: Array, m: Array) -> Array:
    if m.sum() < 2:
        return np.where(m, x, 0.0)
    return np.where(m, (x - x[m].mean()) / np.sqrt(x[m].var(ddof=1) + 1e-8), 0.0)


def leave_one_out(rewards: Array, k: int) -> Array:
    groups = rewards.reshape(-1, k)
    return np.array([[r - (group.sum() - r) / (k - 1) for r in group] for group in groups]).ravel()


# ----------------------------------------------------------------------------------- estimators and distributions

F = functional


@form("k1", 2, lambda m, a, b, x, y: F.kl_k1(x, y))
def _(m: Array, a: float, b: float, x: Array, y: Array) -> Array:
    return x - y


@form("k2", 2, lambda m, a, b, x, y: F.kl_k2(x, y))
def _(m: Array, a: float, b: float, x: Array, y: Array) -> Array:
    return (x - y) ** 2 / 2


@form("k3", 2, lambda m, a, b, x, y: F.kl_k3(x, y))
def _(m: Array, a: float, b: float, x: Array, y: Array) -> Array:
    return k3(x, y)


@form("reverse KL", 2, lambda m, a, b, x, y: F.kl_exact(x, y))
def _(m: Array, a: float, b: float, x: Array, y: Array) -> Array:
    return divergence(log_softmax(x), log_softmax(y))


@form("forward KL", 2, lambda m, a, b, x, y: F.kl_forward(x, y))
def _(m: Array, a: float, b: float, x: Array, y: Array) -> Array:
    return divergence(log_softmax(y), log_softmax(x))


@form("Jensen-Shannon", 2, lambda m, a, b, x, y: F.jensen_shannon(x, y, beta=a))
def _(m: Array, a: float, b: float, x: Array, y: Array) -> Array:
    p, q = log_softmax(x), log_softmax(y)
    mixture = np.log(a * np.exp(q) + (1 - a) * np.exp(p))
    return a * divergence(q, mixture) + (1 - a) * divergence(p, mixture)


@form("log-probabilities of tokens", 1, lambda m, a, b, x: F.token_logprobs(x, m.int().argmax(1)))
def _(m: Array, a: float, b: float, x: Array) -> Array:
    return log_softmax(x)[np.arange(len(x)), m.argmax(1)]


@form("entropy", 1, lambda m, a, b, x: F.entropy_from_logits(x))
def _(m: Array, a: float, b: float, x: Array) -> Array:
    return -(np.exp(log_softmax(x)) * log_softmax(x)).sum(-1)


@form("importance ratios of tokens", 2, lambda m, a, b, x, y: F.importance_ratios(x, y, m))
def _(m: Array, a: float, b: float, x: Array, y: Array) -> Array:
    return np.where(m, np.exp(x - y), 1.0)


@form("importance ratios of responses", 2, lambda m, a, b, x, y: F.importance_ratios(x, y, m, level="sequence"))
def _(m: Array, a: float, b: float, x: Array, y: Array) -> Array:
    return np.where(m, np.exp(np.where(m, x - y, 0).sum(1, keepdims=True)), 1.0)


@form("truncated ratios", 1, lambda m, a, b, x: F.truncated_ratios(x.exp(), 1 + a))
def _(m: Array, a: float, b: float, x: Array) -> Array:
    return np.minimum(np.exp(x), 1 + a)


@form("masked ratios", 1, lambda m, a, b, x: F.masked_ratios(x.exp(), 1 + a))
def _(m: Array, a: float, b: float, x: Array) -> Array:
    return np.where(np.abs(np.log(np.exp(x))) <= np.log(1 + a), np.exp(x), 0.0)


@form("effective sample size", 1, lambda m, a, b, x: F.effective_sample_size(x.exp(), m))
def _(m: Array, a: float, b: float, x: Array) -> float:
    return float(np.exp(x[m]).sum() ** 2 / np.exp(2 * x[m]).sum())


# ----------------------------------------------------------------------------------------- rewards and advantages


@form("rewards with the KL penalty", 3, lambda m, a, b, x, y, z: F.kl_shaped_rewards(z[:, 0], x, y, m, a))
def _(m: Array, a: float, b: float, x: Array, y: Array, z: Array) -> Array:
    return at_the_end(z[:, 0], m) - a * np.where(m, x - y, 0.0)


@form("GAE", 2, lambda m, a, b, v, r: torch.stack(F.gae(v, r, m, gamma=a, lam=b)))
def _(m: Array, a: float, b: float, v: Array, r: Array) -> Array:
    found = advantages_of(v, r, m, a, b, np.zeros(len(m)))
    return np.stack([found, np.where(m, found + v, 0.0)])


@form("GAE with a last value", 3, lambda m, a, b, v, r, z: F.gae(v, r, m, gamma=a, lam=b, bootstrap=z[:, 0])[0])
def _(m: Array, a: float, b: float, v: Array, r: Array, z: Array) -> Array:
    return advantages_of(v, r, m, a, b, z[:, 0])


@form("whitening", 1, lambda m, a, b, x: F.whiten(x, m))
def _(m: Array, a: float, b: float, x: Array) -> Array:
    return whitened(x, m)


@form("leave one out", 1, lambda m, a, b, x: F.leave_one_out(x.flatten(), x.size(1)))
def _(m: Array, a: float, b: float, x: Array) -> Array:
    return leave_one_out(x.ravel(), x.shape[1])


@form("DDPO's advantages over a collection", 1, lambda m, a, b, x: standardise(x.flatten().tolist()), learnt=0)
def _(m: Array, a: float, b: float, x: Array) -> Array:
    return (x.ravel() - x.mean()) / (np.sqrt(((x - x.mean()) ** 2).mean()) + 1e-8)


def _per_prompt(m: Any, a: float, b: float, x: Any) -> Any:
    prompts = [str(row) for row in range(len(x)) for _ in range(x.shape[1])]
    return PerPromptStatTracker(100, 2).update(prompts, x.flatten().tolist())


@form("DDPO's advantages per prompt", 1, _per_prompt, learnt=0)
def _(m: Array, a: float, b: float, x: Array) -> Array:
    return ((x - x.mean(1, keepdims=True)) / (x.std(1, keepdims=True) + 1e-6)).ravel()


# ------------------------------------------------------------------------------------------------ losses in pieces


@form("clipped surrogate", 2, lambda m, a, b, x, y: F.clipped_surrogate(x.exp(), y, cliprange=a, cliprange_high=b))
def _(m: Array, a: float, b: float, x: Array, y: Array) -> Array:
    return surrogate(np.exp(x), y, a, b)


@form("clipped value loss", 3, lambda m, a, b, x, y, z: F.clipped_value_loss(x, y, z, cliprange=a))
def _(m: Array, a: float, b: float, x: Array, y: Array, z: Array) -> Array:
    return value_errors(x, y, z, a)


@form("negative log-likelihood", 1, lambda m, a, b, x: F.nll(x, m))
def _(m: Array, a: float, b: float, x: Array) -> float:
    return -mean(x, m)


@form("DPO", 1, lambda m, a, b, x: functional.sigmoid_loss(x, beta=a, label_smoothing=b / 2))
def _(m: Array, a: float, b: float, x: Array) -> Array:
    return -(1 - b / 2) * log_sigmoid(a * x) - b / 2 * log_sigmoid(-a * x)


@form("robust DPO", 1, lambda m, a, b, x: dpo.robust_loss(x, beta=a, label_smoothing=b / 2))
def _(m: Array, a: float, b: float, x: Array) -> Array:
    return (-(1 - b / 2) * log_sigmoid(a * x) + b / 2 * log_sigmoid(-a * x)) / (1 - b)


@form("hinge", 1, lambda m, a, b, x: functional.hinge_loss(x, beta=a))
def _(m: Array, a: float, b: float, x: Array) -> Array:
    return np.maximum(0, 1 - a * x)


@form("IPO", 1, lambda m, a, b, x: functional.ipo_loss(x, beta=a))
def _(m: Array, a: float, b: float, x: Array) -> Array:
    return (x - 1 / (2 * a)) ** 2


@form("KTO of pairs", 4, lambda m, a, b, *x: torch.stack(dpo.kto_pair_losses(*x, beta=a)), learnt=2)
def _(m: Array, a: float, b: float, c: Array, r: Array, zc: Array, zr: Array) -> Array:
    return np.stack([1 - sigmoid(a * (c - np.maximum(zr, 0))), 1 - sigmoid(a * (np.maximum(zc, 0) - r))])


@form("KTO", 2, lambda m, a, b, x, y: kto_loss(x, y))
def _(m: Array, a: float, b: float, x: Array, y: Array) -> Array:
    return y * (1 - sigmoid(x))


@form("log odds", 1, lambda m, a, b, x: log_odds(-x.abs() - a))
def _(m: Array, a: float, b: float, x: Array) -> Array:
    p = np.exp(-np.abs(x) - a)
    return np.log(p / (1 - p))


@form("SimPO", 1, lambda m, a, b, x: simpo_loss(x, beta=1 + a, gamma=b, label_smoothing=b / 2))
def _(m: Array, a: float, b: float, x: Array) -> Array:
    return -(1 - b / 2) * log_sigmoid((1 + a) * x - b) - b / 2 * log_sigmoid(b - (1 + a) * x)


@form("reward model", 3, lambda m, a, b, x, y, z: preference_loss(x[:, 0], y[:, 0], z[:, 0], center_coef=a))
def _(m: Array, a: float, b: float, x: Array, y: Array, z: Array) -> Array:
    return (-log_sigmoid(x - y - z) + a * (x + y) ** 2)[:, 0]


def goals(values: Array, rewards: Array, m: Array, gamma: float) -> Array:
    """r + γ V of the row's next selected token, at the selected tokens."""
    found = np.zeros(m.shape)
    for row, keep in enumerate(m):
        at = np.flatnonzero(keep)
        found[row, at] = rewards[row, at] + gamma * np.append(values[row, at[1:]], 0.0)
    return found


def expectile(error: Array, tau: float) -> Array:
    return np.where(error < 0, 1 - tau, tau) * error**2


def _q_and_v(m: Tensor, a: float, b: float, q: Tensor, target: Tensor, v: Tensor, r: Tensor) -> Tensor:
    q_loss, v_loss = ilql.ilql_losses([q, 2 * q], target, v, r, m, tau=a, gamma=b)
    return torch.stack([F.zero_masked(q_loss, m), v_loss])


@form("ILQL's losses of Q and V", 4, _q_and_v, learnt=1)
def _(m: Array, a: float, b: float, q: Array, target: Array, v: Array, r: Array) -> Array:
    goal = goals(v, r, m, b)
    return np.stack([np.where(m, (q - goal) ** 2 + (2 * q - goal) ** 2, 0.0), expectile(target - v, a)])


@form("ILQL's expectile loss", 1, lambda m, a, b, x: ilql.expectile_loss(x, a))
def _(m: Array, a: float, b: float, x: Array) -> Array:
    return expectile(x, a)


@form("weights of AWAC", 1, lambda m, a, b, x: ilql.awac_weights(x, beta=a, limit=1 + b))
def _(m: Array, a: float, b: float, x: Array) -> Array:
    return np.minimum(np.exp(a * x), 1 + b)


def _levels(a: Any, b: Any) -> tuple[Any, Any]:
    """ᾱ before and after a step, ascending and inside (0, 1)."""
    return 0.9 * a, 0.9 * a + (0.99 - 0.9 * a) * b


def _denoised(m: Tensor, a: float, b: float, x: Tensor, noise: Tensor, after: Tensor) -> Tensor:
    alpha, previous = (torch.full((len(x),), level, dtype=torch.float64) for level in _levels(a, b))
    sigma = ddim_sigma(alpha, previous, eta=0.9)
    return gaussian_logprob(after, ddim_mean(x, noise, alpha, previous, sigma), sigma)


@form("DDPO's log-probability of a step", 3, _denoised)
def _(m: Array, a: float, b: float, x: Array, noise: Array, after: Array) -> Array:
    alpha, previous = _levels(a, b)
    sigma = 0.9 * np.sqrt((1 - previous) / (1 - alpha) * (1 - alpha / previous))
    image = (x - np.sqrt(1 - alpha) * noise) / np.sqrt(alpha)
    center = np.sqrt(previous) * image + np.sqrt(1 - previous - sigma**2) * noise
    return (-((after - center) ** 2) / (2 * sigma**2) - np.log(sigma) - np.log(2 * np.pi) / 2).mean(1)


# -------------------------------------------------------------------------------------- whole losses of trainers


def trainer_of(
    name: str, answer: Callable[..., Any] = lambda *_, **__: None, *, method: Any = None, **given: Any
) -> Any:
    """A trainer without a model: its settings, and a policy that answers what was drawn."""
    cls, config = get_trainer(name), default_config(name).evolve(method=method or {})
    attributes = {
        "config": config, "method": config.method, "policy": staticmethod(answer), "limit": None, **given,
        "unwrapped": given.get("unwrapped", SimpleNamespace(model=None)),
        "reduce": staticmethod(lambda x: x), "record": staticmethod(lambda metrics: None),
    }  # fmt: skip
    return object.__new__(type(cls)(cls.__name__, (cls,), attributes))


def sequences(m: Tensor) -> Sequences:
    return Sequences(torch.zeros_like(m, dtype=torch.long), torch.ones_like(m), m)


def said(**answers: Any) -> Callable[..., Any]:
    return lambda *_, **__: SimpleNamespace(**answers)


def _ppo(m: Tensor, a: float, b: float, lp: Tensor, v: Tensor, h: Tensor, *batch: Tensor) -> Tensor:
    method = {"cliprange": a, "cliprange_value": b, "vf_coef": 0.7, "ent_coef": 0.3}
    trainer = trainer_of("ppo", said(logprobs=lp, values=v, entropy=h), method=method)
    return trainer.loss(PPOBatch(sequences(m), *batch))[0]


@form("the loss of PPO", 7, _ppo)
def _(
    m: Array, a: float, b: float, lp: Array, v: Array, h: Array, old: Array, old_v: Array, adv: Array, ret: Array
) -> float:
    policy, value = surrogate(np.exp(lp - old), adv, a, a), value_errors(v, old_v, ret, b)
    return mean(policy, m) + 0.7 * mean(value, m) - 0.3 * mean(h, m)


def _ppo_advantages(m: Tensor, a: float, b: float, *x: Tensor) -> Tensor:
    lp, ref, v, weights, scores, bootstrap = x
    kl = SimpleNamespace(coef=0.3, update=lambda *_: None)
    method = {"gamma": a, "lam": b, "scale_reward": "none", "cliprange_reward": None}
    trainer = trainer_of("ppo", method=method, kl=kl, moments=RunningMoments())
    placed, penalty = F.place_scores(scores[:, 0], m), F.kl_k1(lp, ref)
    rollouts = PPORollouts(sequences(m), lp, ref, penalty, v, v, weights, placed, bootstrap[:, 0])
    batch = trainer.prepare_experience(rollouts)
    return torch.stack([batch.advantages, batch.returns])


@form("the advantages of PPO", 6, _ppo_advantages)
def _(
    m: Array, a: float, b: float, lp: Array, ref: Array, v: Array, weights: Array, scores: Array, bootstrap: Array
) -> Array:
    rewards = at_the_end(scores[:, 0], m) - 0.3 * np.where(m, lp - ref, 0.0)
    found = advantages_of(v, rewards, m, a, b, bootstrap[:, 0])
    return np.stack([whitened(found, m) * weights, np.where(m, found + v, 0.0)])


def _rloo(level: str) -> Callable[..., Tensor]:
    def loss(m: Tensor, a: float, b: float, lp: Tensor, old: Tensor, adv: Tensor) -> Tensor:
        trainer = trainer_of("rloo", said(logprobs=lp), method={"cliprange": a, "ratio_level": level})
        batch = RLOORows(sequences(m), old, adv[:, 0]) if level == "sequence" else RLOOBatch(sequences(m), old, adv)
        return trainer.loss(batch)[0]

    return loss


@form("the loss of RLOO per response", 3, _rloo("sequence"))
def _(m: Array, a: float, b: float, lp: Array, old: Array, adv: Array) -> float:
    return float(surrogate(np.exp(np.where(m, lp - old, 0.0).sum(1)), adv[:, 0], a, a).mean())


@form("the loss of RLOO per token", 3, _rloo("token"))
def _(m: Array, a: float, b: float, lp: Array, old: Array, adv: Array) -> float:
    return mean(surrogate(np.exp(lp - old), adv, a, a), m)


def _rloo_advantages(m: Tensor, a: float, b: float, lp: Tensor, ref: Tensor, scores: Tensor) -> Tensor:
    trainer = trainer_of("rloo", method={"kl_coef": a, "rloo_k": len(m), "ratio_level": "sequence"})
    placed = F.place_scores(scores[:, 0], m)
    return trainer.prepare_experience(RLOORollouts(sequences(m), lp, ref, lp, placed, torch.ones_like(lp))).advantages


@form("the advantages of RLOO", 3, _rloo_advantages)
def _(m: Array, a: float, b: float, lp: Array, ref: Array, scores: Array) -> Array:
    return leave_one_out(scores[:, 0] - a * np.where(m, lp - ref, 0.0).sum(1), len(m))


def _grpo(**method: Any) -> Callable[..., Tensor]:
    def loss(m: Tensor, a: float, b: float, lp: Tensor, old: Tensor, ref: Tensor, adv: Tensor, w: Tensor) -> Tensor:
        settings = {"cliprange": a, "cliprange_high": b, "kl_coef": 0.3, **method}
        trainer = trainer_of("grpo", said(logprobs=lp), method=settings)
        return trainer.loss(GRPOBatch(sequences(m), old, ref, adv[:, 0], w))[0]

    return loss


def grpo(
    m: Array, a: float, b: float, lp: Array, old: Array, ref: Array, adv: Array, w: Array, level: str = "token"
) -> Array:
    """The loss of GRPO per token; with the level of sequences, that of GSPO."""
    log_ratio = np.where(m, lp - old, 0.0)
    if level == "sequence":
        log_ratio = np.where(m, log_ratio.sum(1, keepdims=True) / m.sum(1, keepdims=True), 0.0)
    return np.where(m, surrogate(np.exp(log_ratio), adv[:, :1] * w, a, b) + 0.3 * k3(lp, ref), 0.0)


@form("the loss of GRPO per token", 5, _grpo(average="tokens"))
def _(m: Array, *x: Any) -> float:
    return mean(grpo(m, *x), m)


@form("the loss of GRPO per response", 5, _grpo(average="responses"))
def _(m: Array, *x: Any) -> float:
    return float((grpo(m, *x).sum(1) / m.sum(1)).mean())


@form("the loss of GSPO", 5, _grpo(average="responses", ratio_level="sequence"))
def _(m: Array, *x: Any) -> float:
    return float((grpo(m, *x, level="sequence").sum(1) / m.sum(1)).mean())


@form("the loss of CISPO", 5, _grpo(average="tokens", surrogate="cispo"), learnt=0)  # its weights have no gradient
def _(m: Array, a: float, b: float, lp: Array, old: Array, ref: Array, adv: Array, w: Array) -> float:
    weight = np.clip(np.exp(lp - old), 1 - a, 1 + b)
    return mean(-weight * adv[:, :1] * w * lp + 0.3 * k3(lp, ref), m)


def _grpo_advantages(scale: str) -> Callable[..., Tensor]:
    def advantages(m: Tensor, a: float, b: float, x: Tensor) -> Tensor:
        trainer = trainer_of("grpo", method={"group_size": x.size(1), "scale": scale})
        flat = x.flatten()
        batch = GRPORollouts(sequences(torch.ones(len(flat), 1, dtype=torch.bool)), flat, flat, flat, flat)
        return trainer.prepare_experience(batch).advantages

    return advantages


@form("the advantages of GRPO", 1, _grpo_advantages("group"), learnt=0)  # at equal rewards their slope is infinite
def _(m: Array, a: float, b: float, x: Array) -> Array:
    return ((x - x.mean(1, keepdims=True)) / (x.std(1, ddof=1, keepdims=True) + 1e-6)).ravel()


@form("the advantages of Dr. GRPO", 1, _grpo_advantages("none"))
def _(m: Array, a: float, b: float, x: Array) -> Array:
    return (x - x.mean(1, keepdims=True)).ravel()


def _dpo(loss_type: str, **method: Any) -> Callable[..., Tensor]:
    def loss(m: Tensor, a: float, b: float, c: Tensor, r: Tensor, ref_c: Tensor, ref_r: Tensor, kl: Tensor) -> Tensor:
        settings = {"loss_type": loss_type, "beta": a, **method}
        trainer = trainer_of("dpo", said(logprobs=torch.cat([c, r])), method=settings)
        decided = torch.arange(len(m)) > 0  # one pair has no preference
        kls = (kl[:1, 0].expand(len(m)), kl[1:2, 0].expand(len(m)))
        return trainer.loss(dpo.DPOBatch(sequences(m), sequences(m), ref_c[:, 0], ref_r[:, 0], decided, *kls))[0]

    return loss


def ratios(m: Array, c: Array, r: Array, ref_c: Array, ref_r: Array, lengths: Any = 1) -> tuple[Array, Array]:
    """log π − log π_ref of both sides of the pairs with a preference."""
    sides = ((c, ref_c), (r, ref_r))
    chosen, rejected = (np.where(m, lp, 0.0).sum(1) / lengths - ref[:, 0] for lp, ref in sides)
    return chosen[1:], rejected[1:]


@form("the loss of DPO", 5, _dpo("sigmoid"))
def _(m: Array, a: float, b: float, *x: Array) -> float:
    chosen, rejected = ratios(m, *x[:4])
    return float(-log_sigmoid(a * (chosen - rejected)).mean())


@form("the loss of DPO with a hinge", 5, _dpo("hinge"))
def _(m: Array, a: float, b: float, *x: Array) -> float:
    chosen, rejected = ratios(m, *x[:4])
    return float(np.maximum(0, 1 - a * (chosen - rejected)).mean())


@form("the loss of IPO", 5, _dpo("ipo"))
def _(m: Array, a: float, b: float, *x: Array) -> float:
    lengths = m.sum(1) if default_config("dpo").method.ipo_length_normalize else 1
    chosen, rejected = ratios(m, *x[:4], lengths=lengths)
    return float(((chosen - rejected - 1 / (2 * a)) ** 2).mean())


@form("the loss of robust DPO", 5, _dpo("robust", label_smoothing=0.2))
def _(m: Array, a: float, b: float, *x: Array) -> float:
    chosen, rejected = ratios(m, *x[:4])
    margins = a * (chosen - rejected)
    return float(((-0.8 * log_sigmoid(margins) + 0.2 * log_sigmoid(-margins)) / 0.6).mean())


OF_SIDES: dict[str, Callable[[Array, Array], Array]] = {
    "nca_pair": lambda c, r: -log_sigmoid(c) - (log_sigmoid(-c) + log_sigmoid(-r)) / 2,
    "bco_pair": lambda c, r: -log_sigmoid(c) - log_sigmoid(-r),
    "apo_zero": lambda c, r: sigmoid(-c) + sigmoid(r),
    "apo_down": lambda c, r: sigmoid(c) + sigmoid(r - c),
    "discopop": lambda c, r: sigmoid(20 * (c - r)) * np.exp(r - c) - sigmoid(20 * (r - c)) * log_sigmoid(c - r),
}
"""Losses of β(log π − log π_ref) of both sides."""


def _of_sides(loss: Callable[[Array, Array], Array]) -> Callable[..., float]:
    def closed(m: Array, a: float, b: float, *x: Array) -> float:
        chosen, rejected = ratios(m, *x[:4])
        return float(loss(a * chosen, a * rejected).mean())

    return closed


for _name, _loss in OF_SIDES.items():
    form(f"the loss of DPO, {_name}", 5, _dpo(_name))(_of_sides(_loss))


@form("the loss of SPPO", 5, _dpo("sppo_hard"))
def _(m: Array, a: float, b: float, *x: Array) -> float:
    chosen, rejected = ratios(m, *x[:4])
    return float(((chosen - 0.5 / a) ** 2 + (rejected + 0.5 / a) ** 2).mean())


@form("the loss of EXO", 5, _dpo("exo_pair", label_smoothing=0.2))
def _(m: Array, a: float, b: float, *x: Array) -> float:
    chosen, rejected = ratios(m, *x[:4])
    likely = sigmoid(a * (chosen - rejected))
    return float((likely * np.log(likely / 0.8) + (1 - likely) * np.log((1 - likely) / 0.2)).mean())


@form("the loss of DPO, averaged over tokens", 5, _dpo("sigmoid_norm"))
def _(m: Array, a: float, b: float, *x: Array) -> float:
    chosen, rejected = ratios(m, *x[:4], lengths=m.sum(1))
    return float(-log_sigmoid(a * (chosen - rejected)).mean())


@form("the loss of KTO of pairs", 5, _dpo("kto_pair"), learnt=4)
def _(m: Array, a: float, b: float, *x: Array) -> float:
    chosen, rejected = ratios(m, *x[:4])
    chosen_kl, rejected_kl = np.maximum(x[4][:2, 0], 0)
    sides = (1 - sigmoid(a * (chosen - rejected_kl)), 1 - sigmoid(a * (chosen_kl - rejected)))
    return float(((sides[0] + sides[1]) / 2).mean())


def _pairs(name: str, **method: Any) -> Callable[..., Tensor]:
    def loss(m: Tensor, a: float, b: float, c: Tensor, r: Tensor) -> Tensor:
        trainer = trainer_of(name, said(logprobs=-torch.cat([c, r]).abs() - 0.1), method={"beta": a, **method})
        return trainer.loss(Preferences(sequences(m), sequences(m)))[0]

    return loss


def log_probs(m: Array, c: Array, r: Array) -> tuple[Array, Array, Array, Array]:
    """The sums of log π over both sides, and the means."""
    sums = [np.where(m, -np.abs(x) - 0.1, 0.0).sum(1) for x in (c, r)]
    return sums[0], sums[1], sums[0] / m.sum(1), sums[1] / m.sum(1)


@form("the loss of ORPO", 2, _pairs("orpo"))
def _(m: Array, a: float, b: float, *x: Array) -> float:
    _, _, chosen, rejected = log_probs(m, *x)
    odds = [np.exp(p) / (1 - np.exp(p)) for p in (chosen, rejected)]
    return float((-chosen - a * log_sigmoid(np.log(odds[0] / odds[1]))).mean())


@form("the loss of CPO", 2, _pairs("cpo", label_smoothing=0.2))
def _(m: Array, a: float, b: float, *x: Array) -> float:
    chosen, rejected, likelihood, _ = log_probs(m, *x)
    margins = a * (chosen - rejected)
    return float((-0.8 * log_sigmoid(margins) - 0.2 * log_sigmoid(-margins) - likelihood).mean())


@form("the loss of SimPO", 2, _pairs("cpo", loss_type="simpo", simpo_gamma=0.3))
def _(m: Array, a: float, b: float, *x: Array) -> float:
    _, _, chosen, rejected = log_probs(m, *x)
    return float(-log_sigmoid(a * (chosen - rejected) - 0.3).mean())


def _kto(m: Tensor, a: float, b: float, lp: Tensor, ref: Tensor, kl: Tensor) -> Tensor:
    method = {"beta": a, "desirable_weight": 1.0, "undesirable_weight": 1 + b}
    trainer, liked = trainer_of("kto", said(logprobs=lp), method=method), torch.arange(len(m)) % 2 == 0
    return trainer.loss(KTOBatch(sequences(m), ref[:, 0], liked, kl=kl[:1, 0].expand(len(m))))[0]


@form("the loss of KTO", 3, _kto)
def _(m: Array, a: float, b: float, lp: Array, ref: Array, kl: Array) -> float:
    log_ratios, point = np.where(m, lp, 0.0).sum(1) - ref[:, 0], max(kl[0, 0], 0.0)
    liked = np.arange(len(m)) % 2 == 0
    values = np.where(liked, sigmoid(a * (log_ratios - point)), (1 + b) * sigmoid(a * (point - log_ratios)))
    return float((np.where(liked, 1.0, 1 + b) - values).mean())


def _bco(m: Tensor, a: float, b: float, lp: Tensor, ref: Tensor) -> Tensor:
    trainer, liked = trainer_of("bco", said(logprobs=lp), method={"beta": a}), torch.arange(len(m)) % 2 == 0
    trainer.seen = {"desirable": [1, 3 * b], "undesirable": [1, -b]}
    return trainer.loss(LabelledBatch(sequences(m), ref[:, 0], liked))[0]


@form("the loss of BCO", 2, _bco, learnt=1)
def _(m: Array, a: float, b: float, lp: Array, ref: Array) -> float:
    rewards = a * (np.where(m, lp, 0.0).sum(1) - ref[:, 0])
    return float(-log_sigmoid(np.where(np.arange(len(m)) % 2 == 0, rewards - b, b - rewards)).mean())


def _xpo(m: Tensor, a: float, b: float, own: Tensor, other: Tensor, ref: Tensor) -> Tensor:
    sign = torch.arange(len(m)).double() % 3 - 1
    trainer = trainer_of("xpo", said(logprobs=torch.cat([own, other])), method={"beta": a, "alpha": b})
    return trainer.loss(dpo.XPOBatch(sequences(m), sequences(m), ref[:, 0], -ref[:, 0], sign))[0]


@form("the loss of XPO", 3, _xpo, learnt=2)
def _(m: Array, a: float, b: float, own: Array, other: Array, ref: Array) -> float:
    one, two = (np.where(m, x, 0.0).sum(1) for x in (own, other))
    x, sign = one - two - 2 * ref[:, 0], np.arange(len(m)) % 3 - 1
    return float(np.where(sign == 0, 0.0, -log_sigmoid(a * sign * x)).mean() + b * two.mean())


def _spin(m: Tensor, a: float, b: float, own: Tensor, other: Tensor, old: Tensor) -> Tensor:
    trainer = trainer_of("spin", said(logprobs=torch.cat([own, other])), method={"beta": a})
    return trainer.loss(dpo.SPINBatch(sequences(m), sequences(m), old[:, 0], -old[:, 0]))[0]


@form("the loss of SPIN", 3, _spin, learnt=2)
def _(m: Array, a: float, b: float, own: Array, other: Array, old: Array) -> float:
    one, two = (np.where(m, x, 0.0).sum(1) for x in (own, other))
    return float(-log_sigmoid(a * (one - two - 2 * old[:, 0])).mean())


def _reward(m: Tensor, a: float, b: float, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    trainer = trainer_of("reward", lambda _: torch.cat([x[:, 0], y[:, 0]]), method={"center_coef": a})
    return trainer.loss(RewardBatch(sequences(m), sequences(m), z[:, 0]))[0]


@form("the loss of reward", 3, _reward)
def _(m: Array, a: float, b: float, x: Array, y: Array, z: Array) -> float:
    return float((-log_sigmoid(x - y - z) + a * (x + y) ** 2)[:, 0].mean())


def _ilql(m: Tensor, a: float, b: float, q0: Tensor, q1: Tensor, cql: Tensor, lp: Tensor, *x: Tensor) -> Tensor:
    target, values, rewards = x
    method = {"tau": a, "gamma": b, "beta_awac": 0.5, "cql_scale": 0.1, "awac_scale": 0.6}
    head = {"q0": q0, "q1": q1, "target_q": target, "values": values, "cql": cql}
    trainer = trainer_of("ilql", said(logprobs=lp, head=head), method=method)
    return trainer.loss(ilql.ILQLBatch(sequences(m), rewards))[0]


@form("the loss of ILQL", 7, _ilql, learnt=4)
def _(
    m: Array, a: float, b: float, q0: Array, q1: Array, cql: Array, lp: Array, target: Array, v: Array, r: Array
) -> float:
    goal, limit = goals(v, r, m, b), default_config("ilql").method.awac_weight_max
    weights = np.minimum(np.exp(0.5 * (target - v)), limit)
    q = mean((q0 - goal) ** 2 + (q1 - goal) ** 2, m)
    return q + mean(expectile(target - v, a), m) + 0.1 * mean(cql, m) - 0.6 * mean(weights * lp, m)


def _ddpo(m: Tensor, a: float, b: float, lp: Tensor, old: Tensor, adv: Tensor) -> Tensor:
    model = SimpleNamespace(logprobs=lambda *_: lp[:, 0])
    trainer = trainer_of("ddpo", method={"cliprange": a}, unwrapped=model)
    batch = SimpleNamespace(
        latents=None, steps=None, next_latents=None, condition=SimpleNamespace(rows=None),
        old_logprobs=old[:, 0], advantages=adv[:, 0],
    )  # fmt: skip
    return trainer.loss(batch)[0]


@form("the loss of DDPO", 3, _ddpo)
def _(m: Array, a: float, b: float, lp: Array, old: Array, adv: Array) -> float:
    return float(surrogate(np.exp(lp - old), adv, a, a)[:, 0].mean())


def _best(m: Tensor, a: float, b: float, lp: Tensor) -> Tensor:
    trainer = trainer_of("best_of_k", said(logprobs=lp))
    return trainer.loss(dpo.BestResponses(sequences(m), torch.arange(len(m)) > 0))[0]


@form("the loss of best of k", 1, _best)
def _(m: Array, a: float, b: float, lp: Array) -> float:
    return -float(np.where(m, lp, 0.0).sum(1)[1:].mean())


def _distill(m: Tensor, a: float, b: float, lp: Tensor, between: Tensor, adv: Tensor) -> Tensor:
    trainer = trainer_of("distill_offline", said(logprobs=lp, divergence=between), reference=None)
    return trainer.loss(SimpleNamespace(sequences=sequences(m), advantages=adv[:, 0]))[0]


@form("the loss of distillation", 3, _distill)
def _(m: Array, a: float, b: float, lp: Array, between: Array, adv: Array) -> float:
    return mean(between - adv[:, :1] * lp, m)


@form("the loss of RFT", 1, lambda m, a, b, lp: trainer_of("rft", said(logprobs=lp)).loss(sequences(m))[0])
def _(m: Array, a: float, b: float, lp: Array) -> float:
    return -mean(lp, m)


@form("the loss of SFT", 1, lambda m, a, b, lp: trainer_of("sft", said(logprobs=lp)).loss(sequences(m))[0])
def _(m: Array, a: float, b: float, lp: Array) -> float:
    return -mean(lp, m)
