"""The trainer of XPO: online DPO against responses of the reference, with a bonus for exploration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from trainkit import AccelerateRLTrainer, Batch, Rollouts, Sequences, register_trainer
from trainkit.functional import masked_sum, per_response
from trainkit.metrics import Mean, Metrics
from trainkit.models import response_logprobs
from trainkit_dpo.config import XPOConfig
from trainkit_dpo.trainer import divergences, pair_metrics


@dataclass(frozen=True)
class XPOBatch(Batch):
    """A response of the policy and one of the reference to each prompt [B, T], with log π_ref of both [B]."""

    unit: ClassVar[str] = "prompts"
    own: Sequences
    other: Sequences
    ref_own: Tensor
    ref_other: Tensor
    sign: Tensor
    """1 where the policy's response has the higher score, −1 where the lower, 0 where neither [B]."""


def xpo_loss(ratios: Tensor, other: Tensor, sign: Tensor, *, beta: float, alpha: float) -> Tensor:
    """Return −[s ≠ 0] log σ(s β x) + α log π(y_ref), x = r_own − r_ref. [B] ×3 -> [B].

    Source: Xie et al. 2024, algorithm 1; its second term is a sum over all responses of the reference, whatever their
    scores.
    """
    return -F.logsigmoid(sign * beta * ratios) * (sign != 0) + alpha * other


@register_trainer("xpo")
class XPOTrainer(AccelerateRLTrainer[XPOConfig]):
    """Trainer of XPO: loss = mean −log σ(β (r_better − r_worse)) + α log π(y_ref), r = log π − log π_ref."""

    inputs: ClassVar[tuple[str, ...]] = ("reward_fn", "prompts")
    needs_reference: ClassVar[bool] = True

    def experience(self, rollouts: Rollouts, scores: Tensor) -> XPOBatch:
        """Sample a response of the reference to each prompt, and compare its score with that of the policy's."""
        own, sampled = rollouts.sequences, self.sample([*rollouts.rows], reference=True)
        other = self.unwrapped.through_trunk(sampled.sequences)
        totals, others = per_response(scores), per_response(self.score(sampled))
        logprobs, ref_logprobs = self.behaviour(rollouts).logprobs, self.reference(own).logprobs
        sign = torch.sign(totals - others).nan_to_num(0)  # `reward.on_nonfinite` concerns the policy's responses alone
        self.record(
            {
                **divergences(logprobs, ref_logprobs, own.response_mask),
                "reward/reference": Mean.of(others[others.isfinite()]),
                "rollout/ties": Mean.of(sign == 0),
            }
        )
        ref_own = masked_sum(ref_logprobs, own.response_mask, dim=1)
        return XPOBatch(own, other, ref_own, response_logprobs(self.reference, other), sign)

    def loss(self, batch: XPOBatch) -> tuple[Tensor, Metrics]:
        """Return the loss of XPO, a mean over prompts. -> []."""
        beta, won = self.method.beta, batch.sign > 0
        own, other = response_logprobs(self.policy, Sequences.cat([batch.own, batch.other])).chunk(2)
        ratios = own - batch.ref_own, other - batch.ref_other
        losses = xpo_loss(ratios[0] - ratios[1], other, batch.sign, beta=beta, alpha=self.method.alpha)
        logps, better = ((torch.where(won, a, b), torch.where(won, b, a)) for a, b in ((own, other), ratios))
        told = pair_metrics(logps, better, beta, batch.sign != 0)
        return losses.mean(), {**told, "logps/reference": Mean.of(other)}
