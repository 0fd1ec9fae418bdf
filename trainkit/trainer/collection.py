"""A collection: what is sampled and scored between two rounds of steps, and how old the weights are for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from trainkit import metrics as m
from trainkit.data import Rollouts
from trainkit.errors import CheckpointError, describe
from trainkit.rollouts import Weights
from trainkit.runs.checkpoint import is_plain
from trainkit.seeding import PLACE, Place, Seen


@dataclass
class Collection:
    """One collection, in this process."""

    number: int = 0
    """Collections before it."""
    after: int = 0
    """Collections that the weights it is sampled with were trained on."""
    cursor: int = 0
    """Rows of the dataset that the collections before it use, over all processes."""
    taken: int = 0
    """Rows that it uses, over all processes."""
    prompts: int = 0
    """Prompts, or samples, in this process."""
    ordered: bool = False
    """Whether its rows are numbered in the order of the first pass."""
    weights: Weights | None = None
    """The weights it is sampled with; None: those of the model when it is sampled."""
    parts: list[tuple[Rollouts, Tensor]] = field(default_factory=list)
    """Scored rollouts, if it is sampled before its turn."""
    rollouts: list[Any] = field(default_factory=list)
    """What was sampled, for the hooks."""
    scores: list[Tensor] = field(default_factory=list)
    """The scores of the responses [B] of each part."""
    ref_logprobs: Tensor | None = None
    """Those of its experience [B, T] before `prepare_experience`, which need not keep them; for the hooks."""
    seen: Seen = field(default_factory=Counter)
    """Counts of its responses by the position of their row."""
    reward_seconds: float = 0.0
    """How long the calls of the reward function took in this process."""
    extras: dict[str, list[Any]] = field(default_factory=dict)
    """What the last call of the reward function returned besides scores, by name."""
    environment_seconds: float = 0.0
    """How long its environments took in this process."""
    dropped: int = 0
    """Its responses in this process without a usable score."""
    records: m.Metrics = field(default_factory=dict)
    """Metrics that were recorded while it was sampled before its turn."""

    @property
    def staleness(self) -> int:
        """How many collections the policy is trained on between the weights and the turn of the collection."""
        return self.number - self.after

    def state(self) -> dict[str, Any]:
        """Return the collection as plain data and tensors."""
        return {
            **{name: getattr(self, name) for name in ("number", "after", "cursor", "taken", "prompts")},
            "parts": [[_plain(rollouts), scores] for rollouts, scores in self.parts],
            "scores": self.scores,
            "records": {name: [type(metric).__name__, metric.tensors()] for name, metric in self.records.items()},
        }

    @classmethod
    def restored(cls, state: Mapping[str, Any], device: torch.device) -> Collection:
        """Return the collection whose state is given, with its rollouts on ``device``."""
        parts = [(_rollouts(fields).to(device), scores.to(device)) for fields, scores in state["parts"]]
        return cls(
            **{name: state[name] for name in ("number", "after", "cursor", "taken", "prompts")},
            parts=parts,
            rollouts=[rollouts for rollouts, _ in parts],
            scores=[scores.to(device) for scores in state["scores"]],
            records={name: getattr(m, kind)(*tensors) for name, (kind, tensors) in state["records"].items()},
        )


def _plain(rollouts: Rollouts) -> dict[str, Any]:
    """Return the fields of rollouts as plain data and tensors.

    Raises:
        CheckpointError: a column of a row is something else; names the column.
    """
    for row in rollouts.rows:
        for name, value in row.items():
            if not is_plain(value):
                raise CheckpointError(
                    f"the column {name!r} of a prompt is {describe(value)}, which no checkpoint can hold, and with "
                    "rollout.staleness > 0 checkpoints hold what is sampled ahead; give plain data, or set "
                    "train.save_interval to 0"
                )
    judged = rollouts.judged and [{k: v for k, v in each.items() if is_plain(v)} for each in rollouts.judged]
    return {**{each.name: getattr(rollouts, each.name) for each in fields(Rollouts)}, "judged": judged}


def _rollouts(fields: Mapping[str, Any]) -> Rollouts:
    rows = [{**row, **({PLACE: Place(*row[PLACE])} if PLACE in row else {})} for row in fields["rows"]]
    return Rollouts(**{**fields, "rows": rows})
