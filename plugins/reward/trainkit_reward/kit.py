"""What the settings of reward modelling do: measured by the conformance kit."""

from __future__ import annotations

from typing import Any

from trainkit.testing import Effect

EFFECTS: dict[str, Effect | list[Effect]] = {
    "center_coef": Effect("loss", rises=(0.0, 0.1, 1.0)),
}


class Declared:
    """The declarations of reward modelling."""

    @classmethod
    def tiny_effects(cls) -> dict[str, Any]:
        """Return what each setting does."""
        return EFFECTS
