"""What the checks of the battery share: their claims, what they measured, and the table at the end of a run.

A check is a function ``test_a1_...``: its name begins with the check's id, and the first line of its docstring is its
claim. What it measured it gives to the fixture ``figure``. Where the whole rule takes long, it checks a sample of it,
and all of it with ``--full``, as ``make battery-full`` does.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

AREAS = {"A": 7, "B": 12, "C": 11, "D": 4, "E": 6, "F": 7, "G": 3}
CHECKS = tuple(f"{area}{number}" for area, most in AREAS.items() for number in range(1, most + 1))
"""The ids of the battery."""
HERE = Path(__file__).parent


def id_of(item: pytest.Item) -> str | None:
    """Return the id of the check that a test is, or None."""
    named = re.match(r"test_([a-g]\d+)_", item.name)
    return named[1].upper() if named else None


@pytest.hookimpl(tryfirst=True)  # before cases are selected by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all checks as slow, and note their ids and claims in their reports."""
    for item in items:
        if HERE in item.path.parents and (check := id_of(item)):
            item.add_marker(pytest.mark.slow)
            claim = ((item.function.__doc__ or "").strip().splitlines() or [""])[0]  # type: ignore[attr-defined]
            item.user_properties.append(("check", (check, claim.rstrip("."))))


@pytest.fixture
def full(pytestconfig: pytest.Config) -> bool:
    """Whether the whole rule is checked, and not a sample of it."""
    return bool(pytestconfig.getoption("--full"))


@pytest.fixture
def figure(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """``figure("31 kills, 0 differences")``: what a check measured, for the table."""
    return lambda text: record_property("figure", text)


@pytest.fixture
def drawn(record_property: Callable[[str, object], None]) -> int:
    """A seed that is drawn afresh in each run and told in the table."""
    seed = secrets.randbelow(10**6)
    record_property("seed", seed)
    print(f"drawn seed: {seed}")
    return seed


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Write the table: id, result, claim, figure."""
    rows = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            said = dict(report.user_properties) if isinstance(report, pytest.TestReport) else {}
            if "check" in said and (report.when == "call" or report.failed):
                check, claim = said["check"]
                seed = f" (seed {said['seed']})" if "seed" in said else ""
                rows[check] = (report.outcome, claim, said.get("figure", "") + seed)
    if not rows:
        return
    terminalreporter.section("battery: " + ("the whole rule" if config.getoption("--full") else "samples"))
    for check in sorted(rows, key=CHECKS.index):
        outcome, claim, found = rows[check]
        terminalreporter.write_line(f"{check:<4}{outcome:<8}{claim}: {found}")
    passed = sum(outcome == "passed" for outcome, *_ in rows.values())
    terminalreporter.write_line(f"{passed} of {len(CHECKS)} passed")
