"""A game of several turns, and REINFORCE (Williams 1992) that credits every turn with what follows it."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from trainkit import AccelerateRLTrainer, MethodConfig, Rollouts, TokenBatch, register_trainer
from trainkit.functional import masked_mean, place_scores, zero_masked
from trainkit.metrics import Mean, Metrics
from trainkit.rollouts import Turn

LETTERS = "abcdefgh"


class Guess:
    """The model guesses a letter, and is told "a" if the secret one is lower, "h" if it is higher."""

    def __init__(self, row: Mapping[str, Any]) -> None:
        self.secret = random.Random(row["episode_seed"]).choice(LETTERS)

    def step(self, output: str) -> Turn:
        """Return whether the secret letter is lower or higher; the episode ends with the right guess."""
        guess = output[:1]
        if guess == self.secret:
            return Turn(reward=1.0, done=True)
        return Turn("a" if guess > self.secret else "h", reward=0.0)


class TurnsConfig(MethodConfig):
    """Settings of REINFORCE over turns."""

    section_defaults: ClassVar[dict[str, Any]] = {"optimizer": {"lr": 1e-5}, "train": {"total_steps": 1000}}

    name: str = "_test_turns"
    """The registered name."""


@dataclass(frozen=True)
class TurnsBatch(TokenBatch):
    """Experience; returns [B, T], the rewards from a token on."""

    returns: Tensor


@register_trainer("_test_turns")
class TurnsTrainer(AccelerateRLTrainer[TurnsConfig]):
    """Trainer of REINFORCE over turns: loss = −mean (G_t − mean G) log π_t, G the rewards from the token on."""

    inputs: ClassVar[tuple[str, ...]] = ("environment", "prompts")
    encoder_decoders = False

    def experience(self, rollouts: Rollouts, scores: Tensor) -> TurnsBatch:
        """Return the episodes with their returns [B, T]."""
        mask = rollouts.sequences.response_mask
        rewards = place_scores(scores, mask)
        return TurnsBatch(rollouts.sequences, zero_masked(rewards.flip(1).cumsum(1).flip(1), mask))

    def prepare_experience(self, experience: TurnsBatch) -> TurnsBatch:
        """Subtract the mean return over the collection of all processes."""
        mask = experience.sequences.response_mask
        total, count = self.reduce(experience.returns[mask].sum()), self.reduce(mask.sum())
        return TurnsBatch(experience.sequences, zero_masked(experience.returns - total / count, mask))

    def loss(self, batch: TurnsBatch) -> tuple[Tensor, Metrics]:
        """Return −G_t log π_t, a mean over response tokens. -> []."""
        mask = batch.sequences.response_mask
        logprobs = self.policy(batch.sequences).logprobs
        return masked_mean(-batch.returns * logprobs, mask), {"policy/returns": Mean.of(batch.returns, mask)}
