"""Odds ratio preference optimisation."""

from __future__ import annotations

from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from trainkit_trl.trainer.pairs import ReferenceFreeTrainer


class ORPOTrainer(ReferenceFreeTrainer):
    """ORPO on rows with ``prompt``, ``chosen`` and ``rejected``; the arguments are those of `ReferenceFreeTrainer`."""

    method: ClassVar[str] = "orpo"
    section: ClassVar[str] = "ORPOTrainer"

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
