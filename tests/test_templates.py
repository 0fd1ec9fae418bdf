"""A plugin begun by the command: it works before a line is written, and what cannot be begun is refused."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from tables import table
from trainkit import cli
from trainkit.errors import ConfigError
from trainkit.plugins import templates
from trainkit.plugins.templates import Kind

ROOT = Path(__file__).parents[1]
NAMES = {Kind.TRAINER: "my-algo", Kind.TRACKER: "My_Tracker", Kind.SAMPLER: "sampler2"}
NAMES |= {kind: f"my-{kind}" for kind in (Kind.HOOKS, Kind.ENGINE, Kind.SHARDING, Kind.COMMAND)}
LINES = 60
"""What an author is asked to write at most."""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory, where commands run."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def call(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, ["new-plugin", *arguments])


def refused(*arguments: str) -> str:
    result = call(*arguments)
    assert result.exit_code == (2 if "ConfigError" in result.stderr else 1), result.output
    return " ".join(result.stderr.split())


# ---------------------------------------------------------------------------------------------- what is written works


@pytest.mark.parametrize("kind", Kind)
def test_a_new_plugin_installs_passes_its_tests_and_trains_as_it_is_told(
    kind: Kind, fresh_venv: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    started = time.perf_counter()
    told = fresh_venv.run("trainkit", "new-plugin", NAMES[kind], "--kind", kind.value, cwd=tmp_path).stdout
    commands = [line.split() for line in told.partition("next:\n")[2].splitlines()]
    assert 1 + len(commands) <= 5
    printed = [fresh_venv.run(*(word.strip("'") for word in words), cwd=tmp_path).stdout for words in commands]
    seconds = time.perf_counter() - started
    with capsys.disabled():
        print(f"\n{kind}: {1 + len(commands)} commands in {seconds:.1f} s")

    plugin = NAMES[kind].lower().replace("-", "_")
    assert "100/100  done" in printed[-1]
    if kind is Kind.COMMAND:
        assert "Print the step of a run" in printed[-2]
        assert "eval/reward is best at step" in printed[-1]
        tests = fresh_venv.run("python", "-m", "pytest", "-q", tmp_path / "trainkit-my-command", cwd=tmp_path)
        assert " passed" in tests.stdout
        return
    assert any(f"{plugin}: " in text and "passed" in text for text in printed)
    listed = {row["name"]: row for row in json.loads(fresh_venv.run("trainkit", "plugins", "list", "--json").stdout)}
    assert listed[plugin]["distribution"] == f"trainkit-{plugin.replace('_', '-')}"
    folder = tmp_path / listed[plugin]["distribution"]
    if kind is Kind.TRAINER:
        assert float(printed[-1].rpartition(": ")[2]) > 6, "letters of 8; less than 1 before"
    own = ["-k", "not test_it_passes"]  # the checks of the kit have just run, by the command
    tests = fresh_venv.run("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", *own, folder, cwd=tmp_path)
    assert " passed" in tests.stdout


@table("kind", Kind)
def test_new_files_are_short_and_pass_the_rules(
    kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines_of_code: Callable[[Path], int]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert call(NAMES[kind], "--kind", kind.value, "--out", "new").exit_code == 0
    modules = sorted(Path("new").rglob("*.py"))
    written = [path for path in modules if path.name.startswith(("trainkit_", "test_"))]
    assert len(written) == 2
    assert sum(map(lines_of_code, written)) <= LINES
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "--config", "pyproject.toml"]
    files = [path.resolve() for path in modules]
    done = subprocess.run([*command, *files], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    left = [path for path in Path("new").rglob("*") if path.is_file() and "ew_plugin" in path.read_text("utf-8")]
    assert left == []


@pytest.mark.slow
def test_new_modules_and_their_tests_are_typed(here: Path) -> None:
    for kind in Kind:
        assert call(NAMES[kind], "--kind", kind.value).exit_code == 0
    files = sorted(path for path in here.rglob("*.py") if path.name != "example.py")
    assert len(files) == 2 * len(Kind)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", *files], capture_output=True, text=True, check=False, cwd=ROOT
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_is_needed_is_the_trainkit_that_runs(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for version, requirement in (("0.1.0", ">=0.1,<0.2"), ("0.12.3.dev1", ">=0.12,<0.13"), ("2.3.0", ">=2.3,<3")):
        monkeypatch.setattr(templates, "__version__", version)
        assert call("any", "--out", version).exit_code == 0
        assert f'dependencies = ["trainkit-rl{requirement}"]' in Path(version, "pyproject.toml").read_text("utf-8")


def test_the_wheel_holds_the_templates(fresh_venv: Any, tmp_path: Path) -> None:
    fresh_venv.run("pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path, ROOT)
    (wheel,) = tmp_path.glob("*.whl")
    held = set(zipfile.ZipFile(wheel).namelist())
    needed = [path for path in templates.TEMPLATES.rglob("*") if path.suffix in (".md", ".py", ".toml")]
    assert len(needed) == 4 * len(Kind) + 1, "a pyproject.toml is that of all"
    assert {str(path.relative_to(ROOT)) for path in needed} <= held


@pytest.mark.slow
def test_the_command_answers_at_once(here: Path) -> None:
    script = (
        "import sys; from trainkit.plugins.templates import Kind, new_plugin; new_plugin('mine', Kind.TRAINER); "
        "print(sorted({'torch', 'transformers', 'numpy', 'pydantic'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


# ------------------------------------------------------------------------------------------------------------- names


@table("given", ["my-algo", "my_algo"])
def test_hyphens_and_underscores_are_one(given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    told = call(given).stdout
    assert "pip install -e 'trainkit-my-algo[dev]'\n" in told
    assert "trainkit plugins check my_algo\n" in told
    module = Path("trainkit-my-algo/trainkit_my_algo.py").read_text("utf-8")
    assert '@register_trainer("my_algo")\nclass MyAlgoTrainer(AccelerateRLTrainer[MyAlgoConfig])' in module


@table("given", ["requirement", "new-plugin", "my-new-plugin", "NewPlugin2"])
def test_names_that_templates_use_themselves_can_be_had(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert call(given, "--out", "new").exit_code == 0
    project = Path("new/pyproject.toml").read_text("utf-8")
    assert f'name = "trainkit-{given.lower()}"' in project
    assert 'dependencies = ["trainkit-rl>=' in project


@table(
    "given, says",
    [
        ("2fast", "a plugin cannot be called '2fast'; use English letters"),
        ("my algo", "cannot be called 'my algo'"),
        ("-x-", "cannot be called '-x-'"),
        ("a__b", "single hyphens or underscores"),
        ("größe", "use English letters"),
        ("../up", "cannot be called '../up'"),
        ("", "cannot be called ''"),
        ("off", "'off', which a configuration would read as False; choose another name"),
        ("null", "'null', which a configuration would read as None; choose another name"),
        ("lambda", "'lambda', which is a keyword of Python; choose another name"),
        ("trainkit-mine", "put before the name automatically: trainkit new-plugin mine"),
        ("PPO", "the name 'ppo' belongs to trainkit's own trainkit-ppo; choose another"),
        ("rl", "'trainkit-rl' is trainkit itself; choose another name than 'rl'"),
        ("online-dpo", "the name 'online_dpo' belongs to trainkit's own trainkit-dpo; choose another"),
    ],
)
def test_names_that_cannot_be_had_are_refused(given: str, says: str, here: Path) -> None:
    assert says in refused("--", given)
    assert list(here.iterdir()) == []


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("my-algo", "the name 'my_algo' is taken by the plugin my_algo (trainkit-theirs 3.1, module their_module)"),
        ("theirs", "'trainkit-theirs' is already installed, and holds the plugin my_algo (trainkit-theirs 3.1"),
    ],
)
def test_names_of_installed_plugins_and_distributions_are_taken(
    given: str, says: str, install: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("trainkit-theirs", {"my_algo": "their_module"}, "", version="3.1")
    monkeypatch.chdir(tmp_path)
    assert says in refused(given)
    assert [path.name for path in tmp_path.iterdir()] == ["trainkit-theirs"]


def test_an_unknown_kind_lists_the_kinds(here: Path) -> None:
    result = call("mine", "--kind", "optimiser")
    assert result.exit_code == 2
    assert all(kind in result.stderr for kind in Kind)


# ------------------------------------------------------------------------------------------------------- directories


def test_a_directory_that_is_not_empty_is_left_alone(here: Path) -> None:
    (here / "trainkit-mine").mkdir()
    (here / "trainkit-mine" / "notes").write_text("kept")
    assert "the directory 'trainkit-mine' is not empty; give another with --out" in refused("mine")
    assert [path.name for path in here.rglob("*")] == ["trainkit-mine", "notes"]


def test_an_empty_directory_is_filled(here: Path) -> None:
    (here / "mine").mkdir()
    told = call("mine", "--out", "mine").stdout
    assert "pip install -e 'mine[dev]'\n" in told
    assert (here / "mine" / "pyproject.toml").is_file()


@table(
    "out, says", [("no/where", "cannot write 'no/where': No such file"), ("file", "cannot write 'file': File exists")]
)
def test_what_cannot_be_written_says_why(out: str, says: str, here: Path) -> None:
    (here / "file").write_text("kept")
    assert says in refused("mine", "--out", out)
    assert [path.name for path in here.rglob("*")] == ["file"]


@table("existed", [False, True])
@table("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_nothing_half_written_stays(
    existed: bool, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if existed:
        Path("trainkit-mine").mkdir()
    write = Path.write_text

    def full(path: Path, text: str, encoding: str) -> int:
        if path.name == "test_mine.py":
            raise error
        return write(path, text, encoding)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", full)
        with pytest.raises(ConfigError if isinstance(error, OSError) else KeyboardInterrupt):
            templates.new_plugin("mine", Kind.TRAINER)
    assert [path.name for path in tmp_path.rglob("*")] == ["trainkit-mine"] * existed
