"""Best-of-n sampling: of n responses to each prompt, those with the highest scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainkit.config import SamplingConfig
from trainkit.data import Rollouts, Row
from trainkit.errors import ConfigError, RewardError, describe
from trainkit.functional import per_response
from trainkit.rollouts import RewardFn, score
from trainkit.seeding import PLACE

if TYPE_CHECKING:
    from trainkit.trainer.accelerate import AccelerateRLTrainer

    Trainer = AccelerateRLTrainer[Any]


def check_best(trainer: Trainer, n: Any, keep: Any, reward_fn: Any, settings: SamplingConfig) -> None:
    """Raise a `ConfigError` unless ``keep`` of ``n`` responses can be chosen by their scores."""
    for name, value, most in (("n", n, None), ("keep", keep, n)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1 or (most is not None and value > most):
            allowed = "of at least 1" if most is None else f"from 1 to n, which is {most}"
            raise ConfigError(f"best-of-n sampling: {name} is {describe(value)}; give an integer {allowed}")
    if reward_fn is not None and not callable(reward_fn):
        raise ConfigError(f"reward_fn should be a function; given {describe(reward_fn)}")
    if reward_fn is None and not trainer.scores_samples:
        raise ConfigError("best-of-n sampling needs scores, and the run has no reward function; give reward_fn")
    if n > 1 and (settings.temperature == 0 or settings.top_k == 1):
        field = "temperature is 0" if settings.temperature == 0 else "top_k is 1"
        raise ConfigError(
            f"best-of-n sampling: {field}, so that all {n} responses to a prompt are the same; give a temperature > 0 "
            "and a top_k of 0 or more than 1, or n = 1"
        )


def choose_best(
    trainer: Trainer,
    rows: Sequence[Row],
    settings: SamplingConfig,
    seeds: Sequence[int],
    n: int,
    keep: int,
    reward_fn: RewardFn | None,
) -> tuple[Rollouts, Tensor]:
    """Sample a response to each row [B·n], or play an episode; return the best of each n, and their scores [B·keep].

    Rows of one prompt are adjacent. The best is the first, and of equal scores that of the response that was sampled
    first. `rollout.batch_size` responses are sampled and scored at a time.

    Raises:
        RewardError: as `trainkit.rollouts.score`; or a score is not finite.
    """
    size, parts, scores = trainer.config.rollout.batch_size, list[Rollouts](), list[Tensor]()
    for start in range(0, len(rows), size):
        part = slice(start, start + size)
        rollouts = trainer.sampling.sample(list(rows[part]), settings, "generate", seeds[part])
        scores.append(_finite(_scores(trainer, rollouts, reward_fn)))
        parts.append(replace(rollouts, hidden=None))  # D numbers a token, of responses that are mostly not returned
    whole = torch.cat(scores)
    ranks = whole.view(-1, n).sort(dim=1, descending=True, stable=True).indices[:, :keep]
    chosen = (ranks + torch.arange(0, len(whole), n, device=ranks.device).unsqueeze(1)).flatten()
    best = Rollouts.cat(parts).select(chosen.tolist())
    own = [{name: value for name, value in row.items() if name != PLACE} for row in best.rows]
    return replace(best, rows=own), whole[chosen]


def _scores(trainer: Trainer, rollouts: Rollouts, reward_fn: RewardFn | None) -> Tensor:
    """Return the scores [B] by ``reward_fn``, or those of the run; rewards per token are summed."""
    if reward_fn is None:
        return per_response(trainer.score(rollouts))
    numbered = replace(rollouts, rows=[trainer.text.numbered(row) for row in rollouts.rows])
    found = score(reward_fn, numbered, trainer.tokenizer, trainer.config.reward, step=trainer.progress.step)
    return per_response(found).to(trainer.accelerator.device)


def _finite(scores: Tensor) -> Tensor:
    """Return the scores, which `reward.on_nonfinite` may have left infinite or NaN."""
    if not bool(scores.isfinite().all()):
        at = int((~scores.isfinite()).nonzero()[0])
        raise RewardError(
            f"best-of-n sampling: the score of sample {at} is {float(scores[at]):g}, and scores that are compared must "
            "be finite, whatever reward.on_nonfinite is; return finite numbers"
        )
    return scores
