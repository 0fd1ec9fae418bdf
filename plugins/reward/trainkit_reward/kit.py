"""What the settings of reward modelling do: measured by the conformance kit."""

from __future__ import annotations

from trainkit.testing import Effect

EFFECTS: dict[str, Effect | list[Effect]] = {
    "center_coef": Effect("loss", rises=(0.0, 0.1, 1.0)),
}
