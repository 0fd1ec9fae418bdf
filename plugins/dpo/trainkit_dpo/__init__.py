"""DPO and its family: a policy learns from pairs of responses, one preferred to the other.

From pairs of a dataset (`dpo`), or from the best and the worst of K responses of its own (`online_dpo`); and from the
best alone (`best_of_k`). Rafailov et al. 2023 (DPO), Guo et al. 2024 (online).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self, TypeVar

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor

from trainkit import (
    AccelerateRLTrainer,
    MethodConfig,
    Preferences,
    Rollouts,
    Row,
    Sequences,
    TokenBatch,
    register_trainer,
)
from trainkit.functional import kl_k1, kl_k3, masked_mean, masked_sum, per_response, preference_accuracy
from trainkit.metrics import Mean, Metrics
from trainkit.models import TokenOutputs


class DPOConfig(MethodConfig):
    """The numbers of DPO. Defaults are those of Rafailov et al. 2023, appendix B."""

    section_defaults: ClassVar[dict[str, Any]] = {"optimizer": {"lr": 1e-6}}

    name: str = "dpo"
    """The registered name."""
    loss_type: Literal["sigmoid", "hinge", "ipo", "robust", "kto_pair"] = "sigmoid"
    """The loss of a pair; the README has their equations and what each is for."""
    beta: float = Field(0.1, gt=0)
    """β: how many units of implicit reward a nat of divergence from the reference is worth; τ of IPO."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """ε: the share of pairs taken to be the wrong way round; for `sigmoid`, and needed by `robust`."""
    ipo_length_normalize: bool = True
    """For `ipo`: log-probabilities of responses are means over their tokens, as its authors have it; else sums."""
    reference_free: bool = False
    """Compare with the uniform policy: no reference is kept, and rewards are β log π."""

    @model_validator(mode="after")
    def _settings_fit_the_loss(self) -> Self:
        smoothed = self.loss_type in ("sigmoid", "robust")
        if self.label_smoothing and not smoothed:
            raise ValueError(f"label_smoothing is for loss_type 'sigmoid' or 'robust', not {self.loss_type!r}")
        if self.loss_type == "robust" and not self.label_smoothing:
            raise ValueError("loss_type 'robust' without label_smoothing is 'sigmoid'; give the share of wrong labels")
        if self.loss_type != "ipo" and not self.ipo_length_normalize:
            raise ValueError(f"ipo_length_normalize is for loss_type 'ipo', not {self.loss_type!r}; leave it out")
        if self.loss_type == "kto_pair" and self.reference_free:
            raise ValueError("loss_type 'kto_pair' compares with the divergence from a reference; keep the reference")
        return self


class OnlineDPOConfig(DPOConfig):
    """The numbers of DPO on the policy's own responses. Two of a prompt make a pair in Guo et al. 2024."""

    section_defaults: ClassVar[dict[str, Any]] = {"optimizer": {"lr": 1e-6}, "train": {"total_steps": 1000}}

    name: str = "online_dpo"
    """The registered name."""
    k: int = Field(2, ge=2)
    """Responses per prompt, of which the best and the worst make a pair."""


class BestOfKConfig(MethodConfig):
    """The one number of best-of-K fine-tuning."""

    section_defaults: ClassVar[dict[str, Any]] = {"optimizer": {"lr": 1e-6}, "train": {"total_steps": 1000}}

    name: str = "best_of_k"
    """The registered name."""
    k: int = Field(4, ge=2)
    """Responses per prompt, of which the best is learnt."""


# ------------------------------------------------------------------------------------------------ losses of pairs


def sigmoid_loss(margins: Tensor, *, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """−(1 − ε) log σ(βx) − ε log σ(−βx). [*] -> [*].

    Source: Rafailov et al. 2023, equation 7; with ε Mitchell 2023, *A note on DPO with noisy preferences*.
    """
    x = beta * margins
    return -(1 - label_smoothing) * F.logsigmoid(x) - label_smoothing * F.logsigmoid(-x)


def hinge_loss(margins: Tensor, *, beta: float) -> Tensor:
    """max(0, 1 − βx). [*] -> [*]. Source: Liu et al. 2023 (RSO), the loss hinge-norm."""
    return F.relu(1 - beta * margins)


def ipo_loss(margins: Tensor, *, beta: float) -> Tensor:
    """(x − 1/2β)². [*] -> [*]. Source: Azar et al. 2023, equation 17, β being their τ."""
    return (margins - 1 / (2 * beta)) ** 2


def robust_loss(margins: Tensor, *, beta: float, label_smoothing: float) -> Tensor:
    """(−(1 − ε) log σ(βx) + ε log σ(−βx)) / (1 − 2ε): unbiased if a share ε of the labels is flipped. [*] -> [*].

    Source: Chowdhury, Kini, Natarajan 2024.
    """
    x = beta * margins
    return (-(1 - label_smoothing) * F.logsigmoid(x) + label_smoothing * F.logsigmoid(-x)) / (1 - 2 * label_smoothing)


def kto_pair_losses(
    chosen: Tensor, rejected: Tensor, chosen_kl: Tensor, rejected_kl: Tensor, *, beta: float
) -> tuple[Tensor, Tensor]:
    """1 − σ(β(r_c − z_r)) and 1 − σ(β(z_c − r_r)), r = log π − log π_ref, z = max(0, its mean). [*] ×4 -> [*] ×2.

    Each side is held against the divergence z of the other, in which no gradient flows.
    Source: Ethayarajh et al. 2023 (HALOs), the form of KTO for pairs.
    """
    against_chosen, against_rejected = rejected_kl.detach().clamp(min=0), chosen_kl.detach().clamp(min=0)
    return 1 - F.sigmoid(beta * (chosen - against_chosen)), 1 - F.sigmoid(beta * (against_rejected - rejected))


# ----------------------------------------------------------------------------------------------------- experience


@dataclass(frozen=True)
class DPOBatch(Preferences):
    """Pairs, and log π_ref of each side as the loss reads it [B]; 0 without a reference."""

    ref_chosen: Tensor
    ref_rejected: Tensor
    decided: Tensor
    """bool [B]: there is a preference. Other pairs have no part in any mean."""
    chosen_kl: Tensor | None = None
    """Mean of log π − log π_ref over the chosen of the whole step, and ...; [B], for `kto_pair`."""
    rejected_kl: Tensor | None = None
    """... over the rejected."""

    @property
    def weight(self) -> Tensor:
        """Pairs with a preference []."""
        return self.decided.sum().float()


@dataclass(frozen=True)
class ScoredResponses(TokenBatch):
    """K responses to each prompt, next to each other, with their scores and log π_ref [B]."""

    scores: Tensor
    ref_logps: Tensor


@dataclass(frozen=True)
class BestResponses(TokenBatch):
    """The best response to each prompt; ``decided`` bool [B]: it is better than another."""

    unit: ClassVar[str] = "responses"
    decided: Tensor

    @property
    def weight(self) -> Tensor:
        """Responses that are better than another []."""
        return self.decided.sum().float()


def best_and_worst(x: ScoredResponses, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of the best and the worst of each k, by score alone, the first of equals. -> [B / k] ×3.

    The third is bool: they differ in score, and are not one response that was scored twice.
    """
    groups = x.scores.view(-1, k)
    first = torch.arange(0, len(x), k, device=groups.device)
    best, worst = first + groups.argmax(1), first + groups.argmin(1)
    ids = x.sequences.input_ids.masked_fill(~x.sequences.response_mask, -1)  # which is no token
    return best, worst, (x.scores[best] > x.scores[worst]) & (ids[best] != ids[worst]).any(1)


# ------------------------------------------------------------------------------------------------------- trainers

C = TypeVar("C", bound=DPOConfig)


class PairTrainer(AccelerateRLTrainer[C]):
    """loss = mean f(x), x = (log π(y_c) − log π_ref(y_c)) − (log π(y_r) − log π_ref(y_r)), f the loss of a pair."""

    @property
    def needs_reference(self) -> bool:
        """Not for a loss without one."""
        return not self.method.reference_free

    @classmethod
    def tiny_contexts(cls) -> dict[str, dict[str, Any]]:
        """Lengths count in the loss that may leave them out."""
        return {"ipo_length_normalize": {"method.loss_type": "ipo"}}

    def logps(self, logprobs: Tensor, mask: Tensor) -> Tensor:
        """log π of whole responses, EOS included; for IPO the mean over their tokens. [B, T] ×2 -> [B]."""
        sums = masked_sum(logprobs, mask, dim=1)
        return sums / mask.sum(1) if self.method.loss_type == "ipo" and self.method.ipo_length_normalize else sums

    def read(self, policy: Callable[[Sequences], TokenOutputs], batch: Preferences) -> tuple[Tensor, Tensor]:
        """log π of the chosen and of the rejected [B], from one pass over both."""
        both = batch.both
        chosen, rejected = self.logps(policy(both).logprobs, both.response_mask).chunk(2)
        return chosen, rejected

    def prepare_step(self, batch: DPOBatch) -> DPOBatch:
        """For `kto_pair` the divergences, which are means over the step and not over a micro-batch (law 3)."""
        if self.method.loss_type != "kto_pair":
            return batch
        sums = torch.zeros(3, dtype=torch.float64)
        for micro in self.micro_batches(batch):
            micro = micro.to(self.accelerator.device)
            chosen, rejected = self.read(self.unwrapped, micro)
            ratios = torch.stack([chosen - micro.ref_chosen, rejected - micro.ref_rejected, torch.ones_like(chosen)])
            sums += masked_sum(ratios, micro.decided, dim=1).cpu()
        total = self.reduce(sums)
        chosen_kl, rejected_kl = ((part / total[2]).float().expand(len(batch)) for part in total[:2])
        return replace(batch, chosen_kl=chosen_kl, rejected_kl=rejected_kl)

    def losses(self, chosen: Tensor, rejected: Tensor, batch: DPOBatch) -> Tensor:
        """f of each pair, from log π − log π_ref of its sides. [B] ×2 -> [B]."""
        method, margins = self.method, chosen - rejected
        smoothing = {"beta": method.beta, "label_smoothing": method.label_smoothing}
        match method.loss_type:
            case "sigmoid":
                return sigmoid_loss(margins, **smoothing)
            case "robust":
                return robust_loss(margins, **smoothing)
            case "hinge":
                return hinge_loss(margins, beta=method.beta)
            case "ipo":
                return ipo_loss(margins, beta=method.beta)
        assert batch.chosen_kl is not None, "prepare_step has seen the whole step"
        assert batch.rejected_kl is not None, "prepare_step has seen the whole step"
        sides = kto_pair_losses(chosen, rejected, batch.chosen_kl, batch.rejected_kl, beta=method.beta)
        return (sides[0] + sides[1]) / 2

    def loss(self, batch: DPOBatch) -> tuple[Tensor, Metrics]:
        """f, a mean over the pairs with a preference. -> []."""
        logps, decided = self.read(self.policy, batch), batch.decided
        ratios = logps[0] - batch.ref_chosen, logps[1] - batch.ref_rejected
        margins = self.method.beta * (ratios[0] - ratios[1])
        return masked_mean(self.losses(*ratios, batch), decided), {
            "rewards/chosen": Mean.of(self.method.beta * ratios[0], decided),
            "rewards/rejected": Mean.of(self.method.beta * ratios[1], decided),
            "rewards/margins": Mean.of(margins, decided),
            "rewards/accuracies": Mean.of(preference_accuracy(*ratios), decided),
            "logps/chosen": Mean.of(logps[0], decided),
            "logps/rejected": Mean.of(logps[1], decided),
        }


@register_trainer("dpo")
class DPOTrainer(PairTrainer[DPOConfig]):
    """DPO on the pairs of a dataset; what the reference says about them is computed once (F-12)."""

    inputs: ClassVar[tuple[str, ...]] = ("samples",)
    sample_format = "preference"

    def make_experience(self, rows: list[Row]) -> DPOBatch:
        """Pairs as sequences, with log π_ref of both sides."""
        pairs = self.encode_preferences(rows)
        ref = torch.zeros(len(rows), 2, device=pairs.chosen.input_ids.device)
        if self.needs_reference:
            ref = self.in_micro_batches(pairs, lambda micro: torch.stack(self.read(self.reference, micro), dim=1))
        decided = torch.ones(len(rows), dtype=torch.bool, device=ref.device)
        return DPOBatch(pairs.chosen, pairs.rejected, ref[:, 0], ref[:, 1], decided)


@register_trainer("online_dpo")
class OnlineDPOTrainer(PairTrainer[OnlineDPOConfig]):
    """DPO on the best and the worst of k responses of the policy's own, by score alone (Guo et al. 2024)."""

    inputs: ClassVar[tuple[str, ...]] = ("reward_fn", "prompts")
    group = "k"

    @property
    def experience_rows(self) -> int:
        """A pair for each prompt."""
        return self.collection_rows

    def experience(self, rollouts: Rollouts, scores: Tensor) -> ScoredResponses:
        """What the reference says about scored responses, and how far the policy is from it."""
        sequences, mask = rollouts.sequences, rollouts.sequences.response_mask
        totals = per_response(scores)
        if not self.needs_reference:
            return ScoredResponses(sequences, totals, torch.zeros_like(totals))
        logprobs, ref_logprobs = self.behaviour(rollouts).logprobs, self.reference(sequences).logprobs
        self.record(
            {
                "policy/kl": Mean.of(masked_sum(kl_k1(logprobs, ref_logprobs), mask, dim=1)),
                "policy/kl_per_token": Mean.of(kl_k3(logprobs, ref_logprobs), mask),
            }
        )
        return ScoredResponses(sequences, totals, self.logps(ref_logprobs, mask))

    def prepare_experience(self, experience: ScoredResponses) -> DPOBatch:
        """The best and the worst response to each prompt as a pair."""
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
    """loss = −mean log π(best of k responses), whole responses, EOS included: expert iteration, no reference."""

    inputs: ClassVar[tuple[str, ...]] = ("reward_fn", "prompts")
    group = "k"

    @property
    def experience_rows(self) -> int:
        """A response for each prompt."""
        return self.collection_rows

    def experience(self, rollouts: Rollouts, scores: Tensor) -> ScoredResponses:
        """Scored responses."""
        totals = per_response(scores)
        return ScoredResponses(rollouts.sequences, totals, torch.zeros_like(totals))

    def prepare_experience(self, experience: ScoredResponses) -> BestResponses:
        """The best response to each prompt."""
        best, _, decided = best_and_worst(experience, self.method.k)
        self.record({"reward/best": Mean.of(experience.scores[best]), "rollout/ties": Mean.of(~decided)})
        return BestResponses(experience.sequences.select(best), decided)

    def loss(self, batch: BestResponses) -> tuple[Tensor, Metrics]:
        """Negative log-likelihood of whole responses, a mean over those that are better than another. -> []."""
        logps = masked_sum(self.policy(batch.sequences).logprobs, batch.sequences.response_mask, dim=1)
        return -masked_mean(logps, batch.decided), {"logps/best": Mean.of(logps, batch.decided)}
