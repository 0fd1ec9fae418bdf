"""Implements a hook with an argument that the hook does not have."""

from trainkit import hookimpl


@hookimpl
def on_step(step: int, loss: float) -> None:
    """Do nothing; this hook is never called."""
