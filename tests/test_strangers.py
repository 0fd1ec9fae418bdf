"""Strangers' plugins: pip installs them into an environment of their own, and they work as the built-in ones do.

Beside them all those of `examples/plugins` are installed that are broken on purpose, which is nobody's trouble.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tables import table
from trainkit.examples import find_examples

if TYPE_CHECKING:
    from conftest import FreshVenv

ROOT = Path(__file__).parents[1]
PLUGINS = ROOT / "examples" / "plugins"
WORKING = {"reinforce_pp": 60, "remax": 60, "csv": 32}
"""Those that work, and how many lines of code each may have."""
BROKEN = {
    "broken_import": "ModuleNotFoundError",
    "broken_exit": "SystemExit",
    "broken_key": "KeyError",
    "broken_hook": "on_stepp",
    "broken_signature": "loss",
    "broken_api": ">=99",
}
"""Those that do not, by what a run that names one is told."""
TASK = """
from trainkit_kit import Bandit

def bandit():
    arguments = Bandit().arguments
    return {name: arguments[name] for name in ("tokenizer", "reward_fn", "prompts", "logit_mask")}
"""
CONFIG: dict[str, Any] = {
    "model": {"model_path": {"model_type": "gpt2", "vocab_size": 10, "n_layer": 2, "n_head": 2, "n_embd": 32}},
    "rollout": {"max_new_tokens": 1, "num_rollouts": 8, "batch_size": 8},
    "train": {"batch_size": 8, "total_steps": 2, "eval_interval": 1, "save_interval": 1, "trackers": []},
}
METHOD = {"name": "reinforce_pp"}


@pytest.fixture(scope="module")
def strangers(fresh_venv: FreshVenv) -> FreshVenv:
    """The environment with all of `examples/plugins` installed."""
    fresh_venv.install(*(path.parent for path in sorted(PLUGINS.glob("*/pyproject.toml"))))
    return fresh_venv


def train(venv: FreshVenv, folder: Path, *overrides: str, config: dict[str, Any]) -> None:
    """A run of the command line in ``folder``, into ``folder/run``."""
    (folder / "task.py").write_text(TASK, encoding="utf-8")
    (folder / "config.yaml").write_text(json.dumps({**CONFIG, **config}), encoding="utf-8")  # which is YAML too
    venv.run(
        "trainkit", "train", "config.yaml", "train.run_dir=run", *overrides, "--task", "task.py:bandit", cwd=folder
    )


@table("name, limit", WORKING.items())
def test_a_plugin_is_a_page_of_code_as_its_table_says(
    name: str, limit: int, lines_of_code: Callable[[Path], int]
) -> None:
    lines = lines_of_code(PLUGINS / name / f"trainkit_{name}.py")
    assert lines <= limit
    (row,) = (x for x in (PLUGINS / "README.md").read_text("utf-8").splitlines() if x.startswith(f"| [{name}]"))
    assert row.endswith(f"| {lines} |")


def test_short_algorithms_have_the_lines_that_their_table_says(lines_of_code: Callable[[Path], int]) -> None:
    place = "plugins/kit/tests/sound"
    page = (ROOT / "docs/write-an-algorithm.md").read_text("utf-8")
    rows = re.findall(rf"{place}/(\w+)\.py\) \| (\d+) \|", page)
    assert {name: int(lines) for name, lines in rows} == {
        path.stem: lines_of_code(path) for path in ROOT.glob(f"{place}/[a-z]*.py")
    }


def test_plugins_of_strangers_are_no_examples_to_run() -> None:
    assert "plugins" not in find_examples()
    assert not {path.name for path in PLUGINS.iterdir()} & find_examples().keys()


def test_they_are_listed_with_what_they_are_and_why_they_cannot_be_used(strangers: FreshVenv) -> None:
    found = json.loads(strangers.run("trainkit", "plugins", "list", "--json").stdout)
    by_name = {(plugin["name"], plugin["distribution"]): plugin for plugin in found}
    for name in WORKING:
        plugin = by_name[name, f"trainkit-{name.replace('_', '-')}"]
        assert plugin["why"] == ""
        assert plugin["kind"] == ("tracker" if name == "csv" else "trainer")
        assert plugin["version"] == "0.1.0"
    refused = by_name["broken_api", "trainkit-broken-api"]
    assert "it requires trainkit >=99" in refused["why"]
    claimed = by_name["ppo", "trainkit-broken-claim"]
    assert "the name 'ppo' belongs to trainkit's own trainkit-ppo" in claimed["why"]
    for plugin in (refused, claimed):
        assert f"{plugin['distribution']} 0.4.0" in plugin["why"]
    assert by_name["ppo", "trainkit-ppo"]["why"] == ""


@pytest.mark.parametrize(
    "name", [name if name == "csv" else pytest.param(name, marks=pytest.mark.weekly) for name in WORKING]
)
def test_its_own_tests_pass_where_it_is_installed(strangers: FreshVenv, name: str) -> None:
    done = strangers.run("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", PLUGINS / name / "tests")
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


def test_a_run_with_two_strangers_is_resumed_and_loses_and_repeats_no_line(
    strangers: FreshVenv, tmp_path: Path
) -> None:
    config = {"method": METHOD, "train": {**CONFIG["train"], "trackers": ["csv"]}}
    train(strangers, tmp_path, config=config)
    train(strangers, tmp_path, "train.total_steps=4", "train.resume=auto", config=config)
    rows = [line.split(",") for line in (tmp_path / "run" / "metrics.csv").read_text(encoding="utf-8").splitlines()[1:]]
    told = [int(step) for step, name, _ in rows if name == "policy/ratio"]
    assert told == [1, 2, 3, 4]
    assert [int(step) for step, name, _ in rows if name == "eval/reward"] == [0, 1, 2, 3, 4]
    written = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text("utf-8").splitlines()]
    assert [(int(step), name) for step, name, _ in rows] == [(x["step"], k) for x in written for k in x if k != "step"]


def test_a_built_in_algorithm_runs_beside_all_that_are_broken(strangers: FreshVenv, tmp_path: Path) -> None:
    train(strangers, tmp_path, config={"method": {"name": "ppo", "ppo_epochs": 1}})
    export = json.loads((tmp_path / "run" / "model" / "config.json").read_text(encoding="utf-8"))
    assert export["model_type"] == "gpt2"
    assert "values/mean" in (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8"), "it is PPO, with a critic"


NAMED = """
import json, sys
from pathlib import Path
import trainkit
from task import bandit

config, told = json.loads(Path("config.json").read_text()), {}
for name in sys.argv[1:]:
    try:
        trainkit.train(config={**config, "plugins": [name]}, **bandit())
    except trainkit.errors.TrainkitError as error:
        told[name] = [type(error).__name__, str(error)]
assert not Path("run").exists()
trainer = trainkit.train(config={**config, "train": {**config["train"], "trackers": ["csv"]}}, **bandit())
print(json.dumps([told, trainer.progress.step]))
"""


def test_a_run_that_names_a_broken_one_is_told_whose_it_is_and_the_next_one_works(
    strangers: FreshVenv, tmp_path: Path
) -> None:
    (tmp_path / "task.py").write_text(TASK, encoding="utf-8")
    config = {**CONFIG, "method": METHOD, "train": {**CONFIG["train"], "run_dir": "run"}}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    done = strangers.run("python", "-c", NAMED, *BROKEN, cwd=tmp_path)
    told, steps = json.loads(done.stdout.splitlines()[-1])
    for name, cause in BROKEN.items():
        kind, message = told[name]
        distribution = "trainkit-broken-api 0.4.0" if name == "broken_api" else "trainkit-broken 0.3.0"
        assert kind == "PluginError", message
        assert distribution in message
        assert cause in message
        assert "\n" not in message
    assert steps == 2
