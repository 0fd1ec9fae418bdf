"""The console of a run: a live table on a terminal, lines elsewhere, and the history of evaluations at the end."""

from __future__ import annotations

import atexit
import logging
import math
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import rich.console
from rich.cells import cell_len
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from trainkit.errors import DataError, printable
from trainkit.plugins import hookimpl
from trainkit.runs.record import main_metric, read_lines

if TYPE_CHECKING:
    from trainkit.data import Rollouts
    from trainkit.runs.view import RunView

Sample = dict[str, Any]

SHOWN = (
    ("reward", "reward/mean", "reward/std"),
    ("kl", "policy/kl", None),
    ("entropy", "policy/entropy", None),
    ("clip", "policy/clipfrac", None),
    ("nll", "loss/nll", None),
    ("loss", "loss/total", None),
    ("lr", "train/lr", None),
)
"""(label, metric, metric of its spread) of what the console shows, as far as the run logs it."""
ROWS = 20
"""The most evaluations in the table at the end of a run."""
WIDEST = 32
"""The most characters of a metric's name in this table."""

Evaluations = dict[int, dict[str, float]]
"""The metrics of evaluations by their step, without times and the prefix ``eval/``."""


class Console:
    """Console output of a run: on a terminal a table that is updated in place, elsewhere a line every few seconds.

    Args:
        output: where to print; None for standard output.
        interval: least seconds between two lines of training metrics, if there is no table.
    """

    def __init__(self, output: rich.console.Console | None = None, *, interval: float = 5.0) -> None:
        # no colours and no table in files and pipes, whatever FORCE_COLOR says
        self.output = output or rich.console.Console(force_terminal=None if sys.stdout.isatty() else False)
        self.interval = interval
        self._live: Live | None = None
        self._moved: list[tuple[logging.StreamHandler[Any], Any]] = []
        self._running = False
        self._unit = "tok"
        self._reset("")

    def _reset(self, title: str) -> None:
        self._title, self._total, self._step, self._followed = title, 0, 0, False
        self._metrics: dict[str, float] = {}
        self._evaluation = self._sample = ""
        self._evaluations: Evaluations = {}
        self._pace, self._last_line = Pace(), time.monotonic()

    @hookimpl(trylast=True)  # so that no other hook can fail after the table is started
    def on_train_begin(self, trainer: RunView) -> None:
        """Show the method and the run's directory; on a terminal, start the table."""
        self._reset(f"{trainer.config.method.name}  {trainer.run_dir}")
        self._running = True
        if trainer.progress.step and trainer.run_dir is not None:
            with suppress(DataError):  # the run goes on without the history of before
                for line in read_lines(trainer.run_dir / "metrics.jsonl"):
                    self._remember(line["step"], line)
        self._follow(trainer)
        if self._live is None:
            steps = f"  {self._total} steps" if self._followed else ""
            self._say(f"{trainer.config.method.name}{steps}  {trainer.run_dir}")
        for note in trainer.run.resumption.messages:
            self._say(note)

    def _follow(self, trainer: RunView) -> None:
        """Show where the run ends, and on a terminal the table, from when `learn` makes its steps.

        A loop of the user's own may end anywhere, and may print anything.
        """
        if self._followed or not trainer.run.learning:
            return
        self._followed, self._total = True, trainer.total_steps
        if self.output.is_terminal and not self.output.is_dumb_terminal:
            self._start_live()

    @hookimpl
    def on_experience(self, rollouts: list[Rollouts]) -> None:
        """Keep the newest rollout, to show it."""
        if rollouts:
            self._sample = excerpt(rollouts[-1].prompts[-1], rollouts[-1].outputs[-1])

    @hookimpl
    def log_metrics(self, trainer: RunView, step: int, metrics: dict[str, float]) -> None:
        """Keep the metrics; if there is no table and the interval is over, print them."""
        trained = {name: value for name, value in metrics.items() if not name.startswith("eval/")}
        if self._running:
            self._follow(trainer)
        if not self._running or not trained:
            return
        self._step = step
        self._metrics = {**self._metrics, **trained}
        self._pace.add(step, trainer.progress.tokens)
        self._unit = "tok" if trainer.updater.unit == "tokens" else trainer.updater.unit
        now = time.monotonic()
        if self._live is None and now - self._last_line >= self.interval:
            self._last_line = now
            self._say("  ".join([self._step_of_total(), *self._fields(), *self._pace_fields()]))

    @hookimpl
    def on_evaluate(self, step: int, metrics: dict[str, float], samples: list[Sample]) -> None:
        """Show an evaluation and one of its samples."""
        if not self._running:
            return
        self._step = step
        self._remember(step, metrics)
        shown = "  ".join(f"{name} {short_number(value)}" for name, value in self._evaluations.get(step, {}).items())
        self._evaluation = f"step {step}  {shown}"
        if samples:
            self._sample = excerpt(samples[0]["prompt"], samples[0]["output"])
        if self._live is None:
            sample = f"  sample  {self._sample}" if samples else ""
            self._say(f"{self._step_of_total()}  evaluation  {shown}{sample}")

    @hookimpl(tryfirst=True)
    def on_train_end(self, trainer: RunView) -> None:
        """Stop the table, print the evaluations as a table that stays, and how the run ended."""
        self._stop_live()
        if not self._running:
            return
        for line in self._history():
            self._say(line)
        self._running, at = False, trainer.progress
        self._step = at.step
        self._say(
            f"{self._step_of_total()}  {'done' if trainer.done and not at.stop_reason else 'stopped'} after "
            f"{clock(at.seconds)}  "
            f"{count(at.trained)} samples  {count(at.tokens)} {trainer.updater.unit}  {trainer.run_dir}"
        )

    # --------------------------------------------------------------------------------------------------- history

    def _remember(self, step: int, metrics: dict[str, float]) -> None:
        names = [name for name in metrics if name.startswith("eval/") and not name.startswith("eval/time")]
        if names:
            names.sort(key=main_metric(names).__ne__)  # first: a narrow terminal cuts off the others
            self._evaluations[step] = {name.removeprefix("eval/"): metrics[name] for name in names}

    def _history(self) -> Iterator[str]:
        """Yield the lines of a table of the evaluations, a row each; evenly thinned out if there are many."""
        steps = sorted(self._evaluations)
        if not steps:
            return
        last, rows = len(steps) - 1, min(len(steps), ROWS)
        shown = [steps[round(row * last / max(rows - 1, 1))] for row in range(rows)]
        names = list(dict.fromkeys(name for metrics in self._evaluations.values() for name in metrics))
        columns = [["step", *map(str, shown)]]
        for name in names:
            values = (self._evaluations[step].get(name) for step in shown)
            columns.append([_heading(name), *("" if value is None else short_number(value) for value in values)])
        widths = [max(map(cell_len, column)) for column in columns]
        fitting = self._fitting(widths)
        for cells in zip(*columns[:fitting], strict=True):
            yield "  ".join(" " * (width - cell_len(cell)) + cell for cell, width in zip(cells, widths, strict=False))
        if left_out := self._left_out(len(steps) - rows, len(columns) - fitting):
            yield f"not shown, in metrics.jsonl: {left_out}"

    def _fitting(self, widths: list[int]) -> int:
        """Return how many columns fit into a line of the terminal, two at least; elsewhere lines have any length."""
        if not self.output.is_terminal:
            return len(widths)
        ends = [sum(widths[: index + 1]) + 2 * index for index in range(len(widths))]
        return max(2, sum(end < self.output.width for end in ends))

    @staticmethod
    def _left_out(evaluations: int, metrics: int) -> str:
        parts = [f"{evaluations} evaluations between these"] * (evaluations > 0) + [f"{metrics} metrics"] * (
            metrics > 0
        )
        return " and ".join(parts)

    # ------------------------------------------------------------------------------------------------------ text

    def _say(self, text: str) -> None:
        self.output.print(Text(self._encodable(printable(text))), soft_wrap=True)

    def _encodable(self, text: str) -> str:
        """Return ``text`` without the characters that the output's encoding lacks: printing them would end the run."""
        return text.encode(self.output.encoding, "replace").decode(self.output.encoding)

    def _step_of_total(self) -> str:
        return f"step {self._step:>{len(str(self._total))}}/{self._total}" if self._total else f"step {self._step}"

    def _fields(self) -> list[str]:
        """Return the known metrics as text of constant width, so that successive lines align."""
        return [f"{label} {value}" for label, value in self._values() if label != "lr"]

    def _values(self) -> list[tuple[str, str]]:
        values, metrics = [], self._metrics
        for label, key, spread in SHOWN:
            if key in metrics:
                around = f" ± {short_number(metrics[spread]):<4}" if spread in metrics else ""
                values.append((label, f"{short_number(metrics[key]):>5}{around}"))
        return values

    def _pace_fields(self) -> list[str]:
        rate = self._pace.tokens_per_second
        left = self._pace.seconds_left(self._total)
        return [
            *([f"{count(rate):>5} {self._unit}/s"] if rate is not None else []),
            *([f"left {clock(left)}"] if left is not None else []),
        ]

    # ----------------------------------------------------------------------------------------------------- table

    def _start_live(self) -> None:
        captured = [stream for stream in (sys.stdout, sys.stderr) if stream.isatty()]
        self._live = Live(
            get_renderable=self._table,
            console=self.output,
            redirect_stdout=sys.stdout in captured,
            redirect_stderr=sys.stderr in captured,
        )
        atexit.register(self._live.stop)  # a loop that the user drives has no on_train_end
        self._live.start()
        self._moved = _move_log_handlers(captured)

    def _stop_live(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            live.stop()
            atexit.unregister(live.stop)
        for handler, stream in self._moved:
            handler.setStream(stream)
        self._moved = []

    def _table(self) -> Panel:
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim", no_wrap=True, min_width=len("evaluation"))
        grid.add_column(no_wrap=True, overflow="ellipsis")
        grid.add_row("progress", self._progress())
        rows = [*self._values(), ("pace", "  ".join(self._pace_fields()).strip())]
        rows += [("evaluation", self._evaluation), ("sample", self._sample)]
        for label, value in rows:
            if value:
                grid.add_row(label, Text(self._encodable(printable(value))))
        return Panel(grid, title=Text(self._encodable(printable(self._title))), title_align="left")

    def _progress(self) -> Table:
        line = Table.grid(padding=(0, 2))
        line.add_row(Text(self._step_of_total()), ProgressBar(self._total or 1, self._step, width=40))
        return line


class Pace:
    """The speed of a run over its last hundred steps."""

    def __init__(self) -> None:
        self._marks: deque[tuple[float, int, int]] = deque(maxlen=100)

    def add(self, step: int, tokens: int) -> None:
        """Record the run's present step and number of tokens."""
        self._marks.append((time.monotonic(), step, tokens))

    def _gained(self, index: int) -> float:
        return self._marks[-1][index] - self._marks[0][index] if self._marks else 0.0

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens (or rows) trained on per second, sampling and evaluation included; None if not known yet."""
        return self._gained(2) / self._gained(0) if self._gained(0) > 0 else None

    def seconds_left(self, total: int) -> float | None:
        """Return the seconds until step ``total``, or None if not known yet."""
        if self._gained(1) <= 0 or not total:
            return None
        return max(total - self._marks[-1][1], 0) * self._gained(0) / self._gained(1)


def _move_log_handlers(captured: list[Any]) -> list[tuple[logging.StreamHandler[Any], Any]]:
    """Point the log handlers of a captured stream to its replacement, so that they do not break the table.

    Return each such handler with its earlier stream.
    """
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    handlers = {handler for logger in loggers if isinstance(logger, logging.Logger) for handler in logger.handlers}
    moved: list[tuple[logging.StreamHandler[Any], Any]] = []
    for handler in handlers:
        if isinstance(handler, logging.StreamHandler) and handler.stream in captured:
            moved.append((handler, handler.setStream(sys.stderr)))
    return moved


def _heading(name: str) -> str:
    name = printable(name)
    return name if len(name) <= WIDEST else f"{name[: WIDEST - 1]}…"


def excerpt(prompt: str, output: str) -> str:
    """Return the end of a prompt and the beginning of its output, on one line."""
    prompt, output = printable(prompt), printable(output)
    start = prompt if len(prompt) <= 24 else f"…{prompt[-23:]}"
    return f"{start} → {output if len(output) <= 60 else f'{output[:59]}…'}"


def short_number(value: float) -> str:
    """Return ``value`` in about five characters: 0.83, 12.3, 4.1k, 3e-5."""
    size = abs(value)
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if math.isfinite(size) and size >= limit:
            return f"{value / limit:.1f}{unit}"
    if 0 < size < 0.005:
        return f"{value:.0e}".replace("e-0", "e-")
    return f"{value:.2f}" if size < 10 else f"{value:.1f}" if size < 100 else f"{value:.0f}"


def count(value: float) -> str:
    """Return a count in about five characters: 16, 4.1k."""
    return short_number(value) if value >= 1000 else f"{value:.0f}"


def clock(seconds: float) -> str:
    """Return ``seconds`` as 0:23 or 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Disable the progress bars of transformers ("Loading weights", "Writing model shards") inside the block."""
    from transformers.utils import logging as bars

    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            bars.enable_progress_bar()
