"""What all tests share: one thread, reproducible property tests, processes played by threads, fake distributions, and
fresh environments."""

from __future__ import annotations

import ast
import functools
import importlib
import io
import os
import shutil
import subprocess
import sys
import sysconfig
import tokenize
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Barrier
from typing import TYPE_CHECKING, Any

import pytest
import typer.testing
from hypothesis import HealthCheck, settings

from tiers import pytest_collection_finish, pytest_collection_modifyitems, pytest_runtest_call  # noqa: F401
from trainkit.plugins.discovery import GROUPS

settings.register_profile(
    "trainkit", deadline=None, derandomize=True, max_examples=50, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("trainkit")
typer.testing._get_command = functools.cache(typer.testing._get_command)  # typer reads all signatures for every call
ROOT = Path(__file__).parents[1]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out what `make parity` alone runs: to import it takes a second."""
    return True if collection_path.name == "parity" and config.option.markexpr != "parity" else None


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options; this file is read before options are, those of folders below are not."""
    parser.addoption("--full", action="store_true", help="the battery: all of each check, not a sample")


if TYPE_CHECKING:
    import torch

    Reduce = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(scope="session")
def in_lockstep() -> Callable[[Callable[[Any, Reduce], Any], Sequence[Any]], list[Any]]:
    """``run(fn, shards)``: ``fn(shard, reduce)`` for every shard at once, ``reduce`` summing over the shards."""

    import torch

    def run(fn: Callable[[Any, Reduce], Any], shards: Sequence[Any]) -> list[Any]:
        barrier, slots = Barrier(len(shards), timeout=30), [torch.zeros(())] * len(shards)

        def reduce_as(rank: int) -> Reduce:
            def reduce(x: torch.Tensor) -> torch.Tensor:
                slots[rank] = x
                barrier.wait()  # everyone has given
                total = torch.stack(slots).sum(0)
                barrier.wait()  # everyone has taken
                return total

            return reduce

        with ThreadPoolExecutor(len(shards)) as pool:
            return list(pool.map(lambda rank: fn(shards[rank], reduce_as(rank)), range(len(shards))))

    return run


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """``install("dist", {"name": "module"}, "source of module")``: a distribution, as an installer leaves it.

    ``kind`` is that of its plugins, or of each by its name.
    """

    def install(
        distribution: str,
        entries: Mapping[str, str],
        source: str | None = None,
        version: str = "1.0",
        requires: Sequence[str] = (),
        kind: str | Mapping[str, str] = "trainer",
        group: str | None = None,
        summary: str = "",
    ) -> Path:
        home = tmp_path / distribution
        info = home / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        metadata = ["Metadata-Version: 2.1", f"Name: {distribution}", f"Version: {version}", f"Summary: {summary}"]
        (info / "METADATA").write_text("\n".join([*metadata, *(f"Requires-Dist: {line}" for line in requires), ""]))
        kinds = dict.fromkeys(entries, kind) if isinstance(kind, str) else kind
        groups = [f"[{group or GROUPS[kinds[name]]}]\n{name} = {module}\n" for name, module in entries.items()]
        (info / "entry_points.txt").write_text("\n".join(groups))
        if source is not None:
            for module in {value.partition(":")[0] for value in entries.values()}:
                (home / f"{module}.py").write_text(source)
        monkeypatch.syspath_prepend(home)
        importlib.invalidate_caches()
        return home

    return install


@pytest.fixture(scope="session")
def lines_of_code() -> Callable[[Path], int]:
    """``lines_of_code(path)``: the lines of a module that hold code: not blank ones, comments and docstrings."""

    def lines_of_code(path: Path) -> int:
        source = path.read_text(encoding="utf-8")
        said = {
            line
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
        }
        blank = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
        tokens = [t for t in tokenize.generate_tokens(io.StringIO(source).readline) if t.type not in blank]
        return len({line for t in tokens for line in range(t.start[0], t.end[0] + 1)} - said)

    return lines_of_code


@dataclass(frozen=True)
class FreshVenv:
    """A virtual environment without network, in which trainkit is installed from this checkout.

    What the tests themselves run on (torch and the like, the built-in plugins) is seen from it; what is installed into
    it is seen by nobody else.
    """

    home: Path

    def run(
        self, *command: str | Path, cwd: Path | None = None, check: bool = True, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """A command of the environment, such as ``trainkit``, ``python`` or ``pip``, with further variables."""
        program, *arguments = map(str, command)
        done = subprocess.run(
            [str(self.home / "bin" / program), *arguments],
            cwd=cwd or self.home,
            env={**os.environ, "PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0", **variables},  # 0 means: none (pip)
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert not check or done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
        return done

    def install(self, *projects: str | Path) -> None:
        """Install the projects at these paths, as a user does; those behind ``-e`` where they are."""
        self.run("pip", "install", "--quiet", "--no-deps", "--disable-pip-version-check", *projects)


@pytest.fixture(scope="module")
def fresh_venv(tmp_path_factory: pytest.TempPathFactory) -> FreshVenv:
    """A virtual environment for the tests of one module."""
    home = tmp_path_factory.mktemp("fresh") / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(home)], check=True, timeout=300)
    (packages,) = home.glob("lib/python*/site-packages")
    for brought in packages.glob("setuptools*"):  # older than what torch needs, and it would hide that
        shutil.rmtree(brought)
    outer = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    (packages / "of_the_tests.pth").write_text(outer, encoding="utf-8")
    venv = FreshVenv(home)
    venv.install("-e", ROOT)
    return venv
