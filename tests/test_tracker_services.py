"""accelerate's trackers: their settings, and what is read back from those that need no network."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tables import table
from trainkit import TRLConfig
from trainkit.config.trackers import TRACKERS
from trainkit.errors import ConfigError
from trainkit.plugins.discovery import ACCELERATE_TRACKERS
from trainkit.runs import default_trackers, trackers
from trainkit.runs.trackers import KINDS, drawn, markdown_table, table_of
from trainkit.testing.trainers import tiny_trainer

Lines = list[dict[str, Any]]


def read(run_dir: Path, name: str = "metrics.jsonl") -> Lines:
    return [json.loads(line) for line in (run_dir / name).read_text(encoding="utf-8").splitlines()]


def expected(run_dir: Path, *, first: int = 0) -> dict[str, dict[int, float]]:
    """Return what a run has logged: by metric, the value at each step."""
    found: dict[str, dict[int, float]] = {}
    for line in read(run_dir):
        for name, value in line.items():
            if name != "step" and line["step"] >= first:
                found.setdefault(name, {})[line["step"]] = value
    return found


def evaluated(run_dir: Path, step: int) -> list[tuple[str, str, float]]:
    lines = [each for each in read(run_dir, "samples.jsonl") if each["kind"] == "evaluation" and each["step"] == step]
    return [(each["prompt"], each["output"], each["reward"]) for each in lines]


def train(run_dir: Path, tracker: Any, *, steps: int = 4) -> None:
    """Train a tiny model; with more steps, go on with it."""
    changes = {"eval_interval": 2, "save_interval": 2, "resume": "auto", "trackers": [tracker]}
    given = {f"train__{name}": value for name, value in changes.items()}
    tiny_trainer("ppo", run_dir, train__total_steps=steps, **given).learn()


# --------------------------------------------------------------------------------------------------- read back


@pytest.mark.slow
def test_tensorboard_holds_metrics_samples_and_histograms(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tensorboard's own imports
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    run = tmp_path / "run"
    train(run, "tensorboard")
    time.sleep(1.1)  # files of events are read in the order of their names, which begin with the second
    train(run, "tensorboard", steps=6)
    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"histograms": 0}).Reload()
    for name, values in expected(run).items():
        assert {event.step: event.value for event in events.Scalars(name)} == pytest.approx(values, rel=1e-6), name
    tables = {e.step: e.tensor_proto.string_val[0].decode() for e in events.Tensors("eval/samples/text_summary")}
    assert {*tables} == {0, 2, 4, 6}
    for step, text in tables.items():
        rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in text.splitlines()[2:]]
        assert [(row[1], row[2], float(row[4])) for row in rows] == evaluated(run, step)
    for name, tag in (("reward", "eval/reward/histogram"), ("length", "eval/length/histogram")):
        last = events.Histograms(tag)[-1].histogram_value
        assert (last.num, last.sum / last.num) == (8, pytest.approx(expected(run)[f"eval/{name}"][6]))


@pytest.fixture(scope="module")
def trackio_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRACKIO_DIR", str(tmp_path_factory.mktemp("trackio")))  # which trackio reads when it is imported
        yield Path(str(tmp_path_factory.getbasetemp()))


@pytest.mark.slow
def test_trackio_holds_names_metrics_samples_and_histograms(tmp_path: Path, trackio_dir: Path) -> None:
    run, entry = tmp_path / "run", {"name": "trackio", "project": "x", "group": "y", "run_name": "r", "log_model": True}
    train(run, entry)
    train(run, entry, steps=6)
    from trackio.sqlite_storage import SQLiteStorage

    (record,) = SQLiteStorage.get_run_records("x")
    assert record["name"] == "r", "the resumed run goes on in the same run"
    config = SQLiteStorage.get_run_config("x", "r")
    assert config is not None
    assert (config["_Group"], config["train.batch_size"], config["method.name"]) == ("y", 8, "ppo")
    logs = SQLiteStorage.get_logs("x", "r")
    for name, values in expected(run).items():
        assert {each["step"]: each[name] for each in logs if name in each} == pytest.approx(values), name
    tables = {each["step"]: each["eval/samples"]["_value"] for each in logs if "eval/samples" in each}
    for step, rows in tables.items():
        assert [(row["prompt"], row["output"], row["reward"]) for row in rows] == evaluated(run, step)
    assert {*tables} == {0, 2, 4, 6}
    assert sum([each for each in logs if "eval/reward/histogram" in each][-1]["eval/reward/histogram"]["values"]) == 8


@pytest.fixture
def mlflow_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    uri = (tmp_path / "mlruns").as_uri()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    return uri


@pytest.mark.slow
def test_mlflow_holds_names_metrics_parameters_and_files(tmp_path: Path, mlflow_dir: str) -> None:
    run, entry = tmp_path / "run", {"name": "mlflow", "project": "x", "tags": {"team": "a"}, "log_model": True}
    train(run, entry)
    train(run, entry, steps=6)
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=mlflow_dir)
    experiment = client.get_experiment_by_name("x")
    assert experiment is not None
    (found,) = client.search_runs([experiment.experiment_id])
    assert (found.info.run_name, found.info.status, found.data.tags["team"]) == ("run", "FINISHED", "a")
    assert found.data.params["train.batch_size"] == "8"
    for name, values in expected(run).items():
        history = client.get_metric_history(found.info.run_id, name)
        assert {each.step: each.value for each in history} == pytest.approx(values), name
    files = Path(client.download_artifacts(found.info.run_id, ""))
    assert (files / "config.yaml").read_text() == (run / "config.yaml").read_text()
    assert (files / "model" / "model.safetensors").stat().st_size == (
        run / "model" / "model.safetensors"
    ).stat().st_size


# ---------------------------------------------------------------------------------------------------- settings


def config(*entries: Any) -> TRLConfig[Any]:
    return TRLConfig.from_dict({"method": "sft", "train": {"trackers": [*entries]}})


def test_every_tracker_of_accelerate_has_its_settings_but_tensorboard() -> None:
    assert {*TRACKERS, "tensorboard"} == {*KINDS} == ACCELERATE_TRACKERS
    for name, settings in TRACKERS.items():
        assert settings().name == name


def test_settings_name_a_tracker_survive_a_file_and_become_its_words(tmp_path: Path) -> None:
    before = config("tensorboard", {"name": "mlflow", "project": "x", "tags": {"a": "b"}})
    before.save_yaml(tmp_path / "config.yaml")
    assert TRLConfig.load_yaml(tmp_path / "config.yaml").train.trackers == before.train.trackers
    made = default_trackers(["tensorboard", *config({"name": "trackio"}).train.trackers])
    assert [type(each).__name__ for each in made] == ["Console", "JsonLines", "TensorBoard", "Trackio"]
    given = {"project": "x", "run_name": "r", "entity": "z", "group": "y", "tags": ["a"]}
    (wandb,) = config({"name": "wandb", **given}).train.trackers
    assert wandb.arguments() == {"name": "r", "entity": "z", "group": "y", "tags": ["a"]}  # type: ignore[union-attr]
    (swanlab,) = config({"name": "swanlab", **given}).train.trackers
    assert swanlab.arguments() == {  # type: ignore[union-attr]
        "experiment_name": "r", "workspace": "z", "group": "y", "tags": ["a"],
    }  # fmt: skip
    (clearml,) = config({"name": "clearml", "run_name": "r", "tags": ["a"]}).train.trackers
    assert clearml.arguments() == {"task_name": "r", "tags": ["a"]}  # type: ignore[union-attr]


@table(
    "entry, message",
    [
        (
            {"name": "trackio", "entity": "z"},
            r"\(trackio\)\.entity: unknown field.*known: name, project, run_name, group",
        ),
        ({"name": "wandb", "projekt": "x"}, r"\(wandb\)\.projekt: unknown field; did you mean 'project'"),
        ({"name": "tensorboard", "project": "x"}, "'tensorboard' has no settings; remove 'project'"),
        ({"name": "dvclive", "project": "x"}, r"\(dvclive\)\.project: unknown field"),
        ({"name": "mlflow", "tags": ["a"]}, r"\(mlflow\)\.tags: should be a mapping"),
        ({"name": "wandb", "mode": "ofline"}, r"\(wandb\)\.mode: .*did you mean 'offline'"),
        ({"name": "wandb", "project": ""}, r"\(wandb\)\.project: .*at least 1 character"),
    ],
)
def test_a_setting_that_a_tracker_does_not_have_is_refused(entry: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(entry)


@table("entry", ["aim", {"name": "aim", "project": "x"}])
def test_a_missing_package_is_a_one_line_hint(entry: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"'aim'.*not installed.*pip install aim") as caught:
        tiny_trainer("sft", Path("unused"), train__trackers=[entry])
    assert "\n" not in str(caught.value)


def test_the_settings_of_trackers_are_read_without_torch() -> None:
    code = (
        "import sys; from trainkit import TRLConfig; "
        "TRLConfig.from_dict({'method': 'sft', 'train': {'trackers': [{'name': 'wandb', 'project': 'x'}]}}); "
        "assert not {'torch', 'accelerate', 'wandb'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# ----------------------------------------------------------------------------------------------- what they get


def test_samples_in_a_markdown_table_have_no_effect_as_markup() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tensorboard.plugin_util import markdowns_to_safe_html
    evil = [
        "a | b",
        "<script>x</script>",
        "**bold** _it_ `code`",
        "[x](http://y)",
        "![](http://z)",
        "# head\n- list",
        "\\|",
    ]
    table = markdown_table(table_of([{"prompt": text, "output": "", "reward": 1.0} for text in evil], 3))
    cells: list[str] = []
    tags: set[str] = set()

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: Any) -> None:
            tags.add(tag)
            if tag == "td":
                cells.append("")

        def handle_data(self, data: str) -> None:
            if cells and data.strip():
                cells[-1] += data

    Reader().feed(markdowns_to_safe_html([table], "\n".join))
    assert tags <= {"table", "thead", "tbody", "tr", "th", "td"}
    assert cells[1::4] == [text.replace("\n", " ") for text in evil]


def test_tables_hold_texts_and_numbers_and_histograms_the_finite_numbers_of_each_value_of_a_sweep() -> None:
    rows: Lines = [
        {"prompt": "p", "output": "\ud800", "reward": 0.5, "episode": [1]},
        {"prompt": "q", "output": "o", "won": True},
    ]
    assert table_of(rows, 7) == {
        "step": [7, 7], "prompt": ["p", "q"], "output": ["?", "o"], "reward": [0.5, None], "won": [None, True],
    }  # fmt: skip
    samples: Lines = [
        {"reward": 1.0, "length": 3.0},
        {"reward": float("nan")},
        {"reward": 2, "setting": "temperature=0.5"},
    ]
    assert drawn(samples) == {"reward": [1.0], "length": [3.0], "reward@temperature=0.5": [2.0]}
