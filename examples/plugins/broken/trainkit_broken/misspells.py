"""Implements a hook that does not exist."""

from trainkit import hookimpl


@hookimpl
def on_stepp(step: int) -> None:
    """Do nothing; this hook is never called."""
