"""The metrics of a run in a notebook: a table, a data frame, charts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from trainkit.errors import ConfigError, RegistryError, describe, suggest
from trainkit.plugins.commands import OWN, installed_commands
from trainkit.plugins.discovery import how_to_install
from trainkit.runs.record import main_metric
from trainkit.tables import table

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

    from trainkit.runs.view import RunView

ROWS = 10
"""Evaluations that the table of a history has at most."""
COLUMNS = 6
"""Metrics of evaluations that it has at most."""
USUAL = ("reward/mean", "loss/total", "policy/kl")
"""What is plotted if nothing is named, besides the main metric, of what the run has."""


class History(Mapping[str, dict[int, float]]):
    """The metrics of a run by their names, each a dict of values by step. A notebook shows the evaluations.

    Args:
        series: the metrics, such as `Record.series` returns.
    """

    def __init__(self, series: Mapping[str, dict[int, float]]) -> None:
        self._series = dict(series)

    def __getitem__(self, name: str) -> dict[int, float]:
        return self._series[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._series)

    def __len__(self) -> int:
        return len(self._series)

    @property
    def steps(self) -> list[int]:
        """The steps of which there are metrics."""
        return sorted({step for values in self.values() for step in values})

    def to_pandas(self) -> DataFrame:
        """Return a data frame with a row per step and a column per metric; NaN where a step has no value."""
        from pandas import DataFrame, Index

        columns = {name: list(map(values.get, self.steps)) for name, values in self.items()}
        return DataFrame(columns, index=Index(self.steps, name="step"), dtype=float)

    def plot(self, *names: str) -> Figure:
        """Return a figure of matplotlib with a chart of each metric over the steps, which a notebook shows.

        Args:
            *names: the metrics. None: the one that says best how good the model is, and what the run has of
                ``reward/mean``, ``loss/total`` and ``policy/kl``.

        Raises:
            ConfigError: there is no metric of a name, or none yet; or matplotlib is not installed.
        """
        for name in names:
            if name not in self:
                names_of_metrics = ", ".join(self) or "none yet"
                raise ConfigError(
                    f"no metric is called {describe(name)}{suggest(str(name), self)}; there are: {names_of_metrics}"
                )
        usual = [main_metric(self), *(name for name in USUAL if name in self)]
        chosen = list(dict.fromkeys(names or [name for name in usual if name is not None]))
        if not chosen:
            raise ConfigError("there are no metrics yet to plot; train first")
        try:
            from matplotlib import pyplot
        except ModuleNotFoundError as error:
            raise ConfigError(
                "plots are drawn by matplotlib, which is not installed; run 'pip install matplotlib'"
            ) from (error)

        figure, axes = pyplot.subplots(len(chosen), squeeze=False, layout="constrained", figsize=(6, 2.5 * len(chosen)))
        for axis, name in zip(axes.flat, chosen, strict=True):
            axis.plot(list(self[name]), list(self[name].values()))
            axis.set(title=name, xlabel="step")
        pyplot.close(figure)  # a notebook shows it as the value of the cell, once
        return figure

    def __repr__(self) -> str:
        steps = self.steps
        return f"History({len(self)} metrics" + (f", steps {steps[0]} to {steps[-1]})" if steps else ")")

    def _repr_html_(self) -> str:
        """Return a table of the last evaluations, or of the last metrics if there was none."""
        evaluated = sorted({step for name, values in self.items() if name.startswith("eval/") for step in values})
        kinds = [name for name in self if name.startswith("eval/") == bool(evaluated)]
        chosen = sorted(kinds, key=lambda name: (name != main_metric(kinds), "time/" in name))[:COLUMNS]
        steps = (evaluated or self.steps)[-ROWS:]
        rows = [(step, *(self[name].get(step) for name in chosen)) for step in steps]
        return table(rows, ["step", *chosen], caption=f"{self!r}; .to_pandas() and .plot() show all")


def overview(trainer: RunView) -> Markup:
    """Return a table of a trainer: the method, the directory, how far the run is, and the last evaluation."""
    at, total = trainer.progress, trainer.total_steps if trainer.pipeline is not None else 0
    early = f"ended early: {at.stop_reason}" if at.stop_reason else ""
    state = early or ("done" if total and trainer.done else "begun" if at.step else "not begun")
    facts: list[tuple[str, object]] = [
        ("method", trainer.config.method.name),
        ("run", trainer.run_dir or trainer.config.train.run_dir or ""),
        ("step", f"{at.step} of {total}" if total else at.step),
        ("state", state),
    ]
    evaluation = [row for row in sorted(at.evaluation.items()) if not row[0].startswith("eval/time")]
    facts += [(f"evaluated after step {at.evaluated}", "")] if evaluation else []
    return table([*facts, *evaluation], caption=type(trainer).__name__)


def watched(trainer: RunView, port: int) -> Any:
    """Serve the page of ``trainkit watch`` about the run of a trainer from a thread; see `AcceleratedLoop.watch`."""
    place = trainer.run_dir or trainer.config.train.run_dir
    if place is None:
        raise ConfigError("the run has no directory yet, so there is nothing to watch; set train.run_dir")
    command = next((each for each in installed_commands(()) if each.name == "watch" and not each.why), None)
    if command is None:
        owner, _ = OWN["watch"]
        raise RegistryError(f"'watch' is in {owner}, which is not installed: {how_to_install(owner)}")
    return import_module(command.target.partition(":")[0]).served([Path(place)], port)
