"""The settings and names of other frameworks, and what becomes of them.

``<framework>.toml`` has every field of a framework's configuration, ``<framework>_names.toml`` its public names. The
command, the adapters and the documents share these tables.
"""

from __future__ import annotations

from trainkit_migrate.recognition import recognised
from trainkit_migrate.scripts import Configured, Rewritten, configured, rewritten
from trainkit_migrate.tables import (
    FRAMEWORKS,
    Framework,
    Name,
    Setting,
    absent,
    framework,
    instead,
    refuse_modules,
    refusing,
)
from trainkit_migrate.translation import Remark, Translation, translate, translate_sampling

__all__ = [
    "FRAMEWORKS",
    "Configured",
    "Framework",
    "Name",
    "Remark",
    "Rewritten",
    "Setting",
    "Translation",
    "absent",
    "configured",
    "framework",
    "instead",
    "recognised",
    "refuse_modules",
    "refusing",
    "rewritten",
    "translate",
    "translate_sampling",
]
