"""Code that the examples share: options, training in stages, and a table of results. Also finds the examples."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.errors import printable
from trainkit.plugins import hookimpl

if TYPE_CHECKING:
    from trainkit.trainer.accelerate import AccelerateRLTrainer


def find_examples() -> dict[str, Path]:
    """Return the ``run.py`` of every example by name.

    The examples are beside the package in a checkout, and inside it when it is installed.
    """
    package = Path(__file__).parent
    folder = package / "_examples" if (package / "_examples").is_dir() else package.parent / "examples"
    return {path.parent.name: path for path in sorted(folder.glob("*/run.py"))}


def option_parser(name: str, about: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that all examples have: ``--seed``, ``--run-dir`` and ``--help``.

    The description is the first line of ``about``. Examples add options that shorten a run, which the tests use, with
    ``type=positive``: ``--steps`` for the main stage, ``--<stage>-epochs`` or ``--<stage>-steps`` for earlier stages.
    """
    parser = argparse.ArgumentParser(prog=f"trainkit examples run {name}", description=(about or "").split("\n")[0])
    parser.add_argument("--seed", type=int, default=1, help="seed of the data and of all training (default: 1)")
    runs = Path("runs") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    parser.add_argument("--run-dir", type=Path, default=runs, help=f"where runs are saved (default: runs/{name}-TIME)")
    return parser


def positive(text: str) -> int:
    """Parse a positive whole number, as the ``type`` of an option."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value


class Evaluations:
    """A callback that keeps the metrics and samples of every evaluation."""

    def __init__(self) -> None:
        self.metrics: list[dict[str, float]] = []
        self.samples: list[list[dict[str, Any]]] = []

    @hookimpl
    def on_evaluate(self, metrics: dict[str, float], samples: list[dict[str, Any]]) -> None:
        """Store the metrics and samples of one evaluation."""
        self.metrics.append(metrics)
        self.samples.append(samples)


@dataclass(frozen=True)
class Stage:
    """A finished training run."""

    name: str
    """The name of its configuration file, without the suffix, and of its run directory."""
    trainer: AccelerateRLTrainer[Any]
    evaluations: Evaluations

    @property
    def model(self) -> str:
        """The path of the exported model, for the ``model.model_path`` of a later stage."""
        return str(self.trainer.config.train.run_dir) + "/model"


def run_stage(
    config: Path, options: argparse.Namespace, arguments: Mapping[str, Any], changes: Mapping[str, Any] | None = None
) -> Stage:
    """Train once, in a directory inside ``options.run_dir`` that has the name of the file.

    Args:
        config: the YAML file.
        options: the parsed options of `option_parser`: ``seed`` and ``run_dir``.
        arguments: further arguments of `trainkit.train`, mostly those that the task returns.
        changes: settings by dotted path that override those of the file; None keeps the file's value.
    """
    from trainkit.api import train
    from trainkit.config import TRLConfig

    settings = {key: value for key, value in (changes or {}).items() if value is not None}
    settings |= {"train.seed": options.seed, "train.run_dir": str(options.run_dir / config.stem)}
    evaluations = Evaluations()
    callbacks = [evaluations, *arguments.get("callbacks", ())]
    settled: TRLConfig[Any] = TRLConfig.load_yaml(config).update(settings)
    return Stage(config.stem, train(config=settled, **{**arguments, "callbacks": callbacks}), evaluations)


def show(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[Any]],
    stages: Iterable[Stage],
    options: argparse.Namespace,
) -> None:
    """Print a table of results, the speed of each stage, and the directory of the runs.

    Args:
        title: the title of the table.
        columns: the headings, except that of the first column, which is empty.
        rows: a label, then one cell per column; floats are shown with three decimals.
        stages: the stages whose steps, time and speed are printed.
        options: as for `run_stage`.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    table = Table("", *columns, title=title)
    for row in rows:
        table.add_row(*(Text(f"{cell:.3f}" if isinstance(cell, float) else printable(str(cell))) for cell in row))
    console.print(table)
    for stage in stages:
        at = stage.trainer.progress
        console.print(
            f"{stage.name}: {at.step} steps in {at.seconds:.1f} s, {at.samples / at.seconds:.0f} samples per second, "
            "evaluations included",
            markup=False,
        )
    look = f"trainkit report {options.run_dir}  or  tensorboard --logdir {options.run_dir}"
    console.print(Text(f"runs: {options.run_dir}\nlook: {look}"))
