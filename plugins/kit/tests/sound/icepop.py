"""IcePop: tokens whose importance ratio has left a range on either side have no gradient (Ling Team 2025)."""

from __future__ import annotations

from typing import Any

from pydantic import Field
from torch import Tensor

from researchers.dr_grpo import DrGRPOConfig, DrGRPOTrainer
from trainkit import register_trainer
from trainkit.functional import masked_sum, zero_masked
from trainkit.metrics import Mean, Metrics
from trainkit.testing import Declaration, Structure


class Config(DrGRPOConfig):
    """Settings of IcePop."""

    name: str = "_sound_icepop"
    """The registered name."""
    k: int = Field(4, ge=2)
    """Responses per prompt."""


@register_trainer("_sound_icepop")
class Trainer(DrGRPOTrainer):
    """Trainer of IcePop: −A ρ where |ρ − 1| ≤ ε, and 0 elsewhere."""

    method_class = Config

    def loss(self, batch: Any) -> tuple[Tensor, Metrics]:
        """Return −A ρ of the tokens in the range, divided by a constant, a mean over responses. -> []."""
        mask = batch.sequences.response_mask
        ratio = zero_masked(self.policy(batch.sequences).logprobs - batch.old_logprobs, mask).exp()
        near = mask & ((ratio - 1).abs() <= self.method.cliprange)
        sums = masked_sum(-batch.advantages.unsqueeze(1) * ratio, near, dim=1)
        return sums.mean() / self.config.rollout.max_new_tokens, {"policy/masked": Mean.of(~near, mask)}


KIT = Declaration(structure=(Structure(scores="group", surrogate="masked", gradient="policy", detached=()),))
