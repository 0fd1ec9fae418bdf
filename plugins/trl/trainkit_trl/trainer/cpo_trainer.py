"""Contrastive preference optimisation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from trainkit_migrate import refusing
from trainkit_trl.trainer.pairs import ReferenceFreeTrainer


class CPOTrainer(ReferenceFreeTrainer):
    """CPO on rows with ``prompt``, ``chosen`` and ``rejected``; the arguments are those of `ReferenceFreeTrainer`."""

    method: ClassVar[str] = "cpo"
    section: ClassVar[str] = "CPOTrainer"
    of_loss: ClassVar[tuple[str, ...]] = (*ReferenceFreeTrainer.of_loss, "cpo_loss")
    names: ClassVar[Mapping[str, str]] = {"loss/nll": "nll_loss"}

    @property
    def averages(self) -> bool:
        """Whether log π of a side is a mean over its tokens: for ``"ipo"``."""
        return bool(self.trainer.method.loss_type == "ipo")

    def preference_loss(self, chosen: Tensor, rejected: Tensor) -> tuple[Tensor, Tensor, Tensor, dict[str, float]]:
        """Return what `cpo_loss` does, and no metrics."""
        return *self.cpo_loss(chosen, rejected), {}

    def cpo_loss(self, policy_chosen_logps: Tensor, policy_rejected_logps: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the losses of pairs and the rewards of both sides, without the likelihood. [B] ×2 -> [B] ×3.

        Args:
            policy_chosen_logps: log π of the chosen sides, sums over tokens, or for ``"ipo"`` means.
            policy_rejected_logps: those of the rejected sides.
        """
        losses = self.trainer.losses(policy_chosen_logps - policy_rejected_logps)
        return losses, (self.beta * policy_chosen_logps).detach(), (self.beta * policy_rejected_logps).detach()


__getattr__ = refusing(__name__)
