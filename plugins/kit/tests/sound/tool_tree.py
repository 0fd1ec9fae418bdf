"""A tree over turns: values of states are means of episodes that go on there (as Kazemnejad et al. 2024 over text)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from trainkit import AccelerateRLTrainer, MethodConfig, Rollouts, TokenBatch, register_trainer
from trainkit.functional import clipped_surrogate, masked_mean, place_scores, zero_masked
from trainkit.metrics import Mean, Metrics


class ToolTreeConfig(MethodConfig):
    """Settings of the tree."""

    section_defaults: ClassVar[dict[str, Any]] = {"train": {"total_steps": 1000}}
    name: str = "_sound_tool_tree"
    """The registered name."""
    branches: int = Field(2, ge=1)
    """Episodes by which the value of a state is estimated."""


@dataclass(frozen=True)
class ToolTreeBatch(TokenBatch):
    """Experience; old log-probabilities and advantages [B, T]."""

    old_logprobs: Tensor
    advantages: Tensor


@register_trainer("_sound_tool_tree")
class ToolTreeTrainer(AccelerateRLTrainer[ToolTreeConfig]):
    """Trainer of the tree: A of a token is the rewards from it on − V of the state before its output."""

    inputs: ClassVar[tuple[str, ...]] = ("environment", "prompts")
    encoder_decoders = False
    forks = True

    def values(self, rollouts: Rollouts, outputs: int) -> Tensor:
        """Return the mean return of episodes that go on after so many outputs of each; 0 of those given. -> [B]."""
        found = torch.zeros(len(rollouts), self.method.branches)
        going = [row for row, turns in enumerate(rollouts.turns or []) if len(turns) > outputs]
        for branch in range(self.method.branches if going and rollouts.moments is not None else 0):
            played = self.branch(rollouts.select(going), [outputs] * len(going)).turns or []
            found[going, branch] = torch.tensor([sum(turn["reward"] for turn in turns[outputs:]) for turns in played])
        return found.mean(1).to(rollouts.terminated.device)

    def experience(self, rollouts: Rollouts, scores: Tensor) -> ToolTreeBatch:
        """Return the advantages and the old log-probabilities of episodes. [B, T]."""
        mask = rollouts.sequences.response_mask
        output = (mask & ~F.pad(mask, (1, 0))[:, :-1]).cumsum(1)  # the number of the output, from 1
        values = torch.stack([self.values(rollouts, number) for number in range(int(output.max()))], dim=1)
        returns = place_scores(scores, mask).flip(1).cumsum(1).flip(1)
        advantages = returns - values.gather(1, (output - 1).clamp(min=0))
        return ToolTreeBatch(rollouts.sequences, self.behaviour(rollouts).logprobs, zero_masked(advantages, mask))

    def loss(self, batch: ToolTreeBatch) -> tuple[Tensor, Metrics]:
        """Return the clipped surrogate, a mean over response tokens. -> []."""
        mask = batch.sequences.response_mask
        ratio = zero_masked(self.policy(batch.sequences).logprobs - batch.old_logprobs, mask).exp()
        loss = clipped_surrogate(ratio, batch.advantages, cliprange=0.2)
        return masked_mean(loss, mask), {"policy/ratio": Mean.of(ratio, mask)}
