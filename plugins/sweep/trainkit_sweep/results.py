"""What a sweep has found: the best configuration as YAML, and a report as HTML."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.exceptions import ExperimentalWarning
from optuna.trial import FrozenTrial, TrialState

from trainkit.errors import SweepError, printable
from trainkit_report.charts import Bars, horizontal_bars
from trainkit_report.lines import Line, line_chart
from trainkit_report.page import render
from trainkit_sweep.coordinates import Coordinate, parallel_coordinates
from trainkit_sweep.progress import WORDS, measured, number
from trainkit_sweep.study import ERROR, Study

PAGE = Path(__file__).parent / "templates" / "sweep.html"
FEW = 4
"""Completed trials from which importances are computed."""


def best_config(study: Study) -> str:
    """Return the configuration of the best trial as YAML, with a comment that says how it was found.

    Raises:
        SweepError: no trial has completed.
    """
    sweep, best = study.sweep, _best(study)
    made = f"trial {best.number} of the sweep {sweep.name}"
    seeds = ", ".join(map(str, study.values(best)))
    about = printable(f"{made}: {sweep.settings.metric} {measured(study, best)} (seeds {seeds})")
    return f"# {about}\n{sweep.config(study.parameters(best))}"


def write_best(study: Study) -> Path:
    """Write the best configuration to ``best.yaml`` in the directory of the sweep, and return the path."""
    return _written(study.sweep.directory / "best.yaml", best_config(study))


def write_report(study: Study) -> Path:
    """Write the report to ``report.html`` in the directory of the sweep, and return the path.

    The page has the importance of the parameters, the trials in parallel coordinates, the history of the values, a
    table of the trials, and the best configuration. It needs no other file.

    Raises:
        SweepError: no trial has completed.
    """
    sweep, valid = study.sweep, study.valid
    best = _best(study)
    names = [f"trial {trial.number}" for trial in valid]
    weights, told = importances(study)
    shown = [printable(name) for name in weights]
    facts = {
        "name": sweep.name,
        "metric": printable(sweep.settings.metric),
        "direction": sweep.settings.direction,
        "seeds": sweep.settings.seeds,
        "counts": _counts(study),
        "best": best.number,
        "value": measured(study, best),
        "parameters": [printable(name) for name in sweep.space],
        "importance": horizontal_bars(Bars("importance", list(weights.values())), shown, title="Importance"),
        "weighed": bool(weights),
        "unweighed": told,
        "coordinates": parallel_coordinates(coordinates(study, valid), names=names, title="Completed trials"),
        "history": line_chart(history(study), title=printable(sweep.settings.metric), x_label="trial"),
        "trials": [_row(study, trial) for trial in study.trials if trial.state != TrialState.WAITING],
        "config": best_config(study),
    }
    page = render(PAGE, title=printable(f"Sweep {sweep.name}"), **facts)
    return _written(sweep.directory / "report.html", page)


def _written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8", errors="replace")
    return path


def _best(study: Study) -> FrozenTrial:
    if not study.valid:
        made = ", ".join(f"{count} {state}" for state, count in _counts(study).items())
        raise SweepError(f"no trial of the sweep {study.sweep.name!r} has completed ({made or 'none was made'})")
    return study.valid[0]


def _counts(study: Study) -> dict[str, int]:
    states = [WORDS.get(trial.state, trial.state.name.lower()) for trial in study.trials]
    return {state: states.count(state) for state in dict.fromkeys(states)}


def importances(study: Study) -> tuple[dict[str, float], str]:
    """Return the importance of each parameter, as shares, the largest first; or why there are none.

    PED-ANOVA: how much the distribution of a parameter among the best trials differs from that among all.
    """
    valid = study.valid
    if len(valid) < FEW:
        return {}, f"The importance of parameters needs at least {FEW} completed trials; there are {len(valid)}."
    if len({trial.value for trial in valid}) == 1:
        return {}, "All completed trials have the same value, so no parameter is important."
    from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances  # it imports scikit-learn

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        try:
            found = get_param_importances(study.study, evaluator=PedAnovaImportanceEvaluator(target_quantile=0.25))
        except (RuntimeError, ValueError, ZeroDivisionError) as error:
            return {}, f"The importance of parameters cannot be computed: {printable(str(error))}."
    if not found or not all(map(math.isfinite, found.values())) or not sum(found.values()):
        return {}, "The completed trials do not tell the importance of the parameters."
    return found, ""


def coordinates(study: Study, trials: Sequence[FrozenTrial]) -> list[Coordinate]:
    """Return an axis for each parameter, and for the metric as the last; better values of it are higher."""
    axes = []
    for name, dimension in study.sweep.space.items():
        given, values = dimension.distribution, [trial.params[name] for trial in trials]
        if isinstance(given, CategoricalDistribution):
            places = [(given.choices.index(value) + 0.5) / len(given.choices) for value in values]
        else:
            assert isinstance(given, IntDistribution | FloatDistribution)
            places = [_place(value, given.low, given.high, log=given.log) for value in values]
        axes.append(Coordinate(printable(name), places, [printable(number(value)) for value in values]))
    found = [float(trial.value or 0.0) for trial in trials]
    low, high = min(found), max(found)
    places = [_place(value, low, high) for value in found]
    if study.sweep.settings.direction == "minimize":
        places = [1 - place for place in places]
    return [*axes, Coordinate(printable(study.sweep.settings.metric), places, [f"{value:.4g}" for value in found])]


def _place(value: float, low: float, high: float, *, log: bool = False) -> float:
    if low == high:
        return 0.5
    if log:
        value, low, high = math.log(value), math.log(low), math.log(high)
    return (value - low) / (high - low)


def history(study: Study) -> list[Line]:
    """Return the values of the completed trials by number, and the best value until then."""
    done = sorted(study.valid, key=lambda trial: trial.number)
    numbers, values = [float(trial.number) for trial in done], [float(trial.value or 0.0) for trial in done]
    choose = max if study.sweep.settings.direction == "maximize" else min
    best = [choose(values[: at + 1]) for at in range(len(values))]
    apart = [each for value in values for each in (value, math.nan)]  # points, not a line
    twice = [each for at in numbers for each in (at, at)]
    return [Line("best so far", numbers, best), Line("trials", twice, apart)]


def _row(study: Study, trial: FrozenTrial) -> dict[str, Any]:
    values = study.parameters(trial)
    return {
        "number": trial.number,
        "state": WORDS.get(trial.state, trial.state.name.lower()),
        "value": measured(study, trial),
        "seeds": ", ".join(f"{seed}: {value:.4g}" for seed, value in study.values(trial).items()),
        "parameters": [printable(number(values[name])) if name in values else "" for name in study.sweep.space],
        "error": printable(trial.user_attrs.get(ERROR, "")),
    }
