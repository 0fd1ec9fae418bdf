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
    """The numbers of GRPO. Defaults are those of DeepSeekMath, section 4.2, which does not say its ε."""

    section_defaults: ClassVar[dict[str, Any]] = {
        "optimizer": {"lr": 1e-6},
        "rollout": {"num_rollouts": 1024},
        "train": {"batch_size": 1024, "total_steps": 1000},
    }

    name: str = "grpo"
    """The registered name."""
    group_size: int = Field(64, ge=2)
    """G: responses to each prompt, which are compared with each other."""
    grpo_epochs: int = Field(1, ge=1)
    """μ: passes over each collection of rollouts."""
    kl_coef: float = Field(0.04, ge=0)
    """β: the price of a nat of divergence from the reference, in the loss."""
    cliprange: float = Field(0.2, gt=0)
    """ε of the clipped surrogate; without effect in the first step on a collection."""


@dataclass(frozen=True)
class GRPOBatch(TokenBatch):
    """Log-probabilities [B, T] at sampling, and advantages [B]: scores until the collection is complete."""

    unit: ClassVar[str] = "responses"
    old_logprobs: Tensor
    ref_logprobs: Tensor
    advantages: Tensor

    @property
    def weight(self) -> Tensor:
        """Responses []: the loss is a mean over each response's tokens, then over responses."""
        return self.advantages.new_tensor(len(self))


@register_trainer("grpo")
class GRPOTrainer(AccelerateRLTrainer[GRPOConfig]):
    """Scores → advantages within the group → clipped surrogate + β·k3, of which both have a gradient."""

    inputs: ClassVar[tuple[str, ...]] = ("reward_fn", "prompts")
    group = "group_size"
    needs_reference: ClassVar[bool] = True

    @property
    def passes(self) -> int:
        """GRPO's iterations."""
        return self.method.grpo_epochs

    def experience(self, rollouts: Rollouts, scores: Tensor) -> GRPOBatch:
        """What the policy and the reference say about scored rollouts, before any update."""
        sequences, policy = rollouts.sequences, self.behaviour(rollouts)
        reference, mask = self.reference(sequences).logprobs, sequences.response_mask
        divergence = zero_masked(kl_k1(policy.logprobs, reference), mask).sum(1)
        self.record({"policy/kl": Mean.of(divergence), "policy/entropy": Mean.of(policy.entropy, mask)})
        return GRPOBatch(sequences, policy.logprobs, reference, per_response(scores))

    def prepare_experience(self, experience: GRPOBatch) -> GRPOBatch:
        """A = (r − mean) / std over the responses to a prompt; 0 where all of them got the same (section 4.1.2)."""
        groups = exact(experience.advantages).view(-1, self.method.group_size)
        centred = groups - groups.mean(1, keepdim=True)
        advantages = centred / (groups.std(1, keepdim=True) + 1e-6)
        return replace(experience, advantages=advantages.flatten().to(experience.advantages.dtype))

    def loss(self, batch: GRPOBatch) -> tuple[Tensor, Metrics]:
        """Equation 3, negated: a mean over tokens of each response, then over responses. -> []."""
        mask, advantages = batch.sequences.response_mask, batch.advantages.unsqueeze(1)
        logprobs = self.policy(batch.sequences).logprobs
        ratio = zero_masked(logprobs - batch.old_logprobs, mask).exp()
        surrogate = clipped_surrogate(ratio, advantages, cliprange=self.method.cliprange)
        k3 = kl_k3(logprobs, zero_masked(batch.ref_logprobs, mask))  # equation 4, of the policy as it is now
        tokens = masked_sum(surrogate + self.method.kl_coef * k3, mask, dim=1)
        return (tokens / mask.sum(1).clamp(min=1)).mean(), {
            "policy/kl_per_token": Mean.of(k3, mask),
            "policy/ratio": Mean.of(ratio, mask),
            "policy/clipfrac": Mean.of(surrogate > -advantages * ratio, mask),
        }
