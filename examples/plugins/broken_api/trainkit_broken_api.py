"""A plugin that works, but requires another version of trainkit."""

from trainkit import hookimpl


@hookimpl
def on_step(step: int) -> None:
    """Do nothing; this hook is never called."""
