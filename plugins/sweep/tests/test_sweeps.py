"""Sweeps: what is refused before a run, claims of trials, runs that fail, are pruned or killed, and the results."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import TrialState
from typer.testing import CliRunner

from tables import table
from trainkit.cli import app
from trainkit.errors import ConfigError, DataError, SweepError
from trainkit.runs.record import find_runs
from trainkit_sweep import Sweep, read_sweep, run_sweep, running, trials
from trainkit_sweep.coordinates import Coordinate, parallel_coordinates
from trainkit_sweep.lines import AddedLines
from trainkit_sweep.results import best_config, importances, write_best, write_report
from trainkit_sweep.settings import Range
from trainkit_sweep.study import ALIVE, GRACE, OWNER, Study
from trainkit_sweep.trials import shared_machine

EVIL = "</pre><script>alert(1)</script>\x1b[31m & \"quoted\" 'text'"
CONFIG = """
method: ppo
model: {model_path: {model_type: gpt2, vocab_size: 5, n_layer: 1, n_head: 2, n_embd: 16, n_positions: 16,
                     bos_token_id: null, eos_token_id: null}}
rollout: {max_new_tokens: 4, num_rollouts: 4}
train: {batch_size: 4, total_steps: 4, eval_interval: 2, save_interval: 1, trackers: []}
"""
TASK = """
from trainkit.testing import character_tokenizer

def online():
    return {
        "reward_fn": lambda outputs, **_: [float(o.count("a")) for o in outputs],
        "prompts": ["a", "b"],
        "tokenizer": character_tokenizer("abc"),
    }
"""
SWEEP: dict[str, Any] = {
    "run": {"config": "run.yaml", "task": "task.py:online"},
    "trials": 3,
    "sampler": "random",
    "parameters": {"optimizer.lr": {"low": 1e-4, "high": 1e-2, "log": True}},
}
SCRIPT = """
import json, signal, sys, time
from pathlib import Path

place, what = Path(sys.argv[1]), json.loads(sys.argv[2])
place.mkdir(parents=True, exist_ok=True)
(place / "checkpoints").mkdir(exist_ok=True)
(place / "metrics.jsonl").unlink(missing_ok=True)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
for step, value in enumerate(what["values"]):
    with (place / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, what.get("metric", "eval/reward"): value}) + "\\n")
    time.sleep(what.get("pause", 0))
if error := what.get("error"):
    print("something before it")
    sys.exit(f"DataError: {error}")
"""
"""A run that writes the evaluations that it is told to write, without training."""


OF_TRLX = {
    "tune_config": {
        "mode": "max",
        "metric": "reward/mean",
        "search_alg": "bohb",
        "scheduler": "hyperbandforbohb",
        "num_samples": 4,
        "max_concurrent_trials": 2,
    },
    "optimizer.kwargs.lr": {"strategy": "loguniform", "values": [1e-5, 1e-2]},
    "method.init_kl_coef": {"strategy": "uniform", "values": [0, 1]},
    "method.ppo_epochs": {"strategy": "randint", "values": [2, 5]},
    "train.batch_size": {"strategy": "qrandint", "values": [8, 32, 8]},
    "model.num_layers_unfrozen": {"strategy": "choice", "values": [-1, 2]},
}
MAIN = "import json\n\n\ndef main(hparams={}):\n    pass\n"


def of_trlx(tmp_path: Path, changes: dict[str, Any], script: str | None = MAIN) -> Sweep:
    """Read a sweep of trlX with changes, and a script."""
    (tmp_path / "sweep.yml").write_text(yaml.safe_dump({**OF_TRLX, **changes}), encoding="utf-8")
    given = {} if script is None else {"script": str(tmp_path / "script.py")}
    (tmp_path / "script.py").write_text(script or "", encoding="utf-8")
    return read_sweep(tmp_path / "sweep.yml", given)


def test_a_sweep_of_trlx_is_read(tmp_path: Path) -> None:
    sweep = of_trlx(tmp_path, {})
    settings = sweep.settings
    assert (settings.metric, settings.direction, settings.sampler, settings.pruner) == (
        *("eval/reward", "maximize", "tpe", "hyperband"),
    )
    assert (settings.trials, settings.workers, settings.run.script) == (4, 2, str(tmp_path / "script.py"))
    assert {name: dimension.distribution for name, dimension in sweep.space.items()} == {
        "optimizer.kwargs.lr": FloatDistribution(1e-5, 1e-2, log=True),
        "method.init_kl_coef": FloatDistribution(0.0, 1.0),
        "method.ppo_epochs": IntDistribution(2, 4),  # Ray excludes the end
        "train.batch_size": IntDistribution(8, 32, step=8),
        "model.num_layers_unfrozen": CategoricalDistribution([-1, 2]),
    }
    every = [name for name in OF_TRLX if name != "tune_config"]
    values = {"strategy": "grid", "values": [1, 2]}
    assert of_trlx(tmp_path, dict.fromkeys(every, values)).trials == 2 ** len(every)


def test_an_option_without_effect_on_a_script_is_refused(tmp_path: Path) -> None:
    of_trlx(tmp_path, {})
    given = ["sweep", str(tmp_path / "sweep.yml"), "--script", str(tmp_path / "script.py"), "--trust-remote-code"]
    found = CliRunner().invoke(app, given)
    assert (found.exit_code, "--trust-remote-code has no effect on a script" in found.output) == (2, True)


@table(
    "changes, script, words",
    [
        (
            {"tune_config": {**OF_TRLX["tune_config"], "search_alg": "bayesopt"}},
            MAIN,
            "'bayesopt' is not supported: write",
        ),
        (
            {"tune_config": {**OF_TRLX["tune_config"], "scheduler": "pbt"}},
            MAIN,
            "'pbt' is not supported: it may be fifo",
        ),
        ({"tune_config": {**OF_TRLX["tune_config"], "metric": "mean_reward"}}, MAIN, "'mean_reward' is no metric of"),
        (
            {"tune_config": {**OF_TRLX["tune_config"], "time_budget": 3}},
            MAIN,
            r"tune_config\.time_budget .*: not supported",
        ),
        ({"method.gamma": {"strategy": "randn", "values": [0, 1]}}, MAIN, "no normal distribution; write uniform"),
        ({"method.gamma": {"strategy": "unifrom", "values": [0, 1]}}, MAIN, "not supported: .*did you mean 'uniform'"),
        ({"method.gamma": {"strategy": "uniform", "values": [0]}}, MAIN, "uniform has 2 values; given 1"),
        ({"method.gamma": {"values": [0]}}, MAIN, "a parameter has strategy and values"),
        (
            {"method.gamma": {"strategy": "grid", "values": [0]}},
            MAIN,
            r"a grid with parameters that are drawn \(method\.init_kl_coef, ",
        ),
        ({"train.seed": {"strategy": "choice", "values": [1, 2]}}, MAIN, "give seeds"),
        ({}, None, r"needs the script that trains: give --script FILE\.py"),
        ({}, "import trlx\n" + MAIN, "imports trlx, which is not installed; `trainkit migrate"),
        ({}, "def main():\n    pass\n", r"has no function main\(hparams\)"),
        ({}, "def main(:\n", "cannot be read"),
    ],
)
def test_what_a_sweep_of_trlx_cannot_have_is_named(
    changes: dict[str, Any], script: str | None, words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=words):
        of_trlx(tmp_path, changes, script)


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a configuration and a task, where commands run."""
    (tmp_path / "run.yaml").write_text(CONFIG)
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "script.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(running, "POLL", 0.02)
    return tmp_path


def written(sweep: dict[str, Any], name: str = "s.yaml") -> Path:
    Path(name).write_text(yaml.safe_dump(sweep, sort_keys=False))
    return Path(name)


def made(**changes: Any) -> Sweep:
    sweep = read_sweep(written({**SWEEP, **changes}))
    sweep.directory.mkdir(parents=True, exist_ok=True)
    return sweep


def told(**what: Any) -> Any:
    """In place of `Run.command`: the script, told what to do by the trial's number."""

    def command(run: trials.Run) -> list[str]:
        chosen = what.get(f"trial_{run.trial.number}", what["others"])
        return [sys.executable, "script.py", str(run.directory), json.dumps(chosen)]

    return command


def finished(study: Study) -> list[str]:
    return [trial.state.name for trial in study.trials]


@pytest.fixture
def opened() -> Iterator[Any]:
    """Opens studies, and closes them after the test."""
    known: list[Study] = []

    def study(sweep: Sweep, url: str | None = None) -> Study:
        known.append(Study(sweep, url))
        return known[-1]

    yield study
    for each in known:
        each.close()


# ------------------------------------------------------------------------------------------------------ the file


def test_all_faults_of_a_sweep_are_told_with_their_lines(work: Path) -> None:
    Path("bad.yaml").write_text(
        dedent("""
            run: {config: run.yaml, method: ppo}
            seed: [1, 2]
            trials: 0
            sampler: tpee
            parameters:
              optimizer.lr: {low: 1e-4, high: 1e-9, log: true}
              method.gamma: 5
              method.lam: []
              train.batch_size: {low: 2, hi: 4}
        """)
    )
    with pytest.raises(ConfigError) as caught:
        read_sweep(Path("bad.yaml"))
    for line in (
        "run (bad.yaml:2): give either config, a file, or method, the name of an algorithm",
        "seed (bad.yaml:3): unknown field; did you mean 'seeds'?",
        "trials (bad.yaml:4): should be greater than or equal to 1 (given 0 (int))",
        "sampler (bad.yaml:5): should be 'tpe', 'random' or 'grid' (given 'tpee' (str))",
        "parameters.optimizer.lr (bad.yaml:7): low should be less than high",
        "parameters.method.gamma (bad.yaml:8): should be a list of choices, or a mapping with low and high",
        "parameters.method.lam (bad.yaml:9): List should have at least 1 item",
        "parameters.train.batch_size.hi (bad.yaml:10): unknown field; did you mean 'high'?",
    ):
        assert line in str(caught.value)


@table(
    "changes, says",
    [
        (
            {
                "run": {
                    "config": "run.yaml",
                    "task": "taks.py:online",
                    "samples": "no/a.csv",
                    "prompts": "owner/name:test",
                }
            },
            "run.task (s.yaml:3): there is no file 'taks.py'; did you mean 'task.py'?\n"
            "  run.samples (s.yaml:4): there is no file 'no/a.csv'",
        ),
        (
            {"metric": "reward"},
            "should be a metric of evaluations, such as 'eval/reward' or 'eval/loss/total'; did you mean",
        ),
        ({"parameters": {"optimizer.lrr": [1e-3]}}, "unknown field; did you mean 'lr'?"),
        ({"parameters": {"optimizer.lr": [1e-3, -1.0]}}, "-1.0 is refused: optimizer.lr: should be greater than 0"),
        ({"parameters": {"train.seed": [1, 2]}}, "no parameter of a sweep; give seeds"),
        ({"run": {"config": "run.yaml", "overrides": {"train": {"run_dir": "x"}}}}, "train.run_dir cannot be set here"),
        ({"run": {"config": "run.yaml", "overrides": {"train.eval_interval": 0}}}, "a sweep compares evaluations"),
        ({"run": {"config": "run.yaml", "overrides": {"train.lr": 1}}}, "did you mean optimizer.lr?"),
        ({"sampler": "grid"}, "needs a list of choices, or a range with a step"),
        ({"trials": None}, "trials: required, unless the sampler is 'grid'"),
        ({"seeds": [1, 1]}, "a seed is given twice"),
        ({"parameters": {"optimizer.lr": [1e-3, 1e-3]}}, "two choices are equal"),
        ({"parameters": {}}, "parameters (s.yaml:6)"),
    ],
)
def test_what_cannot_work_is_refused_before_a_run(work: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        made(**changes)


def test_a_value_that_is_valid_only_with_another_parameter_is_not_refused(work: Path) -> None:
    pair: dict[str, Any] = {"environment.on_error": ["fail_episode"], "environment.fail_reward": [-1.0]}
    sweep = made(parameters=pair)
    assert sweep.config({name: values[0] for name, values in pair.items()}).environment.fail_reward == -1
    with pytest.raises(ConfigError, match=r"-1\.0 is refused: environment: fail_reward has an effect only if"):
        made(parameters={"environment.fail_reward": [-1.0]})


def test_a_range_is_of_integers_only_where_the_setting_is_one(work: Path) -> None:
    sweep = made(
        parameters={
            "train.batch_size": {"low": 8, "high": 65, "step": 8},
            "method.gamma": {"low": 0, "high": 1},
            "train.max_grad_norm": {"low": 1, "high": 2},
            "train.microbatch_size": {"low": 1, "high": 4},
            "optimizer.lr": {"low": 1e-5, "high": 1e-3, "log": True},
            "optimizer.kwargs": [{"eps": 1e-6}, {"eps": 1e-8}],
        }
    )
    found = {name: each.distribution for name, each in sweep.space.items()}
    assert found["train.batch_size"] == IntDistribution(8, 64, step=8)
    assert found["method.gamma"] == FloatDistribution(0.0, 1.0)
    assert found["train.max_grad_norm"] == FloatDistribution(1.0, 2.0)
    assert found["train.microbatch_size"] == IntDistribution(1, 4)
    assert found["optimizer.lr"] == FloatDistribution(1e-5, 1e-3, log=True)
    choices = found["optimizer.kwargs"]
    assert isinstance(choices, CategoricalDistribution)
    assert sweep.space["optimizer.kwargs"].value(choices.choices[1]) == {"eps": 1e-8}
    assert Range(low=1, high=2).integers
    assert not Range(low=1, high=2, step=0.5).integers


@table("url", ["nonsense", "postgresql://me:hunter2@127.0.0.1:1/x", "sqlite:////nowhere/x.db"])
def test_a_storage_that_cannot_be_used_is_told_without_its_password(work: Path, url: str) -> None:
    result = CliRunner().invoke(app, ["sweep", str(written(SWEEP))], env={"TRAINKIT_SWEEP_STORAGE": url})
    assert result.exit_code in (1, 2)
    assert "the storage" in result.stderr
    assert "hunter2" not in result.output
    assert "Traceback" not in result.output


def test_a_report_of_nothing_is_answered_with_a_sentence(work: Path) -> None:
    result = CliRunner().invoke(app, ["sweep", str(written(SWEEP)), "--report"])
    assert result.exit_code == 2
    assert "there is no sweep in 'sweeps/s' yet" in result.stderr


# ------------------------------------------------------------------------------------------------------- claiming


def test_a_grid_is_claimed_point_by_point(work: Path, opened: Any) -> None:
    grid = {"train.batch_size": {"low": 2, "high": 4, "step": 2}, "optimizer.lr": [1e-3, 1e-2]}
    sweep = made(sampler="grid", trials=None, parameters=grid)
    assert sweep.trials == 4
    study = opened(sweep)
    study.begin()
    found = set()
    while trial := study.claim():
        found.add(tuple(study.parameters(trial).values()))
        study.tell(trial, TrialState.COMPLETE, 1.0)
    assert found == {(size, lr) for size in (2, 4) for lr in (1e-3, 1e-2)}


@pytest.mark.daily(sampler=("random",))
@pytest.mark.parametrize("sampler", ["random", "tpe"])
def test_a_trial_that_was_not_finished_waits_with_its_number_and_parameters(
    work: Path, opened: Any, sampler: str
) -> None:
    study = opened(made(sampler=sampler, seeds=[1, 2]))
    study.begin()
    first, second = study.claim(), study.claim()
    study.record(first, 1, 0.5)
    study.tell(second, TrialState.COMPLETE, 1.0)
    again = opened(study.sweep)
    assert not again.begin()
    trial = again.claim()
    assert trial.number == first.number == 0
    assert trial.params == first.params != second.params
    assert again.values(trial) == {1: 0.5}
    assert again.claim().number == 2
    assert again.claim() is None
    assert len(again.trials) == 3


@pytest.mark.slow
def test_draws_do_not_depend_on_when_a_sweep_was_interrupted(work: Path, opened: Any) -> None:
    study = opened(made())
    study.begin()
    at_once = [study.claim().params for _ in range(3)]
    found = []
    for _ in range(3):
        other = opened(made(name="other"))
        other.begin()
        found.append(trial := other.claim())
        other.tell(trial, TrialState.COMPLETE, 1.0)
    assert [trial.params for trial in found] == at_once


def test_workers_of_one_database_claim_different_trials(work: Path, opened: Any) -> None:
    url = "sqlite:///shared.db"
    one, other = opened(made(directory="a"), url), opened(made(directory="b"), url)
    one.begin()
    trial = one.claim()
    other.begin()  # does not take what another machine makes
    assert [other.claim().number, other.claim().number] == [1, 2]
    assert other.claim() is None
    trial.set_user_attr(ALIVE, time.time() - 2 * GRACE)
    trial.storage.set_trial_user_attr(trial._trial_id, OWNER, "gone")
    started = other.study.get_trials()[0].datetime_start.timestamp()
    assert time.time() - started < GRACE  # it may still write its first sign of life
    assert other.claim() is None


@pytest.mark.slow
def test_what_a_silent_machine_has_claimed_is_made_by_another(
    work: Path, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = "sqlite:///shared.db"
    one, other = opened(made(directory="a"), url), opened(made(directory="b"), url)
    one.begin()
    trial = one.claim()
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 2 * GRACE)
    assert other.claim().number == trial.number
    assert one.beat({0: trial}) == [0]  # the first machine learns that it has lost it


def test_a_sweep_that_has_changed_is_refused_unless_no_trial_is_valid(work: Path, opened: Any) -> None:
    study = opened(made())
    study.begin()
    study.tell(study.claim(), TrialState.FAIL, error="x")
    assert opened(made(metric="eval/length")).begin()  # all have failed
    study = opened(made(metric="eval/length", trials=4, workers=2, pruner="none"))
    study.begin()
    assert finished(study) == ["WAITING"] * 4
    study.tell(study.claim(), TrialState.COMPLETE, 1.0)
    with pytest.raises(ConfigError, match=r"begun with other settings.*metric: eval/length -> eval/reward"):
        opened(made()).begin()


# ---------------------------------------------------------------------------------------------------------- runs


def test_a_trial_is_the_mean_over_its_seeds(work: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def command(run: trials.Run) -> list[str]:
        return [sys.executable, "script.py", str(run.directory), json.dumps({"values": [0.0, run.seed]})]

    monkeypatch.setattr(trials.Run, "command", command)
    assert run_sweep(made(trials=1, seeds=[2, 4])) == 0
    printed = capsys.readouterr().out
    assert "trial 0  complete  eval/reward 3 ± 1.4  optimizer.lr=" in printed
    assert "(1/1, best 3 of trial 0)" in printed


def test_a_trial_that_fails_is_recorded_and_the_sweep_goes_on(
    work: Path, monkeypatch: pytest.MonkeyPatch, opened: Any
) -> None:
    what = {"trial_0": {"values": [1.0], "error": "no rows"}, "trial_1": {"values": [float("nan")]}}
    monkeypatch.setattr(trials.Run, "command", told(**what, others={"values": [1.0]}))
    sweep = made(trials=4, workers=2)
    assert run_sweep(sweep) == 0
    study = opened(sweep)
    assert finished(study) == ["FAIL", "FAIL", "COMPLETE", "COMPLETE"]
    assert [trial.user_attrs["error"] for trial in study.trials[:2]] == [
        "seed 1: DataError: no rows",
        "seed 1: the last eval/reward is nan",
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "says", "attempts"),
    [
        ({"values": [], "error": "no rows"}, "all 3 failed, trial 0 for this reason:\nseed 1: DataError: no rows", 3),
        ({"values": []}, "the run was not evaluated", 3),
        ({"values": [1.0], "metric": "eval/rewards"}, "no metric 'eval/reward'; did you mean 'eval/rewards'?", 1),
    ],
)
def test_a_sweep_without_a_valid_trial_ends_with_a_sentence(
    work: Path, monkeypatch: pytest.MonkeyPatch, opened: Any, what: dict[str, Any], says: str, attempts: int
) -> None:
    monkeypatch.setattr(trials.Run, "command", told(others=what))
    sweep = made(trials=5)
    with pytest.raises(SweepError, match="no trial is valid: ") as caught:
        run_sweep(sweep)
    assert says in str(caught.value)
    assert finished(opened(sweep)).count("FAIL") == attempts
    with pytest.raises(SweepError, match="no trial of the sweep 's' has completed"):
        write_best(opened(sweep))
    monkeypatch.setattr(trials.Run, "command", told(others={"values": [1.0]}))
    assert run_sweep(sweep) == 0  # the cause is corrected
    assert finished(opened(sweep)) == ["COMPLETE"] * 5


@pytest.mark.slow
@pytest.mark.parametrize("pruner", ["median", "hyperband", "none"])
def test_a_trial_is_pruned_by_the_evaluations_of_its_first_seed(
    work: Path, monkeypatch: pytest.MonkeyPatch, opened: Any, pruner: str
) -> None:
    slow = {"values": [0.0, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1], "pause": 0.05 if pruner == "none" else 0.5}
    monkeypatch.setattr(trials.Run, "command", told(trial_5=slow, others={"values": [0.0, *[1.0] * 7]}))
    config = yaml.safe_load(CONFIG)
    config["train"].update(eval_interval=1, total_steps=7)
    Path("run.yaml").write_text(yaml.safe_dump(config))
    sweep = made(trials=6, pruner=pruner, workers=3, name=f"of {pruner}")
    run_sweep(sweep)
    last = opened(sweep).trials[5]
    assert last.state == (TrialState.COMPLETE if pruner == "none" else TrialState.PRUNED)
    assert len(last.intermediate_values) == 8 if pruner == "none" else last.last_step < 7


@pytest.mark.slow
def test_only_the_best_trial_keeps_its_checkpoints_if_asked(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials.Run, "command", told(trial_1={"values": [2.0]}, others={"values": [1.0]}))
    run_sweep(made(keep="best"))
    assert [str(path) for path in Path().glob("sweeps/s/*/*/checkpoints")] == ["sweeps/s/trial_0001/seed_1/checkpoints"]


def test_parallel_runs_share_processors_and_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    trials._devices.cache_clear()
    found = [shared_machine(2, slot) for slot in range(2)]
    assert [each["CUDA_VISIBLE_DEVICES"] for each in found] == ["4", "5"]
    assert found[0]["OMP_NUM_THREADS"] == str(max((os.cpu_count() or 1) // 2, 1))
    assert shared_machine(1, 0) == {}
    trials._devices.cache_clear()


def test_one_process_makes_the_trials_of_a_directory(work: Path) -> None:
    from trainkit.runs import RunLock

    lock = RunLock(made().directory)
    with pytest.raises(ConfigError, match="another process makes the trials in"):
        run_sweep(made())
    lock.release()


# -------------------------------------------------------------------------------------------------------- results


def full(opened: Any, count: int = 8, **changes: Any) -> Study:
    """A study of which some trials have completed, one was pruned and one has failed."""
    parameters = {"optimizer.lr": {"low": 1e-4, "high": 1e-2, "log": True}, "method.gamma": [0.9, 1.0]}
    study: Study = opened(made(trials=count + 2, seeds=[1, 2], parameters=parameters, **changes))
    study.begin()
    for number in range(count):
        trial = study.claim()
        assert trial is not None
        value = -abs(trial.params["optimizer.lr"] - 1e-3) * 100
        study.record(trial, 1, value + 0.1)
        study.record(trial, 2, value - 0.1)
        trial.report(value, 2)
        study.tell(trial, TrialState.COMPLETE, value)
        assert trial.number == number
    pruned, failed = study.claim(), study.claim()
    assert pruned is not None
    assert failed is not None
    pruned.report(-5.0, 2)
    study.tell(pruned, TrialState.PRUNED)
    study.tell(failed, TrialState.FAIL, error=f"seed 1: RewardError: {EVIL}")
    return study


def test_the_best_configuration_is_a_file_that_train_takes(work: Path, opened: Any) -> None:
    study = full(opened, 2)
    best = max(study.trials[:2], key=lambda trial: trial.value)
    path = write_best(study)
    assert path.read_text().startswith(f"# trial {best.number} of the sweep s: eval/reward {best.value:.4g} ± 0.14")
    result = CliRunner().invoke(app, ["config", "check", str(path)])
    assert result.exit_code == 0, result.output
    assert yaml.safe_load(path.read_text())["optimizer"]["lr"] == pytest.approx(best.params["optimizer.lr"])


def test_the_report_escapes_what_it_shows_and_needs_no_other_file(work: Path, opened: Any) -> None:
    study = full(opened, 4, name=f"sweep {EVIL}", directory="here")
    page = write_report(study).read_text()
    assert "<script" not in page
    assert "\x1b" not in page
    assert set(re.findall(r"https?://[^\s\"']*", page)) == {"http://www.w3.org/2000/svg"}
    drawn = re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)
    assert len([ElementTree.fromstring(each) for each in drawn]) >= 5
    for text in ("4 complete, 1 pruned, 1 failed", "RewardError", "PED-ANOVA", best_config(study).splitlines()[3]):
        assert text in page
    result = CliRunner().invoke(app, ["sweep", "s.yaml", "--report"])
    assert result.exit_code == 0, result.output
    assert "report: here/report.html" in result.stdout


@pytest.mark.slow
def test_the_learning_rate_that_decides_is_the_important_one(work: Path, opened: Any) -> None:
    weights, why = importances(full(opened, 20))
    assert why == ""
    assert next(iter(weights)) == "optimizer.lr"
    assert sum(weights.values()) == pytest.approx(1)
    few, why = importances(full(opened, 2, name="few"))
    assert few == {}
    assert "at least 4 completed trials; there are 2" in why


@pytest.mark.slow
def test_a_small_value_is_best_if_the_metric_is_minimised(work: Path, opened: Any) -> None:
    study = full(opened, direction="minimize")
    assert study.valid[0].value == min(trial.value for trial in study.trials[:8])
    assert "1 pruned" in write_report(study).read_text()


def test_a_line_of_parallel_coordinates_goes_through_its_values() -> None:
    axes = [Coordinate("lr", [0.0, 1.0], ["1e-4", "1e-2"]), Coordinate("reward", [1.0, 0.0], ["2", "<script>&"])]
    drawn = ElementTree.fromstring(parallel_coordinates(axes, names=["trial 0", "trial 1"], title="trials"))
    told = [each.text or "" for each in drawn.iter("{http://www.w3.org/2000/svg}title")]
    assert told[1] == "trial 0: lr 1e-4, reward 2"  # the best is drawn last, above the others
    paths = [each.attrib["d"] for each in drawn if "line" in each.attrib["class"]]
    assert paths == ["M80.0 34.0L880.0 294.0", "M80.0 294.0L880.0 34.0"]


# ------------------------------------------------------------------------------------------------- real processes

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def begun(*options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "trainkit.cli", "sweep", "s.yaml", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # jobs in the background of a shell ignore it
    )


def children() -> list[int]:
    """The processes of runs in this directory."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            here = path.joinpath("cwd").resolve() == Path.cwd().resolve()
            if here and b"trainkit_sweep.child" in path.joinpath("cmdline").read_bytes():
                found.append(int(path.name))
        except OSError:
            continue
    return found


def wait_for(condition: Any, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/cwd").exists(), reason="finds processes by /proc")
def test_a_sweep_that_is_interrupted_and_killed_ends_with_each_trial_once(work: Path, opened: Any) -> None:
    written({**SWEEP, "seeds": [1, 2], "trials": 2})
    process = begun("--workers", "2")
    wait_for(lambda: list(Path().glob("sweeps/s/*/seed_1/metrics.jsonl")))
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "the same command continues it" in errors
    assert children() == []

    process = begun("--workers", "2")
    wait_for(lambda: list(Path().glob("sweeps/s/*/seed_2/metrics.jsonl")))
    process.kill()
    process.communicate(timeout=60)
    wait_for(lambda: children() == [], 30)  # the runs see that the sweep has ended

    process = begun("--workers", "2")
    wait_for(children)
    process.kill()
    for child in children()[:1]:  # the other one saves and ends, while the next sweep begins
        os.kill(child, signal.SIGKILL)
    process.communicate(timeout=60)

    process = begun("--workers", "2")
    printed, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    study = opened(read_sweep(Path("s.yaml")))
    assert finished(study) == ["COMPLETE"] * 2
    assert all(set(study.values(trial)) == {1, 2} for trial in study.trials)
    assert [run.state for run in find_runs(Path("sweeps"))] == ["done"] * 4
    assert len(re.findall(r"^trial \d+  complete", printed, flags=re.MULTILINE)) <= 2
    assert "report: sweeps/s/report.html" in printed


@pytest.mark.slow
def test_a_sweep_of_an_algorithm_alone_ends_with_a_configuration_that_trains_alike(work: Path) -> None:
    overrides = {name: value for name, value in yaml.safe_load(CONFIG).items() if name != "method"}
    written({**SWEEP, "run": {"method": "ppo", "task": "task.py:online", "overrides": overrides}, "trials": 1})
    process = begun()
    printed, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    subprocess.run(
        [sys.executable, "-m", "trainkit.cli", "train", "sweeps/s/best.yaml", "--task=task.py:online"],
        check=True,
        env=ENVIRONMENT,
        capture_output=True,
    )
    again, first = next(find_runs(Path("runs"))), next(find_runs(Path("sweeps")))
    assert again.series["eval/reward"] == first.series["eval/reward"]
    assert f"best: eval/reward {first.series['eval/reward'][4]:.4g}, trial 0" in printed


def test_added_lines_are_read_once_and_anew_if_the_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    added = AddedLines(path)
    assert added.read() == ([], False)
    path.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert added.read() == ([{"step": 1}, {"step": 2}], True)
    assert added.read() == ([], False)
    with path.open("a") as file:
        file.write('ep": 3}\n')
    assert added.read() == ([{"step": 3}], False)
    (tmp_path / "other").write_text('{"step": 1}\n{"step": 22}\n{"step": 3}\n{"step": 4}\n')  # longer
    (tmp_path / "other").replace(path)
    assert added.read() == ([{"step": 1}, {"step": 22}, {"step": 3}, {"step": 4}], True)
    path.write_text("nonsense\n")
    with pytest.raises(DataError, match=r"metrics\.jsonl: a line is not a JSON object"):
        added.read()
