"""Commands that distributions bring: listed by their metadata, imported when called."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from test_floors import WINGS
from trainkit.cli import app
from trainkit.plugins import commands, discovery
from trainkit.plugins.commands import OWN
from trainkit.plugins.discovery import how_to_install

GROUP = "trainkit.commands"
FUNCTION = """
import typer

def peek(run: str, often: bool = False) -> None:
    "Peek a run."
    typer.echo(f"peeking {run} {often}")
"""
APP = """
import typer

app = typer.Typer(help="Peek runs.")

@app.command()
def begin(run: str) -> None:
    "Begin."
    typer.echo(f"peeking {run}")

@app.command()
def fail() -> None:
    from trainkit.errors import DataError
    raise DataError("there is no run; give one")
"""
ONE = """
import typer

app = typer.Typer(rich_markup_mode=None)

@app.command(epilog="That is all.")
def peek(run: str) -> None:
    typer.echo(f"peeking {run}")
"""
LOUD = "raise RuntimeError('imported')"


@pytest.fixture(autouse=True)
def forgotten(tmp_path: Path) -> Iterator[None]:
    """Forget the modules of fake distributions."""
    yield
    for name in list(sys.modules):
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def call(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def said(result: Any) -> str:
    return " ".join(result.output.split())


@pytest.mark.parametrize(
    ("source", "target", "arguments", "prints"),
    [
        (FUNCTION, "peek_f:peek", ["a", "--often"], "peeking a True"),
        (FUNCTION, "peek_f:peek", ["--help"], "Usage: trainkit peek [OPTIONS]"),
        (APP, "peek_a:app", ["begin", "a"], "peeking a"),
        (APP, "peek_a:app", ["--help"], "Peek runs."),
        (APP, "peek_b:app", ["fail"], "DataError: there is no run; give one"),
        (ONE, "peek_c:app", ["a"], "peeking a"),
        (ONE, "peek_c:app", ["--help"], "[required] Options: --help Show this message and exit. That is all."),
    ],
)
def test_an_installed_command_is_called(
    install: Callable[..., Path], source: str, target: str, arguments: list[str], prints: str
) -> None:
    install("fake-peek", {"peek": target}, source, group=GROUP)
    assert prints in said(CliRunner().invoke(app, ["peek", *arguments], prog_name="trainkit"))


def test_help_lists_installed_commands_with_the_summary_and_does_not_import_them(install: Callable[..., Path]) -> None:
    install("fake-loud", {"loud": "loud_module:app"}, LOUD, group=GROUP, summary="Makes noise. Much of it")
    assert "loud Makes noise." in said(call("--help"))


def test_help_takes_little_time() -> None:
    def seconds() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "trainkit.cli", "--help"], check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(seconds() for _ in range(3)) < 0.3  # of CPU time, which depends on the load all the same


@pytest.mark.parametrize(
    ("target", "source", "says"),
    [
        ("loud_1:app", LOUD, "RuntimeError: imported"),
        ("loud_2:app", "raise SystemExit(3)", "SystemExit: 3"),
        ("loud_3:gone", "", "no attribute 'gone'"),
        ("gone.entirely:app", None, "No module named 'gone'"),
        ("loud_4", "", "should be a function or a typer.Typer"),
        ("loud_5:app", "app = 3", "should be a function or a typer.Typer; given 3 (int)"),
        ("loud_6:app", "import typer\napp = typer.Typer()", "Could not get a command"),
        ("loud_7:app", "class app: pass", "should be a function or a typer.Typer"),
    ],
)
def test_a_command_that_cannot_be_imported_is_explained(
    install: Callable[..., Path], target: str, source: str | None, says: str
) -> None:
    install("fake-loud", {"loud": target}, source, group=GROUP)
    result = call("loud")
    assert result.exit_code == 1
    assert said(result).startswith(f"PluginError: the command 'loud' of fake-loud 1.0 ({target}) cannot be used: ")
    assert says in said(result)


def test_a_name_that_two_distributions_claim_is_refused_and_both_are_named(install: Callable[..., Path]) -> None:
    for name in ("fake-one", "fake-two"):
        install(name, {"peek": f"{name.replace('-', '_')}:peek"}, FUNCTION, group=GROUP)
    result = call("peek", "a")
    both = (
        "it is claimed twice: fake-one 1.0 (fake_one:peek); fake-two 1.0 (fake_two:peek); "
        "uninstall or disable all but one"
    )
    told = call("--help").output.partition("Commands that cannot be used:")
    assert result.exit_code == 1
    assert f"RegistryError: the command 'peek' cannot be used: {both}" in said(result)
    assert "peek" not in told[0]
    assert both in " ".join(told[2].split())


@pytest.mark.parametrize("name", ["train", "config"])
def test_a_command_of_the_core_stays_its_own(install: Callable[..., Path], name: str) -> None:
    install("fake-core", {name: "fake_core:peek"}, LOUD, group=GROUP)
    assert f"Usage: trainkit {name}" in said(CliRunner().invoke(app, [name, "--help"], prog_name="trainkit"))
    told = "fake-core 1.0 (fake_core:peek) names it, but it is a command of trainkit itself; uninstall fake-core"
    assert told in said(call("--help"))


def test_a_disabled_command_says_what_disables_it(
    install: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    install("fake-peek", {"peek": "fake_peek:peek"}, FUNCTION, group=GROUP)
    monkeypatch.setenv("TRAINKIT_DISABLE_PLUGINS", "fake-peek")
    assert "fake-peek 1.0 is disabled by TRAINKIT_DISABLE_PLUGINS" in said(call("peek", "a"))
    install("fake-other", {"peek": "fake_other:peek"}, FUNCTION, group=GROUP)
    assert said(call("peek", "a")) == "peeking a False"


def test_entry_points_that_cannot_be_read_hide_no_other_command(install: Callable[..., Path]) -> None:
    home = install("fake-torn", {"torn": "torn:app"}, group=GROUP)
    (home / "fake_torn-1.0.dist-info" / "entry_points.txt").write_text(f"[{GROUP}]\nnonsense\n")
    install("fake-peek", {"peek": "fake_peek:peek"}, FUNCTION, group=GROUP)
    assert "the entry points of fake-torn 1.0 cannot be read" in said(call("--help"))
    assert call("peek", "a").exit_code == 0


@pytest.mark.parametrize(("given", "meant"), [("trian", "train"), ("peeek", "peek"), ("exmaples", "examples")])
def test_an_unknown_command_has_suggestions(install: Callable[..., Path], given: str, meant: str) -> None:
    install("fake-peek", {"peek": "fake_peek:peek"}, FUNCTION, group=GROUP)
    result = call(given)
    assert result.exit_code == 2
    assert f"No such command '{given}'. Did you mean '{meant}'?" in said(result)


# ------------------------------------------------------------------------------------------- trainkit's own commands


def test_what_installs_a_distribution_is_in_the_checkout_with_what_it_requires(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugins = Path(__file__).parents[1] / "plugins"
    assert how_to_install("trainkit-sweep") == f"pip install -e {plugins / 'report'} -e {plugins / 'sweep'}"
    assert how_to_install("trainkit-early-stop") == f"pip install -e {plugins / 'early_stop'}"
    monkeypatch.setattr(discovery, "CHECKOUT", tmp_path)  # as where trainkit is installed from a wheel
    assert how_to_install("trainkit-sweep") == "pip install trainkit-sweep"


@pytest.mark.parametrize("name", [*OWN])
def test_a_command_of_trainkit_that_is_not_installed_says_what_to_install(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "distributions", list)
    result = call(name, "a")
    home = OWN[name][0]
    assert result.exit_code == 2
    assert f"Error: '{name}' is in {home}, which is not installed: {how_to_install(home)}" in said(result)
    assert f"Did you mean '{name}'" in said(call(f"{name}x"))


@pytest.mark.parametrize("name", [*OWN])
def test_a_command_of_trainkit_stays_its_own(name: str, install: Callable[..., Path]) -> None:
    install("fake-own", {name: "fake_own:peek"}, LOUD, group=GROUP)
    assert f"Usage: trainkit {name}" in said(CliRunner().invoke(app, [name, "--help"], prog_name="trainkit"))
    assert f"it belongs to trainkit's own {OWN[name][0]}; uninstall fake-own" in said(call("--help"))


def test_a_strangers_command_with_the_name_of_one_that_is_not_installed_is_refused(
    install: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    install("fake-own", {"migrate": "fake_own:peek"}, LOUD, group=GROUP)
    alone = [each for each in commands.distributions() if each.name == "fake-own"]
    monkeypatch.setattr(commands, "distributions", lambda: alone)
    result = call("migrate", "a")
    assert result.exit_code == 1
    how = how_to_install("trainkit-migrate")
    assert f"is in trainkit-migrate, which is not installed: {how}; fake-own 1.0" in said(result)


def test_the_list_says_of_trainkits_commands_what_their_help_begins_with() -> None:
    every = typer.main.get_command(app).everything()  # type: ignore[attr-defined]
    helps = {name: " ".join(every[name].help.split()) for name in OWN}
    assert [name for name, (_, line) in OWN.items() if not helps[name].startswith(line.rstrip("."))] == []
    assert {name.replace("-", "_") for name, _ in OWN.values()} <= WINGS
