"""Tables of cases, and the tiers of tests: what `tables.py` and `conftest.py` promise."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tables import table

TESTS = Path(__file__).parent


@table("given, expected", [(1, 2), (2, 4)])
@table("sign", [1, -1])
def test_rows_are_crossed_and_have_their_own_fixtures(
    given: int, expected: int, sign: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sign * given * 2 == sign * expected
    assert not list(tmp_path.iterdir())
    assert "ROW" not in os.environ
    (tmp_path / "file").touch()
    monkeypatch.setenv("ROW", "1")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("@pytest.mark.slwo\ndef test_a(): ...", ["'slwo' not found in `markers` configuration option"]),
        (
            "@pytest.mark.slow\n@pytest.mark.gpu\ndef test_a(): ...\n@pytest.mark.parity\ndef test_b(): ...",
            [
                "test_x.py::test_a is marked slow and gpu; keep one of these marks",
                "test_x.py::test_b is marked parity, but make parity looks in tests/parity",
            ],
        ),
        ("@pytest.mark.needs('json', 'no_such')\ndef test_a(): ...", ["test_x.py::test_a needs no_such, which is not"]),
        (
            "def test_a(): pytest.importorskip('no_such')\n"
            "@table('row', [1, 2, 3])\ndef test_b(row): assert row != 2\n"
            "@table('row', [])\ndef test_c(row): ...",
            ["test_a skips itself (could not import 'no_such'", "row 1", "the table has no rows", "4 failed"],
        ),
    ],
)
def test_what_no_tier_runs_and_what_fails_is_reported(source: str, expected: list[str], tmp_path: Path) -> None:
    (tmp_path / "test_x.py").write_text(f"import pytest\nfrom tables import table\n{source}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "conftest", "-p", "no:cacheprovider"]
    command += ["-c", str(TESTS.parent / "pyproject.toml"), "--rootdir", str(tmp_path), str(tmp_path)]
    ran = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(TESTS)}, capture_output=True, text=True)
    assert ran.returncode != 0
    printed = ran.stdout + ran.stderr
    assert [text for text in expected if text not in printed] == [], printed
