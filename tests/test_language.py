"""Docstrings say what a function does or returns, and the documents use the words of the field."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = [
    *sorted((ROOT / "trainkit").rglob("*.py")),
    *sorted((ROOT / "plugins").glob("*/trainkit_*/**/*.py")),
    *sorted((ROOT / "examples").rglob("*.py")),
    *sorted((ROOT / "benchmarks").rglob("*.py")),
    *sorted((ROOT / "docs").glob("*.py")),
]
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "plugins").glob("*/README.md")),
    *sorted((ROOT / "examples").rglob("README.md")),
    *sorted((ROOT / "benchmarks").glob("*.md")),
]
VERBS = frozenset(
    """
    Accept Accumulate Adapt Add Adopt Advance Allow Anneal Answer Append Apply Arrange Ask Assemble Assert Assign
    Attach Average Backpropagate Begin Block Bound Broadcast Build Cache Call Cast Check Choose Clear Clip Close
    Collect Combine Commit Compare Compile Complete Compute Concatenate Configure Construct Convert Copy Count
    Create Decide Decode Decorate Default Define Delete Derive Describe Detach Detect Disable Discover Distribute
    Divide Do Draw Drop Echo Embed Empty Enable Encode End Ensure Enter Estimate Evaluate Examine Exclude Execute
    Exit Explain Export Extend Extract Fail Fetch Fill Filter Find Fingerprint Finish Fit Flatten Flush Follow Force
    Forget Format Forward Freeze Gather Generate Get Give Go Group Guard Handle Hash Have Ignore Import Include
    Increase Index Infer Initialise Insert Install Interpolate Invert Iterate Join Judge Keep Kill Launch Learn
    Leave Let Limit List Load Locate Lock Log Look Lower Make Map Mark Mask Match Measure Merge Modify Move Mutate
    Name Normalise Note Notify Observe Open Order Pack Pad Parse Pass Penalise Perform Perturb Pick Pickle Place
    Plant Play Point Prefer Prepare Print Process Produce Project Protect Provide Publish Push Put Raise Reach Read
    Rebuild Receive Recognise Record Reduce Refuse Register Reject Release Reload Remember Remove Rename Render
    Repeat Replace Report Request Require Rescale Reset Resolve Restore Restrict Resume Return Reuse Reward Round
    Run Sample Save Say Scale Scan Score Seal Search Seed Select Send Serialise Set Shard Shift Shorten Show Shuffle
    Sign Skip Sleep Solve Sort Spawn Split Stack Standardise Start State Steer Step Stop Store Strip Submit Subtract
    Suggest Sum Suppress Switch Take Tell Test Time Tokenise Track Train Transform Translate Truncate Try Turn
    Unfreeze Unlock Unpack Unwrap Update Use Validate Verify Visit Wait Walk Warn Watch Whiten Wrap Write Yield Zero
    """.split()  # noqa: SIM905
)
"""What a docstring of a function begins with: it says what the function does or returns."""
OWN_WORDS = {
    r"\bpockets?\b": "extension point, optional method or hook",
    r"\b(can|could|cannot) be had\b": "installed, available",
    r"\b(leaves?|left) (it|them)? ?out\b": "omitted, skipped, removed",
    r"\bat the door\b": "at construction, before a model is loaded",
    r"\bgone over\b": "iterated over",
    r"\bthe same face\b": "the same interface",
}
"""Words of our own, and the field's words for them."""


def functions(path: Path) -> Iterator[tuple[int, str, str]]:
    """(line, name, docstring) of the functions and methods that have one; properties are attributes, and not here."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (said := ast.get_docstring(node)):
            marks = {ast.unparse(mark).partition("(")[0].rpartition(".")[2] for mark in node.decorator_list}
            if not marks & {"property", "cached_property", "fixture"}:
                yield node.lineno, node.name, said


def first(said: str) -> str:
    """Return the first word of a docstring."""
    return re.split(r"[\s,:.;()]", said.strip(), maxsplit=1)[0]


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of every string that documents something: of modules, classes, functions and constants."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_docstrings_of_functions_begin_with_a_verb(path: Path) -> None:
    wrong = [
        f"{line} {name}: {said.splitlines()[0]}" for line, name, said in functions(path) if not VERBS & {first(said)}
    ]
    assert wrong == []


@pytest.mark.parametrize("path", [*PAGES, *SOURCES], ids=lambda path: str(path.relative_to(ROOT)))
def test_documents_use_the_words_of_the_field(path: Path) -> None:
    if path.suffix == ".md":
        texts: list[tuple[int, str]] = list(enumerate(path.read_text(encoding="utf-8").splitlines(), 1))
    else:
        texts = list(docstrings(path))
    wrong = [
        f"{line}: {found[0]!r}; write {better}"
        for line, text in texts
        for pattern, better in OWN_WORDS.items()
        if (found := re.search(pattern, text, flags=re.IGNORECASE))
    ]
    assert wrong == []
