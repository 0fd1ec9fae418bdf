"""Tables of cases, and the tiers of tests: what `tables.py` and `conftest.py` promise."""

from __future__ import annotations

from pathlib import Path

import pytest

from tables import table




@table("given, expected", [(1, 2), (2, 4)])
@table("sign", [1, -1])
def test_rows_are_crossed_and_have_their_own_fixtures(
    given: int, expected: int, sign: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sign * given * 2 == sign * expected
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").touch()
