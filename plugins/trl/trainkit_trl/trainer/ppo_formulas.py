"""Formulas of TRL that trainkit's PPO has as methods to override."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from trainkit import functional as F
from trainkit import get_trainer

if TYPE_CHECKING:
    from torch import Tensor

    from trainkit_trl.trainer.ppo_config import PPOConfig

log = logging.getLogger(__name__)
Trainer: Any = get_trainer("ppo")
PENALTIES = {"kl": F.kl_k1, "abs": F.kl_abs, "mse": F.kl_k2}
"""The penalties per token that are functions of the log-probabilities; ``full`` is that of whole distributions."""


def trainer_class(config: PPOConfig) -> Any:
    """Return trainkit's PPO with the penalty, the whitening and the normalisation that the configuration asks for."""
    if config.use_score_norm and not config.use_score_scaling:
        log.warning("use_score_norm has no effect without use_score_scaling, in TRL neither")
    if config.kl_penalty == "kl" and not (config.whiten_rewards or config.use_score_norm):
        return Trainer

    class PPO(Trainer):  # type: ignore[misc]
        """PPO with formulas of TRL."""

        @torch.no_grad()
        def penalty(self, sequences: Any, policy: Any, reference: Any) -> Tensor:
            if config.kl_penalty == "full":
                divergence: Tensor = self.unwrapped(sequences, reference=self.reference).divergence
                return divergence
            return PENALTIES[config.kl_penalty](policy.logprobs, reference.logprobs)

        def rewards(self, experience: Any, scores: Tensor) -> Tensor:
            rewards: Tensor = super().rewards(experience, scores)
            mask = experience.sequences.response_mask
            whitened = config.whiten_rewards
            return F.whiten(rewards, mask, shift_mean=False, reduce=self.reduce) if whitened else rewards

        def normalised(self, scores: Tensor, mask: Tensor, std: float) -> Tensor:
            mean = self.moments.mean if config.use_score_norm else 0.0
            return F.normalise_scores(scores, mask, mean=mean, std=std)

    return PPO
