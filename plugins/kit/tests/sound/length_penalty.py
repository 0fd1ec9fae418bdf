"""RLOO whose scores are less a penalty for every token beyond a budget (Ahmadian et al. 2024)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from pydantic import Field
from torch import Tensor

from trainkit import AccelerateRLTrainer, MethodConfig, Rollouts, TokenBatch, register_trainer
from trainkit.functional import clipped_surrogate, leave_one_out, masked_sum, per_response
from trainkit.metrics import Mean, Metrics
from trainkit.testing import Declaration, Structure


class LengthPenaltyConfig(MethodConfig):
    """Settings of RLOO with a penalty of length."""

    section_defaults: ClassVar[dict[str, Any]] = {"train": {"total_steps": 1000}}
    name: str = "_sound_length_penalty"
    """The registered name."""
    k: int = Field(4, ge=2)
    """Responses per prompt."""
    budget: int = Field(2, ge=0)
    """Tokens of a response that are free."""
    price: float = Field(0.05, ge=0)
    """What every further token costs."""


@dataclass(frozen=True)
class LengthPenaltyBatch(TokenBatch):
    """Experience; old log-probabilities [B, T], advantages [B]."""

    unit: ClassVar[str] = "responses"
    old_logprobs: Tensor
    advantages: Tensor

    @property
    def weight(self) -> Tensor:
        """Number of responses []."""
        return self.advantages.new_tensor(len(self))


@register_trainer("_sound_length_penalty")
class LengthPenaltyTrainer(AccelerateRLTrainer[LengthPenaltyConfig]):
    """Trainer of RLOO with R = score − price · max(tokens − budget, 0)."""

    inputs: ClassVar[tuple[str, ...]] = ("reward_fn", "prompts")
    group = "k"
    environments: ClassVar[bool] = False  # the length of an episode is no length of an answer

    def experience(self, rollouts: Rollouts, scores: Tensor) -> LengthPenaltyBatch:
        """Return the scores less the penalty [B] in place of advantages, and old log-probabilities [B, T]."""
        beyond = (rollouts.sequences.response_mask.sum(1) - self.method.budget).clamp(min=0)
        rewards = per_response(scores) - self.method.price * beyond
        return LengthPenaltyBatch(rollouts.sequences, self.behaviour(rollouts).logprobs, rewards)

    def prepare_experience(self, experience: LengthPenaltyBatch) -> LengthPenaltyBatch:
        """Return the advantages, R less the mean of the others of its group. [B]."""
        return replace(experience, advantages=leave_one_out(experience.advantages, self.method.k))

    def loss(self, batch: LengthPenaltyBatch) -> tuple[Tensor, Metrics]:
        """Return the clipped surrogate of whole responses, a mean over them. -> []."""
        mask = batch.sequences.response_mask
        ratio = masked_sum(self.policy(batch.sequences).logprobs - batch.old_logprobs, mask, dim=1).exp()
        loss = clipped_surrogate(ratio, batch.advantages, cliprange=0.2)
        return loss.mean(), {"policy/ratio": Mean.of(ratio)}


KIT = Declaration(structure=(Structure(scores="group", baseline="leave_one_out", detached=()),))
