"""The checks of the kit by subject. Importing this package registers them in the order in which they run."""

from trainkit_kit.checks import (
    corrections,
    credit,
    effects,
    engines,
    episodes,
    exactness,
    losses,
    observing,
    policy,
    resume,
    rows,
    runs,
    samplers,
    shardings,
    structure,
    usability,
)

__all__ = [
    "corrections",
    "credit",
    "effects",
    "engines",
    "episodes",
    "exactness",
    "losses",
    "observing",
    "policy",
    "resume",
    "rows",
    "runs",
    "samplers",
    "shardings",
    "structure",
    "usability",
]
