"""Table tests: one test that checks a row of a table after another, each as a subtest."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

Test = Callable[..., None]


def table(names: str, rows: Collection[Any]) -> Callable[[Test], Test]:
    """Run a test for each row, as subtests of one test; used as `pytest.mark.parametrize`.

    A failing row does not stop the others. Each row has its own ``tmp_path`` and ``monkeypatch`` and finds ``capsys``,
    ``caplog`` and ``recwarn`` empty; other fixtures are made once and shared by the rows.
    """
    columns = [name.strip() for name in names.split(",")]

    def decorate(test: Test) -> Test:
        parameters = dict(inspect.signature(test).parameters)
        assert {*columns} <= {*parameters}, f"{test.__name__} has no parameters {names}"
        fixtures = [parameter for name, parameter in parameters.items() if name not in columns]

        def run(subtests: pytest.Subtests, **given: Any) -> None:
            if "subtests" in parameters:
                given["subtests"] = subtests
            for index, row in enumerate(rows):
                values = dict(zip(columns, row if len(columns) > 1 else [row], strict=True))
                with ExitStack() as stack, subtests.test(f"row {index}", **{k: _short(v) for k, v in values.items()}):
                    test(**values, **_of_this_row(given, index, stack))
            assert rows, "the table has no rows"

        run.__doc__, run.__name__, run.__module__ = test.__doc__, test.__name__, test.__module__
        wanted = [inspect.Parameter("subtests", inspect.Parameter.KEYWORD_ONLY)]
        wanted += [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in fixtures if p.name != "subtests"]
        run.__signature__ = inspect.Signature(wanted)  # type: ignore[attr-defined]
        run.pytestmark = [*getattr(test, "pytestmark", [])]  # type: ignore[attr-defined]
        return run

    return decorate


def _short(value: Any) -> str:
    return getattr(value, "__name__", None) or repr(value)[:80]


def _of_this_row(given: dict[str, Any], index: int, stack: ExitStack) -> dict[str, Any]:
    own = dict(given)
    if isinstance(path := given.get("tmp_path"), Path):
        own["tmp_path"] = path / f"row{index}"
        own["tmp_path"].mkdir()
    if "monkeypatch" in given:
        own["monkeypatch"] = stack.enter_context(pytest.MonkeyPatch.context())
    for name in ("capsys", "capfd"):
        if name in given:
            given[name].readouterr()
    for name in ("caplog", "recwarn"):
        if name in given:
            given[name].clear()
    return own
