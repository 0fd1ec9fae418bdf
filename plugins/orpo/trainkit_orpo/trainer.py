"""The trainers of ORPO and CPO: experience and loss."""

from __future__ import annotations

import math
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from trainkit import AccelerateRLTrainer, MethodConfig, Preferences, Row, register_trainer
from trainkit.functional import hinge_loss, ipo_loss, masked_sum, preference_accuracy, sigmoid_loss
from trainkit.metrics import Mean, Metrics
from trainkit_orpo.config import CPOConfig, ORPOConfig

# ------------------------------------------------------------------------------------------------ losses of pairs


def log_odds(logps: Tensor) -> Tensor:
    """Return log p − log(1 − p) for log p ≤ 0. [*] -> [*].

    log(1 − p) is log(−expm1(log p)) for p above ½ and log1p(−exp(log p)) below, so that neither loses digits. A p that
    is rounded to 1, whose odds are infinite, is taken as the number before 1. Hong, Lee, Thorne 2024, equation 4.
    """
    x = logps.clamp(max=-torch.finfo(logps.dtype).eps / 2)
    large = x > -math.log(2)
    above, below = torch.where(large, x, -1.0), torch.where(large, -1.0, x)  # or the other branch's gradient is NaN
    return x - torch.where(large, torch.log(-torch.expm1(above)), torch.log1p(-torch.exp(below)))


def odds_ratio_loss(log_ratios: Tensor) -> Tensor:
    """Return −log σ(x), for x the log of the odds ratio of a pair. [*] -> [*].

    Source: Hong, Lee, Thorne 2024, equations 5 and 7.
    """
    return -F.logsigmoid(log_ratios)


def simpo_loss(margins: Tensor, *, beta: float, gamma: float, label_smoothing: float = 0.0) -> Tensor:
    """Return the loss of SimPO, −(1 − ε) log σ(βx − γ) − ε log σ(γ − βx), x of mean log-probabilities. [*] -> [*].

    Source: Meng, Xia, Chen 2024, equation 6; ε as in DPO.
    """
    return sigmoid_loss(beta * margins - gamma, beta=1.0, label_smoothing=label_smoothing)


# ------------------------------------------------------------------------------------------------------- trainers

C = TypeVar("C", bound=MethodConfig)


class LogProbs(NamedTuple):
    """log π of the chosen and of the rejected outputs [B]."""

    chosen: Tensor
    rejected: Tensor


class PairTrainer(AccelerateRLTrainer[C]):
    """Base of trainers on pairs whose loss reads the policy alone."""

    inputs: ClassVar[tuple[str, ...]] = ("samples", "pairs")

    def make_experience(self, rows: list[Row]) -> Preferences:
        """Return the pairs as token sequences [B, T]."""
        return self.encode_preferences(rows)

    def read(self, batch: Preferences) -> tuple[LogProbs, LogProbs]:
        """Return the sums, and the means over tokens, of log π of both sides, EOS included, from one forward pass."""
        both = batch.both
        sums = masked_sum(self.policy(both).logprobs, both.response_mask, dim=1)
        means = sums / both.response_mask.sum(1)
        return LogProbs(*sums.chunk(2)), LogProbs(*means.chunk(2))

    def report(self, logps: LogProbs, means: LogProbs, losses: Tensor, beta: float) -> Metrics:
        """Return the metrics that both trainers have: rewards are β times ``logps``, ``losses`` those of pairs [B]."""
        chosen, rejected = beta * logps.chosen, beta * logps.rejected
        return {
            "rewards/chosen": Mean.of(chosen),
            "rewards/rejected": Mean.of(rejected),
            "rewards/margins": Mean.of(chosen - rejected),
            "rewards/accuracies": Mean.of(preference_accuracy(*logps)),
            "logps/chosen": Mean.of(logps.chosen),
            "logps/rejected": Mean.of(logps.rejected),
            "loss/nll": Mean.of(-means.chosen),
            "loss/preference": Mean.of(losses),
        }


@register_trainer("orpo")
class ORPOTrainer(PairTrainer[ORPOConfig]):
    """Trainer of ORPO: loss = mean (−log p_c − λ log σ(log odds_c − log odds_r)), log p a mean over tokens."""

    def log_ratios(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        """Return the log of the odds ratio of each pair, from log p of its two sides. [B] ×2 -> [B]."""
        return log_odds(chosen) - log_odds(rejected)

    def loss(self, batch: Preferences) -> tuple[Tensor, Metrics]:
        """Return the loss of ORPO, a mean over pairs. -> []."""
        beta, (_, means) = self.method.beta, self.read(batch)
        ratios = self.log_ratios(*means)
        losses = odds_ratio_loss(ratios)
        metrics = self.report(means, means, losses, beta)
        return (beta * losses - means.chosen).mean(), {**metrics, "odds/log_ratio": Mean.of(ratios)}


@register_trainer("cpo")
class CPOTrainer(PairTrainer[CPOConfig]):
    """Trainer of CPO and SimPO: loss = mean (f(log π_c − log π_r) − α log p_c), with f given by `loss_type`."""

    def losses(self, margins: Tensor) -> Tensor:
        """Return the loss of each pair, from the difference of log π of its two sides. [B] -> [B]."""
        method = self.method
        smoothing: dict[str, Any] = {"beta": method.beta, "label_smoothing": method.label_smoothing}
        match method.loss_type:
            case "sigmoid":
                return sigmoid_loss(margins, **smoothing)
            case "hinge":
                return hinge_loss(margins, beta=method.beta)
            case "ipo":
                return ipo_loss(margins, beta=method.beta)
            case "simpo":
                return simpo_loss(margins, gamma=method.simpo_gamma, **smoothing)

    def loss(self, batch: Preferences) -> tuple[Tensor, Metrics]:
        """Return the loss of CPO or SimPO, a mean over pairs. -> []."""
        method, (sums, means) = self.method, self.read(batch)
        logps = means if method.loss_type in ("ipo", "simpo") else sums
        losses = self.losses(logps.chosen - logps.rejected)
        metrics = self.report(logps, means, losses, method.beta)
        return (losses - method.nll_weight * means.chosen).mean(), metrics
