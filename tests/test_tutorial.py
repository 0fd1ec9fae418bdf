"""The tutorial is true, word for word: its files are written and its commands run, in order, in a fresh environment.

It is the first part of the page about algorithms; test_docs.py runs the second one.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/write-an-algorithm.md"


def tutorial() -> str:
    return PAGE.read_text(encoding="utf-8").partition("\n## The contract\n")[0]


class Block(NamedTuple):
    before: str
    """The line of text before it: of a file, its path in backquotes; of a command that fails, that it does."""
    language: str
    text: str
    line: int


def blocks(text: str) -> list[Block]:
    found = re.finditer(r"^```(\w+)\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    return [
        Block(text[: m.start()].rstrip().rpartition("\n")[2], m[1], m[2], text.count("\n", 0, m.start(2)))
        for m in found
    ]


class Reader:
    """Somebody who does what the page says."""

    def __init__(self, venv: Any, home: Path) -> None:
        self.venv, self.home, self.seen = venv, home, ""

    def follow(self, block: Block) -> None:
        """Write a file, change one, run commands, or compare what they printed."""
        file = re.fullmatch(r"`(\S+)`:", block.before)
        if block.language == "bash":
            fails = block.before.endswith("fails:")
            self.seen = "".join(self.run(line, fails) for line in block.text.splitlines())
        elif block.language == "text":
            self.compare(block.text)
        elif block.language == "diff":
            assert file is not None
            self.change(self.home / file[1], block.text.splitlines())
        else:
            assert file is not None, f"line {block.line}: which file is that?"
            assert (self.home / file[1]).parent.exists(), file[1]
            (self.home / file[1]).write_text(block.text, encoding="utf-8")

    def run(self, line: str, fails: bool) -> str:
        done = self.venv.run(*shlex.split(line), cwd=self.home, check=False)
        printed = str(done.stdout + done.stderr)
        assert (done.returncode != 0) == fails, f"$ {line}\n{printed}"
        return printed

    def compare(self, shown: str) -> None:
        """Every line that is shown was printed, in this order; numbers and widths may differ."""
        at = 0
        for line in shown.splitlines():
            words = [re.escape(word).replace(r"\.\.\.", ".*") for word in line.split()]
            pattern = re.sub(r"\d+(\\\.\d+)*", r"\\d+([.]\\d+)*", r"\s+".join(words))
            clock = r"(?: \(\d+:\d\d:\d\d\))?"  # which pytest adds to what takes over a minute
            found = re.compile(rf"^\s*{pattern}{clock}\s*$", flags=re.MULTILINE).search(self.seen, at)
            assert found is not None, f"{line!r} is not in what was printed:\n{self.seen[at:]}"
            at = found.end()

    def change(self, path: Path, lines: list[str]) -> None:
        text = path.read_text(encoding="utf-8")
        old, new = ("".join(f"{line[1:]}\n" for line in lines if line[0] == sign) for sign in "-+")
        assert text.count(old) == 1, old
        path.write_text(text.replace(old, new), encoding="utf-8")


def test_the_tutorial_works_word_for_word_and_its_baseline_helps(fresh_venv: Any, tmp_path: Path) -> None:
    reader, letters = Reader(fresh_venv, tmp_path), []
    for block in blocks(tutorial()):
        reader.follow(block)
        if block.language == "text":
            letters += [float(found) for found in re.findall(r"letters a in an output of 8: ([\d.]+)", reader.seen)]
    easy, without, with_baseline = letters
    assert easy > 7
    assert without < 6 < 7 < with_baseline
    assert len(list((tmp_path / "dist").glob("trainkit_mine-*.whl"))) == 1


def test_every_block_of_the_tutorial_is_followed() -> None:
    text = tutorial()
    found = blocks(text)
    assert 2 * len(found) == len(re.findall(r"^```", text, flags=re.MULTILINE))
    assert {block.language for block in found} == {"bash", "diff", "python", "text"}
    for block in found:
        if block.before.endswith("_mine.py`:"):
            assert len([line for line in block.text.splitlines() if line.strip()]) <= 60, (
                "what its reader writes is short"
            )
