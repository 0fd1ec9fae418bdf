"""The algorithm with which the kit checks observers and samplers: REINFORCE with a baseline."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

from torch import Tensor

from trainkit.config import MethodConfig
from trainkit.data import Rollouts, TokenBatch
from trainkit.functional import masked_mean, per_response, whiten
from trainkit.metrics import Mean, Metrics
from trainkit.plugins import register_trainer
from trainkit.trainer.accelerate import AccelerateRLTrainer

NAME = "_trainkit_kit"
"""The registered name; the underscore excludes it from `available_trainers`."""


class ReinforceConfig(MethodConfig):
    """Settings of REINFORCE: none besides the name."""

    name: str = NAME
    """The registered name."""


@dataclass(frozen=True)
class ReinforceBatch(TokenBatch):
    """Responses with their advantages [B]."""

    advantages: Tensor


class ReinforceTrainer(AccelerateRLTrainer[ReinforceConfig]):
    """loss = −mean A · log π(y_t | prompt, y_<t), A = (score − mean) / deviation. Williams 1992."""

    inputs: ClassVar[tuple[str, ...]] = ("reward_fn", "prompts")

    def experience(self, rollouts: Rollouts, scores: Tensor) -> ReinforceBatch:
        """Return rollouts with their scores."""
        return ReinforceBatch(rollouts.sequences, per_response(scores))

    def prepare_experience(self, experience: ReinforceBatch) -> ReinforceBatch:
        """Whiten scores to advantages over the collections of all processes."""
        scores = experience.advantages
        mask = scores.isfinite()
        return ReinforceBatch(experience.sequences, whiten(scores, mask, reduce=self.reduce))

    def loss(self, batch: ReinforceBatch) -> tuple[Tensor, Metrics]:
        """Return the mean of −A · log π over response tokens. -> []."""
        mask = batch.sequences.response_mask
        losses = -batch.advantages.unsqueeze(1) * self.policy(batch.sequences).logprobs
        return masked_mean(losses, mask), {"loss/policy": Mean.of(losses, mask)}


def registered() -> str:
    """Register the trainer, and return its name."""
    register_trainer(NAME)(ReinforceTrainer)
    return NAME


@cache
def attributes_of_the_loop() -> frozenset[str]:
    """Return the names of attributes that every trainer has after a run, and that are not the algorithm's."""
    from trainkit.testing.trainers import tiny_trainer

    with TemporaryDirectory() as folder:
        trainer: Any = tiny_trainer(registered(), Path(folder) / "run", train__total_steps=1)
        trainer.learn()
    return frozenset(vars(trainer))
