"""The trainers of DPO and its variants: experience and loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from trainkit import (
    AccelerateRLTrainer,
    Preferences,
    Rollouts,
    Row,
    Sequences,
    TokenBatch,
    register_trainer,
)
from trainkit.functional import (
    kl_k1,
    kl_k3,
    masked_mean,
    masked_sum,
    per_response,
    preference_accuracy,
    sigmoid_loss,
    zero_masked,
)
from trainkit.metrics import Mean, Metrics
from trainkit.models import TokenOutputs, response_logprobs
from trainkit_dpo.config import SORTED, BestOfKConfig, DPOConfig, OnlineDPOConfig
from trainkit_dpo.losses import LOSSES, kto_pair_losses, unpaired_aot_loss

# ----------------------------------------------------------------------------------------------------- experience


@dataclass(frozen=True)
class DPOBatch(Preferences):
    """Pairs, and log π_ref of each side [B], summed or averaged as for the loss; 0 without a reference."""

    ref_chosen: Tensor
    ref_rejected: Tensor
    decided: Tensor
    """Whether a pair has a preference, bool [B]. Pairs without one are excluded from all means."""
    chosen_kl: Tensor | None = None
    """For `kto_pair`: mean of log π − log π_ref over the chosen responses of the whole step, repeated [B]."""
    rejected_kl: Tensor | None = None
    """For `kto_pair`: the same mean over the rejected responses [B]."""
    beside: Tensor | None = None
    """For `aot` and `aot_unpaired`: what has the rank of the pair, or of each of its sides, in the step [B, 2]."""

    @property
    def weight(self) -> Tensor:
        """Number of pairs with a preference []."""
        return self.decided.sum().float()


@dataclass(frozen=True)
class ScoredResponses(TokenBatch):
    """K adjacent responses to each prompt, with their scores and log π_ref [B]."""

    scores: Tensor
    ref_logps: Tensor


@dataclass(frozen=True)
class BestResponses(TokenBatch):
    """The best response to each prompt; ``decided``, bool [B], says whether it is better than another."""

    unit: ClassVar[str] = "responses"
    decided: Tensor

    @property
    def weight(self) -> Tensor:
        """Number of responses that are better than another []."""
        return self.decided.sum().float()


def best_and_worst(x: ScoredResponses, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows of the best and the worst of k responses, and whether they give a preference. -> [B / k] ×3.

    They are selected by score alone; of equal scores the first is taken. They give a preference (bool) if their scores
    and their tokens differ.
    """
    groups = x.scores.view(-1, k)
    first = torch.arange(0, len(x), k, device=groups.device)
    best, worst = first + groups.argmax(1), first + groups.argmin(1)
    ids = x.sequences.input_ids.masked_fill(~x.sequences.response_mask, -1)  # -1 is not a token id
    return best, worst, (x.scores[best] > x.scores[worst]) & (ids[best] != ids[worst]).any(1)


# -------------------------------------------------------------------------------------------------------- metrics

Sides = tuple[Tensor, Tensor]
"""Numbers of the chosen and of the rejected responses, [B] ×2."""


def pair_metrics(logps: Sides, ratios: Sides, beta: float, decided: Tensor) -> Metrics:
    """Return metrics of log π and log π − log π_ref of both sides, means over the pairs with a preference."""
    return {
        "rewards/chosen": Mean.of(beta * ratios[0], decided),
        "rewards/rejected": Mean.of(beta * ratios[1], decided),
        "rewards/margins": Mean.of(beta * (ratios[0] - ratios[1]), decided),
        "rewards/accuracies": Mean.of(preference_accuracy(*ratios), decided),
        "logps/chosen": Mean.of(logps[0], decided),
        "logps/rejected": Mean.of(logps[1], decided),
    }


def divergences(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Metrics:
    """Return estimates of the KL from the reference, of responses and of tokens. [B, T] ×3."""
    return {
        "policy/kl": Mean.of(masked_sum(kl_k1(logprobs, ref_logprobs), mask, dim=1)),
        "policy/kl_per_token": Mean.of(kl_k3(logprobs, ref_logprobs), mask),
    }


# ------------------------------------------------------------------------------------------------------- trainers

C = TypeVar("C", bound=DPOConfig)


class PairTrainer(AccelerateRLTrainer[C]):
    """Base of trainers on pairs: loss = mean f(r_c − r_r), r = log π − log π_ref, with f given by `loss_type`."""

    @property
    def needs_reference(self) -> bool:
        """Whether a reference model is needed: unless `reference_free` is set."""
        return not self.method.reference_free

    def logps(self, logprobs: Tensor, mask: Tensor) -> Tensor:
        """Return log π of whole responses, EOS included: a sum, or a mean over tokens. [B, T] ×2 -> [B]."""
        sums = masked_sum(logprobs, mask, dim=1)
        loss, normalised = self.method.loss_type, self.method.ipo_length_normalize
        averaged = loss == "sigmoid_norm" or (loss == "ipo" and normalised)
        return sums / mask.sum(1) if averaged else sums

    def read(self, policy: Callable[[Sequences], TokenOutputs], batch: Preferences) -> tuple[Tensor, Tensor]:
        """Return log π of the chosen and of the rejected responses [B] ×2, from one forward pass over both."""
        both = batch.both
        chosen, rejected = self.logps(policy(both).logprobs, both.response_mask).chunk(2)
        return chosen, rejected

    def prepare_step(self, batch: DPOBatch) -> DPOBatch:
        """Compute what the losses need of the whole step and not of a micro-batch (law 3): mean KL, or ranks."""
        if self.method.loss_type in SORTED:
            return replace(batch, beside=self.beside(batch))
        if self.method.loss_type != "kto_pair":
            return batch

        def read(micro: DPOBatch) -> Tensor:
            chosen, rejected = self.read(self.unwrapped, micro)
            ratios = torch.stack([chosen - micro.ref_chosen, rejected - micro.ref_rejected, torch.ones_like(chosen)])
            return zero_masked(ratios.T, micro.decided.unsqueeze(1))

        total = self.step_mean(batch, read)
        chosen_kl, rejected_kl = ((part / total[2]).expand(len(batch)) for part in total[:2])
        return replace(batch, chosen_kl=chosen_kl, rejected_kl=rejected_kl)

    @torch.no_grad()
    def beside(self, batch: DPOBatch) -> Tensor:
        """Return for each pair what has its rank in sorted order, among the pairs of all processes. -> [B, 2].

        For `aot`, this is the margin of the reference in the place of the policy's, less the pair's own. For
        `aot_unpaired`, it is r_r in the place of r_c, and r_c in the place of r_r.
        """
        read = self.in_micro_batches(batch, lambda micro: torch.stack(self.read(self.unwrapped, micro), dim=1))
        ref = torch.stack([batch.ref_chosen, batch.ref_rejected], dim=1)
        paired = self.method.loss_type == "aot"
        sides = torch.stack([read[:, 0] - read[:, 1], ref[:, 0] - ref[:, 1]], dim=1) if paired else read - ref
        mine, first = sides[batch.decided].tolist(), self.gather([int(batch.decided.sum())])
        every = torch.tensor(self.gather(mine)).view(-1, 2)
        ordered, order = every.sort(dim=0, stable=True)
        start = sum(first[: self.accelerator.process_index])
        ranks = order.argsort(dim=0)[start : start + len(mine)]
        found = torch.stack([ordered[ranks[:, 0], 1], ordered[ranks[:, 1], 0]], dim=1).to(sides.device)
        beside = torch.zeros_like(sides)
        beside[batch.decided] = found - sides[batch.decided][:, 1:] if paired else found
        return beside

    def losses(self, chosen: Tensor, rejected: Tensor, batch: DPOBatch) -> Tensor:
        """Return the loss of each pair, from log π − log π_ref of its two sides. [B] ×2 -> [B]."""
        method = self.method
        if (loss := LOSSES.get(method.loss_type)) is not None:
            return loss(chosen, rejected, method.beta, method.label_smoothing)
        if method.loss_type in SORTED:
            assert batch.beside is not None, "prepare_step has seen the whole step"
            below, above = batch.beside.unbind(1)
            if method.loss_type == "aot":
                return sigmoid_loss(chosen - rejected - below, beta=method.beta, label_smoothing=method.label_smoothing)
            return unpaired_aot_loss(chosen, rejected, below, above, beta=method.beta, smoothing=method.label_smoothing)
        assert batch.chosen_kl is not None, "prepare_step has seen the whole step"
        assert batch.rejected_kl is not None, "prepare_step has seen the whole step"
        sides = kto_pair_losses(chosen, rejected, batch.chosen_kl, batch.rejected_kl, beta=method.beta)
        return (sides[0] + sides[1]) / 2

    def loss(self, batch: DPOBatch) -> tuple[Tensor, Metrics]:
        """Return the mean loss over the pairs with a preference. -> []."""
        logps, decided = self.read(self.policy, batch), batch.decided
        ratios = logps[0] - batch.ref_chosen, logps[1] - batch.ref_rejected
        losses = self.losses(*ratios, batch)
        return masked_mean(losses, decided), pair_metrics(logps, ratios, self.method.beta, decided)


@register_trainer("dpo")
class DPOTrainer(PairTrainer[DPOConfig]):
    """Trainer of DPO on the pairs of a dataset; the reference's log-probabilities are computed once."""

    inputs: ClassVar[tuple[str, ...]] = ("samples", "pairs")
    reference_makes_experience: ClassVar[bool] = True

    def make_experience(self, rows: list[Row]) -> DPOBatch:
        """Return the pairs as token sequences [B, T], with log π_ref of both sides [B]."""
        pairs = self.through_trunk(self.encode_preferences(rows))
        ref = torch.zeros(len(rows), 2, device=pairs.chosen.input_ids.device)
        if self.needs_reference:
            ref = self.in_micro_batches(pairs, lambda micro: torch.stack(self.read(self.reference, micro), dim=1))
        decided = torch.ones(len(rows), dtype=torch.bool, device=ref.device)
        return DPOBatch(pairs.chosen, pairs.rejected, ref[:, 0], ref[:, 1], decided)


@register_trainer("online_dpo")
class OnlineDPOTrainer(PairTrainer[OnlineDPOConfig]):
    """Trainer of DPO on the best and the worst of k responses sampled from the policy, by score (Guo et al. 2024)."""

    inputs: ClassVar[tuple[str, ...]] = ("reward_fn", "prompts")
    group = "k"

    @property
    def experience_rows(self) -> int:
        """Rows of a collection: one pair for each prompt."""
        return self.collection_rows

    def experience(self, rollouts: Rollouts, scores: Tensor) -> ScoredResponses:
        """Return the scored responses with log π_ref [B], and record the policy's KL from the reference."""
        sequences, mask = rollouts.sequences, rollouts.sequences.response_mask
        totals = per_response(scores)
        if not self.needs_reference:
            return ScoredResponses(sequences, totals, torch.zeros_like(totals))
        logprobs, ref_logprobs = self.behaviour(rollouts).logprobs, self.reference(sequences).logprobs
        self.record(divergences(logprobs, ref_logprobs, mask))
        return ScoredResponses(sequences, totals, self.logps(ref_logprobs, mask))

    def prepare_experience(self, experience: ScoredResponses) -> DPOBatch:
        """Return the best and the worst response to each prompt as a pair, [B] responses as [B / k] pairs."""
        x, (best, worst, decided) = experience, best_and_worst(experience, self.method.k)
        self.record(
            {
                "reward/best": Mean.of(x.scores[best]),
                "reward/worst": Mean.of(x.scores[worst]),
                "rollout/ties": Mean.of(~decided),
            }
        )
        chosen, rejected = x.sequences.select(best), x.sequences.select(worst)
        return DPOBatch(chosen, rejected, x.ref_logps[best], x.ref_logps[worst], decided)


@register_trainer("best_of_k")
class BestOfKTrainer(AccelerateRLTrainer[BestOfKConfig]):
    """Trainer of best-of-K fine-tuning (expert iteration): loss = −mean log π(best of k responses), EOS included."""

    inputs: ClassVar[tuple[str, ...]] = ("reward_fn", "prompts")
    group = "k"

    @property
    def experience_rows(self) -> int:
        """Rows of a collection: one response for each prompt."""
        return self.collection_rows

    def experience(self, rollouts: Rollouts, scores: Tensor) -> ScoredResponses:
        """Return the responses with their scores [B]; log π_ref is 0, because no reference is needed."""
        totals = per_response(scores)
        return ScoredResponses(rollouts.sequences, totals, torch.zeros_like(totals))

    def prepare_experience(self, experience: ScoredResponses) -> BestResponses:
        """Return the best response to each prompt, [B] responses as [B / k]."""
        best, _, decided = best_and_worst(experience, self.method.k)
        self.record({"reward/best": Mean.of(experience.scores[best]), "rollout/ties": Mean.of(~decided)})
        return BestResponses(experience.sequences.select(best), decided)

    def loss(self, batch: BestResponses) -> tuple[Tensor, Metrics]:
        """Return the mean negative log-likelihood of the best responses that are better than another. -> []."""
        logps = response_logprobs(self.policy, batch.sequences)
        return -masked_mean(logps, batch.decided), {"logps/best": Mean.of(logps, batch.decided)}
