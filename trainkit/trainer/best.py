"""Best-of-n sampling: of n responses to each prompt, those with the highest scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from trainkit.config import SamplingConfig
from trainkit.data import Rollouts, Row
from trainkit.errors import ConfigError, RewardError, describe
from trainkit.functional import per_response
from trainkit.seeding import PLACE


def check_best(n: Any, keep: Any, reward_fn: Any, settings: SamplingConfig, *, scored: bool) -> None:
    """Raise a `ConfigError` unless ``keep`` of ``n`` responses can be chosen; ``scored``: the run has rewards."""
    for name, value, most in (("n", n, None), ("keep", keep, n)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1 or (most is not None and value > most):
            allowed = "of at least 1" if most is None else f"from 1 to n, which is {most}"
            raise ConfigError(f"best-of-n sampling: {name} is {describe(value)}; give an integer {allowed}")
    if reward_fn is not None and not callable(reward_fn):
        raise ConfigError(f"reward_fn should be a function; given {describe(reward_fn)}")
    if reward_fn is None and not scored:
        raise ConfigError("best-of-n sampling needs scores, and the run has no reward function; give reward_fn")
    if n > 1 and (settings.temperature == 0 or settings.top_k == 1):
        field = "temperature is 0" if settings.temperature == 0 else "top_k is 1"
        raise ConfigError(
            f"best-of-n sampling: {field}, so that all {n} responses to a prompt are the same; give a temperature > 0 "
            "and a top_k of 0 or more than 1, or n = 1"
        )


def choose_best(
    rows: Sequence[Row],
    seeds: Sequence[int],
    n: int,
    keep: int,
    size: int,
    sample: Callable[[Sequence[Row], Sequence[int]], Rollouts],
    score: Callable[[Rollouts], Tensor],
) -> tuple[Rollouts, Tensor]:
    """Sample a response to each row [B·n], or play an episode; return the best of each n, and their scores [B·keep].

    Rows of one prompt are adjacent. The best is the first, and of equal scores that of the response that was sampled
    first. ``size`` responses are sampled and scored at a time; scores [b, T] of tokens are summed.

    Raises:
        RewardError: as `trainkit.rollouts.score`; or a score is not finite.
    """
    parts, scores = list[Rollouts](), list[Tensor]()
    for start in range(0, len(rows), size):
        part = slice(start, start + size)
        rollouts = sample(rows[part], seeds[part])
        scores.append(_finite(per_response(score(rollouts))))
        parts.append(replace(rollouts, hidden=None))  # D numbers a token, of responses that are mostly not returned
    whole = torch.cat(scores)
    ranks = whole.view(-1, n).sort(dim=1, descending=True, stable=True).indices[:, :keep]
    chosen = (ranks + torch.arange(0, len(whole), n, device=ranks.device).unsqueeze(1)).flatten()
    best = Rollouts.cat(parts).select(chosen.tolist())
    rows_of_best = [{name: value for name, value in row.items() if name != PLACE} for row in best.rows]
    return replace(best, rows=rows_of_best), whole[chosen]


def _finite(scores: Tensor) -> Tensor:
    """Return the scores, which `reward.on_nonfinite` may have left infinite or NaN."""
    if not bool(scores.isfinite().all()):
        at = int((~scores.isfinite()).nonzero()[0])
        raise RewardError(
            f"best-of-n sampling: the score of sample {at} is {float(scores[at]):g}, and scores that are compared must "
            "be finite, whatever reward.on_nonfinite is; return finite numbers"
        )
    return scores
