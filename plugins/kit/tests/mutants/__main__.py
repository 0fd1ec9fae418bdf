"""Runs the whole kit on every bug, two at a time, and prints which checks found which.

    python -m mutants [NAME ...]      those bugs only

Ends with 1 if one was found by nothing, or not by the checks that the table names.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed

from mutants.bugs import BUGS
from mutants.planting import Bug, search
from trainkit.errors import suggest
from trainkit_kit.conformance import all_checks

PROCESSES = 2
Found = dict[str, tuple[list[str], list[str]]]


def search_all(bugs: list[Bug]) -> Found:
    """`search` of all bugs by name, telling of each as it is done."""
    found: Found = {}
    spawn, started = multiprocessing.get_context("spawn"), time.perf_counter()
    with ProcessPoolExecutor(PROCESSES, mp_context=spawn) as pool:
        running = {pool.submit(search, bug): bug.name for bug in bugs}
        for done in as_completed(running):
            found[running[done]] = done.result()
            seconds, number = time.perf_counter() - started, len(found[running[done]][0])
            print(f"{len(found)}/{len(bugs)}  {seconds:4.0f} s  {running[done]}: {number} checks", file=sys.stderr)
    return found


def table(bugs: list[Bug], found: Found) -> str:
    """A row of Markdown for each bug."""
    rows = ["| bug | source | in | found by |", "|---|---|---|---|"]
    for bug in bugs:
        checks, broken = found[bug.name]
        said = ", ".join(checks) or "**nothing**"
        said += f"; broke {', '.join(broken)}" if broken else ""
        rows.append(f"| {bug.name}: {bug.what} | {bug.source} | {bug.base} | {said} |")
    return "\n".join(rows)


def _finders(found: Found) -> set[str]:
    return {name.partition("@")[0] for checks, _ in found.values() for name in checks}


def main(names: list[str]) -> int:
    """Print the table; 1 if a bug got away."""
    known = {bug.name: bug for bug in BUGS}
    for name in names:
        if name not in known:
            print(f"there is no bug {name!r}{suggest(name, known)}; there are {', '.join(known)}", file=sys.stderr)
            return 2
    bugs = [known[name] for name in names or known]
    found = search_all(bugs)
    print(table(bugs, found))
    free = [bug.name for bug in bugs if not found[bug.name][0]]
    otherwise = [bug.name for bug in bugs if bug.name not in free and set(bug.caught_by) - set(found[bug.name][0])]
    print(f"\n{len(bugs) - len(free)} of {len(bugs)} bugs were found, by {len(_finders(found))} checks")
    if idle := [
        name for name, check in all_checks().items() if check.kind == "trainer" and name not in _finders(found)
    ]:
        print(f"checks of trainers that found none of them: {', '.join(idle)}")
    if free:
        print(f"found by nothing: {', '.join(free)}")
    if otherwise:
        print(f"not found by all the checks that the table names: {', '.join(otherwise)}")
    return int(bool(free or otherwise))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
