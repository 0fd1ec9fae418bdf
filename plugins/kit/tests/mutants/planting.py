"""A plugin with a bug in it, installed as a stranger's: a distribution on the path, of whose name nobody knows."""

from __future__ import annotations

import ast
import importlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from mutants import loops
from trainkit.plugins import registry
from trainkit_kit import ConformanceError, check_plugin
from trainkit_kit.conformance import Result

ROOT = Path(__file__).parents[4]
SOURCES = [
    *sorted(ROOT.glob("plugins/*/trainkit_*/*.py")),
    *ROOT.glob("examples/plugins/*/trainkit_*.py"),
    *ROOT.glob("plugins/kit/tests/sound/*.py"),
    *ROOT.glob("tests/researchers/*.py"),
]
TUTORIAL = ROOT / "docs/write-an-algorithm.md"
"""The page whose algorithm is a base too: the one with settings."""
SETTINGS = re.compile(r"^from trainkit_\w+\.config import .*\n", re.MULTILINE)
"""The line that imports the settings from their module. A mutant is one module, so it has their source instead."""
FUTURE = "from __future__ import annotations\n"


MISSED = (
    "lengths that count prompt tokens", "GAE over observations", "sums in the direction of the text",
    "bootstrap one state early", "γ and λ exchanged", "teacher and student exchanged", "the higher of two targets",
    "CQL without its second part", "a weight applied twice", "statistics over group means", "a wrong baseline",
    "the own score in the baseline", "off by one token",
)  # fmt: skip
"""The kinds of bugs that an earlier edition of the kit did not find when it was tried from outside."""


class PlantingError(Exception):
    """A bug does not fit the source that it is planted into, which must have changed since."""


@dataclass(frozen=True)
class Bug:
    """A bug that was shipped, as a change of one of the plugins here, and what of the kit must find it."""

    name: str
    what: str
    """What goes wrong, in a line."""
    source: str
    """Its number in the list of known faults, where it has one, and who shipped it."""
    base: str
    """The name of the algorithm into which it is planted."""
    caught_by: tuple[str, ...]
    """Checks each of which finds it; others may too."""
    patch: str = ""
    """What changes in the source: lines that go with ``-`` before them, that come with ``+``, and that stay with a
    space. Places are parted by ``@@``; what is looked for stands in the source once."""
    loop: str = ""
    """A class of `loops` between the trainer and the loop."""
    missed: str = ""
    """Which of `MISSED` it is: a kind that an earlier edition of the kit did not find."""


def planted(bug: Bug) -> str:
    """The source of the bug's base with the bug in it.

    Raises:
        PlantingError: a text that is to be replaced is not there once.
    """
    text = _source_of(bug.base)
    for place in bug.patch.strip("\n").split("\n@@\n") if bug.patch else ():
        lines = place.split("\n")
        old, new = ("".join(f"{line[1:]}\n" for line in lines if line[0] in kinds) for kinds in ("- ", "+ "))
        text = _replaced(text, old, new, bug)
    if bug.loop:
        text = _replaced(text, FUTURE, f"{FUTURE}\nfrom mutant_loops import {bug.loop}\n", bug)
        header = f'@register_trainer("{bug.base}")\nclass '
        name = text.partition(header)[2].partition("(")[0]
        text = _replaced(text, f"{header}{name}(", f"{header}{name}({bug.loop}, ", bug)
    return text


def _source_of(base: str) -> str:
    registers = f'@register_trainer("{base}")'
    for path in SOURCES:
        if registers in (text := path.read_text(encoding="utf-8")):
            settings = _settings_beside(path)
            text = text.replace('"""', f'"""{_sources_beside(path)}', 1)
            kit = f"\nfrom {path.parent.name}.kit import KIT\n" if path.with_name("kit.py").exists() else ""
            return SETTINGS.sub(lambda _, found=settings: found, text) + kit
    for text in re.findall(r"^```python\n(.*?)^```$", TUTORIAL.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
        if registers in text and FUTURE in text:
            return str(text)
    raise PlantingError(f"no plugin here registers {base!r}")


def _sources_beside(path: Path) -> str:
    """The docstring of the trainer's package, in which most name their papers: a copy without them has a fault more."""
    package = path.with_name("__init__.py")
    found = ast.get_docstring(ast.parse(package.read_text(encoding="utf-8"))) if package.exists() else None
    return f"{found}\n\n" if found else ""


def _settings_beside(path: Path) -> str:
    settings = path.with_name("config.py")
    return settings.read_text(encoding="utf-8").partition(FUTURE)[2] if settings.exists() else ""


def _replaced(text: str, old: str, new: str, bug: Bug) -> str:
    if (times := text.count(old)) != 1:
        raise PlantingError(f"{bug.name}: {old!r} stands {times} times in the source of {bug.base}; it should once")
    return text.replace(old, new)


def _renamed(text: str, base: str, name: str) -> tuple[str, list[str]]:
    """The source with names of its own for what it registers, so that they are nobody else's; and these names."""
    names = {old: name if old == base else f"{name}_{old}" for old in re.findall(r'@register_trainer\("(\w+)"\)', text)}
    for old, new in names.items():
        text = text.replace(f'@register_trainer("{old}")', f'@register_trainer("{new}")')
        text = text.replace(f'name: str = "{old}"', f'name: str = "{new}"')
    return text, list(names.values())


@contextmanager
def installed(bug: Bug, folder: Path) -> Iterator[str]:
    """The bug as a plugin that is installed in ``folder`` meanwhile, for this process and those it starts: its name."""
    name = f"mutant_{bug.name}"
    text, names = _renamed(planted(bug), bug.base, name)
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: trainkit-rl\n")
    entries = [f"{each} = {name}\n" for each in names]
    (info / "entry_points.txt").write_text("".join(["[trainkit.trainers]\n", *entries]))
    (folder / f"{name}.py").write_text(text, encoding="utf-8")
    (folder / "mutant_loops.py").write_text(Path(loops.__file__).read_text(encoding="utf-8"), encoding="utf-8")
    paths = os.environ.get("PYTHONPATH")
    sys.path.insert(0, str(folder))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), *([paths] if paths else [])])
    importlib.invalidate_caches()
    try:
        yield name
    finally:
        sys.path.remove(str(folder))
        os.environ.pop("PYTHONPATH")
        os.environ |= {"PYTHONPATH": paths} if paths is not None else {}
        for module in (name, "mutant_loops"):
            sys.modules.pop(module, None)
        for each in names:
            registry._TRAINERS.pop(each, None)
        importlib.invalidate_caches()


def examine(bug: Bug, folder: Path, only: tuple[str, ...] | None = None) -> list[Result]:
    """How the checks ``only``, or all that apply, end on the bug."""
    seen: list[Result] = []
    with installed(bug, folder) as name, suppress(ConformanceError):
        check_plugin(name, only=only, tell=seen.append)
    return seen


def found_by(results: list[Result]) -> list[str]:
    """The checks that found the bug: by what they require, not because something else broke."""
    return [result.check.name for result in results if result.outcome == "failed" and not result.error]


def search(bug: Bug, only: tuple[str, ...] | None = None) -> tuple[list[str], list[str]]:
    """The checks that find the bug, of ``only`` or the whole kit, and those on which the plugin broke otherwise."""
    with tempfile.TemporaryDirectory() as made:
        results = examine(bug, Path(made) / "site", only)
    return found_by(results), [f"{each.check.name} ({each.error})" for each in results if each.error]
