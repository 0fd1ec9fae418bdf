"""Prints what `test_trl` measures, as a table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the largest difference of each comparison."""
    lines = list(_rows(terminalreporter.stats.get("passed", [])))
    if lines:
        terminalreporter.section("losses beside TRL")
        terminalreporter.write_line("| comparison | losses | largest difference |\n|---|---|---|\n" + "\n".join(lines))


def _rows(reports: list[pytest.TestReport]) -> Iterator[str]:
    for report in reports:
        found = dict(report.user_properties)
        if "difference" in found:
            name = report.nodeid.rpartition("::")[2].removeprefix("test_").replace("_", " ")
            yield f"| {name} | {found['losses']} | {found['difference']:.1g} |"
