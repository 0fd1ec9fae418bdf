"""The settings and the loss of PPO, and its models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from trainkit import functional as F
from trainkit_migrate import refusing
from trainkit_migrate.shared import AdaptiveKLController, FixedKLController
from trainkit_trlx.data.method_configs import MethodConfig, register_method
from trainkit_trlx.models.modeling_base import (
    AutoModelForCausalLMWithHydraValueHead,
    AutoModelForCausalLMWithValueHead,
    AutoModelForSeq2SeqLMWithHydraValueHead,
    AutoModelForSeq2SeqLMWithValueHead,
    CausalLMOutputWithValue,
    Seq2SeqLMOutputWithValue,
)
from trainkit_trlx.utils.modeling import flatten_dict, get_tensor_stats, whiten

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "AdaptiveKLController",
    "AutoModelForCausalLMWithHydraValueHead",
    "AutoModelForCausalLMWithValueHead",
    "AutoModelForSeq2SeqLMWithHydraValueHead",
    "AutoModelForSeq2SeqLMWithValueHead",
    "CausalLMOutputWithValue",
    "FixedKLController",
    "PPOConfig",
    "Seq2SeqLMOutputWithValue",
]


@dataclass
@register_method
class PPOConfig(MethodConfig):
    """Settings of PPO."""

    ppo_epochs: int
    num_rollouts: int
    chunk_size: int
    init_kl_coef: float
    target: float | None
    horizon: int
    gamma: float
    lam: float
    cliprange: float
    cliprange_value: float
    vf_coef: float
    scale_reward: str | bool | None
    ref_mean: float | None
    ref_std: float | None
    cliprange_reward: float
    gen_kwargs: dict[str, Any]
    gen_experience_kwargs: dict[str, Any] | None = None
    num_value_layers_unfrozen: int = 0

    def get_advantages_and_returns(
        self, values: Tensor, rewards: Tensor, response_length: int, use_whitening: bool | None = True
    ) -> tuple[Tensor, Tensor]:
        """Return advantages and returns of the first ``response_length`` tokens of each row. [B, R] -> two [B, R].

        Whitened advantages have mean 0 and variance 1 over all of these entries of all processes, padding included:
        trainkit's own PPO whitens over the tokens of responses alone, as `trainkit.functional.whiten` does with a mask.
        """
        values, rewards = values[:, :response_length], rewards[:, :response_length]
        every = torch.ones_like(values, dtype=torch.bool)
        advantages, returns = F.gae(values, rewards, every, gamma=self.gamma, lam=self.lam)
        return (whiten(advantages) if use_whitening else advantages).detach(), returns

    def loss(
        self,
        logprobs: Tensor,
        values: Tensor,
        old_logprobs: Tensor,
        old_values: Tensor,
        advantages: Tensor,
        returns: Tensor,
        mask: Tensor,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Return the loss, policy + vf_coef · value, and its statistics. All are [B, R].

        Means are over the tokens of ``mask``, those of the statistics too.
        """
        mask = mask.bool()
        difference = F.zero_masked(logprobs - old_logprobs, mask)
        ratio = difference.exp()
        surrogate = F.clipped_surrogate(ratio, advantages, cliprange=self.cliprange)
        value_losses = F.clipped_value_loss(values, old_values, returns, cliprange=self.cliprange_value)
        policy_loss, value_loss = F.masked_mean(surrogate, mask), F.masked_mean(value_losses, mask)
        loss = policy_loss + self.vf_coef * value_loss
        with torch.no_grad():
            clipped = surrogate > -advantages * ratio
            squared = (values - returns) ** 2
            clipped_values = value_losses > 0.5 * squared  # where clipping makes the loss larger
            stats = {
                "losses": {
                    "total_loss": loss.item(),
                    "policy_loss": policy_loss.item(),
                    "value_loss": value_loss.item(),
                },
                "values": {
                    **_stats(values, mask),
                    "values_error": F.masked_mean(squared, mask).item(),
                    "values_mape_error": F.masked_mean(relative_error(values, returns), mask).item(),
                    "clipfrac": F.masked_mean(clipped_values.float(), mask).item(),
                },
                "old_values": _stats(old_values, mask),
                "returns": _stats(returns, mask),
                "policy": {
                    "approx_kl": F.masked_mean(ratio - 1 - difference, mask).item(),
                    "clipfrac": F.masked_mean(clipped.float(), mask).item(),
                },
                "ratio": F.masked_mean(ratio, mask).item(),
                "padding_percentage": 1 - mask.float().mean().item(),
            }
        return loss, flatten_dict(stats)


def relative_error(values: Tensor, returns: Tensor) -> Tensor:
    """Return how far values are from returns, as a share of these. [*], [*] -> [*]."""
    return (values - returns).abs() / (returns + 1e-2).abs()


def _stats(x: Tensor, mask: Tensor) -> dict[str, float]:
    return {name: float(value) for name, value in get_tensor_stats(x, mask, mask.sum()).items()}


__getattr__ = refusing(__name__)
