"""The tiers of tests: which target runs a test. The conftest of tests/ and that of plugins/ have these hooks."""

from __future__ import annotations

import gc
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, by the modules of tests
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # to look for a model where there is no network takes a minute
gc.disable()  # imports make many objects and no garbage: to look through them costs a fifth of collection
ROOT = Path(__file__).parents[1]
TIERS = {
    "slow": ("make test-all", ("tests", "plugins")),
    "weekly": ("make weekly", ("tests", "plugins")),
    "engines": (
        "make engines or make shards",
        ("plugins/ray", "plugins/vllm", "plugins/deepspeed", "tests/test_kernels.py"),
    ),
    "browser": ("make browser", ("tests/test_browser.py",)),
    "gpu": ("make test-gpu", ("tests/test_gpu.py",)),
    "parity": ("make parity", ("tests/parity", "tests/test_speed_benchmark.py")),
}
"""The marks of tests that `make test` does not run, with the target that does, and where that target looks for them."""


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put every test into one tier, and stop if there is a test that no tier runs.

    What needs an environment of its own is slow, and so are cases that ``daily(parameter=values)`` does not name.
    """
    for item in items:
        slow = "fresh_venv" in getattr(item, "fixturenames", ())
        for mark in item.iter_markers("daily"):
            case = item.callspec.params  # type: ignore[attr-defined]
            slow |= any(case[parameter] not in values for parameter, values in mark.kwargs.items())
        if slow and not any(item.get_closest_marker(tier) for tier in TIERS):
            item.add_marker(pytest.mark.slow)
    if faults := [fault for item in items for fault in faults_of_tier(item)]:
        raise pytest.UsageError(*faults)


def faults_of_tier(item: pytest.Item) -> Iterator[str]:
    """Say why no tier runs a test: it is in two, or not where the target of its tier looks for it."""
    marks = [name for name in TIERS if item.get_closest_marker(name)]
    if len(marks) > 1:
        targets = " and ".join(TIERS[name][0] for name in marks)
        yield f"{item.nodeid} is marked {' and '.join(marks)}; keep one of these marks, {targets} exclude each other"
    for name in marks[:1]:
        target, places = TIERS[name]
        if not any(item.path.is_relative_to(ROOT / place) for place in places):
            yield f"{item.nodeid} is marked {name}, but {target} looks in {', '.join(places)} only; move it or its mark"


def pytest_collection_finish(session: pytest.Session) -> None:
    """Stop if a selected test ``needs`` a package that is not installed; collect garbage, but for what is imported."""
    gc.freeze()
    gc.enable()
    missing = [
        f"{item.nodeid} needs {name}, which is not installed; run the target of its tier, and if that does not install "
        f"{name}, add it there or mark the test for another tier"
        for item in session.items
        for mark in item.iter_markers("needs")
        for name in mark.args
        if importlib.util.find_spec(name) is None
    ]
    if missing:
        raise pytest.UsageError(*missing)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Fail a test that skips itself: a package that it needs is named by ``needs``, and its tier installs it."""
    try:
        yield
    except pytest.skip.Exception as skipped:
        pytest.fail(f"{item.nodeid} skips itself ({skipped}); name the packages that it needs with the mark `needs`")
