"""The scripts behind ``make dist`` and ``make test-lowest``: what they check, and which file their messages name."""

from __future__ import annotations

import importlib.util
import re
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tables import table

ROOT = Path(__file__).parents[1]
CORE = """
[project]
name = "trainkit-rl"
dynamic = ["version"]
[tool.hatch.version]
path = "trainkit/__init__.py"
"""
PLUGIN = """
[project]
name = "trainkit-{name}"
version = "1.2.0"
dependencies = ["pillow>=11", "trainkit-rl>=1.2,<1.3"]
"""


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"ci_{name}", ROOT / ".ci" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


dist, lowest = script("dist"), script("lowest")


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")


def made(tmp_path: Path) -> Path:
    """A project of trainkit and two plugins that can be released."""
    write(tmp_path / "pyproject.toml", CORE)
    write(tmp_path / "trainkit/__init__.py", '__version__ = "1.2.0"\n')
    write(tmp_path / "CHANGELOG.md", "# Changelog\n\n## 1.2.0 (2026-11-22)\n")
    write(tmp_path / "LICENSE", "text\n")
    for name in ("one", "two"):
        write(tmp_path / f"plugins/{name}/pyproject.toml", PLUGIN.format(name=name))
        write(tmp_path / f"plugins/{name}/LICENSE", "text\n")
    return tmp_path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return made(tmp_path)


def checked(root: Path) -> None:
    projects = dist.read_projects(root)
    dist.check_licences(projects)
    dist.check_versions(projects, root / "CHANGELOG.md")


def test_this_project_has_its_licences_and_one_version() -> None:
    checked(ROOT)
    assert len(dist.read_projects(ROOT)) == 1 + len([*ROOT.glob("plugins/*/pyproject.toml")])
    assert "Copyright 2026 The trainkit authors" in (ROOT / "LICENSE").read_text(encoding="utf-8")
    for project in dist.read_projects(ROOT):
        declared = tomllib.loads((project.folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        assert (declared["license"], declared["license-files"]) == ("Apache-2.0", ["LICENSE"])
        assert (project.folder / project.package / "py.typed").is_file()


def test_trainkits_version_is_read_from_its_package_and_a_plugins_from_its_pyproject(root: Path) -> None:
    core, one, _ = dist.read_projects(root)
    assert (core.version, core.version_file) == ("1.2.0", root / "trainkit/__init__.py")
    assert (one.version, one.version_file) == ("1.2.0", root / "plugins/one/pyproject.toml")
    checked(root)


TWO, ONE = PLUGIN.format(name="two"), PLUGIN.format(name="one")


@table(
    "file, text, told",
    [
        ("LICENSE", None, "{root}/LICENSE is missing"),
        ("plugins/two/LICENSE", None, "{root}/plugins/two/LICENSE is missing"),
        ("plugins/one/LICENSE", "another\n", "{root}/plugins/one/LICENSE differs from {root}/LICENSE; copy "),
        (
            "plugins/two/pyproject.toml",
            TWO.replace("1.2.0", "1.2.1"),
            "{root}/plugins/two/pyproject.toml has the version 1.2.1",
        ),
        ("plugins/two/pyproject.toml", TWO.replace("1.2.0", "1.2.1"), "{root}/trainkit/__init__.py has 1.2.0"),
        (
            "plugins/one/pyproject.toml",
            ONE.replace("trainkit-rl>=1.2,<1.3", "trainkit-rl>=1.1,<1.2"),
            "{root}/plugins/one/pyproject.toml requires trainkit-rl<1.2,>=1.1, which excludes trainkit-rl 1.2.0",
        ),
        ("trainkit/__init__.py", "", "{root}/trainkit/__init__.py has no line __version__"),
        (
            "CHANGELOG.md",
            "# Changelog\n\n## 1.1.0\n\nLater: 1.2.0\n",
            "{root}/CHANGELOG.md has no heading '## 1.2.0'",
        ),
    ],
)
def test_what_cannot_be_released_is_told_with_its_file(file: str, text: str | None, told: str, tmp_path: Path) -> None:
    made(tmp_path)
    if text is None:
        (tmp_path / file).unlink()
    else:
        write(tmp_path / file, text)
    with pytest.raises(dist.DistError) as caught:
        checked(tmp_path)
    assert told.format(root=tmp_path) in str(caught.value)


def archives(folder: Path, leave_out: str = "") -> None:
    """Write a wheel and a source distribution of ``trainkit-one`` with empty files."""
    stem = "trainkit_one-1.2.0"
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        for name in ("trainkit_one/py.typed", f"{stem}.dist-info/licenses/LICENSE"):
            if leave_out not in name or not leave_out:
                wheel.writestr(name, "")
    with tarfile.open(folder / f"{stem}.tar.gz", "w:gz") as sdist:
        for name in ("pyproject.toml", "README.md", "LICENSE", "trainkit_one/py.typed"):
            if leave_out not in name or not leave_out:
                sdist.addfile(tarfile.TarInfo(f"{stem}/{name}"))


def test_archives_hold_licence_and_py_typed_or_what_is_absent_is_named(root: Path) -> None:
    _, one, _ = dist.read_projects(root)
    with pytest.raises(dist.DistError, match=r"trainkit_one-1\.2\.0-py3-none-any\.whl was not built"):
        dist.check_archives(one, root)
    for absent in ("LICENSE", "py.typed", "README.md"):
        archives(root, leave_out=absent)
        with pytest.raises(dist.DistError, match=rf"trainkit_one-1\.2\.0.* does not contain .*{absent}; see license-f"):
            dist.check_archives(one, root)
    archives(root)
    assert [path.suffix for path in dist.check_archives(one, root)] == [".whl", ".gz"]


def test_a_command_that_fails_is_quoted_with_its_output(tmp_path: Path) -> None:
    assert dist.run(sys.executable, "-c", "print(1)", cwd=tmp_path) == "1\n"
    with pytest.raises(dist.DistError, match=r"(?s)ended with exit code 3:\nwhy"):
        dist.run(sys.executable, "-c", "print('why'); raise SystemExit(3)", cwd=tmp_path)


def test_commands_outside_the_checkout_see_no_path_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    assert "PYTHONPATH" not in dist.outside_variables()
    assert dist.outside_variables()["HF_HUB_OFFLINE"] == "1"


# ----------------------------------------------------------------------------------------------------------- the name

BARE = re.compile(
    r"""(?<![\w./-])trainkit(?:\[[a-z]|\s*[<>=~!]=?\s*\d)|pip install[^\n`]*[ '"]trainkit(?![\w/-])"""
    r"""|dependencies = \[[^\]]*"trainkit["\s]"""
)
"""What would install ``trainkit`` from the Python Package Index, where it is another project."""


@table(
    "text, bare",
    [
        ("pip install 'trainkit[eval]'", True),
        ("pip install -q trainkit", True),
        ("trainkit >= 0.1", True),
        ('dependencies = ["numpy", "trainkit"]', True),
        ("pip install -e . trainkit-rl trainkit-ppo", False),
        ('dependencies = ["trainkit-rl[eval]>=0.1"]', False),
        ("pip install -e plugins/ppo; trainkit plugins", True),
    ],
)
def test_a_bare_name_is_seen(text: str, bare: bool) -> None:
    assert bool(BARE.search(text)) == bare


def test_nothing_requires_or_says_to_install_the_other_project_of_the_name_trainkit() -> None:
    places = [ROOT / name for name in ("docs", "plugins", "examples", "benchmarks", "trainkit", ".ci")]
    files = [*ROOT.glob("*.*"), ROOT / "Makefile", *(file for place in places for file in place.rglob("*.*"))]
    projects = [file for file in files if file.name == "pyproject.toml"]
    assert len(projects) > 25
    for file in projects:
        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        optional = project.get("optional-dependencies", {}).values()
        lines = [*project["dependencies"], *(line for extra in optional for line in extra)]
        assert "trainkit" not in {project["name"], *(lowest.split(line)[0] for line in lines)}, file
    for file in files:
        if file.suffix in ("", ".md", ".py", ".toml", ".ipynb", ".sh", ".yaml", ".yml") and file.is_file():
            assert not (found := BARE.search(file.read_text(encoding="utf-8"))), f"{file}: {found}"


# ---------------------------------------------------------------------------------------------------- lowest versions


@table(
    "requirement, is_",
    [
        ("torch>=2.13,<3", ("torch", ">=2.13,<3")),
        ("PyYAML >= 6", ("pyyaml", ">= 6")),
        ("ruamel.yaml[jinja2]>=0.18; python_version > '3'", ("ruamel-yaml", ">=0.18")),
        ("editables", ("editables", "")),
    ],
)
def test_a_requirement_is_split_into_name_and_bounds(requirement: str, is_: tuple[str, str]) -> None:
    assert lowest.split(requirement) == is_


def test_the_floor_of_a_package_is_its_highest_lower_bound() -> None:
    given = ["numpy>=2.9,<3", "numpy>=2.10", "pyyaml>=6,<7", "trainkit-ppo", "trainkit-rl>=0.1"]
    assert lowest.floors(given) == {"numpy": "2.10", "pyyaml": "6"}
    with pytest.raises(SystemExit, match="'numpy<3' has no lower bound; write numpy>=VERSION"):
        lowest.floors(["numpy<3"])


def test_extras_of_users_are_runtime_dependencies_and_tools_keep_the_versions_of_the_constraints() -> None:
    project: dict[str, Any] = {
        "dependencies": ["a>=1"],
        "optional-dependencies": {"examples": ["b>=2"], "dev": ["c"], "bench": ["d"]},
    }
    assert lowest.runtime_requirements(project) == ["a>=1", "b>=2"]
    constraints = "# a==0\nPyTest==9.2.0\nnumpy==2.4.6\ntwine==7.0.0\n"
    assert lowest.tool_pins(constraints, ["pytest>=9,<10", "editables", "twine>=6.2"]) == {"pytest": "9.2.0"}


def test_every_pin_is_a_version_that_pyproject_allows(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    tested = [line.partition("==")[0].lower().replace("_", "-") for line in text.splitlines() if "==" in line]
    assert sorted(tested) == sorted({*tested}), "pip could install nothing"
    lowest.main()
    lines = capsys.readouterr().out.splitlines()
    names = [line.partition("==")[0] for line in lines]
    assert names == sorted({*names})
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pins = dict(line.split("==") for line in lines)
    assert {lowest.split(line)[0] for line in project["dependencies"]} <= pins.keys()
    assert pins["torch"].startswith("2.11")
