"""The file contains every logged number once: with several runs in a process, and after a kill."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from trainkit import hookimpl
from trainkit.errors import ConfigError
from trainkit.testing.trainers import tiny_trainer
from trainkit_csv import cell

Row = tuple[int, str, float]


def rows(run_dir: Path, file: str = "metrics.csv") -> list[Row]:
    """Return the lines of the file, without times."""
    with (run_dir / file).open(encoding="utf-8", newline="") as file:
        first, *others = csv.reader(file)
    assert first == ["step", "metric", "value"]
    return [(int(step), name, float(value)) for step, name, value in others if "time" not in name]


def logged(run_dir: Path) -> list[Row]:
    """Return the same numbers from trainkit's own file, `metrics.jsonl`."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [(x["step"], k, v) for x in lines for k, v in x.items() if k != "step" and "time" not in k]


def tiny(run_dir: Path, **changes: Any) -> Any:
    return tiny_trainer("sft", run_dir, **{"train__trackers": ["csv"], "train__eval_interval": 2, **changes})


def test_it_holds_every_number_of_training_and_evaluations(tmp_path: Path) -> None:
    tiny(tmp_path / "run").learn()
    found = rows(tmp_path / "run")
    assert found == logged(tmp_path / "run")
    assert {step for step, name, _ in found if name.startswith("eval/")} == {0, 2, 4, 6}
    assert [step for step, name, _ in found if name == "loss/total"] == [1, 2, 3, 4, 5, 6]


def test_runs_of_one_process_have_a_file_each(tmp_path: Path) -> None:
    trainers = [tiny(tmp_path / name, train__seed=seed) for seed, name in enumerate("ab")]
    for trainer in trainers:
        trainer.learn()
    for trainer in trainers:
        trainer.evaluate()  # the first again, after the second
    assert rows(tmp_path / "a") == logged(tmp_path / "a") != rows(tmp_path / "b") == logged(tmp_path / "b")


def test_no_name_of_a_metric_is_a_formula_or_breaks_a_line(tmp_path: Path) -> None:
    names = ["=HYPERLINK(1)", "+1", "-1", "@x", "a\nb", "\t=1", 'q",x']
    for steps in (2, 4):  # the second run reads what the first has written
        trainer = tiny(
            tmp_path / "run", train__total_steps=steps, train__save_interval=2, train__resume="auto",
            arguments={"metric_fn": lambda outputs, **_: dict.fromkeys(names, 1.0)},
        )  # fmt: skip
        trainer.learn()
    found = {name.removeprefix("eval/") for _, name, _ in rows(tmp_path / "run")}
    assert {*(name.replace("\n", " ").replace("\t", " ") for name in names)} <= found
    assert [cell(name)[0] for name in names] == ["'", "'", "'", "'", "a", "'", "q"]


class Killed(BaseException):
    """Stands for SIGKILL, except that `on_train_end` is called."""


class Kill:
    """Kills a run after a step."""

    def __init__(self, at: int) -> None:
        self.at = at

    @hookimpl
    def on_step(self, step: int) -> None:
        if step == self.at:
            raise Killed


@pytest.mark.parametrize("at", [1, 5])
def test_a_killed_and_resumed_run_has_the_lines_of_one_that_never_stopped(tmp_path: Path, at: int) -> None:
    """Resume from step 4 after a kill at step 5, from the start after one at step 1; the last line is incomplete."""
    tiny(tmp_path / "straight", train__save_interval=2).learn()
    with pytest.raises(Killed):
        tiny(tmp_path / "killed", train__save_interval=2, callbacks=[Kill(at)]).learn()
    with (tmp_path / "killed" / "metrics.csv").open("a", encoding="utf-8") as file:
        file.write(f"{at},loss/to")
    tiny(tmp_path / "killed", train__save_interval=2, train__resume="auto").learn()
    assert rows(tmp_path / "killed") == rows(tmp_path / "straight")
    assert [path.name for path in (tmp_path / "killed").glob("*metrics.csv")] == ["metrics.csv"]


def test_resuming_a_finished_run_leaves_the_file_alone(tmp_path: Path) -> None:
    tiny(tmp_path / "run", train__save_interval=2).learn()
    before = (tmp_path / "run" / "metrics.csv").stat()
    tiny(tmp_path / "run", train__save_interval=2, train__resume="auto").learn()
    after = (tmp_path / "run" / "metrics.csv").stat()
    assert (before.st_mtime_ns, before.st_ino) == (after.st_mtime_ns, after.st_ino)


def test_the_settings_name_the_file_and_choose_the_metrics(tmp_path: Path) -> None:
    tiny(tmp_path / "run", train__trackers=[{"name": "csv", "file": "evaluations.csv", "prefix": "eval/"}]).learn()
    found = rows(tmp_path / "run", "evaluations.csv")
    assert found == [row for row in logged(tmp_path / "run") if row[1].startswith("eval/")] != []
    assert not (tmp_path / "run" / "metrics.csv").exists()


@pytest.mark.parametrize("file", ["", ".hidden", "up/../metrics.csv", "/metrics.csv"])
def test_the_file_is_in_the_directory_of_the_run(tmp_path: Path, file: str) -> None:
    with pytest.raises(ConfigError, match=r"train\.trackers\.0 \(csv\)\.file: "):
        tiny(tmp_path, train__trackers=[{"name": "csv", "file": file}])


def test_it_is_a_tracker_and_not_named_in_plugins(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"plugins\.0: 'csv' is a tracker; name it in train\.trackers"):
        tiny(tmp_path, plugins=["csv"])
