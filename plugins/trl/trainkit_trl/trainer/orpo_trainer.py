"""Odds ratio preference optimisation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from trainkit_migrate import refusing
from trainkit_trl.trainer.pairs import ReferenceFreeTrainer


class ORPOTrainer(ReferenceFreeTrainer):
    """ORPO on rows with ``prompt``, ``chosen`` and ``rejected``; the arguments are those of `ReferenceFreeTrainer`."""

    method: ClassVar[str] = "orpo"
    section: ClassVar[str] = "ORPOTrainer"
    of_loss: ClassVar[tuple[str, ...]] = (*ReferenceFreeTrainer.of_loss, "odds_ratio_loss")
    names: ClassVar[Mapping[str, str]] = {"loss/nll": "nll_loss", "odds/log_ratio": "log_odds_chosen"}
    averages = True

    def preference_loss(self, chosen: Tensor, rejected: Tensor) -> tuple[Tensor, Tensor, Tensor, dict[str, float]]:
        """Return minus the losses of `odds_ratio_loss`, the rewards, and its means."""
        found, good, bad, ratio, odds = self.odds_ratio_loss(chosen, rejected)
        return -found, good, bad, {"log_odds_ratio": ratio, "log_odds_chosen": odds}

    def odds_ratio_loss(
        self, policy_chosen_logps: Tensor, policy_rejected_logps: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, float, float]:
        """Return what is subtracted from the likelihood, and the rewards. [B] ×2 -> [B] ×3, and two means.

        The means are those of log σ of the log odds ratio, and of the log odds ratio.

        Args:
            policy_chosen_logps: means over tokens of log π of the chosen sides.
            policy_rejected_logps: those of the rejected sides.
        """
        ratios = self.trainer.log_ratios(policy_chosen_logps, policy_rejected_logps)
        found, beta = F.logsigmoid(ratios), self.beta
        rewards = [(beta * logps).detach() for logps in (policy_chosen_logps, policy_rejected_logps)]
        return beta * found, *rewards, found.mean().item(), ratios.mean().item()


__getattr__ = refusing(__name__)
