"""The command line: thin, light, and clear about what is wrong."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import trainkit
from tables import table
from trainkit import TRLConfig, available_trainers, cli, default_config, examples
from trainkit.cli import configs, console
from trainkit.cli import examples as commands
from trainkit.errors import ConfigError
from trainkit.plugins import discovery as plugins
from trainkit.plugins import load_file, load_function
from trainkit.plugins.discovery import how_to_install

TASK = """
from trainkit.testing import character_tokenizer

def online(seed):
    print("seed", seed)
    return {
        "reward_fn": lambda outputs, **_: [float(o.count("a")) for o in outputs],
        "prompts": ["a", "b"],
        "tokenizer": character_tokenizer("abc"),
    }

def bare():
    return {"tokenizer": character_tokenizer("abc")}

def letters(outputs, **_):
    return [float(len(o)) for o in outputs]

class Game:
    def __init__(self, row):
        self.turn = 0

    def step(self, output):
        from trainkit.rollouts import Turn

        self.turn += 1
        return Turn("b", reward=float(output.count("a")), done=self.turn == 2)

def wrong_type(): return [1]
def wrong_name(): return {"promts": []}
def demanding(path, seed): return {}
"""
CONFIG = """
method: ppo
model: {model_path: {model_type: gpt2, vocab_size: 5, n_layer: 1, n_head: 2, n_embd: 16, n_positions: 16,
                     bos_token_id: null, eos_token_id: null}}
rollout: {max_new_tokens: 4, num_rollouts: 4}
train: {batch_size: 4, total_steps: 2, trackers: []}
"""


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory with a config and a task, where commands run."""
    (tmp_path / "task_for_cli.py").write_text(TASK, encoding="utf-8")
    (tmp_path / "run.yaml").write_text(CONFIG, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def call(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, list(arguments))


def fails(*arguments: str) -> str:
    """The message of a command that fails: with 2 if the command line or the configuration is wrong, else with 1."""
    result = call(*arguments)
    assert result.exit_code == (2 if result.stderr.startswith(("ConfigError", "Usage")) else 1), result.output
    assert "Traceback" not in result.stderr
    return " ".join(result.stderr.split())


# --------------------------------------------------------------------------------------------------------- light


def test_light_commands_and_modules_import_nothing_heavy(tmp_path: Path) -> None:
    """First those that do not read YAML, then modules, then what reads, checks and compares configurations."""
    config, bad = tmp_path / "run.yaml", tmp_path / "bad.yaml"
    config.write_text("method: {name: ppo, gamma: 0.9}\nmodel: {num_layers_unfrozen: 2}\n", encoding="utf-8")
    bad.write_text("method: rloo\noptimizer: {learning_rate: 1}\n", encoding="utf-8")
    light = ["--help", "--version", "plugins", "plugins list --json", "train --help", "examples list"]
    light += [f"{name} --help" for name in ("report", "compare", "sweep", "migrate", "estimate", "data check", "chat")]
    statements = [
        "import trainkit.api, trainkit.plugins.registry",
        "from trainkit.runs import Record, find_runs",
        "from trainkit_sweep import read_sweep, run_sweep",
        "from trainkit.plugins import discover; discover()",
    ]
    commands = {
        "config ppo": 0,
        f"config show {config}": 0,
        f"config check {bad}": 2,
        f"config diff ppo {config}": 0,
        "config schema": 0,
        f"train {bad} --reward-fn x.py:f": 2,
        f"train {config} train.sede=1": 2,
    }
    script = f"""
        import contextlib, io, sys
        from trainkit import cli

        plugins = {{"trainkit_ppo", "trainkit_sft"}}
        heavy = {{"torch", "transformers", "accelerate", "peft", "datasets", "networkx"}} | plugins

        def run(command, expected):
            sys.argv, told, code = ["trainkit", *command.split()], io.StringIO(), 0
            try:
                with contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
                    cli.main()
            except SystemExit as end:
                code = end.code or 0
            assert code == expected, (command, code)
            assert told.getvalue(), command

        for command in {light}:
            run(command, 0)
            found = (heavy | {{"numpy", "yaml"}}) & set(sys.modules)
            assert not found, (command, found)
        for statement in {statements}:
            exec(statement)
            assert not heavy & set(sys.modules), (statement, heavy & set(sys.modules))
        heavy -= plugins  # settings are read from them, without their trainers
        for command, expected in {commands}.items():
            run(command, expected)
            assert not heavy & set(sys.modules), (command, heavy & set(sys.modules))
    """
    done = subprocess.run([sys.executable, "-c", dedent(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_version_is_the_packages() -> None:
    assert call("--version").stdout == f"trainkit {trainkit.__version__}\n"
    assert trainkit.__version__ == metadata.version("trainkit-rl")


# ------------------------------------------------------------------------------------------------------- plugins


OBSERVES = "import trainkit\n@trainkit.hookimpl\ndef on_step(step): print('told of', step)\n"


def listed(*flags: str) -> dict[str, dict[str, str]]:
    result = call("plugins", "list", "--json", *flags)
    assert result.exit_code == 0
    return {row["name"]: row for row in json.loads(result.stdout)}


def test_plugins_lists_what_is_installed() -> None:
    assert listed()["ppo"] == {
        "name": "ppo",
        "module": "trainkit_ppo",
        "distribution": "trainkit-ppo",
        "version": metadata.version("trainkit-ppo"),
        "kind": "trainer",
        "why": "",
        "disabled": False,
    }
    table = [line for line in call("plugins").stdout.splitlines() if line]
    assert table[0].split() == ["name", "kind", "distribution", "version"]
    assert [line.split()[0] for line in table[1:]] == list(listed())
    assert call("plugins").stdout == call("plugins", "list").stdout


def test_plugins_says_in_a_line_why_one_cannot_be_used(
    install: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    install("fake-broken", {"fake-bad": "fake_bad:f"}, version="0.7")
    install("fake-thief", {"ppo": "fake_thief"}, OBSERVES, version="6.6\x1b[31m", kind="hooks")
    install("fake-late", {"fake-late": "fake_late"}, OBSERVES, requires=["trainkit-rl>=99"], kind="hooks")
    monkeypatch.setenv("TRAINKIT_DISABLE_PLUGINS", "trainkit-ilql,gone")
    result = call("plugins")
    table, _, told = result.stdout.partition("\n\n")
    assert [line.removeprefix("cannot be used: ") for line in told.splitlines()] == [
        "fake-bad: fake-broken 0.7: its entry point is fake-bad = 'fake_bad:f'; the value must be a "
        "module, without a class",
        "fake-late: fake-late 1.0: it requires trainkit >=99, and this is trainkit "
        f"{trainkit.__version__}; install another version",
        f"ilql: trainkit-ilql {metadata.version('trainkit-ilql')}: disabled by TRAINKIT_DISABLE_PLUGINS",
        "ppo: fake-thief 6.6 [31m: the name 'ppo' belongs to trainkit's own trainkit-ppo; choose another",
    ]
    assert [line.split()[:3] for line in table.splitlines() if line.startswith("fake-")] == [
        ["fake-bad", "trainer", "fake-broken"], ["fake-late", "hooks", "fake-late"],
    ]  # fmt: skip
    assert result.exit_code == 0
    assert result.stderr == (
        "warning: TRAINKIT_DISABLE_PLUGINS names 'gone', which is not an installed plugin or distribution\n"
    )


def test_strict_plugins_end_with_an_error_if_one_is_broken(install: Callable[..., Path], work: Path) -> None:
    """E1: they are listed all the same; without the option nothing is the matter."""
    assert call("plugins", "list", "--strict-plugins").exit_code == 0
    install("fake-broken", {"fake-bad": "fake_bad:f"}, version="0.7")
    result = call("plugins", "list", "--strict-plugins")
    assert result.exit_code == 1
    assert "fake-bad" in result.stdout
    told = "fake-bad: fake-broken 0.7: its entry point is fake-bad = 'fake_bad:f'; the value must be"
    assert f"PluginError: --strict-plugins, and not all plugins can be used: {told}" in result.stderr
    assert told in fails("train", "run.yaml", "--task", "task_for_cli.py:task", "--strict-plugins")
    assert not (work / "runs").exists()


def test_a_probe_finds_what_metadata_do_not_show(install: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    install(
        "fake-broken", {"fake-bad": "fake_bad"}, f"{OBSERVES}\nraise SystemExit('gone')", version="0.7", kind="hooks"
    )
    install("fake-watch", {"fake-watch": "fake_watch"}, OBSERVES, kind="hooks")
    monkeypatch.setenv("TRAINKIT_DISABLE_PLUGINS", ",".join({*plugins.BUILT_IN.values()}))  # they take a while
    assert listed()["fake-bad"]["why"] == ""
    rows = listed("--probe")
    assert (rows["fake-bad"]["why"], rows["fake-watch"]["why"]) == ("fake-broken 0.7: SystemExit: gone", "")
    assert [rows[name]["disabled"] for name in ("fake-bad", "fake-watch", "ppo")] == [False, False, True]
    assert not {"fake_bad", "fake_watch"} & set(sys.modules)


def test_plugins_list_says_what_exit_codes_mean() -> None:
    text = " ".join(call("plugins", "list", "--help").stdout.split())
    assert "Exit code: 0, whether plugins can be used or not" in text


def test_plugins_check_tells_of_each_check_how_it_ended_and_what_it_proves() -> None:
    result = call("plugins", "check", "sft", "--only", "schedule", "--only", "docstrings")
    assert result.exit_code == 0, result.output
    second, first, _, summary = result.stdout.splitlines()
    assert re.fullmatch(r"✓ docstrings +\d+\.\d s  Check that the plugin's docstrings say what it computes, .*", first)
    assert re.fullmatch(
        r"✓ schedule +\d+\.\d s  Check that learning rates follow the schedule from its first value\.", second
    )
    assert re.fullmatch(r"sft: 2 passed in \d+\.\d s", summary)


def test_plugins_check_ends_with_code_1_and_says_what_was_seen_where_one_fails_unexpectedly(
    install: Callable[..., Path],
) -> None:
    source = "import trainkit\n@trainkit.hookimpl\ndef on_step(): 1 / 0\n"
    install("fake-failing", {"fake_failing": "fake_failing"}, source, kind="hooks")
    check = ["plugins", "check", "fake_failing", "--only", "observer_hooks_fit"]
    result = call(*check)
    assert result.exit_code == 1
    assert result.stdout.startswith("✗ observer_hooks_fit")
    assert "observer_hooks_fit: HookError: the hook on_step of plugin fake_failing" in result.stdout
    assert "  purpose: Check that every hook exists, takes valid arguments, is called in a run, and" in result.stdout
    assert "  matters: A misspelt hook is never called" in result.stdout
    check.append("--expect-failure")
    result = call(*check, "observer_hooks_fit=it fails on purpose")
    assert result.exit_code == 0, result.output
    assert "1 expected" in result.stdout
    assert "--expect-failure is 'observer_hooks_fit'; give CHECK=WHY" in fails(*check, "observer_hooks_fit")
    assert "the check 'nothing' is no check" in fails(*check, "nothing=why")


def test_plugins_check_lists_the_checks_that_apply_and_runs_none() -> None:
    result = call("plugins", "check", "sft", "--list")
    names = [line.split()[0] for line in result.stdout.splitlines()]
    assert {"mask_law", "resume_every_step", "export"} <= {*names}
    assert "sampler_seeds" not in names
    assert "✓" not in result.stdout


def test_plugins_check_refuses_what_does_not_exist() -> None:
    assert "the check 'mask_low' is no check; did you mean 'mask_law'?" in fails(
        "plugins", "check", "sft", "--only", "mask_low"
    )
    assert "no plugin 'stf' is installed; did you mean 'sft'?" in fails("plugins", "check", "stf")


def test_plugins_check_without_the_kit_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trainkit_kit", None)
    assert f"install it: {how_to_install('trainkit-kit')}" in fails("plugins", "check", "sft")


def test_a_console_without_ticks_gets_signs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    assert [console.mark(True), console.mark(False)] == ["+", "-"]


# -------------------------------------------------------------------------------------------------------- config


@table("method", plugins.of_kind("trainer"))
def test_config_prints_yaml_that_reads_back_equal(method: str, tmp_path: Path) -> None:
    config = default_config(method)
    (tmp_path / "c.yaml").write_text(configs.annotated_yaml(config), encoding="utf-8")
    loaded: TRLConfig[Any] = TRLConfig.load_yaml(tmp_path / "c.yaml")
    assert loaded == config
    assert loaded.to_dict() == config.to_dict()


def test_config_describes_every_field_above_it() -> None:
    config, text = default_config("ppo"), call("config", "ppo").stdout
    assert text == configs.annotated_yaml(config)
    lines = text.splitlines()
    for section, field in type(config).model_fields.items():
        at = next(i for i, line in enumerate(lines) if line.startswith(f"{section}:"))
        assert lines[at - 1] == f"# {field.description}"
        for name, inner in getattr(type(getattr(config, section)), "model_fields", {}).items():
            below = next(i for i in range(at, len(lines)) if lines[i].startswith(f"  {name}:"))
            above = next(i for i in range(below - 1, at - 1, -1) if not lines[i].startswith("  # "))
            comment = " ".join(line.removeprefix("  # ") for line in lines[above + 1 : below])
            assert comment == " ".join((inner.description or "").split())


def test_config_keeps_nested_values_as_they_are(tmp_path: Path) -> None:
    kwargs = {"betas": [0.9, 0.95], "name": {"lr": "a: b # c"}, "long": "word " * 40}
    config = default_config("ppo").evolve(model={"kwargs": kwargs}, plugins=["sft"])
    (tmp_path / "c.yaml").write_text(configs.annotated_yaml(config), encoding="utf-8")
    assert TRLConfig.load_yaml(tmp_path / "c.yaml") == config


def test_config_of_an_unknown_method_lists_the_choices() -> None:
    message = fails("config", "pppo")
    assert "did you mean 'ppo'?" in message
    assert all(name in message for name in available_trainers())


# --------------------------------------------------------------------------------------------------------- train


def test_train_runs_a_task_with_overrides_and_the_configs_seed(work: Path) -> None:
    result = call("train", "run.yaml", "train.seed=7", "train.run_dir=out", "--task", "task_for_cli.py:online")
    assert result.exit_code == 0, result.output
    assert "seed 7" in result.stdout
    assert "step 2/2  done" in result.stdout
    assert TRLConfig.load_yaml(work / "out" / "config.yaml").train.seed == 7
    assert (work / "out" / "model" / "model.safetensors").exists()


def test_train_takes_data_and_reward_from_flags_and_modules_from_the_working_directory(work: Path) -> None:
    (work / "prompts.jsonl").write_text('{"prompt": "a", "column": 1}\n"b"\n', encoding="utf-8")
    (work / "eval.txt").write_text("c\nab\n", encoding="utf-8")
    flags = ["--task", "task_for_cli:bare", "--reward-fn", "task_for_cli.py:letters"]
    files = ["--prompts", "prompts.jsonl", "--eval-prompts", "eval.txt"]
    result = call("train", "run.yaml", "train.run_dir=out", *flags, *files)
    assert result.exit_code == 0, result.output
    samples = [json.loads(line) for line in (work / "out" / "samples.jsonl").read_text().splitlines()]
    assert {s["prompt"] for s in samples if s["kind"] == "evaluation"} == {"c", "ab"}
    assert {s["prompt"] for s in samples if s["kind"] == "rollout"} <= {"a", "b"}


def test_train_takes_an_environment_from_a_flag(work: Path) -> None:
    (work / "prompts.txt").write_text("a\nb\n", encoding="utf-8")
    flags = ["--task", "task_for_cli:bare", "--environment", "task_for_cli.py:Game", "--prompts", "prompts.txt"]
    result = call("train", "run.yaml", "train.run_dir=out", *flags)
    assert result.exit_code == 0, result.output
    samples = [json.loads(line) for line in (work / "out" / "samples.jsonl").read_text().splitlines()]
    assert all(len(sample["episode"]) == 2 for sample in samples)


@table(
    "arguments, says",
    [
        (["missing.yaml"], "cannot read the config 'missing.yaml'"),
        (["run.yaml", "method.name=pppo"], "did you mean 'ppo'?"),
        (["run.yaml", "trian.seed=2"], "did you mean 'train'?"),
        (["run.yaml", "train.sed=2"], "train.sed (command line): unknown field; did you mean 'seed'?"),
        (["run.yaml", "train.seed"], "an override is section.field=value"),
        (["run.yaml", "train.seed=[1"], "the value of the override 'train.seed' is not valid YAML"),
        (["run.yaml", "train.seed=x"], "train.seed (command line): should be a valid integer"),
        (
            ["run.yaml", "train.trackers=[tensorbord]", "--task", "task_for_cli.py:online"],
            "did you mean 'tensorboard'?",
        ),
        (["run.yaml", "--task", "nowhere.py:online"], "there is no file 'nowhere.py'"),
        (["run.yaml", "--task", "nowhere_at_all:online"], "there is no module 'nowhere_at_all'"),
        (["run.yaml", "--task", "task_for_cli.py"], "write FILE.py:NAME or module:NAME"),
        (["run.yaml", "--task", "task_for_cli.py:onlin"], "no function or class 'onlin'; did you mean 'online'?"),
        (["run.yaml", "--task", "task_for_cli.py:wrong_type"], "return a dict of arguments of trainkit.train"),
        (["run.yaml", "--task", "task_for_cli.py:wrong_name"], "did you mean 'prompts'?"),
        (["run.yaml", "--task", "task_for_cli.py:demanding"], "cannot be called without path"),
        (["run.yaml", "--task", "broken_for_cli.py:f"], "ZeroDivisionError"),
        (
            ["run.yaml", "--prompts", "data.tsv"],
            "data files are .jsonl, .json, .csv, .parquet, .txt, a directory, or a hub id",
        ),
        (["run.yaml", "--prompts", "missing.txt"], "cannot read missing.txt"),
        (["run.yaml", "--prompts", "bad.jsonl"], "bad.jsonl, line 2: not JSON"),
        (["run.yaml"], "there is nothing to learn from"),
    ],
)
def test_train_explains_bad_inputs(work: Path, arguments: list[str], says: str) -> None:
    (work / "broken_for_cli.py").write_text("1 / 0", encoding="utf-8")
    (work / "bad.jsonl").write_text('"a"\nb\n', encoding="utf-8")
    assert says in fails("train", *arguments)
    assert not (work / "runs").exists()


@pytest.mark.parametrize(("by", "name"), [("--no-plugin", "fake-bad"), ("TRAINKIT_DISABLE_PLUGINS", "Fake_Broken")])
def test_a_run_goes_on_without_a_disabled_plugin_and_says_so_once(
    work: Path,
    install: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    by: str,
    name: str,
) -> None:
    install("fake-broken", {"fake-bad": "fake_bad"}, "1 / 0", "0.7", kind="hooks")
    install("fake-watch", {"fake-watch": "fake_watch"}, OBSERVES, kind="hooks")
    arguments = ["train", "run.yaml", "plugins=[fake-bad, fake-watch]", "--task", "task_for_cli.py:online"]
    told = fails(*arguments, "train.run_dir=fails")
    assert "plugin fake-bad (fake-broken 0.7, module fake_bad) failed to import: ZeroDivisionError: " in told
    flags = ["--no-plugin", name] if by == "--no-plugin" else []
    if not flags:
        monkeypatch.setenv(by, name)
    result = call(*arguments, "train.run_dir=out", *flags)
    assert result.exit_code == 0, result.output
    assert "told of 2" in result.stdout
    assert [record.message for record in caplog.records] == [
        f"the plugin 'fake-bad' is disabled by {by}; the run goes on without it"
    ]
    assert TRLConfig.load_yaml(work / "out" / "config.yaml").plugins == ["fake-watch"]
    assert plugins.find_plugin("fake-watch").why == ""


def test_hooks_of_a_config_work_while_other_plugins_are_broken(work: Path, install: Callable[..., Path]) -> None:
    entries = {"fake-bad": "fake_bad", "fake-odd": "fake_bad:f", "ppo": "fake_bad"}
    home = install("fake-broken", entries, "raise SystemExit", kind="hooks")
    install("fake-torn", {"fake-torn": "fake_torn"}, OBSERVES, kind="hooks")
    (home.parent / "fake-torn" / "fake_torn-1.0.dist-info" / "entry_points.txt").write_text("[trainkit.hooks]\ntorn")
    install("fake-watch", {"fake-watch": "fake_watch"}, OBSERVES, kind="hooks")
    result = call("train", "run.yaml", "plugins=[fake-watch]", "train.run_dir=out", "--task", "task_for_cli.py:online")
    assert result.exit_code == 0, result.output
    assert "told of 2" in result.stdout


@table("name", ["ppo", "trainkit-ppo"])
def test_a_method_that_is_disabled_is_an_error_that_says_by_what(
    work: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    assert "disabled by --no-plugin" in fails("train", "run.yaml", "--no-plugin", "sft", "--no-plugin", name)
    monkeypatch.setenv("TRAINKIT_DISABLE_PLUGINS", name)
    told = f"the plugin 'ppo' cannot be used: trainkit-ppo {metadata.version('trainkit-ppo')}: disabled by TRAINKIT_"
    assert told in fails("config", "ppo")
    assert not (work / "runs").exists()


def test_a_flag_that_disables_nothing_is_an_error_unless_the_config_names_it(
    work: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told = "--no-plugin names 'ilq', which is not an installed plugin or distribution; did you mean 'ilql'?"
    assert told in fails("train", "run.yaml", "--no-plugin", "ilq", "--task", "task_for_cli.py:online")
    assert not (work / "runs").exists()
    arguments = ["plugins=[gone]", "--no-plugin", "gone", "train.run_dir=out", "--task", "task_for_cli.py:online"]
    assert call("train", "run.yaml", *arguments).exit_code == 0
    assert TRLConfig.load_yaml(work / "out" / "config.yaml").plugins == []
    assert [r.message for r in caplog.records] == [
        "the plugin 'gone' is disabled by --no-plugin; the run goes on without it"
    ]


def test_a_variable_that_disables_nothing_is_a_warning(
    work: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TRAINKIT_DISABLE_PLUGINS", "ilq")
    assert call("train", "run.yaml", "train.run_dir=out", "--task", "task_for_cli.py:online").exit_code == 0
    assert [r.message for r in caplog.records] == [
        "TRAINKIT_DISABLE_PLUGINS names 'ilq', which is not an installed plugin or distribution; did you mean 'ilql'?"
    ]


def test_a_config_cannot_name_code(work: Path) -> None:
    with (work / "run.yaml").open("a", encoding="utf-8") as file:
        file.write("\ntask: task_for_cli.py:online\n")
    assert "task (run.yaml:8): unknown field" in fails("train", "run.yaml")
    (work / "run.yaml").write_text("method: !!python/object/apply:os.getcwd []", encoding="utf-8")
    assert "not valid YAML" in fails("train", "run.yaml")


def test_wrong_usage_exits_with_2() -> None:
    assert "Missing argument" in fails("train")
    assert "No such option" in fails("train", "x.yaml", "--tsak", "y")


def test_an_error_shows_its_traceback_when_asked(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = call("--traceback", "train", "missing.yaml")
    assert isinstance(result.exception, ConfigError)
    monkeypatch.setenv("TRAINKIT_TRACEBACK", "1")
    assert isinstance(call("train", "missing.yaml").exception, ConfigError)


def test_an_error_message_cannot_control_the_terminal(work: Path) -> None:
    (work / "evil.py").write_text(r"raise ValueError('\x1b[31m\x07')", encoding="utf-8")
    result = call("train", "run.yaml", "--task", "evil.py:f")
    assert result.exit_code == 2
    assert "\x1b" not in result.stderr
    assert "\x07" not in result.stderr


@pytest.mark.slow
def test_interrupting_exits_with_130(work: Path) -> None:
    (work / "slow.py").write_text("print('ready', flush=True)\nimport time\ntime.sleep(60)", encoding="utf-8")
    command = [sys.executable, "-m", "trainkit.cli", "train", "run.yaml", "--task", "slow.py:f"]
    environment = {**os.environ, "PYTHONWARNINGS": "default"}
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        # a shell starts what runs in the background with SIGINT ignored, and children inherit that
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors


# ---------------------------------------------------------------------------------------------------------- code


def test_a_file_is_imported_once_and_does_not_hide_installed_modules(work: Path) -> None:
    (work / "json.py").write_text("value = 1\ndef f(): return value", encoding="utf-8")
    assert load_function("json.py:f") is load_function(str(work / "json.py:f"))
    assert load_function("json.py:f")() == 1
    assert hasattr(sys.modules["json"], "dumps")


def test_a_name_that_a_file_lacks_is_answered_by_its_own_functions_and_classes(work: Path) -> None:
    lines = ["from json import dumps", "from pathlib import Path", "value = 1", "class Maze: pass"]
    lines += ["class _Hidden: pass", "def go(): pass"]
    (work / "maze_for_cli.py").write_text("\n".join(lines), encoding="utf-8")
    said = r"maze_for_cli.py has no function or class 'Mase'; did you mean 'Maze'\?; it has: Maze, go$"
    with pytest.raises(ConfigError, match=said):
        load_function("maze_for_cli.py:Mase")
    assert load_function("maze_for_cli.py:Maze").__name__ == "Maze"
    assert load_function("maze_for_cli.py:dumps") is json.dumps, "an imported one can be named"


def test_a_module_that_is_not_there_is_told_from_one_that_it_needs(work: Path) -> None:
    (work / "gsm_for_cli.py").write_text("def score(): ...", encoding="utf-8")
    (work / "needs_for_cli.py").write_text("import not_there_for_cli", encoding="utf-8")
    for name, said in (
        ("gsm_for_cli.pyy:score", "no module .gsm_for_cli.pyy.; did you mean .gsm_for_cli.py.. Write FILE.py:NAME"),
        ("absent_for_cli.rewards:score", "no module .absent_for_cli.rewards.. Write FILE.py:NAME, or module:NAME of a"),
        ("needs_for_cli:score", "needs_for_cli needs the module .not_there_for_cli., which is not found; install it"),
    ):
        with pytest.raises(ConfigError, match=said):
            load_function(name)


def test_a_file_can_import_its_neighbours(work: Path) -> None:
    (work / "folder").mkdir()
    (work / "folder" / "neighbour_for_cli.py").write_text("value = 3", encoding="utf-8")
    (work / "folder" / "main_for_cli.py").write_text("from neighbour_for_cli import value\ndef f(): return value")
    assert load_function("folder/main_for_cli.py:f")() == 3


def test_files_of_one_name_in_several_folders_are_several_modules(work: Path) -> None:
    for folder in ("one", "two", "three"):
        (work / folder).mkdir()
        (work / folder / "same_for_cli.py").write_text(f"value = {folder!r}", encoding="utf-8")
    loaded = [load_file(work / folder / "same_for_cli.py") for folder in ("one", "two", "three")]
    assert [module.value for module in loaded] == ["one", "two", "three"]
    assert [sys.modules[module.__name__] for module in loaded] == loaded


# ------------------------------------------------------------------------------------------------------ examples


def test_examples_list_shows_each_with_its_first_line() -> None:
    listed = call("examples", "list").stdout
    assert re.search(r"^randomwalks +Random walks:", listed, flags=re.MULTILINE)
    assert set(examples.find_examples()) == {line.split()[0] for line in listed.splitlines()}


def test_examples_are_found_inside_an_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "trainkit" / "_examples" / "one"
    folder.mkdir(parents=True)
    (folder / "run.py").write_text('"""About one."""\ndef main(argv): print("got", argv)', encoding="utf-8")
    monkeypatch.setattr(examples, "__file__", str(tmp_path / "trainkit" / "examples.py"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert call("examples", "list").stdout == "one  About one.\n"
    assert call("examples", "run", "one", "--seed", "2", "--help").stdout == "got ['--seed', '2', '--help']\n"
    assert "did you mean 'one'?" in fails("examples", "run", "ones")


def test_an_example_that_lacks_a_package_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run.py").write_text("import no_such_package_at_all", encoding="utf-8")
    monkeypatch.setattr(commands, "find_examples", lambda: {"one": tmp_path / "run.py"})
    monkeypatch.setattr(sys, "path", [*sys.path])
    message = fails("examples", "run", "one")
    assert "'no_such_package_at_all'" in message
    assert "pip install 'trainkit-rl[examples]'" in message


def example(run_dir: Path, name: str, *options: str) -> str:
    """What an example prints that is run with few steps."""
    result = call("examples", "run", name, *options, "--run-dir", str(run_dir))
    assert result.exit_code == 0, result.output
    return str(result.stdout)


def measured(run_dir: Path, metric: str) -> list[float]:
    """The values of a metric that the evaluations of a stage have logged."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line[metric] for line in lines if metric in line]


def assert_shown(printed: str, row: str, *values: float) -> None:
    """Require that the table of an example ends its row with these values."""
    cells = next(line for line in printed.splitlines() if row in line and "step" not in line)
    assert cells.replace("│", " ").split()[-len(values) :] == [f"{value:.3f}" for value in values]


@pytest.fixture
def _same_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the folders that examples put on the path."""
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.mark.slow
@pytest.mark.usefixtures("_same_path")
@pytest.mark.parametrize(
    ("name", "options", "stages", "row", "metric"),
    [
        ("ppo_t5_copy", [], ["sft", "ppo"], "letters in place", "eval/reward"),
        ("randomwalks", [], ["sft", "ppo"], "mean optimality", "eval/optimality"),
        ("dpo_randomwalks", [], ["sft", "dpo"], "mean optimality", "eval/optimality"),
        ("dpo_randomwalks", ["--method", "kto"], ["sft", "kto"], "mean optimality", "eval/optimality"),
        ("online_dpo_randomwalks", [], ["sft", "online_dpo"], "mean optimality", "eval/optimality"),
        ("online_dpo_randomwalks", ["--method", "best_of_k"], ["sft", "best_of_k"], "mean opt", "eval/optimality"),
        ("reward_then_ppo", ["--reward-steps", "2"], ["sft", "reward", "ppo"], "mean optimality", "eval/optimality"),
        ("rlhf_pipeline", ["--reward-steps", "2"], ["sft", "reward", "ppo", "dpo"], "learnt reward", "eval/learnt"),
    ],
)  # fmt: skip
def test_an_example_runs_all_stages_and_reports_what_was_measured(
    name: str, options: list[str], stages: list[str], row: str, metric: str, tmp_path: Path
) -> None:
    printed = example(tmp_path, name, "--steps", "1", "--sft-epochs", "1", *options)
    rewarded = [stage for stage in stages if stage not in ("sft", "reward")]
    first = measured(tmp_path / rewarded[0], metric)[0]
    assert_shown(printed, row, first, *(measured(tmp_path / stage, metric)[-1] for stage in rewarded))
    for stage in rewarded:
        assert (tmp_path / stage / "model" / "model.safetensors").is_file()
    if "reward" in stages:
        assert all(f"\n{stage}: " in printed for stage in stages)


@pytest.mark.slow
@pytest.mark.usefixtures("_same_path")
def test_sft_dialogue_reports_the_loss_and_the_answers_before_and_after(tmp_path: Path) -> None:
    printed = example(tmp_path, "sft_dialogue", "--steps", "2")
    losses = measured(tmp_path / "sft", "eval/loss/nll")
    assert_shown(printed, "loss per token", losses[0], losses[-1])
    assert losses[-1] < losses[0]
    assert min(measured(tmp_path / "sft", "rows/filled")) > 0.9
    assert len([line for line in printed.splitlines() if line.startswith("│ Be ")]) == 4


@pytest.mark.slow
@pytest.mark.usefixtures("_same_path")
def test_word_problems_are_learnt_from_two_layers_and_by_an_adapter_of_another_model(tmp_path: Path) -> None:
    task = load_file(examples.find_examples()["word_problems"].parent / "task.py")
    for row in task.split(3, 200)[1]:  # the worked answers get the whole reward
        worked = row["completion"][0]["content"]
        assert eval(worked.split(", ")[1].split(" = ")[0]) == row["answer"]
        assert task.reward([worked], [row["answer"]])["score"] == [1.0]
    outputs = ["The answer is 4.", "The answer is 5.", "It is 5.", "The answer is 5. Or 6"]
    assert task.reward(outputs, [5] * 4)["score"] == [task.WORTH, 1.0, 0.0, 0.0]

    printed = example(tmp_path / "whole", "word_problems", "--sft-steps", "2", "--steps", "2")
    assert_shown(
        printed,
        "form",
        *measured(tmp_path / "whole/sft", "eval/form"),
        measured(tmp_path / "whole/grpo", "eval/form")[-1],
    )
    rollouts = [json.loads(line) for line in (tmp_path / "whole/grpo/newest.jsonl").read_text().splitlines()]
    assert all(each["reward"] == (1 - task.WORTH) * each["result"] + task.WORTH * each["form"] for each in rollouts)
    model = ["--model", str(tmp_path / "whole/sft/model")]
    for train in ("lora", "whole"):
        place = tmp_path / train / "again"
        example(place, "word_problems", "--sft-steps", "1", "--steps", "1", "--train", train, *model)
        assert (place / "pretrained_grpo/model/adapter_config.json").exists() == (train == "lora")


@pytest.mark.slow
@pytest.mark.usefixtures("_same_path")
def test_arithmetic_is_judged_by_sums_that_no_stage_has_seen(tmp_path: Path) -> None:
    task = load_file(examples.find_examples()["rloo_arithmetic"].parent / "task.py")
    parts = task.split(3)
    assert sum(map(len, parts)) == len({problem["prompt"] for part in parts for problem in part}) == 50 * 50
    for problem in (problem for part in parts for problem in part):
        a, b = problem["prompt"].removesuffix("=").split("+")
        assert int(problem["answer"][::-1]) == int(a) + int(b)
    assert task.reward(["91", "90", "9", "", "19"], ["91"] * 5) == [1.0, 0.5, 0.0, 0.0, 0.0]
    assert task.metric(["91", "90"], ["91"] * 2) == {"accuracy": [1.0, 0.0]}

    printed = example(tmp_path, "rloo_arithmetic", "--steps", "2", "--sft-epochs", "1")
    accuracies = measured(tmp_path / "rloo", "eval/accuracy")
    assert_shown(printed, "accuracy", accuracies[0], accuracies[-1])
    samples = [json.loads(line) for line in (tmp_path / "rloo" / "samples.jsonl").read_text().splitlines()]
    held_out = {problem["prompt"] for problem in task.split(1)[0]}
    assert {sample["kind"] for sample in samples} == {"evaluation", "rollout"}
    assert all((sample["prompt"] in held_out) is (sample["kind"] == "evaluation") for sample in samples)


@pytest.mark.parametrize(
    "seed", [pytest.param(n, marks=pytest.mark.slow if n == 1 else pytest.mark.weekly) for n in (1, 2, 3)]
)
@pytest.mark.usefixtures("_same_path")
def test_a_model_learns_to_name_the_shapes_and_colours_of_images(seed: int, tmp_path: Path) -> None:
    task = load_file(examples.find_examples()["shapes"].parent / "task.py")
    assert {row["answer"] for row in task.problems(1, 100)} == {*task.COLOURS, *task.SHAPES}
    assert task.reward(["red ", "blue"], ["red"] * 2) == [1.0, 0.0]
    printed = example(tmp_path, "shapes", "--seed", str(seed))
    accuracies = measured(tmp_path / "grpo", "eval/accuracy")
    assert_shown(printed, "accuracy", accuracies[0], accuracies[-1])
    assert accuracies[0] < 0.3
    assert accuracies[-1] >= 0.95


@pytest.mark.slow
@pytest.mark.usefixtures("_same_path")
def test_a_student_is_distilled_from_its_teacher_and_compared_with_it(tmp_path: Path) -> None:
    printed = example(tmp_path, "distill_randomwalks", "--steps", "1", "--teacher-steps", "1", "--sft-epochs", "1")
    student, teacher = (measured(tmp_path / stage, "eval/optimality") for stage in ("distill", "teacher"))
    assert_shown(printed, "mean optimality", student[0], student[-1], teacher[-1])


@pytest.mark.slow
def test_random_walks_offline_are_measured_for_every_beta(tmp_path: Path) -> None:
    result = call("examples", "run", "ilql_randomwalks", "--steps", "1", "--run-dir", str(tmp_path))
    assert result.exit_code == 0, result.output
    lines = (tmp_path / "ilql" / "metrics.jsonl").read_text().splitlines()
    after = [json.loads(line) for line in lines if "eval/optimality@beta=100" in line][-1]
    rows = [line.replace("│", " ").split() for line in result.stdout.splitlines()]
    for beta in (0, 1, 100):
        (row,) = (row for row in rows if row[:2] == ["mean", f"optimality@beta={beta}"])
        assert row[-1] == f"{after[f'eval/optimality@beta={beta}']:.3f}"
    assert result.stdout.count("a walk at beta=") == 3
