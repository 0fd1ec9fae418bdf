"""The trainer of GRPO: experience and loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from trainkit import AccelerateRLTrainer, Rollouts, TokenBatch, register_trainer
from trainkit.data import finite
from trainkit.errors import RewardError, describe
from trainkit.functional import (
    clipped_surrogate,
    kl_k3,
    masked_mean,
    masked_sum,
    per_response,
    place_scores,
    to_float64,
    zero_masked,
)
from trainkit.metrics import Mean, Metrics, RunningMoments
from trainkit_grpo.config import GRPOConfig


@dataclass(frozen=True)
class GRPORollouts(TokenBatch):
    """Scored responses: log-probabilities [B, T] and scores [B]."""

    old_logprobs: Tensor
    ref_logprobs: Tensor  # without a reference, the old ones
    scores: Tensor
    weights: Tensor  # of the correction for older weights of the sampler, [B, T]
    rewards: Tensor | None = None  # several rewards at the last token of each response, [B, T, N]


@dataclass(frozen=True)
class GRPOBatch(TokenBatch):
    """Experience for a mean over tokens: log-probabilities [B, T] and advantages [B]."""

    old_logprobs: Tensor
    ref_logprobs: Tensor
    advantages: Tensor
    weights: Tensor


class GRPORows(GRPOBatch):
    """Experience for a mean over responses."""

    unit: ClassVar[str] = "responses"

    @property
    def weight(self) -> Tensor:
        """Number of responses []."""
        return self.advantages.new_tensor(len(self))


@register_trainer("grpo")
class GRPOTrainer(AccelerateRLTrainer[GRPOConfig]):
    """Trainer of GRPO: A = (r − mean r) / std r over the group, then clipped surrogate + β·k3, both with gradient."""

    inputs: ClassVar[tuple[str, ...]] = ("reward_fn", "prompts")
    corrections: ClassVar[tuple[str, ...]] = ("sampler", "decoupled", "masked")
    group = "group_size"

    @property
    def needs_reference(self) -> bool:
        """Whether there is a KL penalty."""
        return self.method.kl_coef > 0

    @property
    def keeps(self) -> bool:
        """Whether groups of equal rewards are replaced: `dynamic_sampling`."""
        return self.method.dynamic_sampling

    @property
    def passes(self) -> int:
        """Passes over each collection: `grpo_epochs`."""
        return self.method.grpo_epochs

    def keep(self, rollouts: Rollouts, scores: Tensor) -> Tensor:
        """Return True for responses whose group has different rewards; other groups have no gradient. -> [B]."""
        size = self.method.group_size
        groups: Tensor = self.rewards(rollouts, scores).unflatten(0, (-1, size))  # [G, size, N]
        return (groups != groups[:, :1]).flatten(1).any(1).repeat_interleave(size)

    def rewards(self, rollouts: Rollouts, scores: Tensor) -> Tensor:
        """Return what is compared within a group: the score, or the rewards that are named. -> [B, N]."""
        names = self.method.reward_weights
        if names is None:
            return per_response(scores).unsqueeze(1)
        judged = rollouts.judged or [{"reward": score} for score in per_response(scores).tolist()]
        rows = [[finite(each.get(name)) for name in names] for each in judged]
        for name, values in zip(names, zip(*rows, strict=True), strict=True):
            if None in values:
                given = describe(judged[values.index(None)].get(name))
                raise RewardError(
                    f"method.reward_weights has {name!r}, which is {given} of a response; the reward function should "
                    f'return a finite number for each, besides the score: {{"score": [...], {name!r}: [...]}}'
                )
        return torch.tensor(rows, device=scores.device)

    def experience(self, rollouts: Rollouts, scores: Tensor) -> GRPORollouts:
        """Return scored rollouts with log-probabilities of policy and reference [B, T], before any update."""
        sequences, policy = rollouts.sequences, self.behaviour(rollouts)
        reference, mask = policy.logprobs, sequences.response_mask
        self.record({"policy/entropy": Mean.of(policy.entropy, mask)})
        if self.needs_reference:
            reference = self.reference(sequences).logprobs
            self.record({"policy/kl": Mean.of(masked_sum(policy.logprobs - reference, mask, dim=1))})
        weights, several = self.importance_weights(rollouts, policy), None
        if self.method.reward_weights is not None:
            found = self.rewards(rollouts, scores)
            several = torch.stack([place_scores(reward, mask) for reward in found.T], dim=2)
        return GRPORollouts(sequences, policy.logprobs, reference, per_response(scores), weights, several)

    def prepare_experience(self, experience: GRPORollouts) -> GRPOBatch:
        """Return advantages, (r − mean of the group) / (std + 1e-6) [B]; exactly 0 if a group's rewards are equal.

        Of several rewards they are summed, and divided by their deviation in the collection.
        """
        x, rewards, moments = experience, to_float64(experience.scores), RunningMoments()
        groups = rewards.view(-1, self.method.group_size)
        if x.rewards is not None:
            groups = to_float64(x.rewards).sum(1).unflatten(0, (-1, self.method.group_size))  # [G, size, N]
        advantages = groups - groups.mean(1, keepdim=True)
        if self.method.scale == "group":
            advantages = advantages / (groups.std(1, keepdim=True) + 1e-6)
        elif self.method.scale == "batch":
            moments.update(rewards, self.reduce)
            advantages = advantages / (moments.std + 1e-6)
        if self.method.reward_weights is not None:
            advantages = advantages @ advantages.new_tensor([*self.method.reward_weights.values()])
            moments.update(advantages.flatten(), self.reduce)
            advantages = advantages / (moments.std + 1e-6)
        batch = GRPOBatch if self.method.average == "tokens" else GRPORows
        return batch(x.sequences, x.old_logprobs, x.ref_logprobs, advantages.flatten().to(x.scores.dtype), x.weights)

    def loss(self, batch: GRPOBatch) -> tuple[Tensor, Metrics]:
        """Return surrogate + β·k3, averaged over tokens or responses. -> []."""
        method, mask, advantages = self.method, batch.sequences.response_mask, batch.advantages.unsqueeze(1)
        advantages = advantages * batch.weights
        logprobs, lengths = self.policy(batch.sequences).logprobs, mask.sum(1).clamp(min=1)
        log_ratio = zero_masked(logprobs - batch.old_logprobs, mask)
        if method.ratio_level == "sequence":
            log_ratio = zero_masked((log_ratio.sum(1) / lengths).unsqueeze(1).expand_as(mask), mask)
        ratio, low, high = log_ratio.exp(), method.cliprange, method.cliprange_high or method.cliprange
        if method.surrogate == "cispo":
            weight = ratio.detach().clamp(1 - low, 1 + high)
            losses, clipped = -weight * advantages * logprobs, weight != ratio
        else:
            losses = clipped_surrogate(ratio, advantages, cliprange=low, cliprange_high=high)
            clipped = losses > -advantages * ratio
        metrics: Metrics = {"policy/ratio": Mean.of(ratio, mask), "policy/clipfrac": Mean.of(clipped, mask)}
        metrics["policy/approx_kl"] = Mean.of(ratio - 1 - log_ratio, mask)
        if self.needs_reference:
            k3 = kl_k3(logprobs, zero_masked(batch.ref_logprobs, mask))  # of the current policy: it has a gradient
            losses, metrics["policy/kl_per_token"] = losses + method.kl_coef * k3, Mean.of(k3, mask)
        if method.average == "tokens":
            return masked_mean(losses, mask), metrics
        length = lengths if method.average == "responses" else self.config.rollout.max_new_tokens
        return (masked_sum(losses, mask, dim=1) / length).mean(), metrics
