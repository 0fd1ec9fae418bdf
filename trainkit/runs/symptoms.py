"""The checks of the health monitor. Each looks at what is remembered of the metrics, and returns a finding or None.

The limits are far from what the shipped examples show in training that succeeds: `benchmarks/health.py` measures that
no check finds anything in them, and which planted faults are found.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

FEW, MANY = 3, 10
"""Values that must agree, so that a single one is no finding; and the values that are remembered of each metric."""
PER_COLLECTION = ("policy/approx_kl", "policy/clipfrac")
"""Metrics of which the mean over the steps on a collection is looked at."""
RATIO, FIRST_KL = 1e-3, 1e-4
"""Largest distance of the ratio from 1, and largest KL, at the first update on a collection."""
HALF_PRECISION = 100
"""Factor of both under mixed precision."""
UPDATE_KL, CLIPPED, SOME_KL = 0.2, 0.5, 0.02
"""Largest mean KL to the policy that sampled; largest mean share of clipped ratios, and the KL from which on it counts:
narrow ranges clip small changes. In `FEW` collections in a row: the first one may change the policy a lot."""
HALVED = 0.5
"""Entropy after the updates on one collection, as a share of that before, that makes large ones a finding at once."""
RISEN = 0.2
"""Rise of the mean reward that is no noise, as a share of the standard deviation of rewards at the beginning."""
FAR, FAR_FOR_NOTHING = 3.0, 1.0
"""Largest KL from the reference per token, in nats: where the reward has risen, and where it has not."""
COLLAPSED = 0.1
"""Smallest entropy where the reward has not risen, as a share of that at the beginning."""
ENDED = 0.02
"""Smallest share of responses that end by themselves."""
REPEATED, LONG = 0.9, 16
"""Largest share of tokens that repeat those before them, in responses of so many tokens."""
NO_GRADIENT, STEPS = 1e-10, 5
"""Gradient norm that counts as zero, and the steps in a row for which it has to be."""
LEARNING = 100
"""Steps that a value function has to learn from."""
WORSE = -0.1
"""Explained variance at which a value function is worse than a constant by more than noise."""
SAMPLER_KL, SAMPLE_SIZE = 0.2, 0.5
"""Largest KL of the sampler from the policy per token; smallest effective sample size, as a share."""
GAINED, FELL_BACK = 0.1, 0.5
"""Gain of a held-out metric that is no noise, as a share of its highest value; largest share of it that may be lost."""
NO_MEASURES = ("eval/loss/", "eval/time", "eval/length", "eval/turns", "eval/failed")
"""Beginnings of the names of evaluated metrics of which higher values are not better."""
OVERFITTED = 0.1
"""Largest rise of the held-out loss above its minimum, as a share."""


def mean(values: Sequence[float]) -> float:
    """Return the mean of values, which need not be finite; `statistics.fmean` refuses inf − inf."""
    return sum(values) / len(values)


@dataclass
class Series:
    """What is remembered of a metric: its first values, its extremes and its latest values, oldest first."""

    count: int = 0
    first: list[float] = field(default_factory=list)
    low: float = math.inf
    high: float = -math.inf
    last: list[float] = field(default_factory=list)

    def add(self, value: float) -> None:
        """Add a value; NaN is ignored."""
        if math.isnan(value):
            return
        self.count += 1
        if len(self.first) < FEW:
            self.first.append(value)
        self.low, self.high = min(self.low, value), max(self.high, value)
        self.last = [*self.last[1 - MANY :], value]

    @property
    def start(self) -> float:
        """The mean of the first values."""
        return mean(self.first)


class Seen(dict[str, Series]):
    """What is remembered of the metrics, by name."""

    def add(self, metrics: Mapping[str, float]) -> None:
        """Add the values of metrics, except times."""
        for name, value in metrics.items():
            if not name.startswith("time/"):
                self.setdefault(name, Series()).add(value)

    def last(self, name: str, number: int = FEW) -> list[float]:
        """Return the latest values of a metric; none if there are fewer than ``number``."""
        series = self.get(name)
        return series.last[-number:] if series is not None and series.count >= number else []

    def now(self, name: str, number: int = FEW) -> float | None:
        """Return the median of the latest values of a metric; None if there are fewer than ``number``."""
        return statistics.median(values) if (values := self.last(name, number)) else None

    def start(self, name: str) -> float | None:
        """Return the mean of the first values of a metric; None if there are none."""
        series = self.get(name)
        return series.start if series is not None and series.count else None

    @property
    def improved(self) -> bool:
        """Whether the reward has risen since the beginning, by more than noise."""
        now, spread = self.now("reward/mean"), self.start("reward/std") or 0.0
        return now is not None and now > self["reward/mean"].start + RISEN * spread


@dataclass(frozen=True)
class Finding:
    """A finding: the name of the check, and in words what is wrong and what to do."""

    check: str
    message: str


def off_policy(metrics: Mapping[str, float], half_precision: bool) -> Finding | None:
    """Check that the first update on a collection starts from the policy that has sampled it."""
    ratio, kl = metrics.get("policy/ratio"), metrics.get("policy/approx_kl")
    factor = HALF_PRECISION if half_precision else 1
    if (ratio is None or abs(ratio - 1) <= RATIO * factor) and (kl is None or kl <= FIRST_KL * factor):
        return None
    differences = [None if ratio is None else f"ratio {ratio:.5g}", None if kl is None else f"KL {kl:.2g}"]
    return Finding(
        "off_policy",
        f"the first update on a collection has {', '.join(filter(None, differences))}, where the ratio should be 1 and "
        "the KL 0: the log-probabilities of the experience are not those that the loss computes. Look for other masks, "
        "positions or temperatures, for dropout (model.disable_dropout), and for an engine without the newest weights",
    )


def update_size(seen: Seen) -> Finding | None:
    """Check that the steps on a collection do not change the policy too much."""
    kls, shares = seen.last("policy/approx_kl", 1), seen.last("policy/clipfrac", 1)
    if not (_all_large(seen) or _collapses_at_once(seen)):
        return None
    clipped = f", and the share of clipped ratios {shares[-1]:.2g}" if shares else ""
    return Finding(
        "update_size",
        f"the steps on a collection change the policy too much: in their mean the KL to the policy that sampled "
        f"is {kls[-1]:.2g}{clipped}. Lower optimizer.lr, make fewer passes over a collection, or raise "
        "train.batch_size",
    )


def _all_large(seen: Seen) -> bool:
    kls, shares = seen.last("policy/approx_kl"), seen.last("policy/clipfrac")
    moved = min(kls, default=0.0)
    return moved > UPDATE_KL or (moved > SOME_KL and min(shares, default=0.0) > CLIPPED)


def _collapses_at_once(seen: Seen) -> bool:
    """Return whether the updates on one collection are large by both measures, and halve the entropy."""
    kl, share = max(seen.last("policy/approx_kl", 1), default=0.0), max(seen.last("policy/clipfrac", 1), default=0.0)
    entropies = seen.last("policy/entropy", 2)
    return kl > UPDATE_KL and share > CLIPPED and bool(entropies) and entropies[1] < HALVED * entropies[0]


def divergence(seen: Seen) -> Finding | None:
    """Check that the policy does not run away from its reference."""
    kl, length = seen.now("policy/kl"), seen.now("rollout/length")
    limit = FAR if seen.improved or not seen.last("policy/kl", MANY) else FAR_FOR_NOTHING
    if kl is None or not length or kl <= length * limit:
        return None
    return Finding(
        "divergence",
        f"the KL from the reference is {kl:.3g} nats per response, {kl / length:.2g} per token"
        f"{'' if seen.improved else ', and the reward has not risen'}: the policy writes what the reference would not. "
        "Read samples.jsonl; raise the KL coefficient, or lower optimizer.lr",
    )


def entropy(seen: Seen) -> Finding | None:
    """Check that the entropy does not collapse without a gain in reward."""
    now = seen.now("policy/entropy", 2 * FEW)
    if now is None or seen.improved or now > COLLAPSED * seen["policy/entropy"].start:
        return None
    return Finding(
        "entropy",
        f"the entropy has fallen from {seen['policy/entropy'].start:.3g} to {now:.3g} nats per token, and the reward "
        "has not risen: the policy explores no more. Lower optimizer.lr, raise the KL coefficient or the entropy bonus",
    )


def signal(seen: Seen) -> Finding | None:
    """Check that rewards differ where the algorithm compares them."""
    grouped = "reward/equal_in_group" in seen
    values = seen.last("reward/equal_in_group" if grouped else "reward/std")
    if not values or set(values) != {1.0 if grouped else 0.0} or seen.improved:
        return None
    whose = "the responses to each prompt" if grouped else "all responses"
    return Finding(
        "signal",
        f"in {FEW} collections in a row {whose} had equal rewards: nothing can be learnt from them. Look at the reward "
        "function; choose prompts that are neither too easy nor too hard",
    )


def truncation(seen: Seen) -> Finding | None:
    """Check that responses end by themselves."""
    share = seen.now("rollout/terminated")
    if share is None or share > ENDED or seen.get("rollout/length", Series()).high <= 1:
        return None
    return Finding(
        "truncation",
        f"{1 - share:.0%} of the responses are cut at rollout.max_new_tokens. If they should end by themselves, check "
        "that the model was trained to end with EOS, raise the limit, or set rollout.stop_sequences",
    )


def repetition(seen: Seen) -> Finding | None:
    """Check that responses do not repeat themselves."""
    now, length = seen.now("rollout/repetition"), seen.now("rollout/length")
    if now is None or length is None or now <= REPEATED or length < LONG:
        return None
    return Finding(
        "repetition",
        f"{now:.0%} of the tokens of a response repeat those before them (at the beginning "
        f"{seen['rollout/repetition'].start:.0%}). Read samples.jsonl; check whether the reward function pays for it, "
        "and raise the KL coefficient",
    )


def gradient(seen: Seen) -> Finding | None:
    """Check that the gradient is not zero."""
    values = seen.last("train/grad_norm", STEPS)
    if not values or max(values) > NO_GRADIENT or seen.improved:
        return None
    return Finding(
        "gradient",
        f"the gradient was zero in {STEPS} steps in a row, so the weights do not change. Look at the rewards and the "
        "loss: are all advantages 0, all tokens masked, or the trained layers frozen?",
    )


def value_function(seen: Seen) -> Finding | None:
    """Check that the value function explains some of the variance of returns."""
    values, explained = seen.last("values/explained_variance", MANY), seen.now("values/explained_variance", MANY)
    if explained is None or seen.get("train/lr", Series()).count < LEARNING:
        return None
    if explained > WORSE and any(values):  # where little can be explained, it is near 0, but never exactly
        return None
    return Finding(
        "value_function",
        f"the value function is no better than a constant: the median of its explained variance in {MANY} collections "
        f"is {explained:.2g}. Raise the coefficient of its loss or optimizer.lr, scale the rewards, or use an "
        "algorithm without values",
    )


def sampler(seen: Seen) -> Finding | None:
    """Check that responses are sampled by about the policy that is trained."""
    kl, size = seen.now("policy/sampler_kl", MANY), seen.now("rollout/effective_sample_size", MANY)
    if (kl is None or abs(kl) <= SAMPLER_KL) and (size is None or size >= SAMPLE_SIZE):
        return None
    parts = [None if kl is None else f"KL {kl:.2g} per token", None if size is None else f"sample size {size:.0%}"]
    return Finding(
        "sampler",
        f"the sampler and the policy are apart ({', effective '.join(filter(None, parts))}). Check that the engine has "
        "the newest weights and samples at the same precision; lower rollout.staleness or optimizer.lr",
    )


def held_out(seen: Seen) -> Finding | None:
    """Check that no held-out metric falls that had risen, while the reward goes on rising."""
    now = seen.now("reward/mean")
    if now is None or not seen.improved or now < seen["reward/mean"].high - 0.1 * abs(seen["reward/mean"].high):
        return None
    for name, series in seen.items():
        if not name.startswith("eval/") or name.startswith(NO_MEASURES) or series.count < FEW + 1:
            continue
        gained, best_now = series.high - series.first[0], max(series.last[-FEW:])
        fell_back = gained > GAINED * abs(series.high) and series.high - best_now > FELL_BACK * gained
        spread = seen.start("reward/std")
        below = name.startswith("eval/reward") and spread is not None and best_now < series.first[0] - RISEN * spread
        if fell_back or below:
            return Finding(
                "held_out",
                f"{name} was {series.high:.3g} and has fallen to {series.last[-1]:.3g}, while the reward in training "
                "goes on rising: the policy exploits the reward function, or learns the training prompts by heart. "
                "Stop at the best evaluation (train.save_best, or the plugin early_stop), or raise the KL coefficient",
            )
    return None


def overfitting(seen: Seen) -> Finding | None:
    """Check that the held-out loss does not rise."""
    values = seen.last("eval/loss/total", FEW + 1)
    if not values:
        return None
    low = seen["eval/loss/total"].low
    if min(values[-FEW:]) <= low + OVERFITTED * abs(low):
        return None
    return Finding(
        "overfitting",
        f"the held-out loss has risen from {low:.4g} to {values[-1]:.4g}: the model learns the samples by heart. Make "
        "fewer epochs, use more data, or stop at the best evaluation (the plugin early_stop)",
    )


OF_TRAINING: tuple[Callable[[Seen], Finding | None], ...] = (
    update_size,
    divergence,
    entropy,
    signal,
    truncation,
    repetition,
    gradient,
    value_function,
    sampler,
)
OF_EVALUATION: tuple[Callable[[Seen], Finding | None], ...] = (held_out, overfitting)
