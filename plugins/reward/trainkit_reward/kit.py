"""What the settings of reward modelling do, and its structure: measured by the conformance kit."""

from __future__ import annotations

from trainkit.testing import Declaration, Effect, Structure

EFFECTS: dict[str, Effect | list[Effect]] = {
    "center_coef": Effect("loss", rises=(0.0, 0.1, 1.0)),
}
STRUCTURE = (
    Structure(scores="row", surrogate="none", detached=()),
    Structure(detached=(), under={"method.center_coef": 0.1}),
)
KIT = Declaration(effects=EFFECTS, structure=STRUCTURE)
