"""The trackers of a run: the console, JSON lines, and the trackers of accelerate, which get samples and files, too."""

from __future__ import annotations

import json
import math
import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trainkit.config import PluginConfig
from trainkit.config.trackers import TRACKERS
from trainkit.errors import ConfigError, printable, suggest
from trainkit.plugins import hookimpl
from trainkit.plugins.guard import error_text
from trainkit.plugins.hooks import entry_name
from trainkit.runs.console import Console
from trainkit.runs.journal import JsonLines, Sample

if TYPE_CHECKING:
    from trainkit.runs.view import RunView

ROWS = 16
"""The number of samples of an evaluation that trackers show in a table."""
DRAWN = ("reward", "length")
"""Numbers of samples that trackers show as histograms."""
IDENTITIES = "trackers.json"
"""The file of what identifies the run to the trackers, by which a resumed run goes on in them."""

Columns = dict[str, list[Any]]


def default_trackers(entries: Sequence[str | PluginConfig]) -> list[object]:
    """Return the trackers of a run: the console, ``*.jsonl`` files, and accelerate's trackers.

    Args:
        entries: accelerate's trackers, by name or by their settings.

    Raises:
        ConfigError: accelerate knows no tracker of that name, or its package is not installed.
    """
    named = {entry_name(entry): entry for entry in entries}
    return [Console(), JsonLines(), *(KINDS.get(name, AccelerateTracker)(entry) for name, entry in named.items())]


class AccelerateTracker:
    """A tracker of accelerate. It is open from a run's first metrics to the run's end.

    Args:
        entry: its name in accelerate, e.g. ``"tensorboard"`` or ``"wandb"``, or its settings.

    Raises:
        ConfigError: accelerate knows no tracker of that name, or its package is not installed.
    """

    def __init__(self, entry: str | PluginConfig) -> None:
        self.name = entry_name(entry)
        self._class = _tracker_class(self.name)
        self.settings: Any = TRACKERS.get(self.name, PluginConfig)(name=self.name) if isinstance(entry, str) else entry
        self._begun_at: int | None = None
        self._tracker: Any = None
        self._close: Callable[[], object] = lambda: None

    @hookimpl
    def on_train_begin(self, trainer: RunView) -> None:
        """Record the run's step. The tracker is opened when the first metrics come: a finished run logs none."""
        self._begun_at = trainer.progress.step

    @hookimpl
    def log_metrics(self, trainer: RunView, step: int, metrics: dict[str, float]) -> None:
        """Log metrics at their step; do nothing outside a run."""
        if self.opened(trainer) is not None:
            self._tracker.log(metrics, step=step)

    @hookimpl
    def on_evaluate(self, trainer: RunView, step: int, samples: list[Sample]) -> None:
        """Show the first samples of an evaluation as a table, and histograms of all, if the tracker has them."""
        if samples and self.opened(trainer) is not None:
            self.show_table(table_of(samples[:ROWS], step), step)
            for name, values in drawn(samples).items():
                self.show_histogram(f"eval/{name}/histogram", values, step)
            if images := [sample["image"] for sample in samples[:ROWS] if "image" in sample]:
                self.show_images("eval/images", torch.stack(images), step)

    @hookimpl
    def on_train_end(self, trainer: RunView) -> None:
        """Store the exported model if the settings say so, and close the tracker."""
        try:
            if self._tracker is not None and getattr(self.settings, "log_model", False) and trainer.run.finished():
                assert trainer.run_dir is not None
                self.store(trainer.run_dir / "model", "model")
        finally:
            self._close()
            self._begun_at = self._tracker = None

    def opened(self, trainer: RunView) -> Any:
        """Return the tracker, or None outside a run. The first call opens it and logs the configuration."""
        run_dir, begun_at = trainer.run_dir, self._begun_at
        if self._tracker is not None or run_dir is None or begun_at is None:
            return self._tracker
        known = _identities(run_dir).get(self.name)
        config = flatten(trainer.config.to_dict())
        tracker = self.make(run_dir, config, known if isinstance(known, dict) else {}, begun_at)
        try:
            tracker.start()
        except Exception as error:
            raise ConfigError(
                f"the tracker {self.name!r} cannot open a run: {error_text(error)}. Log in, change its settings in "
                "train.trackers, or remove it from there"
            ) from error
        self._tracker = tracker
        self._close = weakref.finalize(self, self.closing())  # a loop that the user drives has no on_train_end
        if identity := self.identity():
            _write_identity(run_dir, self.name, identity)
        self.store_config(config, run_dir)
        return tracker

    # ---------------------------------------------------------------------------------- what a kind of tracker does

    def make(self, run_dir: Path, config: dict[str, Any], known: dict[str, Any], begun_at: int) -> Any:
        """Return accelerate's tracker, which is not open yet.

        Args:
            run_dir: the directory of the run.
            config: the configuration of the run, flat.
            known: what `identity` has returned before the run was resumed; empty for a new run.
            begun_at: the step after which the run begins.
        """
        return self._class(self.settings.project, **self.arguments(run_dir))

    def arguments(self, run_dir: Path) -> dict[str, Any]:
        """Return the arguments by which the tracker opens the run, named after the run's directory if not otherwise."""
        settings = self.settings
        if not settings.run_name:
            settings = settings.model_copy(update={"run_name": run_dir.name})
        return dict(settings.arguments())

    def identity(self) -> dict[str, Any]:
        """Return what identifies the open run to the tracker, and is given to `make` when it is resumed."""
        return {}

    def closing(self) -> Callable[[], object]:
        """Return what closes the tracker; it must not refer to ``self``."""
        return self._tracker.finish  # type: ignore[no-any-return]

    def store_config(self, config: dict[str, Any], run_dir: Path) -> None:
        """Log the configuration of the run."""
        self._tracker.store_init_configuration(config)

    def show_table(self, columns: Columns, step: int) -> None:
        """Show samples as a table."""

    def show_histogram(self, name: str, values: list[float], step: int) -> None:
        """Show finite numbers as a histogram."""

    def show_images(self, name: str, images: torch.Tensor, step: int) -> None:
        """Show images. [N, C, H, W]."""

    def store(self, path: Path, kind: str) -> None:
        """Store a file or a directory as an artifact."""


class TensorBoard(AccelerateTracker):
    """TensorBoard, with its events in the directory of the run."""

    def make(self, run_dir: Path, config: dict[str, Any], known: dict[str, Any], begun_at: int) -> Any:
        """Return accelerate's tracker; events written after the checkpoint that the run resumes from are hidden."""
        return self._class(self.name, run_dir, purge_step=begun_at + 1 if begun_at else 0)

    def store_config(self, config: dict[str, Any], run_dir: Path) -> None:
        """Write the configuration into the run's own event file.

        accelerate's tracker and `SummaryWriter.add_hparams` are not used: both create a second directory, which
        TensorBoard lists as another run.
        """
        from torch.utils.tensorboard.summary import hparams

        for summary in hparams(config, {}):
            self._tracker.writer.file_writer.add_summary(summary)
        self._tracker.writer.flush()

    def show_table(self, columns: Columns, step: int) -> None:
        """Write samples as a Markdown table, in which nothing of their text has an effect."""
        self._tracker.writer.add_text("eval/samples", markdown_table(columns), step)

    def show_histogram(self, name: str, values: list[float], step: int) -> None:
        """Write a histogram."""
        self._tracker.writer.add_histogram(name, torch.tensor(values, dtype=torch.float64), step)

    def show_images(self, name: str, images: torch.Tensor, step: int) -> None:
        """Write images."""
        self._tracker.writer.add_images(name, images, step)


class Pictured(AccelerateTracker):
    """A tracker whose module has `Table` and `Histogram`, and whose runs have artifacts."""

    def show_table(self, columns: Columns, step: int) -> None:
        """Log samples as a table."""
        table = import_module(self.name).Table(columns=list(columns), data=_rows(columns))
        self._tracker.log({"eval/samples": table}, step=step)

    def show_histogram(self, name: str, values: list[float], step: int) -> None:
        """Log a histogram."""
        self._tracker.log({name: import_module(self.name).Histogram(values)}, step=step)

    def store(self, path: Path, kind: str) -> None:
        """Log an artifact."""
        run = self._tracker.tracker
        run.log_artifact(str(path), name=f"{kind}-{run.id}", type=kind)


class Wandb(Pictured):
    """Weights & Biases, with its files in the directory of the run."""

    def make(self, run_dir: Path, config: dict[str, Any], known: dict[str, Any], begun_at: int) -> Any:
        """Return accelerate's tracker; a resumed run goes on in its run, which ignores the steps that it has."""
        again = {"id": known["id"], "resume": "allow"} if "id" in known else {}
        return self._class(self.settings.project, dir=str(run_dir), **again, **self.arguments(run_dir))

    def identity(self) -> dict[str, Any]:
        """Return the id of the run."""
        return {"id": str(self._tracker.tracker.id)}

    def store_config(self, config: dict[str, Any], run_dir: Path) -> None:
        """Log the configuration, and store its file."""
        super().store_config(config, run_dir)
        self.store(run_dir / "config.yaml", "config")


class Trackio(Pictured):
    """trackio, with its database where the variable TRACKIO_DIR says, or in a Hugging Face Space."""

    def make(self, run_dir: Path, config: dict[str, Any], known: dict[str, Any], begun_at: int) -> Any:
        """Return accelerate's tracker; a resumed run goes on in the run of its name."""
        arguments = self.arguments(run_dir)
        again = {"resume": "allow"} if known.get("name") == arguments["name"] else {}
        # trackio keeps the configuration that it is given at the beginning, and no later one
        return self._class(self.settings.project, config=config, embed=False, **again, **arguments)

    def identity(self) -> dict[str, Any]:
        """Return the name of the run."""
        return {"name": str(self._tracker.tracker.name)}

    def closing(self) -> Callable[[], object]:
        """Return trackio's function, which also forgets the run: it would be closed again by the next one."""
        import trackio

        return trackio.finish  # type: ignore[no-any-return, unused-ignore]

    def store_config(self, config: dict[str, Any], run_dir: Path) -> None:
        """Store the file of the configuration, which is logged already."""
        self.store(run_dir / "config.yaml", "config")


class Mlflow(AccelerateTracker):
    """MLflow, with its runs where the variable MLFLOW_TRACKING_URI says."""

    def make(self, run_dir: Path, config: dict[str, Any], known: dict[str, Any], begun_at: int) -> Any:
        """Return accelerate's tracker; a resumed run goes on in its run."""
        again = {"run_id": known["run_id"]} if "run_id" in known else {}
        settings = self.settings
        arguments = {**again, **self.arguments(run_dir)}
        return self._class(settings.project, logging_dir=settings.artifact_location, **arguments)

    def identity(self) -> dict[str, Any]:
        """Return the id of the run."""
        return {"run_id": str(self._tracker.tracker.info.run_id)}

    def store_config(self, config: dict[str, Any], run_dir: Path) -> None:
        """Log the parameters that the run does not have yet, as MLflow cannot change one, and store the file."""
        logged = self._tracker.tracker.data.params
        super().store_config({name: value for name, value in config.items() if name not in logged}, run_dir)
        self.store(run_dir / "config.yaml", "config")

    def store(self, path: Path, kind: str) -> None:
        """Log an artifact."""
        if path.is_dir():
            self._tracker.log_artifacts(str(path), kind)
        else:
            self._tracker.log_artifact(str(path))


class Comet(AccelerateTracker):
    """Comet, which is told the name and the tags of a run when it is open."""

    def store_config(self, config: dict[str, Any], run_dir: Path) -> None:
        """Name the run, and log the configuration."""
        self._tracker.tracker.set_name(self.settings.run_name or run_dir.name)
        if self.settings.tags:
            self._tracker.tracker.add_tags(list(self.settings.tags))
        super().store_config(config, run_dir)


class Aim(AccelerateTracker):
    """Aim, with its repository in the directory of the run."""

    def make(self, run_dir: Path, config: dict[str, Any], known: dict[str, Any], begun_at: int) -> Any:
        """Return accelerate's tracker; a resumed run goes on in its run."""
        name, project = self.settings.run_name or run_dir.name, self.settings.project
        return self._class(name, run_dir, experiment=project, **known)

    def identity(self) -> dict[str, Any]:
        """Return the hash of the run."""
        return {"run_hash": str(self._tracker.tracker.hash)}

    def store_config(self, config: dict[str, Any], run_dir: Path) -> None:
        """Add the tags, and log the configuration."""
        run = self._tracker.tracker
        for tag in {*self.settings.tags} - {*run.tags}:
            run.add_tag(tag)
        super().store_config(config, run_dir)


class ClearML(AccelerateTracker):
    """ClearML."""

    def make(self, run_dir: Path, config: dict[str, Any], known: dict[str, Any], begun_at: int) -> Any:
        """Return accelerate's tracker."""
        return self._class(self.name, project_name=self.settings.project, **self.arguments(run_dir))


class DVCLive(AccelerateTracker):
    """DVCLive, with its files in the directory of the run."""

    def make(self, run_dir: Path, config: dict[str, Any], known: dict[str, Any], begun_at: int) -> Any:
        """Return accelerate's tracker; without ``resume``, it would remove the files of before."""
        return self._class(dir=str(run_dir / "dvclive"), resume=begun_at > 0, **self.arguments(run_dir))


class SwanLab(AccelerateTracker):
    """SwanLab, with its files in the directory of the run."""

    def arguments(self, run_dir: Path) -> dict[str, Any]:
        """Return the arguments by which the tracker opens the run."""
        return {"logdir": str(run_dir / "swanlab"), **super().arguments(run_dir)}


KINDS: dict[str, type[AccelerateTracker]] = {
    "aim": Aim,
    "clearml": ClearML,
    "comet_ml": Comet,
    "dvclive": DVCLive,
    "mlflow": Mlflow,
    "swanlab": SwanLab,
    "tensorboard": TensorBoard,
    "trackio": Trackio,
    "wandb": Wandb,
}
"""accelerate's trackers by name."""


def _tracker_class(name: str) -> Any:
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    if name not in LOGGER_TYPE_TO_CLASS:
        raise ConfigError(
            f"train.trackers names {name!r}, which accelerate does not have{suggest(name, LOGGER_TYPE_TO_CLASS)}; "
            f"known: {', '.join(sorted(LOGGER_TYPE_TO_CLASS))}. The console and metrics.jsonl are always on"
        )
    tracker = LOGGER_TYPE_TO_CLASS[name]
    if tracker.__module__ == "accelerate.tracking" and find_spec(name) is None:
        raise ConfigError(
            f"train.trackers names {name!r}, and the package {name} is not installed; "
            f"run 'pip install {name}', or remove {name!r} from train.trackers"
        )
    return tracker


def _identities(run_dir: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        return dict(json.loads((run_dir / IDENTITIES).read_text(encoding="utf-8")))
    return {}


def _write_identity(run_dir: Path, name: str, identity: dict[str, Any]) -> None:
    identities = {**_identities(run_dir), name: identity}
    (run_dir / f".{IDENTITIES}").write_text(json.dumps(identities), encoding="utf-8")
    (run_dir / f".{IDENTITIES}").replace(run_dir / IDENTITIES)


# ----------------------------------------------------------------------------------------- what trackers are given


def table_of(samples: list[Sample], step: int) -> Columns:
    """Return samples as columns: the step, prompt and output, and every other text or number."""
    plain = [{key: value for key, value in each.items() if isinstance(value, bool | int | float | str)}
             for each in samples]  # fmt: skip
    names = dict.fromkeys(["prompt", "output", *(key for each in plain for key in each)])
    cells = {name: [_storable(each.get(name)) for each in plain] for name in names}
    return {"step": [step] * len(samples), **cells}


def _storable(value: Any) -> Any:
    """Return text without the surrogates that no file can hold, and anything else as it is."""
    return value.encode("utf-8", "replace").decode("utf-8") if isinstance(value, str) else value


def _rows(columns: Columns) -> list[list[Any]]:
    return [list(row) for row in zip(*columns.values(), strict=True)]


def markdown_table(columns: Columns) -> str:
    """Return columns as a table in Markdown; no character of a cell has an effect as markup or HTML."""
    lines = [list(columns), ["---"] * len(columns), *_rows(columns)]
    head, rule, *body = lines
    return "\n".join(
        f"| {' | '.join(cells)} |" for cells in (map(_cell, head), rule, *(map(_cell, row) for row in body))
    )


def _cell(value: Any) -> str:
    text = "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
    return re.sub(r"[!-/:-@\[-`{-~]", lambda found: f"&#{ord(found[0])};", printable(text))


def drawn(samples: list[Sample]) -> dict[str, list[float]]:
    """Return the finite rewards and lengths of samples; of a sweep, under names like ``reward@temperature=0.5``."""
    series: dict[str, list[float]] = {}
    for each in samples:
        suffix = f"@{each['setting']}" if "setting" in each else ""
        for name in DRAWN:
            value = each.get(name)
            if isinstance(value, int | float) and math.isfinite(value):
                series.setdefault(f"{name}{suffix}", []).append(float(value))
    return series


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, bool | int | float | str]:
    """Return nested plain data as scalars under dotted names; convert values that are not scalars to text."""
    flat: dict[str, bool | int | float | str] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value if isinstance(value, bool | int | float | str) else str(value)
    return flat
