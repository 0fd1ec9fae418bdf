"""VinePPO: values of states are means of the scores of responses that continue there (Kazemnejad et al. 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar
from zlib import crc32

import torch
from pydantic import Field
from torch import Tensor

from trainkit import AccelerateRLTrainer, MethodConfig, Rollouts, TokenBatch, register_trainer
from trainkit.functional import clipped_surrogate, masked_mean, masked_sum, place_scores, zero_masked
from trainkit.metrics import Mean, Metrics


class VineConfig(MethodConfig):
    """Settings of VinePPO."""

    section_defaults: ClassVar[dict[str, Any]] = {"train": {"total_steps": 1000}}
    name: str = "_sound_vine"
    """The registered name."""
    branches: int = Field(2, ge=1)
    """Responses by which the value of a state is estimated."""


@dataclass(frozen=True)
class VineBatch(TokenBatch):
    """Experience; old log-probabilities and advantages [B, T]."""

    old_logprobs: Tensor
    advantages: Tensor


@register_trainer("_sound_vine")
class VineTrainer(AccelerateRLTrainer[VineConfig]):
    """Trainer of VinePPO with two steps per response: its first half, and its second one.

    A of the first step is V(middle) − V(prompt), that of the second score − V(middle).
    """

    inputs: ClassVar[tuple[str, ...]] = ("reward_fn", "prompts")
    encoder_decoders = False

    def values(self, rollouts: Rollouts, counts: list[int]) -> Tensor:
        """Return the mean score of responses that begin with some tokens of each response. -> [B]."""
        if self.reward_fn is None:  # the episodes of an environment cannot be continued
            return torch.zeros(len(rollouts), device=rollouts.terminated.device)
        starts = [ids[:count].tolist() for ids, count in zip(rollouts.responses, counts, strict=True)]
        begun = [[*query.tolist(), *start] for query, start in zip(rollouts.queries, starts, strict=True)]
        asked = [(tuple(ids), branch) for ids in begun for branch in range(self.method.branches)]
        different = [*dict.fromkeys(asked)]  # equal states have one value, whatever rows they are asked for with
        drawn = self.generate(
            [{"prompt": torch.tensor(ids), "seed": crc32(f"{ids} {branch}".encode())} for ids, branch in different]
        ).select([different.index(each) for each in asked])
        owners = [at for at in range(len(rollouts)) for _ in range(self.method.branches)]
        outputs = [
            self.tokenizer.decode([*starts[at], *more.tolist()], skip_special_tokens=True)
            for at, more in zip(owners, drawn.responses, strict=True)
        ]
        scores = self.reward_fn(prompts=[rollouts.prompts[at] for at in owners], outputs=outputs)
        found = torch.tensor([float(sum(score) if isinstance(score, list) else score) for score in scores])
        return found.view(-1, self.method.branches).mean(1).to(rollouts.terminated.device)

    def experience(self, rollouts: Rollouts, scores: Tensor) -> VineBatch:
        """Return advantages of both halves of every response, and old log-probabilities. [B, T]."""
        mask = rollouts.sequences.response_mask
        halves = mask.sum(1) // 2
        middle, start = (self.values(rollouts, counts) for counts in (halves.tolist(), [0] * len(rollouts)))
        first = mask & (mask.cumsum(1) <= halves.unsqueeze(1))
        rewards = place_scores(scores, mask)
        one, two = masked_sum(rewards, first, dim=1), masked_sum(rewards, mask & ~first, dim=1)
        advantages = torch.where(first, (one + middle - start).unsqueeze(1), (two - middle).unsqueeze(1))
        return VineBatch(rollouts.sequences, self.behaviour(rollouts).logprobs, zero_masked(advantages, mask))

    def loss(self, batch: VineBatch) -> tuple[Tensor, Metrics]:
        """Return the clipped surrogate, a mean over response tokens. -> []."""
        mask = batch.sequences.response_mask
        ratio = zero_masked(self.policy(batch.sequences).logprobs - batch.old_logprobs, mask).exp()
        loss = clipped_surrogate(ratio, batch.advantages, cliprange=0.2)
        return masked_mean(loss, mask), {"policy/ratio": Mean.of(ratio, mask)}
