"""GRPO (Shao et al. 2024), and by its settings Dr. GRPO, DAPO, GSPO and CISPO, whose sources are in the README."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator
from torch import Tensor

from trainkit import AccelerateRLTrainer, GroupSize, MethodConfig, Rollouts, TokenBatch, register_trainer
from trainkit.functional import clipped_surrogate, exact, kl_k3, masked_mean, masked_sum, per_response, zero_masked
from trainkit.metrics import Mean, Metrics, RunningMoments
from trainkit_grpo.kit import Declared


class GRPOConfig(MethodConfig):
    """Settings of GRPO. By default the loss is a mean over tokens, without a KL penalty; the README says why."""

    section_defaults: ClassVar[dict[str, Any]] = {"optimizer": {"lr": 1e-6}, "train": {"total_steps": 1000}}

    name: str = "grpo"
    """The registered name."""
    group_size: GroupSize = 8
    """G: responses per prompt; advantages are relative to this group."""
    grpo_epochs: int = Field(1, ge=1)
    """μ: passes over each collection of rollouts."""
    kl_coef: float = Field(0.0, ge=0)
    """β: weight of the KL penalty in the loss, per nat of KL from the reference. 0: no penalty and no reference."""
    scale: Literal["group", "batch", "none"] = "group"
    """Divide advantages by the standard deviation of the rewards of the group, of the collection, or not at all."""
    average: Literal["tokens", "responses", "constant"] = "tokens"
    """A mean over tokens; over responses, of their means; or over responses, of their sums / `max_new_tokens`."""
    surrogate: Literal["clip", "cispo"] = "clip"
    """Clip the objective, as PPO does, or the weight of log π, so that every token has a gradient (CISPO)."""
    ratio_level: Literal["token", "sequence"] = "token"
    """Whether the ratio is that of a token, or the geometric mean of the ratios of a response's tokens (GSPO)."""
    cliprange: float = Field(0.2, gt=0)
    """ε: the ratio is clipped to at least 1 − ε; no effect in the first step on a collection. From 1 on: no limit."""
    cliprange_high: float | None = Field(None, gt=0)
    """ε_high: the ratio is clipped to at most 1 + ε_high. None: ε."""
    dynamic_sampling: bool = False
    """Replace groups whose rewards are all equal by those of further prompts, up to `rollout.max_refills` times."""

    @model_validator(mode="after")
    def _sequences_have_one_ratio(self) -> Self:
        if self.ratio_level == "sequence" and (self.average, self.surrogate) != ("responses", "clip"):
            given = f"given {self.average!r} and {self.surrogate!r}"
            raise ValueError(f"ratio_level 'sequence' (GSPO) needs average 'responses' and surrogate 'clip'; {given}")
        return self


@dataclass(frozen=True)
class GRPOBatch(TokenBatch):
    """Experience for a mean over tokens: log-probabilities [B, T], and advantages [B], which at first are scores."""

    old_logprobs: Tensor
    ref_logprobs: Tensor  # without a reference, the old ones
    advantages: Tensor
    weights: Tensor  # of the correction for older weights of the sampler, [B, T]


class GRPORows(GRPOBatch):
    """Experience for a mean over responses."""

    unit: ClassVar[str] = "responses"

    @property
    def weight(self) -> Tensor:
        """Number of responses []."""
        return self.advantages.new_tensor(len(self))


@register_trainer("grpo")
class GRPOTrainer(Declared, AccelerateRLTrainer[GRPOConfig]):
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
        groups = per_response(scores).view(-1, self.method.group_size)
        return (groups != groups[:, :1]).any(1).repeat_interleave(self.method.group_size)

    def experience(self, rollouts: Rollouts, scores: Tensor) -> GRPOBatch:
        """Return scored rollouts with log-probabilities of policy and reference [B, T], before any update."""
        sequences, policy = rollouts.sequences, self.behaviour(rollouts)
        reference, mask = policy.logprobs, sequences.response_mask
        self.record({"policy/entropy": Mean.of(policy.entropy, mask)})
        if self.needs_reference:
            reference = self.reference(sequences).logprobs
            self.record({"policy/kl": Mean.of(masked_sum(policy.logprobs - reference, mask, dim=1))})
        batch = GRPOBatch if self.method.average == "tokens" else GRPORows
        weights = self.importance_weights(rollouts, policy)
        return batch(sequences, policy.logprobs, reference, per_response(scores), weights)

    def prepare_experience(self, experience: GRPOBatch) -> GRPOBatch:
        """Return advantages, (r − mean of the group) / (std + 1e-6) [B]; exactly 0 if a group's rewards are equal."""
        rewards, moments = exact(experience.advantages), RunningMoments()
        groups = rewards.view(-1, self.method.group_size)
        advantages = groups - groups.mean(1, keepdim=True)
        if self.method.scale == "group":
            advantages = advantages / (groups.std(1, keepdim=True) + 1e-6)
        elif self.method.scale == "batch":
            moments.update(rewards, self.reduce)
            advantages = advantages / (moments.std + 1e-6)
        return replace(experience, advantages=advantages.flatten().to(experience.advantages.dtype))

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
        found: Metrics = {"policy/ratio": Mean.of(ratio, mask), "policy/clipfrac": Mean.of(clipped, mask)}
        found["policy/approx_kl"] = Mean.of(ratio - 1 - log_ratio, mask)
        if self.needs_reference:
            k3 = kl_k3(logprobs, zero_masked(batch.ref_logprobs, mask))  # of the current policy: it has a gradient
            losses, found["policy/kl_per_token"] = losses + method.kl_coef * k3, Mean.of(k3, mask)
        if method.average == "tokens":
            return masked_mean(losses, mask), found
        length = lengths if method.average == "responses" else self.config.rollout.max_new_tokens
        return (masked_sum(losses, mask, dim=1) / length).mean(), found
