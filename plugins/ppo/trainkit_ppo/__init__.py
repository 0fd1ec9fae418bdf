"""PPO: proximal policy optimisation of a language model with a critic and a KL penalty.

Schulman et al. 2017 (the algorithm), Ziegler et al. 2019 (for language models).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor

from trainkit import (
    AccelerateRLTrainer,
    MethodConfig,
    Rollouts,
    Sequences,
    TokenBatch,
    TRLConfig,
    Verdict,
    register_trainer,
)
from trainkit.functional import (
    clipped_surrogate,
    clipped_value_loss,
    gae,
    kl_k1,
    kl_k3,
    kl_shaped_rewards,
    masked_mean,
    masked_sum,
    penalise_cut,
    place_scores,
    whiten,
    zero_masked,
)
from trainkit.metrics import Mean, Metrics, RunningMoments
from trainkit.models import Policy, load_heads, load_model, make_policy


class PPOConfig(MethodConfig):
    """The numbers of PPO. Defaults are trlX's for sentiment tuning of GPT-2, but for `init_kl_coef` (TRL's)."""

    section_defaults: ClassVar[dict[str, Any]] = {
        "optimizer": {"lr": 3e-5, "weight_decay": 1e-6},
        "train": {"total_steps": 1000},
    }

    name: str = "ppo"
    """The registered name."""
    ppo_epochs: int = Field(4, ge=1)
    """Passes over each collection of rollouts."""
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount per token."""
    lam: float = Field(0.95, ge=0, le=1)
    """λ of generalised advantage estimation."""
    cliprange: float = Field(0.2, gt=0)
    """ε of the clipped surrogate: how far the ratio may move."""
    cliprange_value: float = Field(0.2, gt=0)
    """How far a value may move from the one at sampling."""
    vf_coef: float = Field(1.0, ge=0)
    """Weight of the value loss."""
    ent_coef: float = Field(0.0, ge=0)
    """Weight of an entropy bonus."""
    init_kl_coef: float = Field(0.05, ge=0)
    """β, the price of a nat of divergence from the reference; the first one if `target` is set."""
    target: float | None = Field(None, gt=0)
    """Divergence (nats per response) that β is steered to. None: β stays."""
    horizon: int = Field(10_000, ge=1)
    """Responses over which β is steered; smaller is faster. Only with `target`."""
    scale_reward: Literal["none", "running", "ref"] = "none"
    """Divide scores by the standard deviation of all so far (`running`) or of the first collection (`ref`)."""
    cliprange_reward: float | None = Field(10.0, gt=0)
    """Scores are clipped to ± this, after scaling. None: not clipped."""
    missing_eos_penalty: float | None = Field(None, gt=0)
    """Taken off the score of a response that the length limit cut, before scaling. None: nothing is."""
    bootstrap_truncated: bool = False
    """Whether a response that the length limit cut is worth what the critic expects of its end, and not 0."""
    target_kl: float | None = Field(None, gt=0)
    """Divergence from the old policy above 1.5 times which a step is left out, with the rest on its collection."""
    ratio_threshold: float | None = Field(10.0, gt=1)
    """A step whose mean ratio is above this is left out; TRL's guard. None: none is."""

    @model_validator(mode="after")
    def _target_can_be_steered_to(self) -> Self:
        if self.target is not None and self.init_kl_coef == 0:
            raise ValueError("target steers β by factors, and init_kl_coef 0 stays 0; give a positive init_kl_coef")
        return self


@dataclass(frozen=True)
class PPORollouts(TokenBatch):
    """What is known of rollouts before their collection is complete; [B, T] like ``sequences`` unless it is said."""

    logprobs: Tensor
    ref_logprobs: Tensor
    values: Tensor
    entropy: Tensor
    scores: Tensor
    bootstrap: Tensor
    """[B]: V after the last token, which is 0 unless the response was cut and `bootstrap_truncated` is set."""


@dataclass(frozen=True)
class PPOBatch(TokenBatch):
    """What the loss needs about response tokens; all [B, T] like ``sequences``."""

    old_logprobs: Tensor
    old_values: Tensor
    advantages: Tensor
    returns: Tensor


class KLController:
    """β: fixed, or steered to a target once per collection (Ziegler et al. 2019, equation 4; F-10)."""

    def __init__(self, coef: float, target: float | None, horizon: int) -> None:
        self.coef, self.target, self.horizon = coef, target, horizon

    def update(self, mean_kl: float, episodes: int) -> None:
        """β ← β·(1 + clip(KL/target − 1, ±0.2)·episodes/horizon); nothing without a target."""
        if self.target is not None:
            error = min(max(mean_kl / self.target - 1, -0.2), 0.2)
            self.coef = max(self.coef * (1 + error * episodes / self.horizon), 0.0)


@register_trainer("ppo")
class PPOTrainer(AccelerateRLTrainer[PPOConfig]):
    """rollouts → r_t = score − β·k1 → GAE → whitened advantages → clipped surrogate and clipped value loss."""

    inputs: ClassVar[tuple[str, ...]] = ("reward_fn", "prompts")
    needs_reference: ClassVar[bool] = True

    def __init__(self, config: TRLConfig[PPOConfig], **kwargs: Any) -> None:
        super().__init__(config, **kwargs)
        method = self.method
        self.kl = KLController(method.init_kl_coef, method.target, method.horizon)
        self.moments, self.ref_std = RunningMoments(), 0.0

    @property
    def passes(self) -> int:
        """PPO's epochs."""
        return self.method.ppo_epochs

    def get_arch(self, config: TRLConfig[PPOConfig]) -> Policy:
        """The language model with a value head."""
        policy = make_policy(
            load_model(config.model, self.live_model),
            temperature=config.rollout.temperature,
            logit_mask=self.logit_mask,
            value_head=True,
        )
        source = config.model.model_path if self.live_model is None else self.live_model
        return load_heads(policy, source, config.model.kwargs)

    def experience(self, rollouts: Rollouts, scores: Tensor) -> PPORollouts:
        """What the policy and the reference say about scored rollouts, before any update."""
        sequences, policy = rollouts.sequences, self.behaviour(rollouts)
        placed = place_scores(scores, sequences.response_mask)
        if self.method.missing_eos_penalty is not None:
            placed = penalise_cut(placed, rollouts.terminated, sequences.response_mask, self.method.missing_eos_penalty)
        return PPORollouts(
            sequences,
            logprobs=policy.logprobs,
            ref_logprobs=self.reference(sequences).logprobs,
            values=policy.values,
            entropy=policy.entropy,
            scores=placed,
            bootstrap=self.bootstrap(rollouts),
        )

    @torch.no_grad()
    def bootstrap(self, rollouts: Rollouts) -> Tensor:
        """V after the last token of responses that were cut, 0 after others, or everywhere if not asked for. -> [B]."""
        cut = ~rollouts.terminated
        if not self.method.bootstrap_truncated or not cut.any():
            return torch.zeros(cut.shape, device=cut.device)
        further = followed(rollouts.sequences)
        ends = further.response_mask & ~further.attention_mask
        return zero_masked(masked_sum(self.unwrapped(further).values, ends, dim=1), cut)

    def prepare_experience(self, experience: PPORollouts) -> PPOBatch:
        """Shaped rewards, returns, and advantages whitened over the collection; β is steered once (F-06, F-10)."""
        x, mask = experience, experience.sequences.response_mask
        scores = self.scaled(zero_masked(x.scores, mask))
        rewards = kl_shaped_rewards(scores, x.logprobs, x.ref_logprobs, mask, self.kl.coef)
        gamma, lam = self.method.gamma, self.method.lam
        advantages, returns = gae(x.values, rewards, mask, gamma=gamma, lam=lam, bootstrap=x.bootstrap)
        kl = Mean.of(masked_sum(kl_k1(x.logprobs, x.ref_logprobs), mask, dim=1))
        self.record(
            {
                "policy/kl": kl,
                "policy/kl_per_token": Mean.of(kl_k3(x.logprobs, x.ref_logprobs), mask),
                "policy/kl_coef": Mean.of(torch.tensor(self.kl.coef, dtype=torch.float64)),
                "policy/entropy": Mean.of(x.entropy, mask),
                "values/mean": Mean.of(x.values, mask),
                "returns/mean": Mean.of(returns, mask),
            }
        )
        total, episodes = self.reduce(torch.stack(kl.tensors())).tolist()
        self.kl.update(total / episodes, int(episodes))
        return PPOBatch(x.sequences, x.logprobs, x.values, whiten(advantages, mask, reduce=self.reduce), returns)

    def scaled(self, scores: Tensor) -> Tensor:
        """A collection's rewards [B, T], over a standard deviation of scores if asked for, then clipped (S-61)."""
        if self.method.scale_reward != "none":
            self.moments.update(scores.sum(1), self.reduce)
            std = self.moments.std
            if self.method.scale_reward == "ref":
                std = self.ref_std = self.ref_std or (std if std > 0 else 0.0)
            scores = scores / std if std > 0 else scores
        limit = self.method.cliprange_reward
        return scores if limit is None else scores.clamp(-limit, limit)

    def loss(self, batch: PPOBatch) -> tuple[Tensor, Metrics]:
        """Policy loss + vf_coef · value loss − ent_coef · entropy, each a mean over response tokens. -> []."""
        method, mask = self.method, batch.sequences.response_mask
        new = self.policy(batch.sequences, entropy=method.ent_coef > 0)
        log_ratio = zero_masked(new.logprobs - batch.old_logprobs, mask)
        ratio = log_ratio.exp()
        policy = clipped_surrogate(ratio, batch.advantages, cliprange=method.cliprange)
        value = clipped_value_loss(new.values, batch.old_values, batch.returns, cliprange=method.cliprange_value)
        loss = masked_mean(policy, mask) + method.vf_coef * masked_mean(value, mask)
        if method.ent_coef > 0:
            loss = loss - method.ent_coef * masked_mean(new.entropy, mask)
        return loss, {
            "loss/policy": Mean.of(policy, mask),
            "loss/value": Mean.of(value, mask),
            "policy/ratio": Mean.of(ratio, mask),
            "policy/approx_kl": Mean.of(ratio - 1 - log_ratio, mask),
            # where the clipped term is the one that counts, so that the gradient is cut
            "policy/clipfrac": Mean.of(policy > -batch.advantages * ratio, mask),
            "values/clipfrac": Mean.of(value > 0.5 * (new.values - batch.returns) ** 2, mask),
        }

    def judge(self, metrics: Mapping[str, float]) -> Verdict:
        """No step where the policy has moved too far: above 1.5·`target_kl`, or above the bound of the mean ratio.

        The rule for the divergence is that of Spinning Up (Achiam 2018), the guard of the ratio TRL's (S-21).
        """
        target, threshold = self.method.target_kl, self.method.ratio_threshold
        if target is not None and metrics["policy/approx_kl"] > 1.5 * target:
            return Verdict.STOP
        if threshold is not None and metrics["policy/ratio"] > threshold:
            return Verdict.SKIP
        return Verdict.STEP

    def state_dict(self) -> dict[str, Any]:
        """β, the running moments and the first collection's standard deviation."""
        return {"kl_coef": self.kl.coef, "moments": self.moments.state_dict(), "ref_std": self.ref_std}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        if self.kl.target is not None:  # a fixed β is the configuration's
            self.kl.coef = state["kl_coef"]
        self.ref_std = state["ref_std"]
        self.moments.load_state_dict(state["moments"])

    @classmethod
    def tiny_contexts(cls) -> dict[str, dict[str, Any]]:
        """What only counts beside another setting."""
        return {"horizon": {"method.target": 0.01, "method.horizon": 50}}


def followed(sequences: Sequences) -> Sequences:
    """One more token after each row for the policy to speak about: its value is V of the row's end.

    The token is chosen and not real: nothing attends to it, and it needs no room in the model's context. [B, T + 1].
    """
    real, trunk = sequences.attention_mask, sequences.trunk
    return Sequences(
        F.pad(sequences.input_ids, (0, 1)),
        F.pad(real, (0, 1)),
        F.pad(sequences.response_mask, (0, 1)) | (F.pad(real, (1, 0)) & ~F.pad(real, (0, 1))),
        trunk=None if trunk is None else F.pad(trunk, (0, 0, 0, 1)),
    )
