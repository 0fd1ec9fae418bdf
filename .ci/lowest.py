"""Print constraints that pin every runtime dependency to the lowest version that pyproject.toml allows.

``make test-lowest`` writes them to ``build/lowest.txt`` and runs the tests with them. Only the standard library is
used, because the script runs before the environment exists.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FOR_DEVELOPMENT = ("dev", "bench")
"""The extras that are not runtime dependencies. Their packages keep the versions of constraints.txt."""
NOT_FOR_TESTS = ("build", "twine")
"""Tools that the tests do not use. pip chooses versions of them that fit the lowest versions."""
REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)(?:\[[\w.,-]+\])?(?P<bounds>[^;]*)")


def normalised(name: str) -> str:
    """Return a distribution's name as package indexes compare names."""
    return re.sub(r"[-_.]+", "-", name).lower()


def split(requirement: str) -> tuple[str, str]:
    """Return the normalised name and the bounds of a requirement, ``"PyYAML>=6,<7"`` -> ``("pyyaml", ">=6,<7")``."""
    found = REQUIREMENT.match(requirement.strip())
    if found is None:
        raise SystemExit(f"the requirement {requirement!r} cannot be read")
    return normalised(found["name"]), found["bounds"].strip()


def as_numbers(version: str) -> tuple[int, ...]:
    """Return the parts of a version that consists of numbers, to compare two of them."""
    return tuple(int(part) for part in version.split("."))


def runtime_requirements(project: Mapping[str, Any]) -> list[str]:
    """Return what a distribution needs at run time: its dependencies and its extras for users."""
    extras = project.get("optional-dependencies", {})
    return [
        *project.get("dependencies", []),
        *(line for extra, lines in extras.items() if extra not in FOR_DEVELOPMENT for line in lines),
    ]


def floors(requirements: Iterable[str]) -> dict[str, str]:
    """Return the lowest allowed version of each package, the highest where several are given."""
    lowest: dict[str, str] = {}  # without trainkit's own distributions
    for requirement in requirements:
        name, bounds = split(requirement)
        if name.startswith("trainkit-"):
            continue
        found = re.search(r">=\s*([\d.]+)", bounds)
        if found is None:
            raise SystemExit(f"the requirement {requirement!r} has no lower bound; write {name}>=VERSION")
        lowest[name] = max(found[1], lowest.get(name, "0"), key=as_numbers)
    return lowest


def tool_pins(constraints: str, requirements: Iterable[str]) -> dict[str, str]:
    """Return the versions that ``constraints`` has for the packages of ``requirements`` that the tests use."""
    names = {split(requirement)[0] for requirement in requirements} - {*NOT_FOR_TESTS}
    pins = dict(line.split("==") for line in constraints.splitlines() if "==" in line and not line.startswith("#"))
    return {normalised(name): version for name, version in pins.items() if normalised(name) in names}


def main() -> None:
    """Print one ``name==version`` line for every runtime dependency and every development tool."""
    files = [ROOT / "pyproject.toml", *sorted(ROOT.glob("plugins/*/pyproject.toml"))]
    projects = [tomllib.loads(file.read_text(encoding="utf-8"))["project"] for file in files]
    lowest = floors(line for project in projects for line in runtime_requirements(project))
    tools = tool_pins(
        (ROOT / "constraints.txt").read_text(encoding="utf-8"), projects[0]["optional-dependencies"]["dev"]
    )
    sys.stdout.writelines(f"{name}=={version}\n" for name, version in sorted({**tools, **lowest}.items()))


if __name__ == "__main__":
    main()
