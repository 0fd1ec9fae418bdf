"""The space of a sweep: settings and what their values are taken from, as distributions of Optuna."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import Trial

from trainkit.config.places import value_at
from trainkit.errors import ConfigError, describe
from trainkit_sweep.settings import Range

Scalar = bool | int | float | str | None


@dataclass(frozen=True)
class Dimension:
    """A setting that is searched."""

    distribution: BaseDistribution
    values: Mapping[Any, Any] | None = None
    """The choices by what stands for them in Optuna, which stores scalars; None for a range."""

    def draw(self, trial: Trial, name: str) -> None:
        """Choose a value for a trial, unless it has one."""
        given = self.distribution
        if isinstance(given, CategoricalDistribution):
            trial.suggest_categorical(name, given.choices)
        elif isinstance(given, IntDistribution):
            trial.suggest_int(name, given.low, given.high, step=given.step, log=given.log)
        elif isinstance(given, FloatDistribution):
            trial.suggest_float(name, given.low, given.high, step=given.step, log=given.log)

    def value(self, stored: Any) -> Any:
        """Return the value of the setting for what Optuna has stored."""
        return stored if self.values is None else self.values[stored]


Space = dict[str, Dimension]
"""The dimensions by the dotted paths of settings."""


def make_space(parameters: Mapping[str, list[Any] | Range], base: Any, accepts: Callable[[str, Any], bool]) -> Space:
    """Return the space of the parameters.

    A range that is written with integers has integers, unless the setting is a fraction: its value in ``base`` is a
    float, or it has none, and the configuration accepts one.

    Raises:
        ConfigError: two choices of a parameter are the same.
    """
    plain, space = base.to_dict(), {}
    for name, given in parameters.items():
        if not isinstance(given, Range):
            space[name] = _choices(name, given)
            continue
        now = value_at(plain, tuple(name.split(".")))
        fraction = isinstance(now, float) or (now is None and accepts(name, given.low + 0.5))
        space[name] = _range(given, integers=given.integers and not fraction)
    return space


def _range(given: Range, integers: bool) -> Dimension:
    if integers:
        low, step = int(given.low), int(given.step or 1)
        most = int(given.high) - (int(given.high) - low) % step  # as Optuna does, with a warning
        return Dimension(IntDistribution(low, most, log=given.log, step=step))
    high: float = given.high
    if given.step is not None:
        high = given.low + int((given.high - given.low) / given.step + 1e-9) * given.step
    return Dimension(FloatDistribution(float(given.low), float(high), log=given.log, step=given.step))


def _choices(name: str, given: list[Any]) -> Dimension:
    labels = [value if isinstance(value, Scalar) else json.dumps(value) for value in given]
    values = dict(zip(labels, given, strict=True))
    if len(values) < len(given):
        raise ConfigError(f"parameters.{name}: two choices are equal ({describe(given)}); name each once")
    return Dimension(CategoricalDistribution(labels), values)


def grid(space: Space) -> dict[str, list[Any]]:
    """Return the values of each dimension, as Optuna stores them. Every range has a step."""
    found: dict[str, list[Any]] = {}
    for name, dimension in space.items():
        given = dimension.distribution
        if isinstance(given, CategoricalDistribution):
            found[name] = list(given.choices)
        elif isinstance(given, IntDistribution):
            found[name] = list(range(given.low, given.high + 1, given.step))
        elif isinstance(given, FloatDistribution):
            step = given.step or 1.0
            count = round((given.high - given.low) / step)
            found[name] = [min(given.low + at * step, given.high) for at in range(count + 1)]
    return found
