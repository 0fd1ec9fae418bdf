"""`trainkit runs` and the record of a run: state, steps, evaluation, findings; odd and damaged runs."""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from trainkit.cli import app
from trainkit.errors import DataError
from trainkit.runs import Record, RunLock, find_runs
from trainkit.runs.lock import is_held
from trainkit.runs.record import main_metric
from trainkit.testing.trainers import tiny_trainer


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a finished run, two levels deep."""
    place = tmp_path_factory.mktemp("made")
    tiny_trainer("ppo", place / "group" / "first", train__total_steps=4, train__eval_interval=2).learn()
    return place


@pytest.fixture
def runs(made: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(made, tmp_path / "runs"))


def listed(*arguments: str | Path) -> list[dict[str, Any]]:
    result = CliRunner().invoke(app, ["runs", *map(str, arguments), "--json"])
    assert result.exit_code == 0, result.output
    return list(json.loads(result.stdout))


def test_a_finished_run_is_listed_with_its_last_evaluation(runs: Path) -> None:
    (row,) = listed(runs)
    record = Record(runs / "group" / "first")
    assert {name: row[name] for name in ("run", "method", "step", "total_steps", "state", "health", "error")} == {
        "run": "group/first", "method": "ppo", "step": 4, "total_steps": 4, "state": "done", "health": [], "error": ""
    }  # fmt: skip
    assert (row["metric"], row["value"]) == ("eval/reward", record.evaluation["eval/reward"])
    assert row["bytes"] == sum(file.stat().st_size for file in record.path.rglob("*") if file.is_file())
    assert record.evaluation["step"] == 4
    table = CliRunner().invoke(app, ["runs", str(runs)]).stdout
    columns = ["run", "method", "seed", "steps", "state", "metric", "last", "size", "changed", "health"]
    assert table.splitlines()[0].split() == columns
    assert "group/first  ppo" in table


def test_states_are_told_apart(runs: Path) -> None:
    run = runs / "group" / "first"
    lock = RunLock(run)
    assert Record(run).state == "running"
    lock.release()
    assert Record(run).state == "done"
    (run / "run.lock").write_text(f'{{"pid": {os.getpid()}, "host": "elsewhere"}}', encoding="utf-8")
    assert Record(run).state == "killed", "nobody holds the lock, whoever has the number of its process now"
    (run / "run.lock").unlink()
    shutil.rmtree(run / "model")
    assert Record(run).state == "stopped"


def test_looking_at_a_lock_keeps_nobody_from_taking_it(tmp_path: Path) -> None:
    looking = threading.Event()

    def look() -> None:
        while not looking.is_set():
            is_held(tmp_path)
            time.sleep(0.005)

    thread = threading.Thread(target=look)
    (tmp_path / "run.lock").touch()
    thread.start()
    try:
        for _ in range(20):
            RunLock(tmp_path).release()
    finally:
        looking.set()
        thread.join()


def test_a_run_that_goes_on_may_have_a_line_that_is_cut_off(runs: Path) -> None:
    run = runs / "group" / "first"
    before = Record(run).metrics
    with (run / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 5, "loss')
    assert Record(run).metrics == before


def test_what_cannot_be_read_is_said_and_the_others_are_listed(runs: Path) -> None:
    for name, config, metrics in (
        ("cut", "method: [", ""),
        ("garbage", "method: ppo\n", "[1]\n"),
        ("empty", "method: ppo\n", ""),
        ("foreign", "model: gpt2\n", "{}\n"),
        ("odd", "method: ppo\n", '{"step": 1, "eval/reward": "high"}\n'),
        ("nan", "method: ppo\n", '{"step": 1, "eval/reward": NaN}\n'),
    ):
        (runs / name).mkdir()
        (runs / name / "config.yaml").write_text(config, encoding="utf-8")
        (runs / name / "metrics.jsonl").write_text(metrics, encoding="utf-8")
    rows = {row["run"]: row for row in listed(runs)}
    assert "is not valid YAML" in rows["cut"]["error"]
    assert "line 1: not a JSON object" in rows["garbage"]["error"]
    assert (rows["empty"]["step"], rows["empty"]["state"], rows["empty"]["error"]) == (0, "stopped", "")
    assert "is no run of trainkit" in rows["foreign"]["error"]
    assert rows["group/first"]["state"] == "done"
    assert rows["odd"]["value"] is rows["nan"]["value"] is None
    table = CliRunner().invoke(app, ["runs", str(runs)]).stdout
    assert "cut cannot be read: " in table
    assert "None" not in table
    assert re.search(r"^foreign cannot be read: .*no run of trainkit", table, re.MULTILINE)
    with pytest.raises(DataError, match=r"metrics\.jsonl, line 1: not a JSON object"):
        assert Record(runs / "garbage").metrics


def test_no_runs_and_no_directory_are_sentences(tmp_path: Path) -> None:
    assert CliRunner().invoke(app, ["runs", str(tmp_path)]).stdout == f"no runs in {tmp_path}\n"
    result = CliRunner().invoke(app, ["runs", str(tmp_path / "gone")])
    assert result.exit_code == 1
    assert "there is no directory" in result.stderr


def test_links_are_not_followed(runs: Path) -> None:
    (runs / "loop").symlink_to(runs, target_is_directory=True)
    assert len(list(find_runs(runs))) == 1


def test_names_cannot_control_the_terminal(runs: Path) -> None:
    (runs / "group" / "first").rename(runs / "group" / "\x1b[31mred")
    assert "\x1b" not in CliRunner().invoke(app, ["runs", str(runs)]).stdout


def test_the_main_metric_is_a_reward_of_evaluations_before_others() -> None:
    assert main_metric(["loss/total", "eval/length", "eval/loss/total", "eval/reward@temperature=1"]) == (
        "eval/reward@temperature=1"
    )
    assert main_metric(["loss/total", "eval/length", "eval/optimality"]) == "eval/optimality"
    assert main_metric(["loss/nll", "loss/total"]) == "loss/total"
    assert main_metric(["time/update", "x"]) == "x"
    assert main_metric([]) is None
