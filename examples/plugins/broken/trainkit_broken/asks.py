"""Asks a hook for an argument that it does not have."""

from trainkit import hookimpl


@hookimpl
def on_step(step: int, loss: float) -> None:
    """Is never called."""
