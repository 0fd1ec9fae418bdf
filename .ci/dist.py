"""Build and check what a release publishes: ``python .ci/dist.py``, or ``make dist``.

The wheels and source distributions of trainkit and of its plugins are built into ``dist/`` and checked. Then the wheels
are installed into a fresh virtual environment, and an example and a third-party plugin run there, outside the checkout.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import venv
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
LICENCE = "LICENSE"
THIRD_PARTY = "examples/plugins/reinforce_pp"
"""The third-party plugin that is trained with."""
TASK = """\
from trainkit_kit import Bandit

def bandit():
    arguments = Bandit().arguments
    return {name: arguments[name] for name in ("tokenizer", "reward_fn", "prompts", "logit_mask")}
"""
CONFIG = """\
method: {name: reinforce_pp}
model: {model_path: {model_type: gpt2, vocab_size: 10, n_layer: 2, n_head: 2, n_embd: 32}}
rollout: {max_new_tokens: 1, num_rollouts: 8, batch_size: 8}
train: {run_dir: run, batch_size: 8, total_steps: 3, eval_interval: 1, save_interval: 1, trackers: []}
"""


class DistError(Exception):
    """A release cannot be built: the message names the file or the command, and says what to do."""


@dataclass(frozen=True)
class Project:
    """A distribution, as its sources describe it."""

    folder: Path
    """The directory of its ``pyproject.toml``."""
    name: str
    """The distribution's name."""
    package: str
    """The name of its package."""
    version: str
    """Its version."""
    version_file: Path
    """The file that the version is written in."""
    dependencies: tuple[str, ...]
    """What it requires."""
    plugins: bool = False
    """Whether it provides plugins; some provide commands, or are libraries."""

    @property
    def stem(self) -> str:
        """The beginning of the names of its files in ``dist/``."""
        return f"{self.name.replace('-', '_')}-{self.version}"


def read_project(folder: Path) -> Project:
    """Read a distribution's ``pyproject.toml``, and its version from there or from ``__version__`` of its package.

    Raises:
        DistError: the file that should contain the version does not.
    """
    file = folder / "pyproject.toml"
    written = tomllib.loads(file.read_text(encoding="utf-8"))
    project, package = written["project"], written["project"]["name"].replace("-", "_")
    version = project.get("version")
    if version is None:
        file = folder / written["tool"]["hatch"]["version"]["path"]
        package = file.parent.name
        found = re.search(r'^__version__ = "(.+)"$', file.read_text(encoding="utf-8"), flags=re.MULTILINE)
        if found is None:
            raise DistError(f'{file} has no line __version__ = "VERSION"; add it')
        version = found[1]
    plugins = bool(project.get("entry-points", {}).keys() - {"trainkit.commands"})
    return Project(folder, project["name"], package, version, file, tuple(project.get("dependencies", ())), plugins)


def read_projects(root: Path) -> list[Project]:
    """Return trainkit and its plugins, trainkit first."""
    return [read_project(root), *(read_project(file.parent) for file in sorted(root.glob("plugins/*/pyproject.toml")))]


def check_licences(projects: Sequence[Project]) -> None:
    """Check that every distribution has the licence of the first.

    Raises:
        DistError: a licence is missing, or differs from the first; the message names the file.
    """
    first, *others = (project.folder / LICENCE for project in projects)
    if not first.is_file():
        raise DistError(f"{first} is missing; every distribution includes the licence text")
    for file in others:
        if not file.is_file():
            raise DistError(f"{file} is missing; copy {first} there")
        if file.read_bytes() != first.read_bytes():
            raise DistError(f"{file} differs from {first}; copy {first} there")


def check_versions(projects: Sequence[Project], changelog: Path) -> None:
    """Check that all versions are equal, that plugins accept trainkit's version, and that the changelog describes it.

    Raises:
        DistError: one does not; the message names the file.
    """
    core, *plugins = projects
    for plugin in plugins:
        if plugin.version != core.version:
            raise DistError(
                f"{plugin.version_file} has the version {plugin.version}, and {core.version_file} has {core.version}; "
                "all distributions are released with the same version, so write it into both files"
            )
        required = [line for line in map(Requirement, plugin.dependencies) if line.name == core.name]
        if not all(line.specifier.contains(core.version, prereleases=True) for line in required):
            raise DistError(
                f"{plugin.version_file} requires {', '.join(map(str, required))}, which excludes {core.name} "
                f"{core.version}; change its dependencies"
            )
    if not re.search(rf"^## {re.escape(core.version)}\b", changelog.read_text(encoding="utf-8"), flags=re.MULTILINE):
        raise DistError(f"{changelog} has no heading '## {core.version}'; describe the release there")


def names_in(archive: Path) -> list[str]:
    """Return the names of the files in a wheel or source distribution."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return wheel.namelist()
    with tarfile.open(archive) as sdist:
        return [member.name for member in sdist.getmembers() if member.isfile()]


def missing(project: Project, archive: Path, names: Iterable[str]) -> list[str]:
    """Return which of the files that an archive of the project must contain are not among ``names``."""
    stem = project.stem
    if archive.suffix == ".whl":
        needed = [f"{project.package}/py.typed", f"{stem}.dist-info/licenses/{LICENCE}"]
    else:
        inside = ("pyproject.toml", "README.md", LICENCE, f"{project.package}/py.typed")
        needed = [f"{stem}/{name}" for name in inside]
    return sorted({*needed} - {*names})


def check_archives(project: Project, dist: Path) -> list[Path]:
    """Check and return the wheel and the source distribution of a project.

    Raises:
        DistError: one was not built, or a file is missing in it.
    """
    stem = project.stem
    archives = [dist / f"{stem}-py3-none-any.whl", dist / f"{stem}.tar.gz"]
    for archive in archives:
        if not archive.is_file():
            raise DistError(f"{archive} was not built")
        if absent := missing(project, archive, names_in(archive)):
            raise DistError(
                f"{archive} does not contain {', '.join(absent)}; see license-files and [tool.hatch.build] in "
                f"{project.folder / 'pyproject.toml'}"
            )
    return archives


def outside_variables() -> dict[str, str]:
    """Return the environment variables for a command outside the checkout, which uses no network but pip's."""
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "TRAINKIT_DISABLE_PLUGINS")
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    return {**kept, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command outside the checkout's environment and return what it printed.

    Raises:
        DistError: it fails; the message quotes the end of its output.
    """
    done = subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        env=outside_variables(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        last = "\n".join(done.stdout.splitlines()[-40:])
        raise DistError(f"{' '.join(map(str, command))}\nended with exit code {done.returncode}:\n{last}")
    return done.stdout


_STARTED = time.monotonic()


def say(progress: str) -> None:
    """Print a line of progress, with the seconds since the start."""
    print(f"[{time.monotonic() - _STARTED:4.0f} s] {progress}", flush=True)


def build(projects: Sequence[Project], dist: Path) -> list[Path]:
    """Build and check the source distribution of each project, and the wheel from it; return the archives."""
    shutil.rmtree(dist, ignore_errors=True)
    archives: list[Path] = []
    for project in projects:
        say(f"building {project.name} {project.version}")
        run(sys.executable, "-m", "build", "--no-isolation", "--outdir", dist, project.folder, cwd=dist.parent)
        archives += check_archives(project, dist)
    say(f"twine check: {len(archives)} archives")
    run(sys.executable, "-m", "twine", "check", "--strict", *archives, cwd=dist.parent)
    return archives


def install(wheels: Sequence[Path], root: Path, home: Path) -> Path:
    """Install the wheels into a fresh virtual environment at ``home``, and return its directory of programs."""
    say("installing the wheels into a fresh virtual environment, with the dependencies of constraints.txt")
    venv.create(home, with_pip=True)
    programs = home / "bin"
    core, *plugins = wheels
    arguments = ("--quiet", "--constraint", root / "constraints.txt", "--find-links", core.parent)
    run(programs / "python", "-m", "pip", "install", *arguments, f"{core}[examples]", *plugins, cwd=home)
    run(programs / "python", "-m", "pip", "check", cwd=home)
    return programs


def check_installed(programs: Path, projects: Sequence[Project], outside: Path) -> None:
    """Check that trainkit is imported from the environment, and that all plugins can be used there.

    Raises:
        DistError: trainkit comes from elsewhere, or a plugin is missing or cannot be used.
    """
    home = Path(run(programs / "python", "-c", "import trainkit; print(trainkit.__file__)", cwd=outside).strip())
    if programs.parent.resolve() not in home.resolve().parents:
        raise DistError(f"trainkit was imported from {home}, not from the fresh environment {programs.parent}")
    found = json.loads(run(programs / "trainkit", "plugins", "list", "--probe", "--json", cwd=outside))
    if unusable := [f"{plugin['name']}: {plugin['why']}" for plugin in found if plugin["why"]]:
        raise DistError(f"installed from wheels, these plugins cannot be used: {'; '.join(unusable)}")
    if absent := {project.name for project in projects if project.plugins} - {
        plugin["distribution"] for plugin in found
    }:
        raise DistError(f"installed from wheels, these distributions provide no plugin: {', '.join(sorted(absent))}")
    say(f"{len(found)} plugins are installed: {', '.join(plugin['name'] for plugin in found)}")


def try_out(programs: Path, root: Path, outside: Path) -> None:
    """Run an example and train with a third-party plugin that is built and installed as a wheel, in ``outside``."""
    say("trainkit examples run randomwalks, shortened")
    short = ("--sft-epochs", "1", "--steps", "2", "--run-dir", "walks")
    run(programs / "trainkit", "examples", "run", "randomwalks", *short, cwd=outside)
    say(f"building, installing and training with {THIRD_PARTY}")
    wheels = outside / "wheels"
    command = ("-m", "build", "--no-isolation", "--wheel", "--outdir", wheels)
    run(sys.executable, *command, root / THIRD_PARTY, cwd=outside)
    run(programs / "python", "-m", "pip", "install", "--quiet", "--no-index", *wheels.glob("*.whl"), cwd=outside)
    (outside / "task.py").write_text(TASK, encoding="utf-8")
    (outside / "config.yaml").write_text(CONFIG, encoding="utf-8")
    run(programs / "trainkit", "train", "config.yaml", "--task", "task.py:bandit", cwd=outside)
    if not (outside / "run/model/model.safetensors").is_file():
        raise DistError(f"training with {THIRD_PARTY} exported no model")


def main() -> None:
    """Check the sources, build everything into ``dist/``, and try the wheels out."""
    try:
        projects = read_projects(ROOT)
        check_licences(projects)
        check_versions(projects, ROOT / "CHANGELOG.md")
        archives = build(projects, ROOT / "dist")
        wheels = [archive for archive in archives if archive.suffix == ".whl"]
        with tempfile.TemporaryDirectory(prefix="trainkit-dist-") as temporary:
            outside = Path(temporary) / "outside"
            outside.mkdir()
            programs = install(wheels, ROOT, Path(temporary) / "venv")
            check_installed(programs, projects, outside)
            try_out(programs, ROOT, outside)
    except DistError as error:
        sys.exit(f"error: {error}")
    say(f"dist/ contains {len(archives)} archives of trainkit {projects[0].version}, ready to upload")


if __name__ == "__main__":
    main()
