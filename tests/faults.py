"""Faults at the calls of the C library that change files: killing the process, or letting the calls fail.

The library of ``reliability/faults.c`` must have been loaded when the process started, as `killed` does.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def compiled(folder: Path) -> Path:
    """Compile the library into ``folder``, and return its path."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise RuntimeError("no C compiler found (cc, gcc, clang); the battery needs one for tests/reliability/faults.c")
    library = folder / "faults.so"
    source = HERE / "reliability" / "faults.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"], check=True)
    return library


def arm(folder: Path, at: int = 0, *, error: int = 0, removals: bool = False) -> None:
    """Count the calls that change something beneath ``folder`` anew, and kill this process at the one numbered ``at``.

    Args:
        folder: the directory.
        at: the number of the call, from 1; 0 only counts.
        error: an ``errno`` with which this call and those after it fail, instead of killing the process.
        removals: whether only calls that remove or rename are counted.
    """
    ctypes.CDLL(None).arm(os.fsencode(folder.resolve()), ctypes.c_long(at), error, int(removals))


def counted() -> int:
    """Return the number of calls since `arm`."""
    count = ctypes.CDLL(None).counted
    count.restype = ctypes.c_long
    return int(count())


def killed(mode: str, names: list[str], root: Path, timeout: float = 3000, **given: Any) -> dict[str, Any]:
    """Run ``tests/killed.py`` with the library, require that it found no problems, and return what it found by name."""
    command = [sys.executable, str(HERE / "killed.py"), mode, ",".join(names), str(root), json.dumps(given)]
    environment = {**os.environ, "LD_PRELOAD": str(compiled(root)), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith('{"found"')))["found"]
    problems = [f"{name}: {problem}" for name, each in found.items() for problem in each["problems"]]
    assert not problems, "\n".join([*problems, done.stderr[-2000:]])
    return dict(found)
