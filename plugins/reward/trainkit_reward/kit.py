"""What the settings of reward modelling do, and its structure: measured by the conformance kit."""

from __future__ import annotations

from typing import Any

from trainkit.testing import Effect, Structure

EFFECTS: dict[str, Effect | list[Effect]] = {
    "center_coef": Effect("loss", rises=(0.0, 0.1, 1.0)),
}
STRUCTURE = (
    Structure(scores="row", surrogate="none", detached=()),
    Structure(detached=(), under={"method.center_coef": 0.1}),
)


class Declared:
    """The declarations of reward modelling."""

    @classmethod
    def tiny_effects(cls) -> dict[str, Any]:
        """Return what each setting does."""
        return EFFECTS

    @classmethod
    def tiny_structure(cls) -> tuple[Structure, ...]:
        """Return the structure: margins count in their own pair."""
        return STRUCTURE
