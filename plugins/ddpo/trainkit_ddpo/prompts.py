"""Prompts of ddpo-pytorch (Black et al. 2023), as rows for ``prompts`` of `trainkit.train`.

A function of ddpo-pytorch draws one prompt; these return all that it can draw, of which a run takes each equally often.
Lists of words are yours: a file with one on each line, or a list.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trainkit.errors import DataError, describe

Words = str | Path | Sequence[str]
"""Words: the path of a file with one on each line, or a list."""
SMALL = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


def from_file(words: Words, low: int | None = None, high: int | None = None) -> list[dict[str, Any]]:
    """Return the lines ``low`` to ``high - 1`` of a file as prompts, by default all; empty lines do not count.

    Raises:
        DataError: there is no such file, or no line is left.
    """
    lines = _words(words)
    if not lines[low:high]:
        raise DataError(f"there are {len(lines)} lines, and none from {low} to {high}; give other bounds")
    return [{"prompt": line} for line in lines[low:high]]


def imagenet_all(classes: Words) -> list[dict[str, Any]]:
    """Return the names of the 1000 classes of ImageNet, in their order."""
    return from_file(_imagenet(classes))


def imagenet_animals(classes: Words) -> list[dict[str, Any]]:
    """Return the names of the animals among the 1000 classes of ImageNet, the first 398."""
    return from_file(_imagenet(classes), 0, 398)


def imagenet_dogs(classes: Words) -> list[dict[str, Any]]:
    """Return the names of the dogs among the 1000 classes of ImageNet, 151 to 268."""
    return from_file(_imagenet(classes), 151, 269)


def nouns_activities(nouns: Words, activities: Words) -> list[dict[str, Any]]:
    """Return every noun with every activity, such as "an otter playing chess"."""
    return [
        {"prompt": f"{_article(noun)} {noun} {activity}"} for noun in _words(nouns) for activity in _words(activities)
    ]


def counting(nouns: Words, low: int, high: int) -> list[dict[str, Any]]:
    """Return every number from ``low`` to ``high`` with every noun, such as "three otters".

    The columns ``questions`` and ``answers`` are those of `trainkit_ddpo.rewards.llava_strict_satisfaction`.

    Args:
        nouns: nouns; after one whose plural is irregular, write the plural after a comma: "goose, geese".
        low: the first number, at least 0.
        high: the last number, at most 99.

    Raises:
        DataError: a number is out of these bounds.
    """
    if not 0 <= low <= high <= 99:
        raise DataError(f"numbers should be from 0 to 99, low to high; given {low} to {high}")
    rows = []
    for number in map(_in_words, range(low, high + 1)):
        for line in _words(nouns):
            noun, _, plural = (part.strip() for part in line.partition(","))
            counted = noun if number == "one" else plural or _plural(noun)
            questions = [f"How many {plural or _plural(noun)} does this image show?", "Which animal does it show?"]
            rows.append({"prompt": f"{number} {counted}", "questions": questions, "answers": [number, noun]})
    return rows


def drawing(rows: Sequence[dict[str, Any]]) -> Callable[[], tuple[str, dict[str, Any]]]:
    """Return a function that draws a prompt and its other columns, as TRL's ``prompt_function`` does, by `random`."""

    def draw() -> tuple[str, dict[str, Any]]:
        columns = {**random.choice(rows)}
        return columns.pop("prompt"), columns

    return draw


def _words(given: Words) -> list[str]:
    if isinstance(given, str | Path):
        if not Path(given).is_file():
            raise DataError(f"there is no file {str(given)!r}; give the path of a file with one entry on each line")
        given = Path(given).read_text("utf-8").splitlines()
    if odd := [line for line in given if not isinstance(line, str)]:
        raise DataError(f"a list of words should hold texts; it holds {describe(odd[0])}")
    return [line.strip() for line in given if line.strip()]


def _imagenet(classes: Words) -> list[str]:
    found = _words(classes)
    if len(found) != 1000:
        raise DataError(
            f"ImageNet has 1000 classes; given {len(found)}. Give their names, in the order of their indices"
        )
    return found


def _article(noun: str) -> str:
    silent, spoken = ("hour", "honest", "heir"), ("uni", "eu", "one", "use")
    sounds = noun.lower().startswith(silent) or (noun[0].lower() in "aeiou" and not noun.lower().startswith(spoken))
    return "an" if sounds else "a"


def _plural(noun: str) -> str:
    if noun.endswith("y") and noun[-2:-1] not in "aeiou":
        return f"{noun[:-1]}ies"
    return f"{noun}es" if noun.endswith(("s", "x", "z", "ch", "sh")) else f"{noun}s"


def _in_words(number: int) -> str:
    if number < len(SMALL):
        return SMALL[number]
    tens, ones = divmod(number, 10)
    return TENS[tens - 2] + (f"-{SMALL[ones]}" if ones else "")
