"""The trainer of PPO: experience and loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from trainkit import (
    AccelerateRLTrainer,
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
    explained_variance,
    gae,
    kl_k1,
    kl_k3,
    kl_shaped_rewards,
    masked_mean,
    masked_sum,
    penalise_truncated,
    place_scores,
    whiten,
    zero_masked,
)
from trainkit.metrics import Mean, Metrics, RunningMoments
from trainkit.models import Policy, TokenOutputs, load_heads, load_model, make_policy
from trainkit_ppo.config import PPOConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class PPORollouts(TokenBatch):
    """Rollouts before their collection is complete; fields are [B, T] like ``sequences``, except ``bootstrap``."""

    logprobs: Tensor
    ref_logprobs: Tensor
    penalty: Tensor
    values: Tensor
    entropy: Tensor
    weights: Tensor
    scores: Tensor
    bootstrap: Tensor
    """V after the last token [B]; 0 unless the response was truncated and `bootstrap_truncated` is set."""


@dataclass(frozen=True)
class PPOBatch(TokenBatch):
    """Experience of PPO; all fields [B, T] like ``sequences``."""

    old_logprobs: Tensor
    old_values: Tensor
    advantages: Tensor
    returns: Tensor


class KLController:
    """β: constant, or adapted to a target KL once per collection (Ziegler et al. 2019, equation 4)."""

    def __init__(self, coef: float, target: float | None, horizon: int) -> None:
        self.coef, self.target, self.horizon = coef, target, horizon

    def update(self, mean_kl: float, episodes: int) -> None:
        """Update β ← β·(1 + clip(KL/target − 1, ±0.2)·episodes/horizon); without a target, do nothing."""
        if self.target is not None:
            error = min(max(mean_kl / self.target - 1, -0.2), 0.2)
            self.coef = max(self.coef * (1 + error * episodes / self.horizon), 0.0)


@register_trainer("ppo")
class PPOTrainer(AccelerateRLTrainer[PPOConfig]):
    """Trainer of PPO: r_t = score − β·k1, GAE, whitened advantages, clipped surrogate and clipped value loss."""

    inputs: ClassVar[tuple[str, ...]] = ("reward_fn", "prompts")
    needs_reference: ClassVar[bool] = True
    corrections: ClassVar[tuple[str, ...]] = ("sampler", "decoupled", "masked")

    def __init__(self, config: TRLConfig[PPOConfig], **kwargs: Any) -> None:
        super().__init__(config, **kwargs)
        method = self.method
        self.kl = KLController(method.init_kl_coef, method.target, method.horizon)
        self.moments, self.ref_std = RunningMoments(), 0.0

    @property
    def passes(self) -> int:
        """Passes over each collection: `ppo_epochs`."""
        return self.method.ppo_epochs

    def get_arch(self, config: TRLConfig[PPOConfig]) -> Policy:
        """Return the language model with a value head, and with the critic's own layers if it has some."""
        model = load_model(config.model, self.live_model)
        policy = make_policy(
            model,
            temperature=config.rollout.temperature,
            logit_mask=self.logit_mask,
            value_head=True,
            critic=self.critic(model),
        )
        source = config.model.model_path if self.live_model is None else self.live_model
        return load_heads(policy, source, config.model.kwargs)

    def critic(self, model: PreTrainedModel) -> int | PreTrainedModel | None:
        """Return whose states the value head reads; override it for a critic with layers of its own.

        None: the policy's. A number k: those of a trained copy of the policy's top k layers, on its lower layers. A
        model: its own; a classifier with one label, such as a reward model, gives its head too.

        Args:
            model: the language model that is trained.
        """
        return None

    def penalty(self, sequences: Sequences, policy: TokenOutputs, reference: TokenOutputs) -> Tensor:
        """Return what is subtracted from the reward of each token β times, before an update: k1. -> [B, T].

        Override it for another penalty, such as `trainkit.functional.kl_k2` of the log-probabilities.
        """
        return kl_k1(policy.logprobs, reference.logprobs)

    def experience(self, rollouts: Rollouts, scores: Tensor) -> PPORollouts:
        """Return scored rollouts with values and log-probabilities of policy and reference [B, T], before an update."""
        sequences, policy = rollouts.sequences, self.behaviour(rollouts)
        reference = self.reference(sequences)
        placed = place_scores(scores, sequences.response_mask)
        if self.method.missing_eos_penalty is not None:
            placed = penalise_truncated(
                placed, rollouts.terminated, sequences.response_mask, self.method.missing_eos_penalty
            )
        return PPORollouts(
            sequences,
            logprobs=policy.logprobs,
            ref_logprobs=reference.logprobs,
            penalty=self.penalty(sequences, policy, reference),
            values=policy.values,
            entropy=policy.entropy,
            weights=self.importance_weights(rollouts, policy),
            scores=placed,
            bootstrap=self.bootstrap(rollouts),
        )

    @torch.no_grad()
    def bootstrap(self, rollouts: Rollouts) -> Tensor:
        """Return V after the last token of truncated responses, 0 after others; all 0 if it is turned off. -> [B]."""
        cut = ~rollouts.terminated
        if not self.method.bootstrap_truncated or not self.max(cut.any().float()):  # all processes run it, or none
            return torch.zeros(cut.shape, device=cut.device)
        further = followed(rollouts.sequences)
        ends = further.response_mask & ~further.attention_mask
        return zero_masked(masked_sum(self.unwrapped(further).values, ends, dim=1), cut)

    def prepare_experience(self, experience: PPORollouts) -> PPOBatch:
        """Return the experience [B, T]: GAE on rewards with the KL penalty, advantages whitened over the collection.

        Also update β, once per collection.
        """
        x, mask = experience, experience.sequences.response_mask
        rewards = self.rewards(x, self.scaled(zero_masked(x.scores, mask), mask))
        advantages, returns = self.advantages(x, rewards)
        kl = Mean.of(masked_sum(kl_k1(x.logprobs, x.ref_logprobs), mask, dim=1))
        self.record(
            {
                "policy/kl": kl,
                "policy/kl_per_token": Mean.of(kl_k3(x.logprobs, x.ref_logprobs), mask),
                "policy/kl_coef": Mean.of(torch.tensor(self.kl.coef, dtype=torch.float64)),
                "policy/entropy": Mean.of(x.entropy, mask),
                "values/mean": Mean.of(x.values, mask),
                "values/explained_variance": Mean(*explained_variance(x.values, returns, mask)),
                "returns/mean": Mean.of(returns, mask),
            }
        )
        total, episodes = self.reduce(torch.stack(kl.tensors())).tolist()
        self.kl.update(total / episodes, int(episodes))
        return PPOBatch(x.sequences, x.logprobs, x.values, advantages, returns)

    def rewards(self, experience: PPORollouts, scores: Tensor) -> Tensor:
        """Return the rewards per token of a collection: scaled ``scores`` [B, T] less β times the penalty. -> [B, T].

        Override it to change them, for instance to whiten them as TRL's ``whiten_rewards`` does.
        """
        x, mask = experience, experience.sequences.response_mask
        return kl_shaped_rewards(scores, x.logprobs, x.ref_logprobs, mask, self.kl.coef, penalty=x.penalty)

    def advantages(self, experience: PPORollouts, rewards: Tensor) -> tuple[Tensor, Tensor]:
        """Return advantages, whitened over the collection and weighted, and returns: GAE on ``rewards``, all [B, T].

        Override it for another estimator.
        """
        x, mask, method = experience, experience.sequences.response_mask, self.method
        advantages, returns = gae(x.values, rewards, mask, gamma=method.gamma, lam=method.lam, bootstrap=x.bootstrap)
        if method.lam_length is not None:
            lam = (1 - 1 / (method.lam_length * mask.sum(1))).clamp(min=0)
            advantages, _ = gae(x.values, rewards, mask, gamma=method.gamma, lam=lam, bootstrap=x.bootstrap)
        advantages = whiten(advantages, mask, reduce=self.reduce) * x.weights
        return advantages, returns

    def scaled(self, scores: Tensor, mask: Tensor) -> Tensor:
        """Scale a collection's rewards by a standard deviation of scores if set, then clip them. [B, T]."""
        if self.method.scale_reward != "none":
            self.moments.update(scores.sum(1), self.reduce)
            std = self.moments.std
            if self.method.scale_reward == "ref":
                std = self.ref_std = self.ref_std or (std if std > 0 else 0.0)
            scores = self.normalised(scores, mask, std) if std > 0 else scores
        limit = self.method.cliprange_reward
        return scores if limit is None else scores.clamp(-limit, limit)

    def normalised(self, scores: Tensor, mask: Tensor, std: float) -> Tensor:
        """Return scores [B, T] divided by ``std``; override it to subtract ``moments.mean`` too, as TRL can."""
        return scores / std

    def loss(self, batch: PPOBatch) -> tuple[Tensor, Metrics]:
        """Return policy loss + vf_coef · value loss − ent_coef · entropy, each a mean over response tokens. -> []."""
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
            # where the clipped term is the larger one, so that the gradient is 0
            "policy/clipfrac": Mean.of(policy > -batch.advantages * ratio, mask),
            "values/clipfrac": Mean.of(value > 0.5 * (new.values - batch.returns) ** 2, mask),
            **self.statistics(batch, new),
        }

    def statistics(self, batch: PPOBatch, outputs: TokenOutputs) -> Metrics:
        """Return metrics of what the policy computed for a micro-batch; override it to add others."""
        mask = batch.sequences.response_mask
        return {
            "values/predicted": Mean.of(outputs.values, mask),
            "values/error": Mean.of((outputs.values - batch.returns) ** 2, mask),
        }

    def judge(self, metrics: Mapping[str, float]) -> Verdict:
        """Skip a step if the policy has moved too far: KL above 1.5·`target_kl`, or mean ratio above `ratio_threshold`.

        The rule for the KL is that of Spinning Up (Achiam 2018), the one for the ratio is TRL's.
        """
        target, threshold = self.method.target_kl, self.method.ratio_threshold
        if target is not None and metrics["policy/approx_kl"] > 1.5 * target:
            return Verdict.STOP
        if threshold is not None and metrics["policy/ratio"] > threshold:
            return Verdict.SKIP
        return Verdict.STEP

    def state_dict(self) -> dict[str, Any]:
        """Return β, the running moments of scores and the standard deviation of the first collection."""
        return {"kl_coef": self.kl.coef, "moments": self.moments.state_dict(), "ref_std": self.ref_std}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        if self.kl.target is not None:  # without a target, β is that of the configuration
            self.kl.coef = state["kl_coef"]
        self.ref_std = state["ref_std"]
        self.moments.load_state_dict(state["moments"])


def followed(sequences: Sequences) -> Sequences:
    """Append one response token to each row, whose value is V of the row's last state. [B, T] -> [B, T + 1].

    The token is in the response mask but not in the attention mask: no token attends to it, and it takes up no position
    of the model's context.
    """
    real, trunk = sequences.attention_mask, sequences.trunk
    return Sequences(
        F.pad(sequences.input_ids, (0, 1)),
        F.pad(real, (0, 1)),
        F.pad(sequences.response_mask, (0, 1)) | (F.pad(real, (1, 0)) & ~F.pad(real, (0, 1))),
        trunk=None if trunk is None else F.pad(trunk, (0, 0, 0, 1)),
    )
