"""Would work, and says that it is for another trainkit."""

from trainkit import hookimpl


@hookimpl
def on_step(step: int) -> None:
    """Is never called."""
