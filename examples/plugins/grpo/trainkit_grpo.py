"""GRPO: group-relative policy optimisation, PPO without a critic (Shao et al. 2024, DeepSeekMath)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from pydantic import Field
from torch import Tensor

from trainkit import AccelerateRLTrainer, MethodConfig, Rollouts, TokenBatch, register_trainer
from trainkit.functional import clipped_surrogate, exact, kl_k1, kl_k3, masked_sum, per_response, zero_masked
from trainkit.metrics import Mean, Metrics


class GRPOConfig(MethodConfig):
    """Settings of GRPO. The defaults are those of DeepSeekMath, section 4.2, which does not state its ε."""

    section_defaults: ClassVar[dict[str, Any]] = {
        "optimizer": {"lr": 1e-6},
        "rollout": {"num_rollouts": 1024},
        "train": {"batch_size": 1024, "total_steps": 1000},
    }

    name: str = "grpo"
    """The registered name."""
    group_size: int = Field(64, ge=2)
    """G: responses per prompt; advantages are relative to this group."""
    grpo_epochs: int = Field(1, ge=1)
    """μ: passes over each collection of rollouts."""
    kl_coef: float = Field(0.04, ge=0)
    """β: weight of the KL penalty in the loss, per nat of KL from the reference."""
    cliprange: float = Field(0.2, gt=0)
    """ε of the clipped surrogate; has no effect in the first step on a collection."""


@dataclass(frozen=True)
class GRPOBatch(TokenBatch):
    """Log-probabilities [B, T] at sampling, and advantages [B], which hold scores until the collection is complete."""

    unit: ClassVar[str] = "responses"
    old_logprobs: Tensor
    ref_logprobs: Tensor
    advantages: Tensor

    @property
    def weight(self) -> Tensor:
        """Number of responses []: the loss is a mean over each response's tokens, then over responses."""
        return self.advantages.new_tensor(len(self))


@register_trainer("grpo")
class GRPOTrainer(AccelerateRLTrainer[GRPOConfig]):
    """Trainer of GRPO: advantages within the group, then clipped surrogate + β·k3, both with gradient."""

    inputs: ClassVar[tuple[str, ...]] = ("reward_fn", "prompts")
    group = "group_size"
    needs_reference: ClassVar[bool] = True

    @property
    def passes(self) -> int:
        """Passes over each collection: `grpo_epochs`."""
        return self.method.grpo_epochs

    def experience(self, rollouts: Rollouts, scores: Tensor) -> GRPOBatch:
        """Return scored rollouts with log-probabilities of policy and reference [B, T], before any update."""
        sequences, policy = rollouts.sequences, self.behaviour(rollouts)
        reference, mask = self.reference(sequences).logprobs, sequences.response_mask
        divergence = zero_masked(kl_k1(policy.logprobs, reference), mask).sum(1)
        self.record({"policy/kl": Mean.of(divergence), "policy/entropy": Mean.of(policy.entropy, mask)})
        return GRPOBatch(sequences, policy.logprobs, reference, per_response(scores))

    def prepare_experience(self, experience: GRPOBatch) -> GRPOBatch:
        """Return advantages, (r − mean) / std over the responses to a prompt; 0 if all are equal (4.1.2). [B]."""
        groups = exact(experience.advantages).view(-1, self.method.group_size)
        centred = groups - groups.mean(1, keepdim=True)
        advantages = centred / (groups.std(1, keepdim=True) + 1e-6)
        return replace(experience, advantages=advantages.flatten().to(experience.advantages.dtype))

    def loss(self, batch: GRPOBatch) -> tuple[Tensor, Metrics]:
        """Return the negative of equation 3, a mean over the tokens of each response, then over responses. -> []."""
        mask, advantages = batch.sequences.response_mask, batch.advantages.unsqueeze(1)
        logprobs = self.policy(batch.sequences).logprobs
        ratio = zero_masked(logprobs - batch.old_logprobs, mask).exp()
        surrogate = clipped_surrogate(ratio, advantages, cliprange=self.method.cliprange)
        k3 = kl_k3(logprobs, zero_masked(batch.ref_logprobs, mask))  # equation 4, with the current policy
        tokens = masked_sum(surrogate + self.method.kl_coef * k3, mask, dim=1)
        return (tokens / mask.sum(1).clamp(min=1)).mean(), {
            "policy/kl_per_token": Mean.of(k3, mask),
            "policy/ratio": Mean.of(ratio, mask),
            "policy/clipfrac": Mean.of(surrogate > -advantages * ratio, mask),
        }
