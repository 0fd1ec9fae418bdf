"""Finding the examples, and what they share: options, training in stages, and a table of what changed."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.plugins import hookimpl

if TYPE_CHECKING:
    from trainkit.trainer.accelerate import AccelerateRLTrainer


def find_examples() -> dict[str, Path]:
    """The ``run.py`` of every example by name: beside the package in a checkout, inside it when installed."""
    package = Path(__file__).parent
    folder = package / "_examples" if (package / "_examples").is_dir() else package.parent / "examples"
    return {path.parent.name: path for path in sorted(folder.glob("*/run.py"))}


def option_parser(name: str, about: str | None) -> argparse.ArgumentParser:
    """A parser of the options that all examples have: ``--seed``, ``--run-dir``, and ``--help`` with ``about``'s head.

    Options that make a run shorter, which tests use, are added with ``type=positive``: ``--steps`` for steps, and
    ``--<stage>-epochs`` or ``--<stage>-steps`` for a stage before.
    """
    parser = argparse.ArgumentParser(prog=f"trainkit examples run {name}", description=(about or "").split("\n")[0])
    parser.add_argument("--seed", type=int, default=1, help="draws the data, and seeds all training (default: 1)")
    runs = Path("runs") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    parser.add_argument("--run-dir", type=Path, default=runs, help=f"where all runs go (default: runs/{name}-<time>)")
    return parser


def positive(text: str) -> int:
    """The type of an option that is a positive whole number."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value


class Evaluations:
    """A callback that keeps what every evaluation found."""

    def __init__(self) -> None:
        self.metrics: list[dict[str, float]] = []
        self.samples: list[list[dict[str, Any]]] = []

    @hookimpl
    def on_evaluate(self, metrics: dict[str, float], samples: list[dict[str, Any]]) -> None:
        """Keep one evaluation."""
        self.metrics.append(metrics)
        self.samples.append(samples)


@dataclass(frozen=True)
class Stage:
    """A training that is done."""

    name: str
    """Its configuration's file name, which is also that of its run directory."""
    trainer: AccelerateRLTrainer[Any]
    evaluations: Evaluations

    @property
    def model(self) -> str:
        """The exported model, for the ``model.model_path`` of a later stage."""
        return str(self.trainer.config.train.run_dir) + "/model"


def run_stage(
    config: Path, options: argparse.Namespace, arguments: Mapping[str, Any], changes: Mapping[str, Any] | None = None
) -> Stage:
    """Train once, into the directory of ``options.run_dir`` that is called like the file.

    Args:
        config: the YAML file.
        options: what `option_parser` has read: ``seed`` and ``run_dir``.
        arguments: further arguments of `trainkit.train`; mostly what the task gives.
        changes: dotted settings over those of the file; None as a value leaves the file's.
    """
    from trainkit.api import train
    from trainkit.config import TRLConfig

    given = {key: value for key, value in (changes or {}).items() if value is not None}
    given |= {"train.seed": options.seed, "train.run_dir": str(options.run_dir / config.stem)}
    evaluations = Evaluations()
    callbacks = [evaluations, *arguments.get("callbacks", ())]
    settled: TRLConfig[Any] = TRLConfig.load_yaml(config).update(given)
    return Stage(config.stem, train(config=settled, **{**arguments, "callbacks": callbacks}), evaluations)


def show(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[Any]],
    stages: Iterable[Stage],
    options: argparse.Namespace,
) -> None:
    """Print a table of what changed, the speed of each stage, and where everything is.

    Args:
        title: above the table.
        columns: headings, without the first, which is empty.
        rows: what a line is about, then one cell per column; numbers are shown with three decimals.
        stages: whose steps, time and speed are told.
        options: as for `run_stage`.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    table = Table("", *columns, title=title)
    for row in rows:
        table.add_row(*(Text(f"{cell:.3f}" if isinstance(cell, float) else str(cell)) for cell in row))
    console.print(table)
    for stage in stages:
        at = stage.trainer.progress
        console.print(
            f"{stage.name}: {at.step} steps in {at.seconds:.1f} s, {at.samples / at.seconds:.0f} samples per second, "
            "evaluations included"
        )
    console.print(Text(f"runs: {options.run_dir}\nlook: tensorboard --logdir {options.run_dir}"))
