"""Responses that branch: all to one prompt begin with one stem, and are compared where they differ (TreeRL, 2025)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from trainkit import AccelerateRLTrainer, MethodConfig, Rollouts, Row, TokenBatch, register_trainer
from trainkit.functional import leave_one_out, masked_sum, per_response
from trainkit.metrics import Mean, Metrics
from trainkit.rollouts import assemble
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

    def sample(self, rows: list[Row], **overrides: Any) -> Rollouts:
        """Sample a branch for each row, after the stem that all rows of its prompt have."""
        limit = self.settings(**overrides).max_new_tokens
        if limit <= self.method.stem or self.environment is not None:
            return super().sample(rows, **overrides)
        owners = [(str(row["prompt"]), row.get("seed", place(row))) for row in rows]
        different = [*dict.fromkeys(owners)]  # a part of a collection has some of the rows of a prompt
        drawn = self.generate(
            [{"prompt": prompt, "seed": seed} for prompt, seed in different],
            **{**overrides, "max_new_tokens": self.method.stem},
        )
        stems = drawn.select([different.index(owner) for owner in owners])
        begun = [torch.cat([query, stem]) for query, stem in zip(stems.queries, stems.responses, strict=True)]
        longer = [{**row, "prompt": ids} for row, ids in zip(rows, begun, strict=True)]
        branches = super().sample(longer, **{**overrides, "max_new_tokens": limit - self.method.stem})
        parts = list(zip(*(self.numbers(part) for part in (stems, branches)), stems.terminated.tolist(), strict=True))
        whole = assemble(
            self.tokenizer,
            rows,
            [query.tolist() for query in stems.queries],
            [[*stem[0], *([] if ended else branch[0])] for stem, branch, ended in parts],
            terminated=stems.terminated | branches.terminated,
            logprobs=torch.tensor(
                [x for stem, branch, ended in parts for x in [*stem[1], *([] if ended else branch[1])]],
                device=stems.terminated.device,
            ),
            stops=[],
            skip_special_tokens=True,
        )
        self.collector.current.rollouts[-1:] = [whole]
        return whole

    def numbers(self, rollouts: Rollouts) -> list[tuple[list[int], list[float]]]:
        """Return the ids of each response, and their log-probabilities."""
        mask, logprobs = rollouts.sequences.response_mask, rollouts.logprobs
        assert logprobs is not None, "trainkit's sampler gives them"
        return [
            (ids.tolist(), own[keep].tolist())
            for ids, own, keep in zip(rollouts.responses, logprobs, mask, strict=True)
        ]

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
