"""The names of trlX for metrics of trainkit, and statistics that trlX has besides."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from trainkit.metrics import Mean, Metrics
from trainkit_trlx.utils.modeling import get_tensor_stats

if TYPE_CHECKING:
    from torch import Tensor

OWN = "trlx/"
"""What the names of statistics begin with in the directory of the run that are computed as in trlX."""

STATISTICS = {
    "reward/mean": "rollout_scores/mean",
    "reward/std": "rollout_scores/std",
    "policy/kl_coef": "kl_ctl_value",
    "policy/ratio": "ratio",
    "loss/policy": "losses/policy_loss",
    "loss/value": "losses/value_loss",
    "loss/q": "losses/loss_q",
    "loss/v": "losses/loss_v",
    "loss/cql": "losses/loss_cql",
    "loss/awac": "losses/loss_awac",
    "awac/weight": "awac_weight/mean",
    "train/lr": "learning_rate_group_0",
    "time/collect": "time/rollout_time",
    "time/reward": "time/rollout_score",
    "eval/time": "time/generate",
}
"""Names of trainkit with those of trlX for the same number. Others of trlX are those of trainkit."""
OF_A_METHOD = {
    "ppo": {
        "loss/total": "losses/total_loss",
        "values/mean": "old_values/mean",
        "values/predicted": "values/mean",
        "values/error": "values/values_error",
    },
    "ilql": {"loss/total": "losses/loss"},
    "sft": {"loss/total": "loss"},
    "rft": {"loss/total": "loss"},
}
"""Those of which the name in trlX depends on the method."""
ROOTS = {"policy/kl": "policy/sqrt_kl", "policy/kl_per_token": "policy/kl_per_token"}
"""Those of which trlX logs the square root."""
EVALUATED = {"eval/reward": "reward/mean", "eval/metrics/": "metrics/"}
"""What the names of evaluations begin with; a swept setting follows."""


def as_trlx(metrics: Mapping[str, float], method: str) -> dict[str, float]:
    """Return metrics of trainkit by the names of trlX; what trlX does not have keeps its name.

    Args:
        metrics: metrics by their names.
        method: the algorithm of trainkit.
    """
    names = {**STATISTICS, **OF_A_METHOD.get(method, {})}
    found: dict[str, float] = {}
    for name, value in metrics.items():
        if name in ROOTS:
            found[ROOTS[name]] = math.sqrt(max(value, 0.0))
        elif begins := next((each for each in EVALUATED if name.startswith(each)), None):
            found[EVALUATED[begins] + name.removeprefix(begins)] = value
        else:
            found[names.get(name, name)] = value
    own = {name.removeprefix(OWN): value for name, value in metrics.items() if name.startswith(OWN)}
    return {**{name: value for name, value in found.items() if not name.startswith(OWN)}, **own}


def tensor_statistics(name: str, x: Tensor, mask: Tensor) -> Metrics:
    """Return mean, minimum, maximum and deviation of ``x`` over ``mask``; those of micro-batches are averaged."""
    found = get_tensor_stats(x.detach(), mask, mask.sum())
    return {f"{OWN}{name}/{key}": Mean.of(value) for key, value in found.items()}
