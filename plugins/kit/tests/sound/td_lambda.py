"""Actor and critic with TD(λ) whose λ differs among tokens: rare tokens cut the trace (Sutton, Barto 2018, 12.8)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from trainkit import AccelerateRLTrainer, MethodConfig, Rollouts, TokenBatch, TRLConfig, register_trainer
from trainkit.functional import masked_mean, place_scores, zero_masked
from trainkit.metrics import Mean, Metrics
from trainkit.models import Policy, load_heads, load_model, make_policy


class TDLambdaConfig(MethodConfig):
    """Settings of TD(λ)."""

    section_defaults: ClassVar[dict[str, Any]] = {
        "optimizer": {"groups": [{"match": "^value_head", "lr": 1e-4}]},  # the critic learns faster than the policy
        "train": {"total_steps": 1000},
    }
    name: str = "_sound_td_lambda"
    """The registered name."""
    lam: float = Field(0.95, ge=0, le=1)
    """The largest λ, that of tokens which were certain."""


@dataclass(frozen=True)
class TDLambdaBatch(TokenBatch):
    """Experience, [B, T] each; ``advantages`` holds rewards until they are complete."""

    advantages: Tensor
    returns: Tensor
    traces: Tensor


@register_trainer("_sound_td_lambda")
class TDLambdaTrainer(AccelerateRLTrainer[TDLambdaConfig]):
    """Trainer of TD(λ): A_t = δ_t + λ_{t+1} A_{t+1}, δ_t = r_t + V_{t+1} − V_t, λ_t = λ √π(y_t)."""

    inputs: ClassVar[tuple[str, ...]] = ("reward_fn", "prompts")

    def get_arch(self, config: TRLConfig[TDLambdaConfig]) -> Policy:
        """Return the language model with a value head."""
        model = load_model(config.model, self.live_model)
        policy = make_policy(model, temperature=config.rollout.temperature, logit_mask=self.logit_mask, value_head=True)
        return load_heads(policy, config.model.model_path)

    def experience(self, rollouts: Rollouts, scores: Tensor) -> TDLambdaBatch:
        """Return rewards, values and λ of every token. [B, T]."""
        policy, mask = self.behaviour(rollouts), rollouts.sequences.response_mask
        traces = self.method.lam * zero_masked(policy.logprobs, mask).exp().sqrt()
        return TDLambdaBatch(rollouts.sequences, place_scores(scores, mask), policy.values, zero_masked(traces, mask))

    def prepare_experience(self, experience: TDLambdaBatch) -> TDLambdaBatch:
        """Return advantages, and returns A + V. [B, T]."""
        mask = experience.sequences.response_mask
        rewards, values, traces = (
            zero_masked(x, mask) for x in (experience.advantages, experience.returns, experience.traces)
        )
        value = advantage = trace = torch.zeros(len(mask), device=mask.device)
        columns = []
        for t in range(mask.size(1) - 1, -1, -1):
            here = mask[:, t]
            found = rewards[:, t] + value - values[:, t] + trace * advantage
            columns.append(zero_masked(found, here))
            advantage, value, trace = (
                torch.where(here, new, old)
                for new, old in ((found, advantage), (values[:, t], value), (traces[:, t], trace))
            )
        advantages = torch.stack(columns[::-1], dim=1)
        return replace(experience, advantages=advantages, returns=zero_masked(advantages + values, mask))

    def loss(self, batch: TDLambdaBatch) -> tuple[Tensor, Metrics]:
        """Return −A log π + ½ (V − R)², a mean over response tokens. -> []."""
        told, mask = self.policy(batch.sequences), batch.sequences.response_mask
        error = 0.5 * (told.values - batch.returns) ** 2
        return masked_mean(-batch.advantages * told.logprobs + error, mask), {"values/error": Mean.of(error, mask)}
