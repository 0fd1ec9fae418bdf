"""Formulas of TRL that trainkit's PPO has as methods to override."""

from __future__ import annotations

import logging
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from trainkit import functional as F
from trainkit import get_trainer
from trainkit.metrics import Mean, Std

if TYPE_CHECKING:
    from torch import Tensor

    from trainkit_trl.trainer.ppo_config import PPOConfig

log = logging.getLogger(__name__)
Trainer: Any = get_trainer("ppo")
PENALTIES = {"kl": F.kl_k1, "abs": F.kl_abs, "mse": F.kl_k2}
"""The penalties per token that are functions of the log-probabilities; ``full`` is that of whole distributions."""


def trainer_class(config: PPOConfig) -> Any:
    """Return trainkit's PPO with the penalty, the whitening and the normalisation that the configuration asks for.

    It keeps what TRL's statistics of a step have of single responses and tokens in ``seen``, and the seconds that the
    parts of a step took in ``seconds``.
    """
    if config.use_score_norm and not config.use_score_scaling:
        log.warning("use_score_norm has no effect without use_score_scaling, in TRL neither")

    class PPO(Trainer):  # type: ignore[misc]
        """PPO with formulas and statistics of TRL."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.seen: dict[str, Tensor] = {}
            self.seconds: dict[str, float] = {}

        def experience(self, rollouts: Any, scores: Tensor) -> Any:
            started = perf_counter()
            found = super().experience(rollouts, scores)
            self.seconds["time/ppo/forward_pass"] = perf_counter() - started
            return found

        def prepare_experience(self, experience: Any) -> Any:
            started, x, coef = perf_counter(), experience, self.kl.coef
            batch, mask = super().prepare_experience(experience), experience.sequences.response_mask
            without = -coef * x.penalty
            self.record(
                {
                    "reward/non_score": Mean.of(without, mask),
                    "values/std": Std.of(x.values, mask),
                    "returns/std": Std.of(batch.returns, mask),
                    "advantages/mean": Mean.of(batch.advantages, mask),
                }
            )
            kls = F.masked_sum(F.kl_k1(x.logprobs, x.ref_logprobs), mask, dim=1)
            self.seen = {
                "objective/kl_dist": kls.cpu(),
                "objective/logprobs": F.zero_masked(x.logprobs, mask).cpu(),
                "objective/ref_logprobs": F.zero_masked(x.ref_logprobs, mask).cpu(),
                "ppo/policy/advantages": batch.advantages[mask].cpu(),
            }
            self.seconds["time/ppo/compute_rewards"] = perf_counter() - started
            return batch

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
