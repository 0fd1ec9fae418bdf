"""Where a run stands, in plain numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass
class Progress:
    """Where a run stands: all of the loop's own state, in plain numbers."""

    step: int = 0
    """Optimizer steps made, or left out by `judge`."""
    collection: int = 0
    """Collections finished."""
    cursor: int = 0
    """Rows of the stream used up by finished collections."""
    epoch: int = 0
    """Passes made over the present collection."""
    position: int = 0
    """Minibatches made in the present pass."""
    stopped: bool = False
    """`judge` has left out what remains of the present collection."""
    sampled: int = 0
    """Parts of collections made, which key the randomness of sampling; the same on all processes."""
    generated: int = 0
    """Calls of `generate`, which key theirs."""
    samples: int = 0
    """Rows of experience made so far, all processes."""
    tokens: int = 0
    """Units of averaging (`Batch.unit`: tokens, pairs, rows) in the steps so far, all processes."""
    seconds: float = 0.0
    """Wall time spent, over all resumed parts of the run."""
    best: float = -math.inf
    """Highest mean reward of an evaluation."""
    evaluated: int | None = None
    """The step of the last evaluation ..."""
    evaluation: dict[str, float] = field(default_factory=dict)
    """... and what it found."""
    sampler: str = ""
    """The class of the sampler that ..."""
    sampler_exact: bool | None = None
    """... gives the policy's own numbers, or not, as its first collection showed; None before that."""
