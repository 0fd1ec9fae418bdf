"""Sweeps of trlX: ``tune_config`` of Ray, and for each setting a strategy with its values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainkit.config.faults import Fault, report
from trainkit.errors import ConfigError, describe, suggest
from trainkit.plain import Key

MODES = {"max": "maximize", "min": "minimize"}
SAMPLERS = {"random": "random", "bohb": "tpe"}
"""Search algorithms with samplers; BOHB draws from a tree-structured Parzen estimator."""
PRUNERS = {"fifo": "none", "hyperband": "hyperband", "hyperbandforbohb": "hyperband"}
CHOICES = {
    "direction": ("mode", MODES, "max"),
    "sampler": ("search_alg", SAMPLERS, "random"),
    "pruner": ("scheduler", PRUNERS, "fifo"),
}
"""Settings of a sweep with those of ``tune_config``, their values, and the one by default."""
NUMBERS = {"trials": "num_samples", "workers": "max_concurrent_trials"}
"""Settings of a sweep with those of ``tune_config`` of the same value."""
INSTEAD = {
    "bayesopt": "write bohb, which searches by a model of the results too, or random",
    "randn": "trainkit has no normal distribution; write uniform with a lower and an upper bound",
    "qrandn": "trainkit has no normal distribution; write quniform with a lower and an upper bound",
    "qloguniform": "a range has either log or a step; write loguniform, or choice with the values",
    "qlograndint": "a range has either log or a step; write lograndint, or choice with the values",
}
"""What is not supported, and what to write instead."""
LENGTHS = {"uniform": (2, 2), "quniform": (3, 3), "loguniform": (2, 3), "randint": (2, 2), "qrandint": (3, 3)}
LENGTHS |= {"lograndint": (2, 3)}
"""How many values a strategy has; a third one of a logarithm is its base, which changes nothing."""


def is_of_trlx(data: Any) -> bool:
    """Return whether a file has a sweep of trlX."""
    return isinstance(data, Mapping) and "tune_config" in data


def from_trlx(data: Mapping[str, Any], script: str | None, places: Mapping[Key, str]) -> dict[str, Any]:
    """Return the settings of a sweep of trainkit.

    Args:
        data: those of trlX.
        script: the script that trains.
        places: where keys are in the file, for messages.

    Raises:
        ConfigError: there is no script, or something is not supported; lists every fault with its place.
    """
    tune = data["tune_config"]
    if not isinstance(tune, Mapping):
        raise ConfigError(f"tune_config should be a mapping of settings; given {describe(tune)}")
    parameters = {str(name): about for name, about in data.items() if name != "tune_config"}
    faults: list[Fault] = []
    found = {**_tuned(tune, faults), "parameters": {}}
    for name, about in parameters.items():
        try:
            found["parameters"][name] = _parameter(about)
        except ValueError as error:
            faults.append(Fault((name,), str(error)))
    grids = [name for name, about in parameters.items() if isinstance(about, Mapping) and _strategy(about) == "grid"]
    if grids and len(grids) < len(parameters):
        others = ", ".join(name for name in parameters if name not in grids)
        faults.append(Fault((grids[0],), f"a grid with parameters that are drawn ({others}); write choice instead"))
    elif grids:
        found |= {"sampler": "grid", "trials": None}
    if script is None:
        faults.append(Fault(("tune_config",), "a sweep of trlX needs the script that trains: give --script FILE.py"))
    if faults:
        raise ConfigError(report(faults, dict(places)))
    return {**found, "run": {"script": script}}


def _tuned(tune: Mapping[str, Any], faults: list[Fault]) -> dict[str, Any]:
    """Return what ``tune_config`` says; add what is not supported to ``faults``."""
    found: dict[str, Any] = {}
    for ours, (theirs, known, usual) in CHOICES.items():
        given = str(tune.get(theirs) or usual).lower()
        if given not in known:
            advice = INSTEAD.get(given, f"it may be {', '.join(known)}")
            faults.append(Fault(("tune_config", theirs), f"{given!r} is not supported: {advice}"))
        found[ours] = known.get(given)
    found["metric"] = _metric(str(tune.get("metric", "reward/mean")))
    if not found["metric"]:
        told = f"{tune['metric']!r} is no metric of evaluations: write reward/mean or metrics/NAME"
        faults.append(Fault(("tune_config", "metric"), told))
    for ours, theirs in NUMBERS.items():
        if tune.get(theirs) is not None:
            found[ours] = tune[theirs]
    known_names = ["metric", *NUMBERS.values(), *(theirs for theirs, *_ in CHOICES.values())]
    for name in map(str, tune):
        if name not in known_names:
            faults.append(Fault(("tune_config", name), f"not supported{suggest(name, known_names)}; remove it"))
    return found


def _metric(name: str) -> str:
    """Return the name of trainkit; empty if evaluations have no such metric."""
    if name == "reward/mean":
        return "eval/reward"
    return f"eval/{name}" if name.startswith("metrics/") else ""


def _strategy(about: Mapping[str, Any]) -> str:
    return str(about.get("strategy")).removesuffix("_search")


def _parameter(about: Any) -> Any:
    """Return a parameter of trainkit: a list of choices, or a range.

    Raises:
        ValueError: the strategy is not supported, or has other values.
    """
    if not isinstance(about, Mapping) or {*about} != {"strategy", "values"}:
        raise ValueError(f"a parameter has strategy and values; given {describe(about)}")
    strategy, values = _strategy(about), about["values"]
    if not isinstance(values, list):
        raise ValueError(f"values should be a list; given {describe(values)}")
    if strategy in ("choice", "grid"):
        return values
    if strategy not in LENGTHS:
        advice = INSTEAD.get(strategy, f"it may be choice, grid, {', '.join(LENGTHS)}{suggest(strategy, LENGTHS)}")
        raise ValueError(f"the strategy {strategy!r} is not supported: {advice}")
    least, most = LENGTHS[strategy]
    if not least <= len(values) <= most:
        raise ValueError(
            f"{strategy} has {least if least == most else f'{least} or {most}'} values; given {len(values)}"
        )
    low, high = values[:2]
    if not strategy.endswith("int"):
        found = {"low": float(low), "high": float(high)}
        return {**found, **({"step": values[2]} if strategy == "quniform" else {}), "log": strategy == "loguniform"}
    if strategy == "qrandint":
        return {"low": low, "high": high, "step": values[2]}
    return {"low": low, "high": high - 1, "log": strategy == "lograndint"}  # Ray excludes the end
