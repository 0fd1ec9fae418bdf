"""AWR: regression on samples, weighted by the exponential of their advantages over a critic (Peng et al. 2019)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from trainkit import AccelerateRLTrainer, MethodConfig, Row, TokenBatch, TRLConfig, register_trainer
from trainkit.functional import masked_mean
from trainkit.metrics import Mean, Metrics
from trainkit.models import Policy, load_heads, load_model, make_policy
from trainkit.testing import Declaration, Effect, Structure


class AWRConfig(MethodConfig):
    """Settings of AWR."""

    section_defaults: ClassVar[dict[str, Any]] = {"train": {"total_steps": 1000}}
    name: str = "_sound_awr"
    """The registered name."""
    temperature: float = Field(1.0, gt=0)
    """β: weights are exp(A / β)."""
    weight_max: float = Field(20.0, ge=1)
    """Upper bound of a weight."""
    vf_coef: float = Field(0.5, ge=0)
    """Weight of the critic's loss."""


@dataclass(frozen=True)
class AWRBatch(TokenBatch):
    """Samples with their rewards [B], which are the returns of all of their tokens."""

    rewards: Tensor


@register_trainer("_sound_awr")
class AWRTrainer(AccelerateRLTrainer[AWRConfig]):
    """Trainer of AWR: loss = −mean min(exp((R − V) / β), limit) log π + c · mean (R − V)²."""

    inputs: ClassVar[tuple[str, ...]] = ("samples", "rewards")

    def get_arch(self, config: TRLConfig[AWRConfig]) -> Policy:
        """Return the language model with a value head."""
        model = load_model(config.model, self.live_model)
        return load_heads(make_policy(model, value_head=True), config.model.model_path, config.model.kwargs)

    def make_experience(self, rows: list[Row]) -> AWRBatch:
        """Return the samples [B, T] with their rewards [B]."""
        sequences = self.encode_samples(rows)
        rewards = torch.tensor([float(row["reward"]) for row in rows], device=sequences.input_ids.device)
        return AWRBatch(sequences, rewards)

    def loss(self, batch: AWRBatch) -> tuple[Tensor, Metrics]:
        """Return the weighted negative log-likelihood and the critic's loss, means over output tokens. -> []."""
        method, mask, out = self.method, batch.sequences.response_mask, self.policy(batch.sequences)
        error = batch.rewards.unsqueeze(1) - out.values
        weights = (error.detach() / method.temperature).clamp(max=math.log(method.weight_max)).exp()
        loss = masked_mean(-weights * out.logprobs, mask) + method.vf_coef * masked_mean(error**2, mask)
        return loss, {
            "values/error": Mean.of(error**2, mask),
            "policy/weight": Mean.of(weights, mask),
            "values/mean": Mean.of(out.values, mask),
        }


KIT = Declaration(
    contexts={"weight_max": {"method.temperature": 0.5, "method.weight_max": 2.0}},
    effects={
        "vf_coef": [
            Effect("gradient", linear=(0.0, 0.5, 1.0)),
            Effect("slope of values", proportional=(0.0, 0.5, 1.0)),
        ],
        "temperature": Effect("slope of logprobs", rises=(0.25, 0.5, 1.0)),
    },
    structure=(Structure(scores="row", surrogate="none", detached=("values",)),),
)
