"""Runs the whole kit on every bug, two at a time, and prints which checks found which.

    python -m mutants [NAME ...]      those bugs only
    python -m mutants --tables        the checks named with each bug only, which takes minutes instead of hours; also
                                      bugs by check, and of each algorithm what the kit says, its CPU time and its
                                      unproven settings

Ends with 1 if one was found by nothing, or not by the checks that the table names.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib import import_module
from pathlib import Path

from mutants.bugs import BUGS
from mutants.planting import Bug, search
from trainkit.errors import suggest
from trainkit.plugins import available_trainers
from trainkit.plugins.discovery import BUILT_IN
from trainkit_kit import ConformanceError, check_plugin
from trainkit_kit.checks.effects import unproven
from trainkit_kit.conformance import all_checks
from trainkit_kit.subjects import Subject

PROCESSES = 2
SOUND = "_sound_"
Found = dict[str, tuple[list[str], list[str]]]


def search_all(bugs: list[Bug], named: bool) -> Found:
    """`search` of all bugs by name, telling of each as it is done."""
    found: Found = {}
    spawn, started = multiprocessing.get_context("spawn"), time.perf_counter()
    with ProcessPoolExecutor(PROCESSES, mp_context=spawn) as pool:
        running = {pool.submit(search, bug, bug.caught_by if named else None): bug.name for bug in bugs}
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
        source = f"{bug.source}; missed before: {bug.missed}" if bug.missed else bug.source
        rows.append(f"| {bug.name}: {bug.what} | {source} | {bug.base} | {said} |")
    return "\n".join(rows)


def _finders(found: Found) -> set[str]:
    return {name.partition("@")[0] for checks, _ in found.values() for name in checks}


def by_check(found: Found) -> str:
    """A row of Markdown for each check, with the bugs that it finds."""
    bugs: dict[str, list[str]] = {}
    for name, (checks, _) in found.items():
        for check in checks:
            bugs.setdefault(check.partition("@")[0], []).append(name)
    rows = [
        f"| {check} | {len(set(names))} | {', '.join(sorted(set(names)))} |" for check, names in sorted(bugs.items())
    ]
    return "\n".join(["| check | bugs | which |", "|---|---|---|", *rows])


def _cpu() -> float:
    """Return the seconds of CPU of this process and of those that it started and that have ended."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


def measured(name: str) -> tuple[str, float, str]:
    """What the whole kit says of an algorithm, its seconds of CPU, and the settings that are unproven."""
    if name.startswith(SOUND):
        import_module(f"sound.{name.removeprefix(SOUND)}")
    begun = _cpu()
    try:
        check_plugin(name)
        said = "passed"
    except ConformanceError as error:
        said = str(error).partition("\n")[0]
    return said, _cpu() - begun, ", ".join(unproven(Subject(name))) or "none"


def of_algorithms() -> str:
    """A row of Markdown for each built-in and each sound algorithm."""
    sound = [f"{SOUND}{path.stem}" for path in sorted((Path(__file__).parents[1] / "sound").glob("[a-z]*.py"))]
    sys.path.append(str(Path(__file__).parents[4] / "tests"))  # some are derived from those of researchers
    rows = ["| algorithm | the kit | CPU seconds | unproven settings |", "|---|---|---|---|"]
    for name in [*(name for name in available_trainers() if name in BUILT_IN), *sound]:
        said, seconds, missing = measured(name)
        rows.append(f"| {name.removeprefix('_')} | {said} | {seconds:.0f} | {missing} |")
        print(f"{seconds:4.0f} s of CPU  {name}: {said}", file=sys.stderr)
    return "\n".join(rows)


def main(names: list[str]) -> int:
    """Print the tables; 1 if a bug got away."""
    tables, names = "--tables" in names, [name for name in names if name != "--tables"]
    known = {bug.name: bug for bug in BUGS}
    for name in names:
        if name not in known:
            print(f"there is no bug {name!r}{suggest(name, known)}; there are {', '.join(known)}", file=sys.stderr)
            return 2
    bugs = [known[name] for name in names or known]
    found = search_all(bugs, named=tables)
    print(table(bugs, found))
    if tables:
        print(f"\n{by_check(found)}\n\n{of_algorithms()}")
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
