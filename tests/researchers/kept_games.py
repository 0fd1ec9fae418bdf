"""REINFORCE with a group's mean as baseline, on games; groups of equal returns are sampled again (Yu et al. 2025)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from pydantic import Field
from torch import Tensor

from trainkit import AccelerateRLTrainer, MethodConfig, Rollouts, TokenBatch, register_trainer
from trainkit.functional import masked_mean, per_response
from trainkit.metrics import Mean, Metrics


class KeptGamesConfig(MethodConfig):
    """Settings of REINFORCE on games."""

    name: str = "_test_kept_games"
    """The registered name."""
    group_k: int = Field(4, ge=2)
    """Episodes of each prompt."""
    spread: float = Field(0.0, ge=0)
    """Groups are kept if their returns differ by more than this."""


@dataclass(frozen=True)
class KeptGamesBatch(TokenBatch):
    """Experience; advantages [B], old_logprobs [B, T]."""

    advantages: Tensor
    old_logprobs: Tensor


@register_trainer("_test_kept_games")
class KeptGamesTrainer(AccelerateRLTrainer[KeptGamesConfig]):
    """Trainer of REINFORCE on games: loss = −mean A·π/π_old over response tokens, with A = G − mean G of the group."""

    inputs: ClassVar[tuple[str, ...]] = ("environment", "prompts")
    group: ClassVar[str] = "group_k"

    def keep(self, rollouts: Rollouts, scores: Tensor) -> Tensor:
        """Keep the groups whose returns differ. [B, T] -> bool [B]."""
        returns = per_response(scores).view(-1, self.method.group_k)
        return (returns.amax(1) - returns.amin(1) > self.method.spread).repeat_interleave(self.method.group_k)

    def experience(self, rollouts: Rollouts, scores: Tensor) -> KeptGamesBatch:
        """Return the episodes with their returns [B]."""
        return KeptGamesBatch(rollouts.sequences, per_response(scores), self.behaviour(rollouts).logprobs)

    def prepare_experience(self, experience: KeptGamesBatch) -> KeptGamesBatch:
        """Subtract the mean return of each group. [B]."""
        groups = experience.advantages.view(-1, self.method.group_k)
        return replace(experience, advantages=(groups - groups.mean(1, keepdim=True)).view(-1))

    def loss(self, batch: KeptGamesBatch) -> tuple[Tensor, Metrics]:
        """Return −A·π/π_old, a mean over response tokens. -> []."""
        mask = batch.sequences.response_mask
        ratio = (self.policy(batch.sequences).logprobs - batch.old_logprobs).exp()
        return masked_mean(-batch.advantages.unsqueeze(1) * ratio, mask), {"policy/ratio": Mean.of(ratio, mask)}
