"""What a sweep shows: on a terminal a table that is updated in place, elsewhere a line for each finished trial."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import rich.console
from optuna.trial import FrozenTrial, TrialState
from rich.live import Live
from rich.table import Table
from rich.text import Text

from trainkit.errors import printable
from trainkit_report.groups import spread
from trainkit_sweep.study import ERROR, Study

if TYPE_CHECKING:
    from trainkit_sweep.trials import Run

WORDS = {TrialState.COMPLETE: "complete", TrialState.PRUNED: "pruned", TrialState.FAIL: "failed"}


class Progress:
    """The console output of a sweep.

    Args:
        study: its trials.
        output: where to print; None for standard output.
    """

    def __init__(self, study: Study, output: rich.console.Console | None = None) -> None:
        self.study = study
        self.output = output or rich.console.Console(force_terminal=None if sys.stdout.isatty() else False)
        self._live: Live | None = None
        self._runs: dict[int, Run] = {}
        self._head = ""

    def __enter__(self) -> Self:
        if self.output.is_terminal and not self.output.is_dumb_terminal:
            self._live = Live(get_renderable=self._table, console=self.output, transient=True, refresh_per_second=2)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def say(self, text: str) -> None:
        """Print a line."""
        self.output.print(Text(self._encodable(printable(text))), soft_wrap=True)

    def begin(self) -> None:
        """Print what is to be done."""
        sweep, trials = self.study.sweep, self.study.trials
        made = sum(trial.state.is_finished() for trial in trials)
        seeds = len(sweep.settings.seeds)
        each = f" of {seeds} seeds each" if seeds > 1 else ""
        self.say(f"{sweep.name}  {made} of {sweep.trials} trials{each} are made  {sweep.directory}")
        self._head = self._summary()

    def started(self, run: Run) -> None:
        """Show a run that has begun."""
        self._runs[run.trial.number] = run

    def ended(self, number: int) -> None:
        """Print what has become of a trial."""
        self._runs.pop(number, None)
        trial = next(each for each in self.study.trials if each.number == number)
        self._head = self._summary()
        parts = [f"trial {number}", WORDS.get(trial.state, ""), *self._result(trial)]
        self.say("  ".join([*parts, described(self.study.parameters(trial)), f"({self._head})"]))

    def _result(self, trial: FrozenTrial) -> list[str]:
        if trial.state == TrialState.FAIL:
            return [trial.user_attrs.get(ERROR, "").replace("\n", " ")[:300]]
        at = f" at step {trial.last_step}" if trial.state == TrialState.PRUNED else ""
        return [f"{self.study.sweep.settings.metric} {measured(self.study, trial)}{at}"]

    def _summary(self) -> str:
        trials = self.study.trials
        made, best = sum(trial.state.is_finished() for trial in trials), self.study.valid[:1]
        told = [f"{made}/{self.study.sweep.trials}"]
        return ", ".join([*told, *(f"best {each.value:.4g} of trial {each.number}" for each in best)])

    def _table(self) -> Table:
        table = Table(title=Text(self._encodable(printable(f"{self.study.sweep.name}  {self._head}"))))
        for name in ("trial", "seed", "step", self.study.sweep.settings.metric, "parameters"):
            table.add_column(printable(name), no_wrap=True, overflow="ellipsis")
        for run in list(self._runs.values()):
            value = f"{run.value:.4g}" if run.evaluations else "-"
            cells = (run.trial.number, run.seed, run.step, value, described(run.parameters))
            table.add_row(*(Text(self._encodable(printable(str(cell)))) for cell in cells))
        return table

    def _encodable(self, text: str) -> str:
        return text.encode(self.output.encoding, "replace").decode(self.output.encoding)


def measured(study: Study, trial: FrozenTrial) -> str:
    """Return the value of a trial, with the deviation over its seeds if there are several."""
    if trial.value is None:
        return "-"
    deviation = spread(study.values(trial).values()) if trial.state == TrialState.COMPLETE else math.nan
    return f"{trial.value:.4g}" + (f" ± {deviation:.2g}" if math.isfinite(deviation) else "")


def described(parameters: Mapping[str, Any]) -> str:
    """Return parameters on one line."""
    return " ".join(f"{name}={number(value)}" for name, value in parameters.items())


def number(value: Any) -> str:
    """Return the value of a parameter as text; of a fraction, four digits."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
