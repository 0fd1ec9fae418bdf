"""Area E of the battery: plugins that are broken, that clash, that do not fit, and how fast they are found."""

from __future__ import annotations

import json
import os
import random
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import trainkit
from mutants.bugs import BUGS
from mutants.planting import examine, found_by
from test_cli import CONFIG, OBSERVES, TASK
from test_registry_plugins import trainer_source
from trainkit.plugins import discovery
from trainkit_kit import check_plugin
from trainkit_kit.conformance import checks_for, subjects_of

BUILT_IN = ",".join({*discovery.BUILT_IN.values()})
"""The distributions of trainkit's own plugins; each probe of one takes a while."""


BEFORE = {*sys.path}
"""What every process of this Python sees."""


def homes() -> str:
    """The directories of the distributions that a test has installed, as `PYTHONPATH`."""
    return os.pathsep.join(path for path in sys.path if path not in BEFORE)


def shell(*arguments: str, cwd: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    """A ``trainkit`` command in a process of its own, which sees the distributions that were installed."""
    return subprocess.run(
        [sys.executable, "-m", "trainkit.cli", *arguments],
        cwd=cwd, env={**os.environ, "PYTHONPATH": homes(), "COLUMNS": "1000", **variables}, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


def listed(*flags: str, **variables: str) -> dict[tuple[str, str], dict[str, str]]:
    """The rows of ``trainkit plugins list`` by name and distribution; its exit code is 0."""
    done = shell("plugins", "list", "--json", *flags, **variables)
    assert done.returncode == 0, done.stderr
    return {(row["name"], row["distribution"]): row for row in json.loads(done.stdout)}


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A directory with a configuration and a task."""
    (tmp_path / "task_for_cli.py").write_text(TASK, encoding="utf-8")
    (tmp_path / "run.yaml").write_text(CONFIG, encoding="utf-8")
    return tmp_path


TRAIN = ("train", "run.yaml", "--task", "task_for_cli.py:online")

BROKEN = {
    "needs": ("import gone_for_good\n" + OBSERVES, "ModuleNotFoundError: No module named 'gone_for_good'"),
    "raises": ("raise ImportError('no such library')\n", "ImportError: no such library"),
    "exits": ("raise SystemExit(3)\n", "SystemExit: 3"),
    "lacks": ("{}['missing']\n", "KeyError: 'missing'"),
    "hooks": (
        "import trainkit\nclass H:\n  def __getattr__(self, name): return {}[name]\nH().on_step\n" + OBSERVES,
        "KeyError: 'on_step'",
    ),
    "torn": ("def broken(:\n", "SyntaxError: invalid syntax"),
}


def test_e1_broken_plugins(install: Callable[..., Path], work: Path, figure: Callable[[str], None]) -> None:
    """Plugins that fail at their import are listed with distribution, version and reason; all else works."""
    for name, (source, _) in BROKEN.items():
        install(f"fake-{name}", {f"fake-{name}": f"fake_{name}"}, source, "0.7", kind="hooks")
    install("fake-sound", {"fake-sound": "fake_sound"}, OBSERVES, kind="hooks")
    assert shell("--help").returncode == 0
    disabled = {"TRAINKIT_DISABLE_PLUGINS": BUILT_IN}
    rows = listed("--probe", **disabled)
    told = [rows[f"fake-{name}", f"fake-{name}"] for name in BROKEN]
    for row, (_, why) in zip(told, BROKEN.values(), strict=True):
        assert row["why"].startswith(f"{row['distribution']} 0.7: ")
        assert why in row["why"]
    assert rows["fake-sound", "fake-sound"]["why"] == ""
    strict = shell("plugins", "list", "--probe", "--strict-plugins", **disabled)
    assert strict.returncode == 1
    assert all(f"fake-{name} 0.7" in strict.stderr for name in BROKEN)
    run = shell(*TRAIN, "plugins=[fake-sound]", "train.run_dir=out", cwd=work)
    assert run.returncode == 0, run.stderr
    assert "told of 2" in run.stdout
    for name in BROKEN:
        named = shell("config", f"fake-{name}")
        assert named.returncode == 1
        assert f"fake-{name} 0.7" in named.stderr
    figure(
        f"{len(told)} of {len(BROKEN)} told with the reason, exit 0, strict {strict.returncode}, a run beside them 0"
    )


def test_e2_names_twice(install: Callable[..., Path], work: Path, figure: Callable[[str], None]) -> None:
    """A name of two distributions is an error that names both; a name of trainkit's own cannot be taken."""
    install("fake-mine", {"fake-shared": "fake_mine"}, trainer_source("fake-shared"), version="1.1")
    install("fake-yours", {"Fake-Shared": "fake_yours"}, trainer_source("fake-shared"), version="2.2")
    install("fake-thief", {"ppo": "fake_thief", "sft": "fake_thief"}, "raise SystemExit", version="6.6")
    install("fake-second", {"fake-second": "fake_second"}, trainer_source("rloo"), version="3.3")
    rows = listed()
    pair = [rows["fake-shared", name] for name in ("fake-mine", "fake-yours")]
    assert "claimed by fake-yours 2.2" in pair[0]["why"]
    assert "claimed by fake-mine 1.1" in pair[1]["why"]
    both = shell("config", "fake-shared")
    assert both.returncode == 1
    assert {"fake-mine 1.1", "fake-yours 2.2"} <= {
        name for name in ("fake-mine 1.1", "fake-yours 2.2") if name in both.stderr
    }
    for name in ("ppo", "sft"):
        assert rows[name, f"trainkit-{name}"]["why"] == ""
        assert f"the name '{name}' belongs to trainkit's own trainkit-{name}" in rows[name, "fake-thief"]["why"]
    again = shell("config", "fake-second")
    assert again.returncode == 1
    assert "fake-second 3.3" in again.stderr
    assert "rloo" in again.stderr
    assert shell("config", "rloo").returncode == 0
    run = shell(*TRAIN, "train.run_dir=out", cwd=work)
    assert run.returncode == 0, run.stderr
    figure("1 name of two distributions refused with both named, 3 names of trainkit's own kept")


UNFIT = {
    "signature": (
        OBSERVES.replace("(step)", "(loss)"),
        (),
        "on_step takes 'loss'; it may take trainer, step",
    ),
    "unknown": (
        OBSERVES.replace("on_step", "on_stepp"),
        (),
        "unknown hook 'on_stepp'; did you mean 'on_step'",
    ),
    "newer": (OBSERVES, ("trainkit-rl>=99",), "it requires trainkit >=99, and this is trainkit"),
    "unread": (OBSERVES, ("trainkit-rl >> 1",), "its requirement on trainkit cannot be read"),
}


def test_e3_unfit_plugins(install: Callable[..., Path], work: Path, figure: Callable[[str], None]) -> None:
    """A hook that does not fit, an unknown hook and another version of trainkit are refused in one line each."""
    for name, (source, requires, _) in UNFIT.items():
        install(f"fake-{name}", {f"fake-{name}": f"fake_{name}"}, source, requires=requires, kind="hooks")
    rows = listed("--probe", TRAINKIT_DISABLE_PLUGINS=BUILT_IN)
    refused = 0
    for name, (_, _, why) in UNFIT.items():
        row = rows[f"fake-{name}", f"fake-{name}"]
        assert row["why"].startswith(f"fake-{name} 1.0: "), row
        assert why in row["why"]
        assert "\n" not in row["why"]
        run = shell(*TRAIN, f"plugins=[fake-{name}]", f"train.run_dir={name}", cwd=work)
        assert run.returncode == 1
        line, *rest = run.stderr.splitlines()
        assert rest in ([], ["(TRAINKIT_TRACEBACK=1 shows the traceback)"])
        assert why in line
        assert f"fake-{name} 1.0" in line
        refused += not (work / name / "model").exists()
    figure(f"{refused} of {len(UNFIT)} refused in one line, by the list and by a run")


def test_e4_switching_off(install: Callable[..., Path], work: Path, figure: Callable[[str], None]) -> None:
    """Plugins can be disabled by name, all at once or except those to load, by flag too, also beside a broken one."""
    install("fake-broken", {"fake-bad": "fake_bad"}, "1 / 0", "0.7", kind="hooks")
    install("fake-torn", {"fake-torn": "fake_torn"}, "def broken(:", kind="hooks")
    install("fake-watch", {"fake-watch": "fake_watch"}, OBSERVES, kind="hooks")
    install("fake-other", {"fake-other": "fake_other"}, OBSERVES, kind="hooks")
    ours, cases = ("fake-bad", "fake-torn", "fake-watch", "fake-other"), 0
    for variables, blocked in (
        ({"TRAINKIT_DISABLE_PLUGINS": "fake-bad,fake-torn"}, {"fake-bad", "fake-torn"}),
        ({"TRAINKIT_DISABLE_PLUGINS": "Fake_Broken, fake-watch"}, {"fake-bad", "fake-watch"}),
        ({"TRAINKIT_DISABLE_PLUGINS": "all"}, {*ours}),
        ({"TRAINKIT_LOAD_PLUGINS": "fake-watch"}, {*ours} - {"fake-watch"}),
        ({"TRAINKIT_LOAD_PLUGINS": ""}, {*ours}),
        ({}, set()),
    ):
        cases += 1
        rows = {name: row for (name, _), row in listed(**variables).items()}
        assert {name for name in rows if rows[name]["disabled"]} == blocked
        assert {rows[name]["why"] for name in ("ppo", "sft")} == {""}
    plugins = "plugins=[fake-bad, fake-watch]"
    assert shell(*TRAIN, plugins, "train.run_dir=fails", cwd=work).returncode == 1
    for flags, variables in (
        (("--no-plugin", "fake-bad"), {}),
        ((), {"TRAINKIT_DISABLE_PLUGINS": "fake-bad"}),
        ((), {"TRAINKIT_LOAD_PLUGINS": "fake-watch"}),
    ):
        cases += 1
        run = shell(*TRAIN, *flags, plugins, f"train.run_dir=run{cases}", cwd=work, **variables)
        assert run.returncode == 0, run.stderr
        assert "told of 2" in run.stdout
    figure(f"{cases} of {cases} ways")


def test_e5_contract_kit(tmp_path: Path, figure: Callable[[str], None], full: bool, drawn: int) -> None:
    """The conformance kit passes for the algorithms and finds every planted defect."""
    draws = random.Random(drawn)
    names = trainkit.available_trainers()
    if full:
        checks = {name: None for name in names}
        bugs = list(BUGS)
    else:  # make test-all runs all of the kit, and all bugs
        name = draws.choice(names)
        quick = sorted(
            {check.name for subject in subjects_of(name) for check in checks_for(subject)} - {"two_processes"}
        )
        checks = {name: draws.sample(quick, 5)}
        bugs = draws.sample(BUGS, 12)
    passed = sum(len(check_plugin(name, only=only).results) for name, only in checks.items())
    missed = [bug.name for bug in bugs if not found_by(examine(bug, tmp_path / bug.name, bug.caught_by))]
    told = f"{passed} checks of {len(checks)} of {len(names)} algorithms passed"
    figure(f"{told}, {len(bugs) - len(missed)} of {len(bugs)} defects found")
    assert missed == []
    assert len(bugs) >= 12


def cpu_seconds(command: list[str], count: int = 5) -> float:
    """The seconds of the CPU that a command takes, the least of ``count`` runs."""
    found = []
    for _ in range(count):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, env={**os.environ, "PYTHONPATH": homes()}, capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        found.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(found)


def test_e6_startup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, figure: Callable[[str], None]) -> None:
    """Neither ``trainkit --help`` nor ``plugins list`` with 30 plugins imports torch or takes long.

    Long is compared with the imports of the libraries that commands are made of, on the same machine.
    """
    site = tmp_path / "site"  # one directory, as of an installer
    for number in range(30):
        info = site / f"fake_{number}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: fake-{number}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[trainkit.trainers]\nfake-{number} = fake_{number}\n")
        (site / f"fake_{number}.py").write_text(trainer_source(f"fake-{number}"))
    monkeypatch.setattr(sys, "path", [str(site), *sys.path])
    assert len([row for row in listed().values() if row["name"].startswith("fake-")]) == 30
    help_, list_ = ([sys.executable, "-m", "trainkit.cli", *words] for words in (["--help"], ["plugins", "list"]))
    for command in (help_, list_):
        seen = [command[0], "-X", "importtime", *command[1:]]
        environment = {**os.environ, "PYTHONPATH": homes()}
        traced = subprocess.run(seen, env=environment, capture_output=True, text=True, check=True).stderr
        assert "trainkit" in traced
        assert "torch" not in {line.split("|")[-1].strip() for line in traced.splitlines()}
    libraries = cpu_seconds([sys.executable, "-c", "import typer, rich.table, pydantic, yaml"])
    of_help, of_list = cpu_seconds(help_) / libraries, cpu_seconds(list_) / libraries
    figure(f"--help {of_help:.2f}, plugins list {of_list:.2f} times the imports of the libraries, torch not imported")
    assert of_help <= 2.5
    assert of_list <= 8
