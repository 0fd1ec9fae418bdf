"""The progress of a run, in plain numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields


@dataclass
class Progress:
    """The progress of a run: all of the loop's own state, in plain numbers."""

    step: int = 0
    """Optimizer steps made, or skipped by `judge`."""
    collection: int = 0
    """Collections finished."""
    cursor: int = 0
    """Rows of the dataset used up by finished collections."""
    epoch: int = 0
    """Passes made over the current collection."""
    position: int = 0
    """Minibatches made in the current pass."""
    stopped: bool = False
    """Whether `judge` has skipped the rest of the current collection."""
    taken: int = 0
    """Rows of the dataset that the current collection uses, over all processes."""
    stop_reason: str = ""
    """Why `trainer.stop` has ended the run; empty if it has not."""
    prompts: int = 0
    """Prompts, or samples, of the current collection in one process."""
    generated: int = 0
    """Responses of `generate` so far: a key of their random numbers."""
    samples: int = 0
    """Rows of experience made so far, over all processes."""
    trained: int = 0
    """Rows that the steps so far were made on, over all processes. A row counts in each pass and epoch anew, and not in
    a step that was skipped."""
    tokens: int = 0
    """Units of averaging (`Batch.unit`: tokens, pairs, rows) in the steps so far, over all processes."""
    microbatch: int | None = None
    """The most rows of a micro-batch that fit into memory, where `train.microbatch_size` is ``auto``; None: as many as
    without the setting."""
    seconds: float = 0.0
    """Wall time of the run, including the parts before it was resumed."""
    unusable: int = 0
    """Collections in a row, up to now, of which no response has a usable score."""
    best: float = -math.inf
    """Highest mean reward of an evaluation."""
    evaluated: int | None = None
    """Step of the last evaluation."""
    evaluation: dict[str, float] = field(default_factory=dict)
    """Metrics of the last evaluation."""
    shares_prompts: bool = False
    """Whether the prompts of the current collection are shared among its rows."""
    keeps_trunk: bool = False
    """Whether the rows of an offline collection have the output of the frozen layers."""
    sampler: str = ""
    """The engine, or the class of the sampler, that `sampler_exact` describes."""
    sampler_exact: bool | None = None
    """Whether the sampler gives the policy's log-probabilities, measured on its first collection; None before that."""

    def become(self, other: Progress) -> None:
        """Take over the numbers of another one; the parts of a trainer hold this object."""
        for each in fields(self):
            setattr(self, each.name, getattr(other, each.name))
