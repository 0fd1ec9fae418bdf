"""The settings and names of other frameworks, and what becomes of them: data that core, adapters and documents share.

``<framework>.toml`` has every field of a framework's configuration, ``<framework>_names.toml`` its public names;
``names.toml`` has names that are common among frameworks. This room imports neither torch nor the configuration.
"""

from __future__ import annotations

from trainkit.migrating.recognition import recognised
from trainkit.migrating.scripts import Configured, Rewritten, configured, rewritten
from trainkit.migrating.tables import (
    FRAMEWORKS,
    Framework,
    Name,
    Setting,
    framework,
    instead,
    known_names,
    known_values,
    notes,
    refuse_modules,
    refusing,
)
from trainkit.migrating.translation import Remark, Translation, translate, translate_sampling

__all__ = [
    "FRAMEWORKS",
    "Configured",
    "Framework",
    "Name",
    "Remark",
    "Rewritten",
    "Setting",
    "Translation",
    "configured",
    "framework",
    "instead",
    "known_names",
    "known_values",
    "notes",
    "recognised",
    "refuse_modules",
    "refusing",
    "rewritten",
    "translate",
    "translate_sampling",
]
