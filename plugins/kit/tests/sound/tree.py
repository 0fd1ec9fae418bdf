"""Responses that branch: all to one prompt begin with one stem, and are compared where they differ (TreeRL, 2025)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from pydantic import Field
from torch import Tensor

from trainkit import AccelerateRLTrainer, MethodConfig, Rollouts, Row, TokenBatch, register_trainer
from trainkit.functional import leave_one_out, masked_sum, per_response
from trainkit.metrics import Mean, Metrics
from trainkit.seeding import PLACE


class TreeConfig(MethodConfig):
    """Settings of branching responses."""

    section_defaults: ClassVar[dict[str, Any]] = {"train": {"total_steps": 1000}}
    name: str = "_sound_tree"
    """The registered name."""
    k: int = Field(4, ge=2)
    """Branches per prompt."""
    stem: int = Field(2, ge=1)
    """Tokens of the stem."""


def place(row: Row) -> int:
    """Return the position of a row in the stream of prompts; 0 for one that is not of the stream."""
    return row[PLACE].position if PLACE in row else 0


@dataclass(frozen=True)
class TreeBatch(TokenBatch):
    """Experience; advantages [B]. The loss is a mean over responses."""

    unit: ClassVar[str] = "responses"
    advantages: Tensor

    @property
    def weight(self) -> Tensor:
        """Number of responses []."""
        return self.advantages.new_tensor(len(self))


@register_trainer("_sound_tree")
class TreeTrainer(AccelerateRLTrainer[TreeConfig]):
    """Trainer of branching responses: A = score − mean of the other branches; a stem has their sum, which is 0."""

    inputs: ClassVar[tuple[str, ...]] = ("reward_fn", "prompts")
    group = "k"
    encoder_decoders = False
    images = False  # stems are sampled to texts

    def sample(self, rows: list[Row], **overrides: Any) -> Rollouts:
        """Sample a branch for each row, after the stem that all rows of its prompt have."""
        stem = self.method.stem
        if self.settings(**overrides).max_new_tokens <= stem or self.environment is not None:
            return super().sample(rows, **overrides)
        owners = [(str(row["prompt"]), row.get("seed", place(row))) for row in rows]
        different = [*dict.fromkeys(owners)]  # a part of a collection has some of the rows of a prompt
        prompts = [{"prompt": prompt, "seed": seed} for prompt, seed in different]
        stems = self.generate(prompts, **{**overrides, "max_new_tokens": stem})
        stems = replace(stems.select([different.index(owner) for owner in owners]), rows=rows)
        return self.branch(stems, [stem] * len(rows), **overrides)

    def experience(self, rollouts: Rollouts, scores: Tensor) -> TreeBatch:
        """Return the scores [B] in place of advantages."""
        return TreeBatch(rollouts.sequences, per_response(scores))

    def prepare_experience(self, experience: TreeBatch) -> TreeBatch:
        """Return the advantages over the other branches. [B]."""
        return replace(experience, advantages=leave_one_out(experience.advantages, self.method.k))

    def loss(self, batch: TreeBatch) -> tuple[Tensor, Metrics]:
        """Return −A Σ log π, a mean over responses. -> []."""
        logps = masked_sum(self.policy(batch.sequences).logprobs, batch.sequences.response_mask, dim=1)
        return -(batch.advantages * logps).mean(), {"policy/logps": Mean.of(logps)}
