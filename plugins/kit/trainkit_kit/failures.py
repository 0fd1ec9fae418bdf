"""What fails: a check, or a plugin's checks as a whole."""

from __future__ import annotations


class CheckError(AssertionError):
    """A check failed; the message is what was seen."""


class ConformanceError(AssertionError):
    """A plugin failed checks that it was not expected to fail; the message is the report."""


def require(condition: object, seen: str) -> None:
    """Fail the check unless ``condition`` is true; ``seen`` is the message. Works under ``python -O`` too."""
    if not condition:
        raise CheckError(seen)
