"""Measures how time and memory of RLOO grow with the batch, the length, the vocabulary and k.

Each is doubled three times from the same beginning, model M with 4 prompts × 4 responses of 32 + 32 tokens, while the
others stay. The exponents are slopes of least squares on logarithms: 1 means that a doubling doubles. Memory is what a
process needs beyond what it had before its first step. Systems make their steps in turn, as in ``speed.py``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

from figures import GROWTH, Case, exponents
from rich.progress import Progress
from rich.table import Table
from speed import Job, begin, console, measure, parser, show
from speed import row as row_of

DOUBLINGS = 3
SYSTEMS = ["trainkit", "trl"]
BASE = {"prompts": 4, "samples": 4, "prompt": 32, "new": 32, "vocabulary": 8192}
SMALL = {"prompts": 2, "samples": 2, "prompt": 8, "new": 8, "vocabulary": 64}


def sizes(what: str, factor: int, base: dict[str, int]) -> dict[str, int]:
    """Return the sizes with one of them multiplied."""
    grown = {"batch": ["prompts"], "length": ["prompt", "new"], "vocabulary": ["vocabulary"], "k": ["samples"]}[what]
    return {name: size * (factor if name in grown else 1) for name, size in base.items()}


def job(size: dict[str, int], model: str) -> Job:
    """Return a case of RLOO with these sizes."""
    fields = {name: size[name] for name in ("samples", "prompt", "new", "vocabulary")}
    shape = f"{size['prompts']}x{size['samples']},{size['prompt']}+{size['new']}"
    return Job(Case("rloo", shape), model, fields={**fields, "rows": size["prompts"] * size["samples"]})


def points(asked: list[str], doublings: int) -> Iterator[tuple[str, int]]:
    """Yield what is multiplied and by how much; the beginning is measured once for all."""
    yield asked[0], 1
    yield from ((what, 2**power) for what in asked for power in range(1, doublings + 1))


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    made = parser(__doc__)
    made.add_argument("--what", nargs="+", choices=GROWTH, default=list(GROWTH))
    made.add_argument("--doublings", type=int, default=DOUBLINGS)
    return made.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Measure, print the exponents, and add the figures to a file."""
    options = parse(arguments)
    options.systems = options.systems or SYSTEMS
    base, model = (SMALL, "S") if options.small else (BASE, "M")
    figures = begin(options)
    options.small = False  # the sizes are small already
    with Progress(console=console, transient=True) as progress:
        every = list(points(options.what, options.doublings))
        for at, (what, factor) in enumerate(every, 1):
            size = sizes(what, factor, base)
            made = job(size, model)
            console.print(f"{at} of {len(every)}: {what} × {factor}, {made}", markup=False)
            rows = [row_of(made, worker) for worker in measure(made, options, progress)]
            show(made, rows)
            for name in options.what if factor == 1 else [what]:
                figures.add([], [_point(name, factor, row) for row in rows])
    table = Table("doubled", "system", "exponent of time", "of memory")
    for (name, system), (time, memory) in exponents(figures.growth).items():
        table.add_row(name, system, f"{time:.2f}", f"{memory:.2f}")
    console.print(table)


def _point(what: str, factor: int, row: dict[str, object]) -> dict[str, object]:
    kept = {name: row[name] for name in ("system", "seconds", "peak", "before")}
    return {"what": what, "size": factor, **kept}


if __name__ == "__main__":
    sys.exit(main())
