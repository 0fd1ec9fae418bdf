"""The checks of the kit, by what they are about; importing this registers them, in the order in which they run."""

from trainkit.testing.checks import credit, door, exactness, observing, policy, resume, rows, runs, samplers

__all__ = ["credit", "door", "exactness", "observing", "policy", "resume", "rows", "runs", "samplers"]
