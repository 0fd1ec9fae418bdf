"""The settings of accelerate's trackers."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from trainkit.config.base import PluginConfig

Text = Annotated[str, Field(min_length=1)]


class TrackerConfig(PluginConfig):
    """Settings of a tracker of accelerate."""

    words: ClassVar[dict[str, str]] = {}
    """What the tracker calls a setting, where its word is another one."""
    later: ClassVar[frozenset[str]] = frozenset(("name", "project", "log_model"))
    """Settings that are no arguments by which the tracker opens a run."""

    project: Text = "trainkit"
    """The project of the run."""
    run_name: Text | None = None
    """The name of the run. None: that of the run's directory."""

    def arguments(self) -> dict[str, Any]:
        """Return the settings that are given, except those in `later`, by the words of the tracker."""
        settings = {name: value for name, value in self if name not in self.later}
        return {self.words.get(name, name): value for name, value in settings.items() if value not in (None, [], {})}


class Tagged(TrackerConfig):
    """Settings of a tracker whose runs have tags."""

    tags: list[Text] = []
    """Tags of the run."""


class WandbConfig(Tagged):
    """Settings of Weights & Biases."""

    words = {"run_name": "name"}
    name: Literal["wandb"] = "wandb"
    entity: Text | None = None
    """The user or team of the project. None: the default one of the account."""
    group: Text | None = None
    """The group of runs that this one belongs to."""
    job_type: Text | None = None
    """The kind of run within its group."""
    notes: Text | None = None
    """A description of the run."""
    mode: Literal["online", "offline", "disabled", "shared"] | None = None
    """Where the run is logged: `offline` writes files that ``wandb sync`` uploads. None: as the variable WANDB_MODE
    says, or online."""
    log_model: bool = False
    """Upload the exported model as an artifact at the end of the run."""


class TrackioConfig(TrackerConfig):
    """Settings of trackio."""

    words = {"run_name": "name"}
    name: Literal["trackio"] = "trackio"
    group: Text | None = None
    """The group of runs that this one belongs to."""
    space_id: Text | None = None
    """The Hugging Face Space that the run is logged to. None: the local database."""
    dataset_id: Text | None = None
    """The Hugging Face dataset in which the Space keeps metrics."""
    bucket_id: Text | None = None
    """The Hugging Face bucket in which the Space keeps metrics."""
    private: bool | None = None
    """Whether a Space that is made is private. None: as the organisation's default says."""
    log_model: bool = False
    """Store the exported model as an artifact at the end of the run."""


class MlflowConfig(TrackerConfig):
    """Settings of MLflow; the variable MLFLOW_TRACKING_URI says where runs are stored."""

    name: Literal["mlflow"] = "mlflow"
    later = TrackerConfig.later | {"artifact_location"}
    tags: dict[Text, str] = {}
    """Tags of the run, by name."""
    description: Text | None = None
    """A description of the run."""
    run_id: Text | None = None
    """The id of an existing run to log to. None: a new run."""
    artifact_location: Text | None = None
    """Where the artifacts of a new experiment are stored. None: as the tracking server says."""
    log_model: bool = False
    """Store the exported model as an artifact at the end of the run."""


class CometConfig(Tagged):
    """Settings of Comet."""

    words = {"entity": "workspace"}
    later = TrackerConfig.later | {"run_name", "tags"}
    name: Literal["comet_ml"] = "comet_ml"
    entity: Text | None = None
    """The workspace of the project. None: the default one of the account."""
    online: bool | None = None
    """Whether the run is logged to the server, or to a local archive. None: to the server."""


class AimConfig(Tagged):
    """Settings of Aim; `project` is the experiment."""

    later = TrackerConfig.later | {"run_name", "tags"}
    name: Literal["aim"] = "aim"


class ClearMLConfig(Tagged):
    """Settings of ClearML."""

    words = {"run_name": "task_name"}
    name: Literal["clearml"] = "clearml"
    output_uri: Text | None = None
    """Where models and artifacts are stored."""


class SwanLabConfig(Tagged):
    """Settings of SwanLab."""

    words = {"run_name": "experiment_name", "entity": "workspace"}
    name: Literal["swanlab"] = "swanlab"
    entity: Text | None = None
    """The workspace of the project. None: the default one of the account."""
    group: Text | None = None
    """The group of runs that this one belongs to."""
    description: Text | None = None
    """A description of the run."""
    mode: Literal["online", "local", "offline", "disabled"] | None = None
    """Where the run is logged. None: as the variable SWANLAB_MODE says, or online."""


class DVCLiveConfig(PluginConfig):
    """Settings of DVCLive, whose project is the repository."""

    name: Literal["dvclive"] = "dvclive"
    run_name: Text | None = None
    """The name of the experiment. None: that of the run's directory."""
    save_dvc_exp: bool = True
    """Whether the run is saved as an experiment of DVC."""

    def arguments(self) -> dict[str, Any]:
        """Return the settings that are given, by the words of the tracker."""
        return {"save_dvc_exp": self.save_dvc_exp, **({"exp_name": self.run_name} if self.run_name else {})}


TRACKERS: dict[str, type[PluginConfig]] = {
    "aim": AimConfig,
    "clearml": ClearMLConfig,
    "comet_ml": CometConfig,
    "dvclive": DVCLiveConfig,
    "mlflow": MlflowConfig,
    "swanlab": SwanLabConfig,
    "trackio": TrackioConfig,
    "wandb": WandbConfig,
}
"""The settings of accelerate's trackers by name. ``tensorboard`` has none: it writes into the directory of the run."""
