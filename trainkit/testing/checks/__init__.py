"""The checks of the kit, by what they are about; importing this registers them, in the order in which they run."""

from trainkit.testing.checks import door, exactness, observing, resume, rows, runs, samplers

__all__ = ["door", "exactness", "observing", "resume", "rows", "runs", "samplers"]
